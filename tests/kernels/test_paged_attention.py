"""Paged attention against dense attention written out a query at a time, in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from vllm_module.kernels.paged_attention import causal_attention, paged_attention
from vllm_module.kernels.reshape_and_cache import reshape_and_cache

# Tokens of each sequence before this step and in it: whole prompts, single tokens, later chunks
# and a sequence that has nothing new.
MIXED = [(0, 9), (12, 1), (7, 5), (0, 1), (20, 0), (31, 2)]
GARBAGE = [2**31 - 1, -(2**31), -1, 10**6]


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """Attend from the last ``len(query)`` tokens of one sequence; all ``[tokens, heads, size]``."""
    query, key, value = query.double(), key.double(), value.double()
    new, heads, _ = query.shape
    group = heads // key.shape[1]
    output = torch.zeros_like(query)
    for row in range(new):
        last = len(key) - new + row
        first = 0 if window is None else max(0, last - window + 1)
        for head in range(heads):
            keys = key[first : last + 1, head // group]
            weights = (keys @ query[row, head] * scale).softmax(0)
            output[row, head] = weights @ value[first : last + 1, head // group]
    return output


@dataclass
class Batch:
    """One step's arguments, in the order of ``paged_attention``, and what it should return."""

    query: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    query_start_loc: torch.Tensor
    scale: float
    window: int | None
    expected: torch.Tensor

    def run(self) -> torch.Tensor:
        return paged_attention(*list(vars(self).values())[:-1])

    def check(self, atol: float = 2e-6) -> None:
        output = self.run()
        assert output.shape == self.query.shape
        assert output.dtype == self.query.dtype
        torch.testing.assert_close(output.double(), self.expected, rtol=0, atol=atol)


