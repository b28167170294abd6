"""The Triton Server seam: the only package that knows pb_utils."""
