"""Paged attention, in plain torch and in Triton, against dense attention written out in float64."""

from __future__ import annotations

import mmap
import runpy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_module.kernels.attention import paged_attention_reference, paged_layout
from vllm_module.kernels.attention.paged_attention import causal_attention, paged_attention
from vllm_module.kernels.attention.paged_attention_splits import Splits
from vllm_module.kernels.attention.paged_attention_triton import paged_attention_triton
from vllm_module.kernels.attention.paged_layout import PagedLayout

# Pytest's importlib mode has no imports between test files.
BATCHES: Any = runpy.run_path(str(Path(__file__).with_name("paged_batches.py")))
MIXED, FP8, implementations = (BATCHES[name] for name in ("MIXED", "FP8", "implementations"))
dense, Batch, make_batch = (BATCHES[name] for name in ("dense", "Batch", "make_batch"))


@implementations
@pytest.mark.parametrize("window", [None, 1, 3, 8, 1000])
@pytest.mark.parametrize("page", [1, 7, 16])
def test_mixed_lengths(page: int, window: int | None, attend) -> None:
    """Prompts, chunks and single tokens in one batch attend as densely, on pages of any size."""
    make_batch(MIXED, page, sliding_window=window).check(attend)


@implementations
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (5, 1), (15, 3), (17, 1)])
def test_grouped_heads(heads: int, kv_heads: int, attend) -> None:
    """Consecutive query heads share a key-value head, in groups of five and of 17 too."""
    make_batch(MIXED, 5, heads, kv_heads).check(attend)


@implementations
@pytest.mark.parametrize("head_size", [1, 8, 80, 96, 112, 256, 320, 512])
def test_head_sizes(head_size: int, attend) -> None:
    """Head sizes that are no power of two attend as densely, up to 512."""
    batch = make_batch(MIXED[:3], 6, head_size=head_size, scale=head_size**-0.5)
    batch.check(attend, atol=4e-6)


@pytest.mark.parametrize(
    ("head_size", "heads", "cache_dtype"),
    [(320, 3, torch.float8_e4m3fn), (512, 2, torch.float8_e4m3fn), (512, 16, torch.float16)],
)
def test_large_heads(head_size: int, heads: int, cache_dtype: torch.dtype, as_accurate) -> None:
    """Heads of more than 256 features take every option, splits, and an FP8 cache with scales."""
    scales = dict(zip(("k_scale", "v_scale"), torch.rand(2, 1) + 0.5, strict=True))
    batch = make_batch(
        [(514, 1), (30, 4), (0, 1)], 16, heads, 1, head_size, head_size**-0.5,
        torch.float16, cache_dtype, sliding_window=513, softcap=20.0, sinks=torch.randn(heads),
        alibi_slopes=torch.rand(heads) / 50, **(scales if cache_dtype.itemsize == 1 else {}),
    )  # fmt: skip
    for attend in (paged_attention, paged_attention_triton):
        as_accurate(batch.run(attend), batch.expected, batch.low)


@implementations
def test_lengths_on_and_beside_the_edges_of_tiles_and_pages(attend) -> None:
    """Contexts and chunks of one less, as many and one more than a tile, a page or a split."""
    decode = [(context - 1, 1) for context in (1, 2, 15, 16, 17, 127, 128, 129, 511, 512, 513)]
    make_batch(decode, 16, 2, 1).check(attend)
    chunks = [(0, 31), (1, 32), (96, 33), (0, 64), (63, 65), (127, 2)]
    make_batch(chunks, 16, 2, 1).check(attend)


