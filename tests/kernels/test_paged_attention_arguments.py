"""Arguments of paged attention: refused, traced, or shared by several layers."""

from __future__ import annotations

import itertools
import math
import runpy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module.kernels.attention import paged_attention as public
from vllm_module.kernels.attention.paged_attention import paged_attention
from vllm_module.kernels.attention.paged_layout import PagedLayout

# Pytest's importlib mode has no imports between test files.
BATCHES: Any = runpy.run_path(str(Path(__file__).with_name("paged_batches.py")))
MIXED, Batch, make_batch = (BATCHES[name] for name in ("MIXED", "Batch", "make_batch"))
int32 = BATCHES["int32"]


def changed(**changes: Any) -> Batch:
    options = changes.pop("options", {})
    return replace(make_batch(MIXED, 7), options=options, **changes)


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
