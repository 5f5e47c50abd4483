"""A digest of a tensor that no layout changes: its definition, and how CPUs and GPUs compute it."""
