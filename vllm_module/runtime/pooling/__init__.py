"""Embeddings, classes and scores computed by encoders."""
