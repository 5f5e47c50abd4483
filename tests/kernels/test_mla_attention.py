"""Latent attention, in torch and in Triton, against dense attention written out in float64."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from vllm_module.kernels.attention import mla_attention as public
from vllm_module.kernels.attention import paged_attention_splits
from vllm_module.kernels.attention.concat_and_cache_mla import (
    concat_and_cache_mla,
    concat_and_cache_mla_triton,
)
from vllm_module.kernels.attention.mla_attention import mla_attention, mla_attention_triton
from vllm_module.kernels.attention.mla_attention_tile import decode_candidates, prefill_candidates
from vllm_module.kernels.attention.paged_attention_splits import Decoding, Splits
from vllm_module.kernels.attention.paged_attention_tile import Tiles
from vllm_module.kernels.choices import trying

# Tokens of each sequence before this step and in it: whole prompts, single tokens, later chunks
# and a sequence that has nothing new.
MIXED = [(0, 9), (12, 1), (7, 5), (0, 1), (20, 0), (31, 2)]
GARBAGE = [2**31 - 1, -(2**31), -1, 10**6]
E4M3 = torch.float8_e4m3fn

implementations = pytest.mark.parametrize(
    "attend", [mla_attention, mla_attention_triton], ids=["torch", "triton"]
)
stores = pytest.mark.parametrize(
    "store", [concat_and_cache_mla, concat_and_cache_mla_triton], ids=["torch", "triton"]
)


def dense(query: torch.Tensor, rows: torch.Tensor, rank: int, scale: float, dtype: torch.dtype):
    """Attend from the last ``len(query)`` tokens of one sequence, whose rows are ``rows``."""
    query, rows = query.to(dtype), rows.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    new, total = len(query), len(rows)
    scores = torch.einsum("thd,sd->hts", query, rows) * scale
    unseen = torch.arange(total) > torch.arange(total - new, total).unsqueeze(1)
    weights = scores.to(wide).masked_fill(unseen, -torch.inf).softmax(-1).to(dtype)
    return torch.einsum("hts,sd->thd", weights, rows[:, :rank])


@dataclass(repr=False)
class Batch:
    """One step's arguments, in the order of ``mla_attention``, and what it should return."""

    query: torch.Tensor
    cache: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    query_start_loc: torch.Tensor
    max_query_len: int
    kv_lora_rank: int
    scale: float
    expected: torch.Tensor  # in float64
    low: torch.Tensor  # and in the query's dtype
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, attend: Callable[..., torch.Tensor] = mla_attention) -> torch.Tensor:
        return attend(*list(vars(self).values())[:8], **self.options)

    def check(self, attend: Callable[..., torch.Tensor], atol: float = 2e-6) -> None:
        output = self.run(attend)
        assert output.dtype == self.query.dtype
        torch.testing.assert_close(output.double(), self.expected, rtol=0, atol=atol)


