"""Poisoned memory, which shows elements that were never written."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill new memory with NaN (integers: their largest value) inside the block.

    So unwritten elements show. PyTorch does this in deterministic mode, for ``torch.empty`` and
    everything like it.
    """
    before = torch.get_deterministic_debug_mode()
    with warnings.catch_warnings():
        # Some operations have no deterministic form, and give a warning.
        warnings.filterwarnings("ignore", ".*deterministic", UserWarning)
        torch.set_deterministic_debug_mode("warn")
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(before)
