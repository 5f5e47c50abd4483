"""Attention that reads a cache's pages where they are, beside softmax written out in float64."""

from __future__ import annotations

import pytest
import torch

from vllm_module.kernels.attention.attention_on_pages import can_attend_on_pages
from vllm_module.kernels.attention.paged_attention import paged_attention
from vllm_module.kernels.attention.paged_layout import PagedLayout
from vllm_module.kernels.attention.rotate_and_cache import rotate_and_cache
from vllm_module.kernels.matmul.products import Products, products

pytest.importorskip("numba")
PAGES, SIZE, HEADS, KV_HEADS = 40, 3, 6, 2
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def test_the_loops_compile() -> None:
    """With numba they can be chosen, for a cache of the dtypes that they read."""
    assert can_attend_on_pages(torch.float32)
    assert can_attend_on_pages(torch.bfloat16)
    assert not can_attend_on_pages(torch.float16)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("columns", [5, 64])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("extra", ["", "softcap", "slopes", "sinks"])
def test_softmax_written_out(
    dtype: torch.dtype, columns: int, window: int | None, extra: str
) -> None:
    """Sequences of one token and of two, one without a token, pages in any order."""
    contexts = torch.tensor([1, 7, 5, 0, 30], dtype=torch.int32)
    starts = torch.tensor([0, 1, 2, 4, 4, 5], dtype=torch.int32)
    keys, values = torch.randn(2, PAGES, SIZE, KV_HEADS, columns).to(dtype)
    tables = torch.stack([torch.randperm(PAGES)[:10] for _ in contexts]).int()
    query = torch.randn(5, HEADS, columns).to(dtype)
    cap = 2.0 if extra == "softcap" else None
    slopes = torch.rand(HEADS) if extra == "slopes" else None
    sinks = torch.randn(HEADS) if extra == "sinks" else None
    scores = cap, slopes, sinks
    with torch.inference_mode(), products(Products(pages=True)):
        layout = PagedLayout(tables, contexts, starts)
        caches = query, keys, values, tables, contexts, starts
        y = paged_attention(*caches, 2, 0.3, window, None, None, *scores, layout=layout)
    for sequence, context in enumerate(contexts.tolist()):
        new = range(*starts[sequence : sequence + 2].tolist())
        for token in new:
            last = context - (new.stop - token)
            first = 0 if window is None else max(0, last - window + 1)
            seen = torch.arange(first, last + 1)
            page = tables[sequence, seen // SIZE].long()
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                key = keys[page, seen % SIZE, kv_head].double()
                s = key @ query[token, head].double() * 0.3
                s = s if cap is None else cap * (s / cap).tanh()
                s = s if slopes is None else s + slopes[head].double() * (seen - last)
                s = s if sinks is None else torch.cat((s, sinks[head : head + 1].double()))
                expected = s.softmax(0)[: len(seen)] @ values[page, seen % SIZE, kv_head].double()
                error = (y[token, head].double() - expected).abs().max()
                assert error <= BOUND[dtype], (token, head)


def test_a_page_beyond_the_cache_is_refused() -> None:
    """No memory outside of the cache is read."""
    cache = torch.zeros(2, 4, SIZE, KV_HEADS, 8)
    one = torch.tensor([SIZE + 1], dtype=torch.int32)
    tables, starts = torch.tensor([[0, 4]], dtype=torch.int32), torch.tensor([0, 1]).int()
    with torch.inference_mode(), products(Products(pages=True)):
        layout = PagedLayout(tables, one, starts)
        with pytest.raises(ValueError, match="page"):
            paged_attention(
                torch.zeros(1, HEADS, 8), *cache, tables, one, starts, 1, 1.0, layout=layout
            )


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("pairs", [4, 3])
def test_rotation_beside_torch(neox: bool, normed: bool, pairs: int) -> None:
    """Queries are rotated and keys and values stored as torch's operations do, but for rounding."""
    whole = torch.randn(3, HEADS + 2 * KV_HEADS, 8)
    cos, sin = torch.randn(2, 3, pairs)
    slots = torch.tensor([4, -1, 7])
    weights = (torch.rand(8), torch.rand(8)) if normed else (None, None)
    starts = torch.tensor([0, 3], dtype=torch.int32)
    results = []
    for chosen in (False, True):
        query, key, value = whole.clone().split([HEADS, KV_HEADS, KV_HEADS], 1)
        cache = torch.zeros(2, 4, SIZE, KV_HEADS, 8)
        with torch.inference_mode(), products(Products(pages=chosen)):
            tables, context = torch.arange(4).int()[None], starts[1:]
            layout = PagedLayout(tables, context, starts, slots)
            query = rotate_and_cache(
                query, key, value, cos, sin, *cache, slots, None, None, neox, *weights, 1e-6, 0.5,
                layout=layout,
            )  # fmt: skip
        results.append((query, cache))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    assert results[1][1].ne(0).any(-1).sum() == 2 * 2 * KV_HEADS
