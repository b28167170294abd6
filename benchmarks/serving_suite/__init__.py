"""The serving benchmark in parts: loads, measuring, plots. `benchmarks/serving.py` is the command."""
