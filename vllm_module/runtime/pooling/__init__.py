"""Embeddings, classes and scores of encoders."""
