"""Batches on pages, and dense attention to them, written out in float64.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from vllm_module.kernels.attention.paged_attention import paged_attention
from vllm_module.kernels.attention.paged_attention_triton import paged_attention_triton
from vllm_module.kernels.attention.reshape_and_cache import reshape_and_cache

# Tokens of each sequence before this step and in it: whole prompts, single tokens, later chunks
# and a sequence that has nothing new.
MIXED = [(0, 9), (12, 1), (7, 5), (0, 1), (20, 0), (31, 2)]
GARBAGE = [2**31 - 1, -(2**31), -1, 10**6]
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
implementations = pytest.mark.parametrize(
    "attend", [paged_attention, paged_attention_triton], ids=["torch", "triton"]
)


def dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Attend from the last ``len(query)`` tokens of one sequence; all ``[tokens, heads, size]``.

    In a low ``dtype``, scores and weights are rounded to it, as models written in torch do.
    """
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    new, heads, _ = query.shape
    group = heads // key.shape[1]
    output = torch.zeros_like(query)
    for row in range(new):
        last = len(key) - new + row
        first = 0 if sliding_window is None else max(0, last - sliding_window + 1)
        for head in range(heads):
            scores = (key[first : last + 1, head // group] @ query[row, head]) * scale
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            if alibi_slopes is not None:
                distance = torch.arange(first, last + 1) - last
                scores = scores + (alibi_slopes[head].to(wide) * distance).to(dtype)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head].to(dtype).view(1)))
            weights = scores.to(wide).softmax(0)[: last + 1 - first].to(dtype)
            output[row, head] = weights @ value[first : last + 1, head // group]
    return output


@dataclass(repr=False)
class Batch:
    """One step's arguments, in the order of ``paged_attention``, and what it should return."""

    query: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    query_start_loc: torch.Tensor
    max_query_len: int
    scale: float
    expected: torch.Tensor  # in float64
    low: torch.Tensor  # and in the query's dtype
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, attend: Callable[..., torch.Tensor] = paged_attention) -> torch.Tensor:
        return attend(
            self.query, self.k_cache, self.v_cache, self.block_tables, self.context_lens,
            self.query_start_loc, self.max_query_len, self.scale, **self.options,
        )  # fmt: skip

    def check(self, attend: Callable[..., torch.Tensor], atol: float = 2e-6) -> None:
        output = self.run(attend)
        assert output.shape == self.query.shape
        assert output.dtype == self.query.dtype
        torch.testing.assert_close(output.double(), self.expected, rtol=0, atol=atol)


def make_batch(
    lengths: list[tuple[int, int]],
    page: int,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 16,
    scale: float = 0.3,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    **options: Any,
) -> Batch:
    """Put sequences on pages in a random order; everything that no sequence owns is poison.

    So are tokens that the window has left, and their pages are no longer in the tables.
    """
    cache_dtype = cache_dtype or dtype
    window = options.get("sliding_window")
    counts = [-(-(before + new) // page) for before, new in lengths]
    pool = torch.randperm(sum(counts) + 3)  # three pages belong to nobody
    widest = max([0, *counts]) + 2
    tables = torch.tensor(GARBAGE, dtype=torch.int32).repeat(len(lengths), widest)[:, :widest]
    tables = tables.contiguous()
    cache = torch.full((2, len(pool), page, kv_heads, head_size), torch.nan).to(cache_dtype)
    scales = {name: options[name] for name in ("k_scale", "v_scale") if name in options}
    dense_options = {name: value for name, value in options.items() if name not in scales}
    queries, expected, low, taken = [torch.empty(0, heads, head_size, dtype=dtype)], [], [], 0
    for index, ((before, new), count) in enumerate(zip(lengths, counts, strict=True)):
        pages = pool[taken : taken + count]
        taken += count
        tables[index, :count] = pages.int()
        seen = 0 if window is None else max(0, before - window + 1)
        tables[index, : seen // page] = GARBAGE[index % 4]
        tokens = before + new
        key, value = torch.randn(2, tokens, kv_heads, head_size) + 0.5  # not what a mask gives
        key, value = key.to(dtype), (2 * value).to(dtype)
        positions = torch.arange(tokens)
        slots = torch.where(
            positions < seen, -1, pages[positions // page] * page + positions % page
        )
        reshape_and_cache(key, value, cache[0], cache[1], slots, **scales)
        if cache_dtype.itemsize == 1:  # what is attended to is what the cache holds
            held = cache[:, pages].flatten(1, 2)[:, :tokens].double().nan_to_num()
            key, value = (
                part * scales.get(name, torch.ones(1)).double()[:, None]
                for part, name in zip(held, ("k_scale", "v_scale"), strict=True)
            )
        query = torch.randn(new, heads, head_size).to(dtype)
        queries.append(query)
        expected.append(dense(query, key, value, scale, **dense_options))
        low.append(dense(query, key, value, scale, **dense_options, dtype=dtype))
    starts = torch.tensor([0] + [new for _, new in lengths]).cumsum(0).int()
    contexts = torch.tensor([sum(pair) for pair in lengths], dtype=torch.int32)
    most = max([0, *(new for _, new in lengths)])
    query = torch.cat(queries)
    whole, rounded = torch.cat([queries[0].double(), *expected]), torch.cat([queries[0], *low])
    return Batch(query, *cache, tables, contexts, starts, most, scale, whole, rounded, options)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
