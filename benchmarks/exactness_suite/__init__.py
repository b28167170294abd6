"""The check whether speculation changes a token, and why where it does (`benchmarks/exactness.py`)."""
