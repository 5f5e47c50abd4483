"""Kernels for attention over a paged KV cache, rotary embedding, and writing to the cache."""
