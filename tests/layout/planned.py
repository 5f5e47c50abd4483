"""Layouts of small modules' plans, for tests.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import nn

from vllm_module import vLLMModule
from vllm_module.distributed import expert_parallel, tensor_parallel
from vllm_module.layout import Layout
from vllm_module.weights.region import Region


class Holder(vLLMModule):
    """A module with one child, named ``layer``."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layer = build()


def layout_of(build: Callable[[], nn.Module], size: int, *, experts: int = 0) -> Layout:
    spread = expert_parallel(rank=0, size=experts) if experts else nullcontext()
    with tensor_parallel(rank=0, size=size), spread:
        module = Holder(build)
    regions = {name: Region.of(name, tensor) for name, tensor in module.expected_weights().items()}
    return module.plan_weights(regions).layout()


def boxes(layout: Layout, name: str) -> list[tuple[list[int], Any, Any, int, Any, Any]]:
    """Return ranks, start, size, offset, shape and strides of each box of a tensor."""
    entry, expert = layout.find(name)
    return [
        (list(ranks), box.start, box.size, box.held.offset, box.held.shape, box.held.strides)
        for ranks, box in layout.held_by(entry, expert)
    ]
