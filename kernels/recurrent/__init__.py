"""Kernels for the convolutions and recurrences of Mamba-2 and gated delta nets."""
