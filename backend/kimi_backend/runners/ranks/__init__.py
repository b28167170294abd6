"""Tensor parallelism in processes: rank 0's runners answer, those of the other ranks follow (docs/decisions/0018)."""