def make_batch(
    lengths: list[tuple[int, int]],
    page: int,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 16,
    window: int | None = None,
    scale: float = 0.3,
) -> Batch:
    """Put sequences on pages in a random order; everything that no sequence owns is poison."""
    counts = [-(-(before + new) // page) for before, new in lengths]
    pool = torch.randperm(sum(counts) + 3)  # three pages belong to nobody
    tables = torch.tensor(GARBAGE, dtype=torch.int32).repeat(len(lengths), max(counts))
    tables = tables[:, : max(counts) + 2].contiguous()
    cache = torch.full((2, len(pool), page, kv_heads, head_size), torch.nan)
    queries, expected, taken = [], [], 0
    for index, ((before, new), count) in enumerate(zip(lengths, counts, strict=True)):
        pages = pool[taken : taken + count]
        taken += count
        tables[index, :count] = pages.int()
        tokens = before + new
        key, value = torch.randn(2, tokens, kv_heads, head_size)
        positions = torch.arange(tokens)
        slots = pages[positions // page] * page + positions % page
        reshape_and_cache(key, value, cache[0], cache[1], slots)
        queries.append(torch.randn(new, heads, head_size))
        expected.append(dense(queries[-1], key, value, scale, window))
    starts = torch.tensor([0] + [new for _, new in lengths]).cumsum(0).int()
    contexts = torch.tensor([sum(pair) for pair in lengths], dtype=torch.int32)
    query = torch.cat(queries)
    return Batch(query, *cache, tables, contexts, starts, scale, window, torch.cat(expected))


@pytest.mark.parametrize("window", [None, 1, 2, 3, 8, 1000])
@pytest.mark.parametrize("page", [1, 3, 7, 16])
def test_mixed_lengths(page: int, window: int | None) -> None:
    """Prompts, chunks and single tokens in one batch attend as densely, on pages of any size."""
    make_batch(MIXED, page, window=window).check()


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (5, 1), (10, 2), (15, 3), (8, 1)])
def test_grouped_heads(heads: int, kv_heads: int) -> None:
    """Consecutive query heads share a key-value head, groups of five included."""
    make_batch(MIXED, 5, heads, kv_heads).check()


@pytest.mark.parametrize("head_size", [8, 80, 96, 112])
def test_head_sizes(head_size: int) -> None:
    """Head sizes that are no power of two attend as densely."""
    make_batch(MIXED[:3], 6, head_size=head_size, scale=head_size**-0.5).check()


def test_pages_of_nobody_and_rests_of_pages_are_not_read() -> None:
    """NaN in pages of nobody, past a sequence's end and in its unused entries reaches no output."""
    batch = make_batch(MIXED, 7)
    owned = sum(before + new for before, new in MIXED)
    slots = batch.k_cache[..., 0, 0].numel()
    assert batch.k_cache[..., 0, 0].isnan().sum() == slots - owned > 0
    assert set(batch.block_tables.flatten().tolist()) & set(GARBAGE)
    assert batch.run().isfinite().all()


@pytest.mark.parametrize("window", [1, 3])
def test_what_a_window_has_left_behind_does_not_matter(window: int) -> None:
    """Values that no new token sees any more, finite and of any size, change not one bit."""
    batch = make_batch([(20, 2)], 4, window=window)
    before = batch.run()
    pages = batch.block_tables[0, :6].long()
    for position in range(22 - 2 - window + 1):
        batch.k_cache[pages[position // 4], position % 4] = 1e4
        batch.v_cache[pages[position // 4], position % 4] = -1e4
    assert torch.equal(batch.run(), before)
    position = 22 - 2 - window + 1  # the first that the first new token still sees
    batch.v_cache[pages[position // 4], position % 4] = -1e4
    assert not torch.equal(batch.run(), before)


def test_tokens_of_no_sequence_get_zeros() -> None:
    """Padding, as sequences of length 0 or tokens after the last sequence, gets zeros."""
    batch = make_batch([(0, 3), (4, 1)], 4)
    padding = torch.full((5, *batch.query.shape[1:]), torch.nan)
    padded = replace(
        batch,
        query=torch.cat((batch.query, padding)),
        block_tables=torch.cat((batch.block_tables, batch.block_tables[:2] * 0 - 1)),
        context_lens=torch.cat((batch.context_lens, torch.zeros(2, dtype=torch.int32))),
        query_start_loc=torch.tensor([0, 3, 4, 6, 7], dtype=torch.int32),  # 2 tokens have none
        expected=torch.cat((batch.expected, torch.zeros_like(padding, dtype=torch.float64))),
    )
    padded.check()
    assert not padded.run()[4:].any()


def test_views_of_larger_tensors() -> None:
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
    view = replace(batch, query=query, k_cache=k_cache, v_cache=v_cache)
    assert torch.equal(view.run(), batch.run())


@pytest.mark.parametrize(("dtype", "eps"), [(torch.float16, 2**-11), (torch.bfloat16, 2**-8)])
def test_sixteen_bits(dtype: torch.dtype, eps: float) -> None:
    """In 16 bits the output is within a few roundings of what the rounded inputs give densely."""
    batch = make_batch(MIXED, 5)
    narrow = replace(
        batch,
        query=batch.query.to(dtype),
        k_cache=batch.k_cache.to(dtype),
        v_cache=batch.v_cache.to(dtype),
    )
    exact = replace(
        narrow,
        query=narrow.query.float(),
        k_cache=narrow.k_cache.float(),
        v_cache=narrow.v_cache.float(),
    )
    replace(narrow, expected=exact.run().double()).check(atol=4 * eps)


def test_causal_attention_is_that_of_one_sequence() -> None:
    """Attention without pages attends from a sequence's last tokens to all of it."""
    for total, new, window in ((6, 6, None), (9, 4, None), (9, 4, 2), (5, 1, 3)):
        query, (key, value) = torch.randn(new, 6, 8), torch.randn(2, total, 2, 8)
        heads_first = (x.transpose(0, 1) for x in (query, key, value))
        output = causal_attention(*heads_first, 0.5, window).transpose(0, 1)
        expected = dense(query, key, value, 0.5, window)
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=2e-6)
