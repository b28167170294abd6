"""Starting Triton Server and the processes beside it, and what their ports and secrets are. No model runs here."""
