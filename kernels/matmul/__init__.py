"""Matrix products of dense, FP8, packed and GGUF weights."""
