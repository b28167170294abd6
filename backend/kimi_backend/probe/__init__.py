"""Finds the settings that a draft was trained with."""
