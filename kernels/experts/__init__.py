"""Mixture of experts: routing tokens, sorting them, grouped products, combining."""
