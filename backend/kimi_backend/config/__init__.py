"""Configuration: checkpoint config.json files and server settings, parsed once, validated, frozen."""
