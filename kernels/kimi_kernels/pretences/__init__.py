"""Ops for timing that pretend: uniform routing and synthetic acceptance. No kernel set that serves text has them."""
