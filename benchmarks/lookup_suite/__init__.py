"""Loads and cases for measuring lookup proposals."""