def test_a_token_does_not_depend_on_its_batch() -> None:
    """A token's bits are the same alone and in a batch, with a block table of any width."""
    lengths = [(700, 1), (0, 9), (12, 1), (130, 40), (0, 1)]
    batch = make_batch(lengths, 16, 2, 1, softcap=4.0)
    whole = batch.run(paged_attention_triton)
    assert batch.block_tables.shape[1] * 16 > Splits().tokens  # by parts
    starts = batch.query_start_loc.tolist()
    for index, (before, new) in enumerate(lengths):
        needed = -(-(before + new) // 16)
        alone = replace(
            batch,
            query=batch.query[starts[index] : starts[index + 1]],
            block_tables=batch.block_tables[index : index + 1, :needed],  # often in one pass
            context_lens=batch.context_lens[index : index + 1],
            query_start_loc=torch.tensor([0, new], dtype=torch.int32),
            max_query_len=new,
        )
        result = alone.run(paged_attention_triton)
        assert torch.equal(result, whole[starts[index] : starts[index + 1]])


@implementations
def test_views_of_larger_tensors(attend) -> None:
    """Queries cut from a fused projection and caches that are views attend like copies of them."""
    batch = make_batch(MIXED, 5)
    tokens, heads, head_size = batch.query.shape
    fused = torch.full((tokens, 3 * heads * head_size), torch.nan)
    fused[:, heads * head_size : 2 * heads * head_size] = batch.query.flatten(1)
    query = fused.split(heads * head_size, dim=-1)[1].unflatten(-1, (heads, head_size))
    together = torch.stack((batch.k_cache, batch.v_cache), dim=1)  # a page's key beside its value
    k_cache, v_cache = together.unbind(1)
    assert not query.is_contiguous()
    assert not k_cache.is_contiguous()
    replace(batch, query=query, k_cache=k_cache, v_cache=v_cache).check(attend)
    heads_first = batch.v_cache.transpose(1, 2).contiguous().transpose(1, 2)
    features_apart = batch.query.transpose(0, 2).contiguous().transpose(0, 2)
    tables = batch.block_tables.t().contiguous().t()
    apart = {
        name: torch.stack((getattr(batch, name), -getattr(batch, name)), dim=1)[:, 0]
        for name in ("context_lens", "query_start_loc")
    }
    view = replace(batch, query=features_apart, v_cache=heads_first, block_tables=tables, **apart)
    assert not view.context_lens.is_contiguous()
    assert view.k_cache.stride() != view.v_cache.stride()
    view.check(attend)


@implementations
def test_slopes_and_sinks_that_are_views(attend) -> None:
    """Slopes and sinks may be strided or expanded views."""
    slopes, sinks = torch.rand(8)[::2], torch.randn(1).expand(4)
    make_batch(MIXED, 7, alibi_slopes=slopes, sinks=sinks).check(attend)


def test_offsets_beyond_32_bits() -> None:
    """Pages that start beyond 2**31 elements of the cache are found."""
    page, heads, size, pages = 16, 8, 128, 140_000  # 2.3e9 elements, of which three pages exist
    numbers = pages * page * heads * size
    memory = [mmap.mmap(-1, numbers * 2) for _ in range(2)]
    k_cache, v_cache = (
        torch.frombuffer(m, dtype=torch.float16).view(pages, page, heads, size) for m in memory
    )
    small = make_batch([(20, 1), (9, 3)], page, heads, heads, size, dtype=torch.float16)
    near = small.block_tables[[0, 0, 1], [0, 1, 0]].long()
    far = torch.tensor([pages - 1, 131_072, 139_000])
    for cache, held in ((k_cache, small.k_cache), (v_cache, small.v_cache)):
        cache[far] = held[near]
    tables = small.block_tables.clone()
    tables[[0, 0, 1], [0, 1, 0]] = far.int()
    big = replace(small, k_cache=k_cache, v_cache=v_cache, block_tables=tables)
    result = big.run(paged_attention_triton)
    assert torch.equal(result, small.run(paged_attention_triton))
    del k_cache, v_cache, cache, big


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Draw a step of any kind, with lengths near the edges of tiles."""
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    cache_dtype = draw(st.sampled_from([dtype, dtype, *FP8]))
    length = st.sampled_from([0, 1, 2, 5, 15, 16, 17, 31, 33, 64, 127, 128, 130])
    new = st.sampled_from([0, 1, 1, 1, 2, 3, 17, 33])
    lengths = draw(st.lists(st.tuples(length, new), min_size=1, max_size=4))
    kv_heads = draw(st.sampled_from([1, 2]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 5]))
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["sliding_window"] = draw(st.sampled_from([1, 3, 16, 40, 1000]))
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.5, 30.0]))
    if draw(st.booleans()):
        options["alibi_slopes"] = torch.rand(heads)
    if draw(st.booleans()):
        options["sinks"] = torch.randn(heads) * 3
    if cache_dtype != dtype:
        shape = draw(st.sampled_from([1, kv_heads]))
        options["k_scale"], options["v_scale"] = torch.rand(2, shape) + 0.25
    return make_batch(
        lengths,
        draw(st.sampled_from([1, 3, 16, 32])),
        heads,
        kv_heads,
        draw(st.sampled_from([8, 16, 20])),
        draw(st.sampled_from([0.25, 2.0])),
        dtype,
        cache_dtype,
        **options,
    )


@given(batch=batches())
@settings(max_examples=25, phases=[Phase.generate])  # shrinking would take minutes
def test_no_kernel_is_less_accurate_than_torch(batch: Batch, as_accurate) -> None:
    """For any step, the kernel's error to float64 is at most twice that of torch in its dtype."""
    output = batch.run(paged_attention_triton)
    assert output.dtype == batch.query.dtype
    as_accurate(output, batch.expected, batch.low)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_queries_fit_the_float16_that_eight_bits_are_multiplied_in(dtype) -> None:
    """Queries far beyond float16's range, or all zeros, attend to an FP8 cache."""
    options = {"cache_dtype": torch.float8_e4m3fn, "dtype": dtype, "scale": 1e-6}
    batch = make_batch([(30, 1), (5, 4)], 16, **options)
    batch.query[0] *= 1e4 if dtype == torch.float16 else 1e6
    batch.query[1] = 0
    exact = replace(batch, query=batch.query.float()).run()
    output = batch.run(paged_attention_triton)
    torch.testing.assert_close(output.float(), exact, rtol=0.02, atol=0.02)


def test_causal_attention_is_that_of_one_sequence() -> None:
    """Attention without pages attends from a sequence's last tokens to all of it."""
    for total, new, window in ((6, 6, None), (9, 4, None), (9, 4, 2), (5, 1, 3)):
        query, (key, value) = torch.randn(new, 6, 8), torch.randn(2, total, 2, 8)
        heads_first = (x.transpose(0, 1) for x in (query, key, value))
        output = causal_attention(*heads_first, 0.5, window).transpose(0, 1)
        expected = dense(query, key, value, 0.5, window)
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=2e-6)


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest float tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(
    "options",
    [{"softcap": 3.0}, {"sinks": torch.arange(6.0) - 3}, {"alibi_slopes": torch.arange(6.0) / 8}],
    ids=["softcap", "sinks", "alibi"],
)
def test_scores_of_a_prompt_are_made_in_parts(window, options, monkeypatch) -> None:
    """A prompt's scores are never in memory all at once: for long ones that would be gigabytes."""
    # As many scores as at once in truth would take seconds.
    monkeypatch.setattr(paged_attention_reference, "SCORES_AT_ONCE", 6 * 50 * 9)
    query, (key, value) = torch.randn(40, 6, 2), torch.randn(2, 50, 2, 2)
    heads_first = [x.transpose(0, 1) for x in (query, key, value)]
    with Largest() as largest:
        output = causal_attention(*heads_first, 0.5, window, **options).transpose(0, 1)
    assert largest.numel <= 6 * 51 * 9  # with a column of sinks
    expected = dense(query, key, value, 0.5, window, **options)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("keys", [1, 32 * 40, 32 * 70, 32 * 90])
