"""Sources of weights: names, and handles of tensors that are read only where they are wanted."""

from vllm_module.weights.checkpoint import Checkpoint, open_checkpoint
from vllm_module.weights.handle import Handle, Weight, read_into
from vllm_module.weights.hub import resolve
from vllm_module.weights.pages import prefer_huge_pages
from vllm_module.weights.reading import read_all

__all__ = [
    "Checkpoint",
    "Handle",
    "Weight",
    "open_checkpoint",
    "prefer_huge_pages",
    "read_all",
    "read_into",
    "resolve",
]
