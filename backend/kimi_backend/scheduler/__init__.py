"""The choice of who runs in the next step, with how many rows and which blocks."""