def make_batch(
    lengths: list[tuple[int, int]],
    page: int,
    heads: int = 3,
    rank: int = 24,
    rope: int = 8,
    scale: float = 0.3,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    cache_scale: torch.Tensor | None = None,
) -> Batch:
    """Put sequences on pages in a random order; everything that no sequence owns is poison."""
    counts = [-(-(before + new) // page) for before, new in lengths]
    pool = torch.randperm(sum(counts) + 3)  # three pages belong to nobody
    widest = max([0, *counts]) + 2
    tables = torch.tensor(GARBAGE, dtype=torch.int32).repeat(len(lengths), widest)[:, :widest]
    tables = tables.contiguous()
    cache = torch.full((len(pool), page, rank + rope), torch.nan).to(cache_dtype or dtype)
    queries, expected, low, taken = [torch.empty(0, heads, rank + rope, dtype=dtype)], [], [], 0
    for index, ((before, new), count) in enumerate(zip(lengths, counts, strict=True)):
        pages = pool[taken : taken + count]
        taken += count
        tables[index, :count] = pages.int()
        rows = (torch.randn(before + new, rank + rope) + 0.5).to(dtype)
        positions = torch.arange(before + new)
        slots = pages[positions // page] * page + positions % page
        concat_and_cache_mla(rows[:, :rank], rows[:, rank:], cache, slots, cache_scale)
        if cache.dtype != dtype:  # what is attended to is what the cache holds
            held = cache[pages].flatten(0, 1)[: before + new].double()
            rows = held * (1 if cache_scale is None else cache_scale.double())
        query = torch.randn(new, heads, rank + rope).to(dtype)
        queries.append(query)
        expected.append(dense(query, rows, rank, scale, torch.float64))
        low.append(dense(query, rows, rank, scale, dtype))
    starts = torch.tensor([0] + [new for _, new in lengths]).cumsum(0).int()
    contexts = torch.tensor([sum(pair) for pair in lengths], dtype=torch.int32)
    options = {} if cache_scale is None else {"cache_scale": cache_scale}
    return Batch(
        torch.cat(queries),
        cache,
        tables,
        contexts,
        starts,
        max([0, *(new for _, new in lengths)]),
        rank,
        scale,
        torch.cat(expected),
        torch.cat(low),
        options,
    )


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@implementations
@pytest.mark.parametrize("page", [1, 7, 16])
def test_mixed_lengths(page: int, attend) -> None:
    """Prompts, chunks and single tokens in one batch attend as densely, on pages of any size."""
    make_batch(MIXED, page).check(attend)


@implementations
@pytest.mark.parametrize(
    ("heads", "rank", "rope"), [(1, 16, 16), (5, 512, 64), (17, 8, 2), (33, 20, 6)]
)
def test_numbers_of_heads_and_features(heads: int, rank: int, rope: int, attend) -> None:
    """Any number of heads shares the latents, in tiles that they fill or exceed."""
    scale = (rank + rope) ** -0.5
    make_batch(MIXED[1:3], 6, heads, rank, rope, scale).check(attend, atol=4e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [3, 70])
def test_tiles_of_16_bits(heads: int, dtype: torch.dtype, as_accurate) -> None:
    """Tiles of 16-bit numbers, which are larger, attend as accurately as torch."""
    batch = make_batch([(30, 1), (40, 2)], 16, heads, 32, 8, dtype=dtype)
    as_accurate(batch.run(mla_attention_triton), batch.expected, batch.low)


def test_contexts_are_split_and_summed_up(monkeypatch) -> None:
    """Contexts of several splits attend as densely, also where splits grow with the context."""
    candidates = {"short": Decoding(Splits(64, 4), Tiles(16, 16, 8, 1))}
    monkeypatch.setattr(public, "decode_candidates", lambda *_: candidates)
    lengths = [(0, 1), (63, 1), (64, 1), (256, 1), (300, 1), (3, 2)]
    batch = make_batch(lengths, 16, 2)
    batch.check(mla_attention_triton)
    whole = batch.run(mla_attention_triton)
    monkeypatch.setattr(paged_attention_splits, "SCRATCH", 2 * 4 * 4 * 2 * 24)  # two sequences
    monkeypatch.setattr(paged_attention_splits, "_PROGRAMS", 3)
    assert torch.equal(batch.run(mla_attention_triton), whole)


SIZES = 2, 32, 2, 2, True


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        *(("mla_attention_decode", name) for name in decode_candidates(*SIZES)),
        *(("mla_attention_prefill", name) for name in prefill_candidates(*SIZES)),
    ],
)
def test_candidates_attend_alike(kernel: str, name: str, as_accurate) -> None:
    """Each candidate is as accurate as torch, and a token's bits do not depend on its batch."""
    new = 1 if kernel.endswith("decode") else 9
    batch = make_batch([(290, new), (20, 1), (30, 3)], 16, 2, 32, 8, dtype=torch.float16)
    with trying({kernel: name}):
        whole = batch.run(mla_attention_triton)
        as_accurate(whole, batch.expected, batch.low)
        alone = replace(
            batch,
            query=batch.query[:new],
            block_tables=batch.block_tables[:1],
            context_lens=batch.context_lens[:1],
            query_start_loc=int32(0, new),
            max_query_len=new,
        )
        assert torch.equal(alone.run(mla_attention_triton), whole[:new])


@pytest.mark.parametrize("cache_dtype", [E4M3, torch.float8_e5m2])
@pytest.mark.parametrize("heads", [3, 17])
def test_the_transpose_of_the_values_is_multiplied(heads: int, cache_dtype, as_accurate) -> None:
    """Of a cache of eight bits, on Hopper: for one split and for several, every candidate."""
    scale = torch.tensor([0.5])
    lengths = [(40, 1), (3, 2), (0, 1), (70, 1)]
    batch = make_batch(lengths, 7, heads, 64, 8, 0.3, torch.bfloat16, cache_dtype, scale)
    candidates = decode_candidates(heads, 64, 2, 1, True)
    assert all(each.tiles.swap for each in candidates.values())
    assert not any(each.tiles.swap for each in decode_candidates(heads, 64, 2, 1, False).values())
    for name in candidates:
        with trying({"mla_attention_decode": name}):
            as_accurate(batch.run(mla_attention_triton), batch.expected, batch.low)


def test_a_token_does_not_depend_on_its_batch() -> None:
    """A token's bits are the same alone and in a batch, with a block table of any width."""
    lengths = [(600, 1), (0, 9), (12, 1), (70, 5)]
    batch = make_batch(lengths, 16, 2)
    whole = batch.run(mla_attention_triton)
    starts = batch.query_start_loc.tolist()
    for index, (before, new) in enumerate(lengths):
        alone = replace(
            batch,
            query=batch.query[starts[index] : starts[index + 1]],
            block_tables=batch.block_tables[index : index + 1, : -(-(before + new) // 16)],
            context_lens=batch.context_lens[index : index + 1],
            query_start_loc=int32(0, new),
            max_query_len=new,
        )
        assert torch.equal(
            alone.run(mla_attention_triton), whole[starts[index] : starts[index + 1]]
        )


@implementations
def test_pages_of_nobody_and_rests_of_pages_are_not_read(attend) -> None:
    """NaN in free pages and past a sequence's end reaches neither scores nor values."""
    batch = make_batch(MIXED, 7)
    owned = sum(before + new for before, new in MIXED)
    assert batch.cache[..., 0].isnan().sum() == batch.cache[..., 0].numel() - owned > 0
    assert batch.run(attend).isfinite().all()


@implementations
def test_nan_stays_in_its_sequence(attend) -> None:
    """A sequence that sees NaN gives NaN, and other sequences do not change."""
    batch = make_batch(MIXED, 7)
    before = batch.run(attend)
    for feature in (0, -1):  # of the latent and of the rotary key
        spoilt = replace(batch, cache=batch.cache.clone())
        spoilt.cache[batch.block_tables[0, 0], 0, feature] = torch.nan
        after = spoilt.run(attend)
        assert after[:9].isnan().all()
        assert torch.equal(after[9:], before[9:])


@implementations
def test_tokens_of_no_sequence_get_zeros(attend) -> None:
    """Padding, sequences of length 0 and tokens after the last sequence, gets zeros."""
    batch = make_batch([(0, 3), (4, 1)], 4)
    padding = torch.full((5, *batch.query.shape[1:]), torch.nan)
    zeros = torch.zeros(5, *batch.expected.shape[1:], dtype=torch.float64)
    padded = replace(
        batch,
        query=torch.cat((batch.query, padding)),
        block_tables=torch.cat((batch.block_tables, batch.block_tables[:2] * 0 - 1)),
        context_lens=torch.cat((batch.context_lens, int32(0, 0))),
        query_start_loc=int32(0, 3, 4, 6, 7),  # 2 tokens have none
        expected=torch.cat((batch.expected, zeros)),
    )
    padded.check(attend)
    assert not padded.run(attend)[4:].any()
    wide = padded.block_tables[2:].repeat(1, 300)  # of contexts that could be split
    step = replace(
        padded, block_tables=wide, context_lens=int32(0, 0), query_start_loc=int32(0, 1, 2)
    )
    assert not step.run(attend).any()
    assert replace(batch, query=batch.query[:0], query_start_loc=int32(0, 0, 0)).run(attend).shape


@implementations
def test_views_of_larger_tensors(attend) -> None:
    """Queries, caches and tables that are views attend like copies of them."""
    batch = make_batch(MIXED, 5)
    together = torch.stack((batch.cache, -batch.cache), dim=1)
    view = replace(
        batch,
        query=batch.query.transpose(0, 2).contiguous().transpose(0, 2),
        cache=together[:, 0],
        block_tables=batch.block_tables.t().contiguous().t(),
    )
    assert not view.cache.is_contiguous()
    view.check(attend)
    replace(batch, cache=batch.cache.transpose(1, 2).contiguous().transpose(1, 2)).check(attend)


@implementations
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", [E4M3, torch.float8_e5m2])
def test_an_fp8_cache_is_multiplied_by_its_scale(dtype, cache_dtype, attend, as_accurate) -> None:
    """Keys and values of an FP8 cache are multiplied by its scale, and by 1 without one."""
    for scale in (torch.tensor([0.3]), None):
        batch = make_batch(MIXED, 7, dtype=dtype, cache_dtype=cache_dtype, cache_scale=scale)
        as_accurate(batch.run(attend), batch.expected, batch.low)


def test_offsets_beyond_32_bits() -> None:
    """Pages that start beyond 2**31 elements of the cache are written and found."""
    page, size, pages = 64, 40, 900_000  # 2.3e9 elements, of which three pages exist
    memory = mmap.mmap(-1, pages * page * size * 2)
    cache = torch.frombuffer(memory, dtype=torch.float16).view(pages, page, size)
    small = make_batch([(80, 1), (9, 3)], page, 2, 32, 8, dtype=torch.float16)
    near = small.block_tables[[0, 0, 1], [0, 1, 0]].long()
    far = torch.tensor([pages - 1, 850_000, 899_990])
    rows = small.cache[near].flatten(0, 1).nan_to_num()
    slots = (far.unsqueeze(1) * page + torch.arange(page)).flatten()
    concat_and_cache_mla_triton(rows[:, :32], rows[:, 32:], cache, slots)
    tables = small.block_tables.clone()
    tables[[0, 0, 1], [0, 1, 0]] = far.int()
    big = replace(small, cache=cache, block_tables=tables)
    result = big.run(mla_attention_triton)
    assert torch.equal(result, small.run(mla_attention_triton))
    del cache, big


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Draw a step of any kind, with lengths near the edges of tiles."""
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    length = st.sampled_from([0, 1, 2, 15, 16, 17, 31, 33, 64, 130])
    new = st.sampled_from([0, 1, 1, 2, 3, 17, 33])
    lengths = draw(st.lists(st.tuples(length, new), min_size=1, max_size=4))
    cache_dtype = draw(st.sampled_from([None, None, E4M3]))
    return make_batch(
        lengths,
        draw(st.sampled_from([1, 3, 16, 32])),
        draw(st.sampled_from([1, 3, 16, 40])),
        draw(st.sampled_from([8, 16, 20])),
        draw(st.sampled_from([2, 8, 16])),
        draw(st.sampled_from([0.25, 2.0])),
        dtype,
        cache_dtype,
        None if cache_dtype is None else torch.rand(1) + 0.25,
    )


@given(batch=batches())
@settings(max_examples=6, phases=[Phase.generate])  # shrinking would take minutes
def test_no_kernel_is_less_accurate_than_torch(batch: Batch, as_accurate) -> None:
    """For any step, the kernel's error to float64 is at most twice that of torch in its dtype."""
    as_accurate(batch.run(mla_attention_triton), batch.expected, batch.low)


def changed(**changes: Any) -> Batch:
    return replace(make_batch(MIXED, 7), **changes)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "row": ({"query": torch.zeros(18, 3, 24)}, r"cache must have the shape \[any, any, 24\]"),
    "no rotary key": ({"kv_lora_rank": 32}, "1 to 64 of the rotary key, got 32 and 0"),
    "large latent": (
        {"kv_lora_rank": 513, "query": torch.zeros(1, 1, 520), "cache": torch.zeros(1, 1, 520)},
        "1 to 512 features of the latent .* got 513 and 7",
    ),
    "eight bits": (
        {"cache": torch.zeros(12, 7, 32, dtype=torch.int8)},
        "cache must be torch.float32 or torch.float8_e4m3fn .* got torch.int8",
    ),
    "empty pages": ({"cache": torch.zeros(12, 0, 32)}, "page_size is 0"),
    "scale": ({"options": {"cache_scale": torch.ones(3)}}, r"cache_scale must have the shape"),
    "short context": (
        {"context_lens": int32(8, 13, 12, 1, 20, 33)},
        "sequence 0 has a context of 8 tokens",
    ),
    "page": (
        {"cache": torch.zeros(3, 7, 32)},
        r"block_tables\[\d, \d\] is page \d+, and the cache",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused_with_the_numbers(name: str) -> None:
    """Arguments that do not fit, or point beyond the cache, raise ValueError with what came."""
    changes, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        changed(**changes).run()


def test_the_operators_are_traced_and_run_on_meta() -> None:
    """Their fakes have the right shapes, and they run on meta."""
    batch = make_batch(MIXED, 7)
    arguments = list(vars(batch).values())[:8]
    torch.library.opcheck(torch.ops.vllm_module.mla_attention.default, tuple(arguments))
    on_meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments]
    assert mla_attention(*on_meta).shape == (18, 3, 24)
    rows = torch.randn(4, 32)
    stored = (rows[:, :24], rows[:, 24:], batch.cache, torch.arange(4))
    torch.library.opcheck(torch.ops.vllm_module.concat_and_cache_mla.default, (*stored, None))


@stores
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, E4M3, torch.float8_e5m2])
def test_latents_are_stored_in_their_cache_slots(dtype: torch.dtype, store) -> None:
    """Each token's two parts are stored side by side; -1 stores nothing; nothing else changes."""
    fused = torch.randn(6, 3 + 20 + 6).split([3, 20, 6], -1)
    slots = torch.tensor([5, -1, 11, 0, -1, 2])
    scale = torch.tensor([0.5]) if dtype.itemsize == 1 else None
    cache = torch.full((3, 4, 26), 7.0).to(dtype)
    store(fused[1], fused[2], cache, slots, scale)
    rows = torch.cat(fused[1:], -1) / (1 if scale is None else scale)
    expected = torch.full((12, 26), 7.0).to(dtype)
    kept = slots >= 0
    expected[slots[kept]] = rows[kept].to(dtype)
    assert torch.equal(cache.flatten(0, 1).view(torch.uint8), expected.view(torch.uint8))
    store(fused[1][:0], fused[2][:0], cache, slots[:0], scale)


def test_a_cache_slot_beyond_the_cache_is_refused() -> None:
    """A cache slot beyond the cache is refused on the CPU; the kernel does not write there."""
    latent, rope, cache = torch.ones(1, 20), torch.ones(1, 6), torch.zeros(3, 4, 26)
    with pytest.raises(ValueError, match="slot_mapping has cache slot 12, and the cache has 12"):
        concat_and_cache_mla(latent, rope, cache, torch.tensor([12]))
    concat_and_cache_mla_triton(latent, rope, cache, torch.tensor([12]))
    assert not cache.any()
    with pytest.raises(ValueError, match=r"cache must have the shape \[any, any, 26\]"):
        concat_and_cache_mla(latent, rope, cache[..., 1:], torch.tensor([1]))
