"""Paged attention in splits of the context: their sizes, their memory, and the candidates."""

from __future__ import annotations

import math
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module.kernels.attention import (
    paged_attention_decode,
    paged_attention_prefill,
    paged_attention_splits,
)
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
from vllm_module.kernels.choices import choose, trying
from vllm_module.kernels.operators import tl, triton

# Pytest's importlib mode has no imports between test files.
BATCHES: Any = runpy.run_path(str(Path(__file__).with_name("paged_batches.py")))
MIXED, make_batch, int32 = (BATCHES[name] for name in ("MIXED", "make_batch", "int32"))


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
