"""Paged attention, in plain torch and in Triton, against dense attention written out in float64."""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from vllm_module.kernels.attention import paged_attention as public
from vllm_module.kernels.attention import (
    paged_attention_decode,
    paged_attention_prefill,
    paged_attention_reference,
    paged_attention_splits,
    paged_layout,
)
from vllm_module.kernels.attention.paged_attention import causal_attention, paged_attention
from vllm_module.kernels.attention.paged_attention_decode import decode_candidates
from vllm_module.kernels.attention.paged_attention_prefill import prefill_candidates
from vllm_module.kernels.attention.paged_attention_splits import (
    SCRATCH,
    SEQUENCES,
    Decoding,
    Splits,
    programs_of,
    sequences_of_a_launch,
    split_size,
)
from vllm_module.kernels.attention.paged_attention_tile import Tiles
from vllm_module.kernels.attention.paged_attention_triton import paged_attention_triton
from vllm_module.kernels.attention.paged_layout import PagedLayout
from vllm_module.kernels.attention.reshape_and_cache import reshape_and_cache
from vllm_module.kernels.choices import choose, trying
from vllm_module.kernels.operators import tl, triton

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


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut contexts into at most four splits, of 128 tokens where they are few enough."""
    candidates = {"short": Decoding(Splits(128, 4), Tiles(16, 32, 4, 3))}
    monkeypatch.setattr(paged_attention_decode, "decode_candidates", lambda *_: candidates)


SPLIT = [1, 128, 129, 512, 513, 901]
# The window begins one before, on and one after the edge of a split, of 128 tokens and of 256.
WINDOW = 150
MEETING = [1, *(WINDOW + begin + by for begin in (0, 128, 512) for by in (-1, 0, 1))]


@pytest.mark.parametrize(("window", "contexts"), [(None, SPLIT), (WINDOW, MEETING)])
def test_contexts_are_split_and_summed_up(window, contexts, short_splits, monkeypatch) -> None:
    """Contexts of several splits attend as densely, also where splits grow with the context."""
    sinks = torch.randn(2)
    decode = [(context - 1, 1) for context in contexts]
    batch = make_batch(decode, 16, 2, 1, sliding_window=window, sinks=sinks)
    batch.check(paged_attention_triton)
    whole = batch.run(paged_attention_triton)
    # One program for all splits, or as many as there could be.
    for programs in (1, 1 << 20) if window is None else ():
        monkeypatch.setattr(paged_attention_splits, "_PROGRAMS", programs)
        assert torch.equal(batch.run(paged_attention_triton), whole)


@pytest.mark.parametrize("window", [None, 100])
def test_a_context_of_one_split_has_its_bits_in_any_table(window, short_splits) -> None:
    """In a table with room for more splits, it is written where it is computed, as without room."""
    decode = [(context - 1, 1) for context in (1, 31, 32, 99, 127, 128)]
    batch = make_batch([*decode, (0, 0)], 16, 2, 1, sliding_window=window, sinks=torch.randn(2))
    count, columns = batch.block_tables.shape
    tables = torch.full((count, columns + 70), -1, dtype=torch.int32)
    tables[:, :columns] = batch.block_tables
    alone = batch.run(paged_attention_triton)
    assert torch.equal(replace(batch, block_tables=tables).run(paged_attention_triton), alone)


@triton.jit
def _sizes(contexts_ptr, sizes_ptr):
    at = tl.program_id(0)
    tl.store(sizes_ptr + at, split_size(tl.load(contexts_ptr + at), 256, 8, 32))


def test_splits_are_as_even_as_tiles_allow() -> None:
    """Splits of up to 256 tokens, at most eight, and none larger than so many need to be."""
    contexts = torch.tensor([*range(1, 600), 2047, 2048, 2049, 4095, 4096, 4097, 100_000])
    sizes = torch.zeros_like(contexts)
    _sizes[(len(contexts),)](contexts, sizes)
    counts = -(-contexts // sizes)
    most = 256 * (-(-contexts // (256 * 8)))
    assert (sizes % 32 == 0).all()
    assert (sizes <= most).all()
    assert (counts <= (-(-contexts // most))).all()
    assert (counts <= 8).all()
    fewer = contexts <= counts * (sizes - 32)  # smaller ones would be as many
    assert not fewer.any()


def test_scratch_memory_is_bounded(short_splits, monkeypatch, margins) -> None:
    """However many sequences there are, splits take little memory, and no bit changes."""
    batch = make_batch([(300, 1), (127, 1), (128, 1), (0, 0), (5, 3)], 16, 2, 1)
    padded = replace(batch, query=torch.cat((batch.query, torch.full((2, 2, 16), torch.nan))))
    whole = padded.run(paged_attention_triton)
    one = 3 * 2 * 16 * 4  # bytes of three outputs of two heads
    for bound in (one - 1, 3 * one):
        margins.clear()
        monkeypatch.setattr(paged_attention_splits, "SCRATCH", bound)
        assert torch.equal(padded.run(paged_attention_triton), whole)
        outputs = margins[2].untyped_storage().nbytes() // 4 - 20_000
        assert outputs * 4 == max(bound // one, 1) * one
        assert all(bool((margin == 7).all()) for margin in margins)


@pytest.mark.parametrize(
    ("sequences", "heads", "size", "capacity"),
    [(1, 32, 128, 1 << 17), (256, 32, 128, 1 << 17), (1024, 128, 512, 1 << 20), (300, 1, 16, 600)],
)
def test_a_launch_keeps_to_the_bound(sequences, heads, size, capacity) -> None:
    """Every candidate's scratch memory is within the bound, for a long block table too."""
    for candidate in decode_candidates(128, 4, 128, 2, 2, True).values():
        count = candidate.splits.count(capacity)
        assert count <= candidate.splits.most
        taken = sequences_of_a_launch(heads, size, count)
        assert 1 <= taken <= SEQUENCES
        assert 4 * taken * heads * size * count <= SCRATCH


