"""Steps of few rows a sequence as CUDA graphs: fixed shapes, fixed addresses, one launch."""
