"""Checkpoint files: reading, checking, writing."""
