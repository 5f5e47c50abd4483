"""Kernels for matmuls with dense, FP8, packed and GGUF weights."""
