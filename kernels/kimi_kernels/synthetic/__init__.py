"""Synthetic ops, for timing: uniform routing and forced acceptance. No kernel set that serves text has them."""
