"""The hand-over between a target and its draft without the host: tokens, and the order of their steps."""