def test_programs_do_not_grow_with_the_room_of_the_table() -> None:
    """A block table far wider than the contexts needs no more programs than the GPU keeps busy."""
    assert [programs_of(8, count, 8) for count in (1, 2, 64, 256)] == [8, 16, 128, 128]
    assert [programs_of(64, count, 8) for count in (1, 2, 64, 256)] == [64, 128, 256, 256]
    assert programs_of(0, 1, 8) == programs_of(1, 1, 2048) == 1


def candidates_of(page: int) -> list[tuple[str, str]]:
    """Return every candidate for heads of 16 in pairs, by kernel and name."""
    decode, prefill = (
        decode_candidates(16, 2, page, 2, 2, True),
        prefill_candidates(16, 2, page, 2, True),
    )
    return [("paged_attention_decode", name) for name in decode] + [
        ("paged_attention_prefill", name) for name in prefill
    ]


@pytest.mark.parametrize(("kernel", "name"), candidates_of(128))
def test_candidates_attend_alike(kernel: str, name: str, as_accurate) -> None:
    """Each candidate is as accurate as torch, and a token's bits do not depend on its batch."""
    lengths = [(300, 1)] if kernel.endswith("decode") else [(130, 10)]
    batch = make_batch([*lengths, (40, 2), (0, 1)], 128, 2, 1, dtype=torch.float16)
    with trying({kernel: name}):
        whole = batch.run(paged_attention_triton)
        as_accurate(whole, batch.expected, batch.low)
        new = lengths[0][1]
        alone = replace(
            batch,
            query=batch.query[:new],
            block_tables=batch.block_tables[:1],
            context_lens=batch.context_lens[:1],
            query_start_loc=int32(0, new),
            max_query_len=new,
        )
        assert torch.equal(alone.run(paged_attention_triton), whole[:new])


@pytest.mark.parametrize("head_size", [16, 20])
def test_what_the_copy_engine_cannot_load(head_size: int) -> None:
    """With tiles for the copy engine, views and odd head sizes are loaded as others are."""
    batch = make_batch([(150, 1), (130, 3)], 128, 2, 1, head_size, dtype=torch.float16)
    expected = batch.run(paged_attention_triton)
    both = torch.stack((batch.k_cache, batch.v_cache), 1)
    view = replace(batch, k_cache=both[:, 0], v_cache=both[:, 1])
    kernels = {"paged_attention_decode": "splits of 256, TMA"} if head_size == 16 else {}
    with trying({**kernels, "paged_attention_prefill": "128 x 64, TMA"}):
        for one in (batch, view):
            torch.testing.assert_close(one.run(paged_attention_triton), expected)


