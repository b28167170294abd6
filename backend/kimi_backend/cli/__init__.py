"""The `kimi` command line."""
