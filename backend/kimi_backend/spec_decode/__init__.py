"""Speculation: what is proposed, what was accepted, and how many tokens to draft next."""
