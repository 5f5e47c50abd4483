"""Kernels on rows: norms, activations, quantization, logits."""
