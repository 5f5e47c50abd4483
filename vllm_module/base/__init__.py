"""Helpers that any room may use: messages, lazy imports, waiting."""
