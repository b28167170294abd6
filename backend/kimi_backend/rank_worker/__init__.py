"""The process of one rank other than 0, above the runners that it runs."""
