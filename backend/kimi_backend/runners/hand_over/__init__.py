"""What a target and its draft hand to each other without the host: tokens, and the order of their steps."""
