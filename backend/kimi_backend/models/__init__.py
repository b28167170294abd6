"""The target and the drafts, built from layers and a checkpoint."""
