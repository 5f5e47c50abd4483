"""Choosing the next token of each sequence from logits."""
