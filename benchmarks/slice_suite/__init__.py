"""Whole rounds of a slice of Kimi-K2.5: how `benchmarks/slice.py` builds, drives and measures it."""
