"""What multiplies on a CPU, as an engine has chosen it for its steps, and how it is measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import NamedTuple

import torch

_FEW = 64  # largest number of rows in the class "few"


class Products(NamedTuple):
    """What multiplies on a CPU, by number of rows.

    Attributes:
        one, few, many: True for oneDNN with one row, with 2 to 64 rows, and with more; for large
            float32 matmuls.
        floats: numbers of rows that are multiplied by large weights in float32, bfloat16 or float16
            in the loops of :mod:`~vllm_module.kernels.matmul.code_rows_matmul`.
        codes: largest number of rows that are multiplied by the codes of quantized weights, instead
            of dequantizing a weight first, in the same loops.
        pages: True for attention of single tokens that reads a cache's pages where they are
            (:mod:`~vllm_module.kernels.attention.attention_on_pages`), and for the other loops of
            few rows: norms, activations, states, and routing to experts.

    """

    one: bool = False
    few: bool = False
    many: bool = False
    floats: range = range(0)
    codes: int = 0
    pages: bool = False

    def use_onednn(self, rows: int) -> bool:
        """Return whether oneDNN computes a matmul of ``rows`` rows."""
        return self.one if rows == 1 else self.few if rows <= _FEW else self.many


# A NamedTuple is immutable, so all contexts may share the default that ruff warns of.
products_in_use: ContextVar[Products] = ContextVar("products", default=Products())  # noqa: B039


@contextmanager
def products(chosen: Products) -> Iterator[None]:
    """Use the libraries of ``chosen`` for this thread's matmuls inside the block."""
    token = products_in_use.set(chosen)
    try:
        yield
    finally:
        products_in_use.reset(token)


def seconds_of(work: Callable[[], object]) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def least_seconds(
    ways: Sequence[Callable[..., object]],
    x: torch.Tensor,
    weights: Iterator[torch.Tensor],
    rounds: int,
    seconds: Callable[[Callable[[], object]], float],
) -> list[float]:
    """Return the least time that each way takes to multiply ``x`` by one of the weights.

    They take turns, so that another busy process disturbs few of them, and none is compiled or
    read into the cache for another.
    """
    least = [math.inf] * len(ways)
    for _ in range(rounds):
        for at, way in enumerate(ways):
            least[at] = min(least[at], seconds(partial(way, x, next(weights))))
    return least
