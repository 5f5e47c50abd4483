"""Models of the transformers library, loaded and run as models of ours."""