def test_the_case_of_a_choice_is_made_of_the_model_alone(monkeypatch) -> None:
    """Batches, lengths and the width of the block table do not change which candidate runs."""
    seen = set()

    def note(kernel: str, case: str, candidates: dict[str, Any], device: torch.device) -> Any:
        seen.add((kernel, case, *candidates))
        return choose(kernel, case, candidates, device)

    for module in (paged_attention_decode, paged_attention_prefill):
        monkeypatch.setattr(module, "choose", note)
    for lengths in ([(3, 2)], [(600, 1), (0, 5)], [(0, 4), (1, 2), (9, 3)]):
        make_batch(lengths, 16, 4, 2).run(paged_attention_triton)
    cases = {case for _, case, *_ in seen}
    assert cases == {"4/2 heads of 16, float32 on float32, pages of 16"}
    assert len(seen) == 2


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
def test_pages_of_nobody_and_rests_of_pages_are_not_read(attend) -> None:
    """NaN in free pages, past a sequence's end and in unused entries reaches no output."""
    batch = make_batch(MIXED, 7)
    owned = sum(before + new for before, new in MIXED)
    slots = batch.k_cache[..., 0, 0].numel()
    assert batch.k_cache[..., 0, 0].isnan().sum() == slots - owned > 0
    assert set(batch.block_tables.flatten().tolist()) & set(GARBAGE)
    assert batch.run(attend).isfinite().all()


