"""What paged attention does not read, and NaN, infinities and large scores in what it reads."""

from __future__ import annotations

import runpy
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module.kernels.attention.paged_attention import causal_attention, paged_attention
from vllm_module.kernels.attention.paged_attention_triton import paged_attention_triton

# Pytest's importlib mode has no imports between test files.
BATCHES: Any = runpy.run_path(str(Path(__file__).with_name("paged_batches.py")))
MIXED, GARBAGE = (BATCHES[name] for name in ("MIXED", "GARBAGE"))
implementations, dense = (BATCHES[name] for name in ("implementations", "dense"))
make_batch = BATCHES["make_batch"]


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


@pytest.mark.parametrize("options", [{"softcap": 3.0}, {"sinks": torch.zeros(4)}])
def test_a_compiled_graph_is_of_prompts_of_any_length(options) -> None:
    """A graph of each length would be compiled for each prompt, until torch gives up."""
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(causal_attention, backend=keep, dynamic=True, fullgraph=True)
    for length in (5, 7, 3, 12):
        query, (key, value) = torch.randn(4, length, 8), torch.randn(2, 2, length, 8)
        expected = causal_attention(query, key, value, 0.5, **options)
        torch.testing.assert_close(compiled(query, key, value, 0.5, **options), expected)
    assert len(graphs) == 1


def test_scores_of_any_size_do_not_overflow() -> None:
    """Soft-capped and plain scores in the thousands, and sinks, give finite weights."""
    for options in ({"softcap": 50.0}, {}, {"sinks": torch.tensor([3000.0, -3000.0, 0.0, 1e5])}):
        make_batch(MIXED, 5, scale=500.0, **options).check(paged_attention_triton, 2e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options",
    [{"softcap": 30.0}, {"sinks": torch.zeros(4)}, {"alibi_slopes": torch.full((4,), 0.1)}],
    ids=["softcap", "sinks", "alibi"],
)
def test_scores_are_not_rounded_before_the_softmax(dtype: torch.dtype, options) -> None:
    """Several single tokens of 16 bits have the error of rounding the result, and little more.

    Products of queries and keys may exceed float16 where scores do not.
    """
    torch.manual_seed(5)
    lengths = [(context - 1, 1) for context in (40, 9, 40, 33)]
    batch = make_batch(lengths, 7, head_size=64, scale=1.5, dtype=dtype, **options)
    large = replace(batch, query=batch.query * 4096, scale=1.5 / 4096)  # the same scores
    rounding = batch.expected.to(dtype).double() - batch.expected
    for each in (batch, large):
        assert (each.run().double() - batch.expected).norm() <= 1.5 * rounding.norm()


def test_nan_of_ones_own() -> None:
    """A token that sees NaN gives NaN, although unseen values are zeroed."""
    batch = make_batch([(20, 1), (12, 1)], 7, softcap=30.0)
    batch.k_cache[batch.block_tables[0, 0]] = torch.nan
    output = batch.run()
    assert output[0].isnan().all()
    assert output[1].isfinite().all()
