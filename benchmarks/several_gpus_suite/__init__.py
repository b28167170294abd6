"""The jobs of `benchmarks/several_gpus.py`: what each runs, and what it asks of the figures."""