@implementations
@pytest.mark.parametrize("window", [1, 3])
def test_what_a_window_has_left_behind_does_not_matter(window: int, attend) -> None:
    """Tokens that the window has left, whatever they hold, change no bit."""
    batch = make_batch([(20, 2)], 4, sliding_window=window)
    pages = batch.block_tables[0, :6].long()
    gone = 22 - 2 - window + 1  # tokens that the first new token does not see
    outputs = []
    for value in (1e4, torch.nan):
        for position in range(gone // 4 * 4, gone):  # on a page that is still in the table
            batch.k_cache[pages[position // 4], position % 4] = value
            batch.v_cache[pages[position // 4], position % 4] = -value
        outputs.append(batch.run(attend))
    assert torch.equal(*outputs)
    batch.v_cache[pages[gone // 4], gone % 4] = -1e4
    assert not torch.equal(batch.run(attend), outputs[0])


@implementations
def test_tokens_of_no_sequence_get_zeros(attend) -> None:
    """Padding, sequences of length 0 and tokens after the last sequence, gets zeros."""
    batch = make_batch([(0, 3), (4, 1)], 4, sinks=torch.randn(4))
    padding = torch.full((5, *batch.query.shape[1:]), torch.nan)
    padded = replace(
        batch,
        query=torch.cat((batch.query, padding)),
        block_tables=torch.cat((batch.block_tables, batch.block_tables[:2] * 0 - 1)),
        context_lens=torch.cat((batch.context_lens, torch.zeros(2, dtype=torch.int32))),
        query_start_loc=torch.tensor([0, 3, 4, 6, 7], dtype=torch.int32),  # 2 tokens have none
        expected=torch.cat((batch.expected, torch.zeros_like(padding, dtype=torch.float64))),
    )
    padded.check(attend)
    assert not padded.run(attend)[4:].any()


@implementations
def test_a_step_of_padding_alone(attend) -> None:
    """A batch of nothing but padding gives zeros, also where contexts could be split; of nothing,
    nothing.
    """
    batch = make_batch([(0, 0)], 300)
    nothing = replace(batch, query=torch.full((3, 4, 16), torch.nan), max_query_len=1)
    assert torch.equal(nothing.run(attend), torch.zeros(3, 4, 16))
    rows = torch.full((2, 9), -1, dtype=torch.int32)
    step = replace(
        nothing,
        block_tables=rows,
        context_lens=torch.zeros(2, dtype=torch.int32),
        query_start_loc=torch.tensor([0, 1, 2], dtype=torch.int32),
    )
    assert torch.equal(step.run(attend), torch.zeros(3, 4, 16))
    assert replace(batch, query=torch.empty(0, 4, 16)).run(attend).shape == (0, 4, 16)
    none = replace(step, block_tables=rows[:0], context_lens=rows[:0, 0].clone())
    none.query_start_loc = torch.zeros(1, dtype=torch.int32)
    assert torch.equal(none.run(attend), torch.zeros(3, 4, 16))


@implementations
def test_nan_stays_in_its_sequence(attend) -> None:
    """A sequence whose keys are NaN gives NaN, and other sequences do not change."""
    batch = make_batch(MIXED, 7)
    before = batch.run(attend)
    batch.k_cache[batch.block_tables[0, 0]] = torch.nan
    after = batch.run(attend)
    assert after[:9].isnan().all()
    assert torch.equal(after[9:], before[9:])


@implementations
@pytest.mark.parametrize("window", [None, 4])
def test_nan_reaches_the_rows_that_see_it(window: int | None, attend) -> None:
    """NaN in a query, key or value makes NaN of the rows that see it, and changes no sequence else.

    In plain torch it changes no row else either. A Triton tile of values is shared by its rows.
    """
    batch = make_batch([(0, 6), (11, 1), (4, 1), (9, 5)], 5, sliding_window=window)
    before, starts = batch.run(attend), batch.query_start_loc.tolist()
    for what in ("query", "key", "value"):
        spoilt, sees = deepcopy(batch), torch.zeros(len(batch.query), dtype=torch.bool)
        for sequence, token in ((0, 3), (1, 10), (3, 10)):
            context, end = int(batch.context_lens[sequence]), starts[sequence + 1]
            if what == "query":  # of the last token
                spoilt.query[end - 1] = torch.nan
                sees[end - 1] = True
                continue
            cache = spoilt.k_cache if what == "key" else spoilt.v_cache
            cache[int(batch.block_tables[sequence, token // 5]), token % 5] = torch.nan
            first = starts[sequence] - end + context  # position of the first row
            last = context - 1 if window is None else min(context - 1, token + window - 1)
            sees[max(0, token - first) + starts[sequence] : last - first + starts[sequence] + 1] = 1
        after = spoilt.run(attend)
        assert after[sees].isnan().all()
        assert torch.equal(after[7:8], before[7:8])  # alone in its sequence, without NaN
        if attend is paged_attention:
            torch.testing.assert_close(after[~sees], before[~sees], rtol=0, atol=2e-6)


@implementations
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # NumPy, in the interpreter
@pytest.mark.parametrize("contexts", [[(0, 5), (11, 1), (4, 1)], [(600, 1)]])
def test_scores_that_are_all_minus_infinity_give_nan(contexts, attend) -> None:
    """Softmax of nothing but -inf is NaN, not zeros: in decode, in prefill and over splits."""
    batch = make_batch(contexts, 300)
    batch.query.abs_()
    batch.k_cache.fill_(-torch.inf)
    assert batch.run(attend).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("what", [0, 1, 2], ids=["query", "key", "value"])
def test_what_is_not_finite_is_so_in_plain_torch(what: int, dtype: torch.dtype) -> None:
    """NaN and infinities give finite numbers exactly where they do in attention written out."""
    whole = [(5, 5, None), (40, 40, None), (9, 9, 3)]
    for new, total, window in [(1, 5, None), (1, 40, None), (3, 9, None), (1, 9, 3), *whole]:
        for value in (torch.nan, torch.inf, -torch.inf):
            tensors = [torch.randn(rows, 2, 8).to(dtype) for rows in (new, total, total)]
            if new == 1 and what == 0:
                tensors[0][0, 1] = value
            else:
                tensors[what][-2, 1, 3] = value
            heads_first = (x.transpose(0, 1) for x in tensors)
            output = causal_attention(*heads_first, 0.5, window).transpose(0, 1)
            expected = dense(*tensors, 0.5, window)
            assert torch.equal(output.isfinite(), expected.isfinite()), (new, total, window, value)


def test_nan_reaches_the_output_of_a_compiled_graph() -> None:
    """Compiled for a CPU, attention without pages keeps NaN and breaks no graph."""
    tensors = torch.randn(3, 2, 6, 8)
    tensors[0, 0, 4] = torch.nan
    compiled = torch.compile(causal_attention, backend="aot_eager", fullgraph=True)
    for rows in (6, 1):
        query, key, value = tensors[0, :, 5 - rows : 5], *tensors[1:, :, :5]
        if rows == 6:
            query, key, value = tensors
        output = compiled(query, key, value, 0.5)
        expected = torch.zeros(2, rows, dtype=torch.bool)
        expected[0, min(4, rows - 1)] = True
        assert torch.equal(output.isnan().all(-1), expected)


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


@pytest.fixture
def margins(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Give outputs and scratch memory a margin on both sides, and return the margins."""
    kept: list[torch.Tensor] = []
    new_empty, empty = torch.Tensor.new_empty, torch.empty

    def within(numbers: int, dtype: torch.dtype) -> torch.Tensor:
        whole = torch.full((numbers + 20_000,), 7.0, dtype=dtype)
        kept.extend((whole[:10_000], whole[-10_000:]))
        return whole[10_000:-10_000]

    def output(self: torch.Tensor, shape: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(shape, torch.Size):
            return within(shape.numel(), self.dtype).view(shape)
        return new_empty(self, shape, *args, **kwargs)

    def scratch(*shape: int, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("dtype") == torch.float32:
            return within(math.prod(shape), torch.float32).view(shape)
        return empty(*shape, **kwargs)

    monkeypatch.setattr(torch.Tensor, "new_empty", output)
    monkeypatch.setattr(torch, "empty", scratch)
    return kept


@pytest.mark.parametrize("page", [4, 200])
@pytest.mark.parametrize(
    "changes",
    [
        {"query_start_loc": [0, 9, 10, 15, 16, 16, 40], "max_query_len": 99},
        {"query_start_loc": [-3, 9, 10, 15, 16, 16, 18], "max_query_len": 99},
        {"query_start_loc": [30, 31, 32, 33, 34, 35, 36], "max_query_len": 1},
        {"query_start_loc": [-9, -8, -7, -6, -5, -4, -3], "max_query_len": 1},
        {"context_lens": [900, 900, 900, 900, 900, 900]},
    ],
)
def test_wrong_lengths_write_nothing_out_of_bounds(
    page: int, changes: dict[str, Any], margins: list[torch.Tensor]
) -> None:
    """If values are not checked, wrong starts and lengths write nothing out of bounds."""
    batch = make_batch(MIXED, page)
    batch.block_tables.clamp_(0, len(batch.k_cache) - 1)  # pages that are read are not bounded
    for cache in (batch.k_cache, batch.v_cache):
        cache.nan_to_num_()
    margins.clear()
    for name, value in changes.items():
        setattr(batch, name, int32(*value) if isinstance(value, list) else value)
    output = batch.run(paged_attention_triton)
    assert output.shape == batch.query.shape
    assert len(margins) == (2 if page == 4 else 6)  # of the output, parts, and maxima with sums
    assert all(bool((margin == 7).all()) for margin in margins)


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


def test_scores_of_any_size_do_not_overflow() -> None:
    """Soft-capped and plain scores in the thousands, and sinks, give finite weights."""
    for options in ({"softcap": 50.0}, {}, {"sinks": torch.tensor([3000.0, -3000.0, 0.0, 1e5])}):
        make_batch(MIXED, 5, scale=500.0, **options).check(paged_attention_triton, 2e-4)


def test_causal_attention_is_that_of_one_sequence() -> None:
    """Attention without pages attends from a sequence's last tokens to all of it."""
    for total, new, window in ((6, 6, None), (9, 4, None), (9, 4, 2), (5, 1, 3)):
        query, (key, value) = torch.randn(new, 6, 8), torch.randn(2, total, 2, 8)
        heads_first = (x.transpose(0, 1) for x in (query, key, value))
        output = causal_attention(*heads_first, 0.5, window).transpose(0, 1)
        expected = dense(query, key, value, 0.5, window)
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=2e-6)


def changed(**changes: Any) -> Batch:
    options = changes.pop("options", {})
    return replace(make_batch(MIXED, 7), options=options, **changes)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


BAD: dict[str, tuple[Callable[[], Batch], str]] = {
    "head size": (
        lambda: changed(query=torch.zeros(18, 4, 24)),
        r"k_cache must have the shape \[any, any, any, 24\], got \[\d+, 7, 2, 16\]",
    ),
    "large heads": (
        lambda: changed(
            query=torch.zeros(18, 4, 513),
            k_cache=torch.zeros(12, 7, 2, 513),
            v_cache=torch.zeros(12, 7, 2, 513),
        ),
        "head size must be 1 to 512, got 513",
    ),
    "first start": (
        lambda: changed(query_start_loc=int32(1, 9, 10, 15, 16, 16, 18)),
        "goes from 1 to 18: expected 0",
    ),
    "group of large heads": (
        lambda: changed(
            query=torch.zeros(18, 65, 129),
            k_cache=torch.zeros(12, 7, 1, 129),
            v_cache=torch.zeros(12, 7, 1, 129),
        ),
        "at most 64",
    ),
    "group of the largest heads": (
        lambda: changed(
            query=torch.zeros(18, 17, 257),
            k_cache=torch.zeros(12, 7, 1, 257),
            v_cache=torch.zeros(12, 7, 1, 257),
        ),
        "17 query heads of 257 cannot share 1 .*at most 16",
    ),
    "no features": (
        lambda: changed(
            query=torch.zeros(18, 4, 0),
            k_cache=torch.zeros(12, 7, 2, 0),
            v_cache=torch.zeros(12, 7, 2, 0),
        ),
        "head size must be 1 to 512, got 0",
    ),
    "no room": (
        lambda: changed(k_cache=torch.zeros(12, 0, 2, 16), v_cache=torch.zeros(12, 0, 2, 16)),
        "page_size is 0",
    ),
    "infinite cap": (
        lambda: changed(options={"softcap": math.inf}),
        "softcap must be positive and finite, got inf",
    ),
    "group": (lambda: changed(query=torch.zeros(18, 3, 16)), "3 query heads of 16 cannot share 2"),
    "large group": (lambda: changed(query=torch.zeros(18, 512, 16)), "at most 128"),
    "flat query": (lambda: changed(query=torch.zeros(18, 64)), r"query must have the shape"),
    "values": (
        lambda: changed(v_cache=torch.zeros(12, 7, 1, 16)),
        r"v_cache must have the shape \[\d+, 7, 2, 16\], got \[12, 7, 1, 16\]",
    ),
    "dtype": (lambda: changed(query=torch.zeros(18, 4, 16).double()), "got torch.float64"),
    "cache dtype": (
        lambda: changed(query=torch.zeros(18, 4, 16).half()),
        "cache must be torch.float16, as the query, or of eight bits, got torch.float32",
    ),
    "long tables": (
        lambda: changed(block_tables=torch.zeros(6, 9, dtype=torch.int64)),
        "block_tables must be torch.int32, got torch.int64",
    ),
    "device": (
        lambda: changed(context_lens=torch.zeros(6, dtype=torch.int32, device="meta")),
        "context_lens is on meta, and must be on cpu",
    ),
    "starts": (
        lambda: changed(query_start_loc=int32(0, 1, 2)),
        r"query_start_loc must have the shape \[7\], got \[3\]",
    ),
    "window": (lambda: changed(options={"sliding_window": 0}), "at least 1, got 0"),
    "softcap": (
        lambda: changed(options={"softcap": 0.0}),
        "softcap must be positive and finite, got 0.0",
    ),
    "slopes": (
        lambda: changed(options={"alibi_slopes": torch.zeros(2)}),
        r"alibi_slopes must have the shape \[4\], got \[2\]",
    ),
    "sinks": (lambda: changed(options={"sinks": torch.zeros(4, 1)}), "sinks must have the shape"),
    "scale": (
        lambda: changed(options={"k_scale": torch.zeros(3)}),
        r"k_scale must have the shape \[1\], got \[3\]",
    ),
    "beyond the query": (
        lambda: changed(query=torch.zeros(17, 4, 16)),
        "from 0 to 18: expected 0 to at most the 17 tokens",
    ),
    "backwards": (
        lambda: changed(query_start_loc=int32(0, 9, 8, 15, 16, 16, 18)),
        "sequence 1 has -1 new tokens",
    ),
    "more than the most": (
        lambda: changed(max_query_len=5),
        "sequence 0 has 9 new tokens by query_start_loc: expected 0 to max_query_len 5",
    ),
    "short context": (
        lambda: changed(context_lens=int32(8, 13, 12, 1, 20, 33)),
        "sequence 0 has a context of 8 tokens: expected 0 or at least its 9",
    ),
    "beyond the table": (
        lambda: changed(context_lens=int32(9, 13, 12, 1, 20, 51)),
        "a context of 51 tokens.* at most the 49",
    ),
    "page": (
        lambda: changed(k_cache=torch.zeros(3, 7, 2, 16), v_cache=torch.zeros(3, 7, 2, 16)),
        r"block_tables\[\d, \d\] is page \d+, and the cache has 3 pages",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused_with_the_numbers(name: str) -> None:
    """Arguments that do not fit, or point beyond the cache, raise ValueError with what came."""
    make, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        make().run()


def test_the_operator_is_traced_and_runs_on_meta() -> None:
    """torch.compile traces it whole, its fake has the right shapes, and it runs on meta."""
    batch = make_batch(MIXED, 7)
    arguments = (*list(vars(batch).values())[:8], None)
    torch.library.opcheck(torch.ops.vllm_module.paged_attention.default, arguments)
    compiled = torch.compile(lambda: batch.run() + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(), batch.run() + 1)
    on_meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments]
    assert paged_attention(*on_meta).is_meta


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


def test_a_shared_layout_checks_what_each_layer_brings() -> None:
    """Lengths are checked once; heads, pages and dtypes that do not fit are refused later too."""
    batch = make_batch(MIXED, 7)
    tensors = batch.block_tables, batch.context_lens, batch.query_start_loc
    layout = PagedLayout(*tensors)
    attend = partial(paged_attention, layout=layout)
    batch.check(attend)
    for change, message in (
        ({"query": batch.query[:, :3]}, "3 query heads"),
        ({"k_cache": batch.k_cache[..., :8]}, "k_cache must have the shape"),
        ({"query": batch.query.half()}, "the cache must be torch.float16"),
        ({"query": batch.query[:4]}, "query_start_loc goes from 0"),
        ({"k_cache": batch.k_cache[:2], "v_cache": batch.v_cache[:2]}, "is page"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(batch, **change).run(attend)


@pytest.mark.parametrize("order", [*itertools.permutations([(None, 2), (1, 4), (8, 2)])], ids=str)
def test_layers_of_other_windows_and_heads_share_a_layout(order: Any) -> None:
    """Whichever layer comes first, and comes again, each attends as densely as alone."""
    layout: PagedLayout | None = None
    for window, kv_heads in (*order, *order):
        torch.manual_seed(1)
        whole = make_batch(MIXED, 7, kv_heads=kv_heads)  # no page has left a window
        torch.manual_seed(1)
        expected = make_batch(MIXED, 7, kv_heads=kv_heads, sliding_window=window)
        places = whole.block_tables, whole.context_lens, whole.query_start_loc
        layout = layout or PagedLayout(*places)
        layer = replace(whole, expected=expected.expected, options=expected.options)
        layer.check(partial(paged_attention, layout=layout))


@pytest.mark.parametrize("window", [None, 1, 3, 8])
def test_pages_are_checked_where_they_are_read_and_nowhere_else(window: int | None) -> None:
    """A wrong page is refused if it would be read, and ignored otherwise."""
    check = public.check_pages
    page = 4
    batch = make_batch(MIXED, page, sliding_window=window)
    batch.block_tables[4] = -1  # it has nothing new
    lengths = batch.context_lens, batch.query_start_loc, window
    check(batch.k_cache, batch.block_tables, *lengths)
    for index, (before, new) in enumerate(MIXED):
        first = 0 if window is None else max(0, before - window + 1)
        for entry in range(first // page, -(-(before + new) // page)) if new else ():
            for wrong in (-1, len(batch.k_cache)):
                tables = batch.block_tables.clone()
                tables[index, entry] = wrong
                with pytest.raises(ValueError, match=rf"block_tables\[{index}, {entry}\] is page"):
                    check(batch.k_cache, tables, *lengths)


def test_nan_of_ones_own() -> None:
    """A token that sees NaN gives NaN, although unseen values are zeroed."""
    batch = make_batch([(20, 1), (12, 1)], 7, softcap=30.0)
    batch.k_cache[batch.block_tables[0, 0]] = torch.nan
    output = batch.run()
    assert output[0].isnan().all()
    assert output[1].isfinite().all()


@implementations
@pytest.mark.parametrize("dtype", FP8)
def test_scales(dtype: torch.dtype, attend) -> None:
    """An eight-bit cache is multiplied by its scales, one or one for each head."""
    for shape in (1, 2):
        k_scale, v_scale = torch.rand(2, shape) + 0.25
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        make_batch(MIXED, 7, cache_dtype=dtype, **scales).check(attend, 1e-5)
