"""Models of the transformers library, loaded and run with our layers."""
