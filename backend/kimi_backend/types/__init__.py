"""Frozen values that cross a border between packages. No behaviour beyond derived properties."""
