"""Tensor parallelism in processes: rank 0's runners answer, those of the other ranks run what it tells them
(docs/decisions/0018)."""
