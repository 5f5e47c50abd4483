"""Attention that reads a cache's pages where they are, beside softmax written out in float64."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

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


@pytest.mark.parametrize("window", [None, 1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE])
@pytest.mark.parametrize("context", [1, SIZE, SIZE + 1, 3 * SIZE - 1, 3 * SIZE, 3 * SIZE + 1])
@pytest.mark.parametrize("wrong", [-1, 4])
def test_pages_that_no_token_is_seen_on_may_be_any(
    window: int | None, context: int, wrong: int
) -> None:
    """Of a table's pages, those are refused that have a token of the window and are not there."""
    caches = torch.zeros(2, 4, SIZE, KV_HEADS, 8)
    lengths, starts = torch.tensor([context]).int(), torch.tensor([0, 1]).int()
    seen = range(0 if window is None else max(0, context - window), context)
    for column in range(5):
        tables = torch.zeros(1, 5, dtype=torch.int32)
        tables[0, column] = wrong
        is_read = any(token // SIZE == column for token in seen)
        with (
            torch.inference_mode(),
            products(Products(pages=True)),
            pytest.raises(ValueError, match="page") if is_read else nullcontext(),
        ):
            layout = PagedLayout(tables, lengths, starts)
            query = torch.zeros(1, HEADS, 8)
            y = paged_attention(
                query, *caches, tables, lengths, starts, 1, 1.0, window, layout=layout
            )
            assert not y.any()


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("pairs", [4, 3])
@pytest.mark.parametrize("offset", [None, 0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_beside_torch(
    neox: bool, normed: bool, pairs: int, offset: float | None, dtype: torch.dtype
) -> None:
    """Queries are rotated and keys and values stored as torch's operations do, but for rounding."""
    whole = torch.randn(3, HEADS + 2 * KV_HEADS, 8).to(dtype)
    cos, sin = torch.randn(2, 3, pairs)
    slots = torch.tensor([4, -1, 7])
    weights = tuple(torch.rand(2, 8).to(dtype)) if normed else (None, None)
    starts = torch.tensor([0, 3], dtype=torch.int32)
    results = []
    for chosen in (False, True):
        query, key, value = whole.clone().split([HEADS, KV_HEADS, KV_HEADS], 1)
        cache = torch.zeros(2, 4, SIZE, KV_HEADS, 8, dtype=dtype)
        with torch.inference_mode(), products(Products(pages=chosen)):
            tables, context = torch.arange(4).int()[None], starts[1:]
            layout = PagedLayout(tables, context, starts, slots)
            query = rotate_and_cache(
                query, key, value, cos, sin, *cache, slots, None, None, neox, *weights, 1e-6,
                offset, layout=layout,
            )  # fmt: skip
        results.append((query, cache))
    # Each rounding to bfloat16 is that of torch, but for sums that lie between two numbers.
    close = 1e-5 if dtype == torch.float32 else 2.0**-8
    torch.testing.assert_close(*results, rtol=close, atol=1e-5)
    if dtype == torch.bfloat16:
        others = results[0][0].ne(results[1][0]).float().mean()
        assert others < 0.05
    assert results[1][1].ne(0).any(-1).sum() == 2 * 2 * KV_HEADS


def spread(x: torch.Tensor, gaps: list[int]) -> torch.Tensor:
    """Return a view with the numbers of ``x``, and drawn gaps before its dimensions but the last.

    The only dimension of a vector has gaps, too.
    """
    inner = x.shape[-1:] if x.dim() > 1 else ()
    steps = [gaps.pop() for _ in x.shape[: x.dim() - len(inner)]]
    outer = [size * step for size, step in zip(x.shape, steps, strict=False)]
    room = x.new_full((*outer, *inner), 99)
    view = room[tuple(slice(None, None, step) for step in steps)]
    return view.copy_(x)


@pytest.mark.parametrize("strided", ["cosines", "sines", "both"])
@pytest.mark.parametrize("neox", [True, False])
def test_angles_side_by_side_in_memory(strided: str, neox: bool) -> None:
    """A table of complex numbers has a sine between two cosines, which rotate as torch's do."""
    tokens, pairs = 5, 4
    angles = torch.polar(torch.ones(tokens, pairs), torch.randn(tokens, pairs))
    cos, sin = torch.view_as_real(angles).unbind(-1)
    assert cos.stride() == sin.stride() == (2 * pairs, 2)
    if strided != "both":
        cos, sin = (cos, sin.contiguous()) if strided == "cosines" else (cos.contiguous(), sin)
    query, key, value = torch.randn(3, tokens, 2, 2 * pairs)
    part = query.unflatten(-1, (2, pairs) if neox else (pairs, 2))
    part = part.transpose(-1, -2) if neox else part
    pair = torch.view_as_real(torch.view_as_complex(part.contiguous()) * angles.unsqueeze(1))
    expected = (pair.transpose(-1, -2) if neox else pair).flatten(-2)
    caches = torch.zeros(2, 2, SIZE, 2, 2 * pairs)
    slots, starts = torch.arange(tokens), torch.tensor([0, tokens]).int()
    with torch.inference_mode(), products(Products(pages=True)):
        layout = PagedLayout(torch.arange(2).int()[None], starts[1:], starts, slots)
        result = rotate_and_cache(
            query, key, value, cos, sin, *caches, slots, None, None, neox, layout=layout
        )
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 6),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    half=st.integers(1, 5),
    pairs=st.integers(1, 5),
    size=st.integers(1, 4),
    neox=st.booleans(),
    normed=st.booleans(),
    gaps=st.lists(st.integers(1, 3), min_size=24, max_size=24),
    seed=st.integers(0, 1 << 16),
)
def test_rotation_written_out(
    tokens: int,
    heads: tuple[int, int],
    half: int,
    pairs: int,
    size: int,
    neox: bool,
    normed: bool,
    gaps: list[int],
    seed: int,
) -> None:
    """Any strides of each tensor, and each slot from the first to the last, or none."""
    torch.manual_seed(seed)
    kv_heads, columns, pairs = heads[0], 2 * half, min(half, pairs)
    pages = -(-tokens // size) + 1
    slots = torch.randperm(pages * size + 1)[:tokens] - 1
    query = torch.randn(tokens, kv_heads * heads[1], columns)
    key, value = torch.randn(2, tokens, kv_heads, columns)
    cos, sin = torch.randn(2, tokens, pairs)
    weights = (torch.rand(columns), torch.rand(columns)) if normed else (None, None)
    caches = [spread(torch.full((pages, size, kv_heads, columns), 7.0), gaps) for _ in range(2)]

    def turned(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        x = x.double()
        if weight is not None:
            x = F.rms_norm(x, x.shape[-1:], weight.double() + 0.5, 1e-6)
        part = x[..., : 2 * pairs].unflatten(-1, (2, pairs) if neox else (pairs, 2))
        part = part.transpose(-1, -2) if neox else part
        angles = torch.complex(cos.double(), sin.double()).unsqueeze(1)
        pair = torch.view_as_real(torch.view_as_complex(part.contiguous()) * angles)
        pair = pair.transpose(-1, -2) if neox else pair
        return torch.cat((pair.flatten(-2), x[..., 2 * pairs :]), -1)

    expected = torch.full((2, pages * size, kv_heads, columns), 7.0, dtype=torch.float64)
    stored = slots >= 0
    expected[0, slots[stored]] = turned(key, weights[1])[stored]
    expected[1, slots[stored]] = value[stored].double()
    given = [spread(each, gaps) for each in (query, key, value, cos, sin, slots)]
    *rows, places = given
    with torch.inference_mode(), products(Products(pages=True)):
        tables, starts = torch.arange(pages).int()[None], torch.tensor([0, tokens]).int()
        layout = PagedLayout(tables, starts[1:], starts, places)
        result = rotate_and_cache(
            *rows, *caches, places, None, None, neox, *weights, 1e-6, 0.5, layout=layout
        )
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(result.double(), turned(query, weights[0]), **close)
    for cache, of_cache in zip(caches, expected, strict=True):
        torch.testing.assert_close(cache.double().flatten(0, 1), of_cache, **close)