def test_single_tokens_are_worked_on_in_parts(keys: int, monkeypatch) -> None:
    """Single tokens may be batched in any number."""
    monkeypatch.setattr(paged_attention_reference, "_KEYS_AT_ONCE", keys)
    lengths = [(context - 1, 1) for context in (30, 1, 40, 30, 7, 2)]
    make_batch(lengths, 7).check(paged_attention)


@pytest.mark.parametrize("window", [None, 1, 3, 8])
@pytest.mark.parametrize("options", [{}, {"softcap": 30.0}], ids=["plain", "softcap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_pages_one_after_another_are_read_in_place(window, options, dtype, monkeypatch) -> None:
    """A sequence whose pages lie one after another gives what it gives on scattered ones.

    So it does where the layers of a step share a layout, and in caches that are views.
    """
    torch.manual_seed(1)
    monkeypatch.setattr(paged_layout, "_VIEWED", 0)
    scattered = make_batch(MIXED, 7, sliding_window=window, cache_dtype=dtype, **options)
    whole = [(before + new) // -7 * -1 for before, new in MIXED]
    in_order = replace(scattered, block_tables=scattered.block_tables.clone())
    taken, pages = 0, []
    for index, count in enumerate(whole):
        own = scattered.block_tables[index, :count].clamp(0, len(scattered.k_cache) - 1)
        in_order.block_tables[index, :count] = torch.arange(taken, taken + count)
        taken += count
        pages += own.tolist()
    for cache in ("k_cache", "v_cache"):
        setattr(in_order, cache, getattr(scattered, cache)[pages])
    wide = torch.zeros(taken, 2, *in_order.k_cache.shape[1:]).to(dtype)
    wide[:, 0], wide[:, 1] = in_order.k_cache, in_order.v_cache
    in_wide = replace(in_order, k_cache=wide[:, 0], v_cache=wide[:, 1])
    for batch in (in_order, in_wide):
        layout = PagedLayout(batch.block_tables, batch.context_lens, batch.query_start_loc)
        parts = layout.parts(batch.k_cache, torch.float32, 1 << 19, window)
        assert [part.pages for part in parts] == [None] * 5
        batch.check(paged_attention)
        for _ in range(2):
            batch.check(partial(paged_attention, layout=layout))


@implementations
@pytest.mark.parametrize("dtype", FP8)
def test_scales(dtype: torch.dtype, attend) -> None:
    """An eight-bit cache is multiplied by its scales, one or one for each head."""
    for shape in (1, 2):
        k_scale, v_scale = torch.rand(2, shape) + 0.25
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        make_batch(MIXED, 7, cache_dtype=dtype, **scales).check(attend, 1e-5)
