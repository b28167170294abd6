"""The layers of both models, one module class each; kernels and tensor-parallel group passed in."""
