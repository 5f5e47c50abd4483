"""Kernels for mixtures of experts: routing, sorting, grouped matmuls, combining."""
