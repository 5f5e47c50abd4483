"""Which token each sequence gets."""
