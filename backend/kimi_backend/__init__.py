"""Serving Kimi-K2.x with EAGLE3 speculative decoding: models, engine, and the Triton Server seam."""
