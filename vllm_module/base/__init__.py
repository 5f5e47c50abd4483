"""Helpers without a trade of their own: messages, lazy imports, waiting."""
