"""Settings and checkpoints to runners that are ready for steps."""
