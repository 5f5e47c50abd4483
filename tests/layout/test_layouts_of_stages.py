"""Layouts of pipeline stages, put together."""

from __future__ import annotations

import runpy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from vllm_module import vLLMModule
from vllm_module.layers import (
    FusedMoE,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from vllm_module.layout import Layout, Partition, layout_of_stages, parse_layout
from vllm_module.layout.layout_file import layout_json

# Pytest's importlib mode has no imports between test files.
PLANNED = runpy.run_path(str(Path(__file__).with_name("planned.py")))
boxes, layout_of = PLANNED["boxes"], PLANNED["layout_of"]


@pytest.mark.parametrize("tokens", [130, 10, 0])
@pytest.mark.parametrize("sizes", [(2,), (1, 1), (2, 1), (1, 2, 4), (2, 2, 2)])
def test_the_layout_of_stages_is_that_of_each_of_them(sizes: tuple[int, ...], tokens: int) -> None:
    """On each rank it has what the layout of its stage alone says, and nothing besides.

    All stages hold a table, if there is one, and each a layer and experts of its own. Of 10 tokens,
    which one rank holds and others the padding, stages of any number of ranks hold the same boxes.
    """

    def stage(number: int) -> nn.Module:
        module = vLLMModule()
        if tokens:
            module.table = VocabParallelEmbedding(tokens, 4)
        own = vLLMModule()
        own.qkv_proj = QKVParallelLinear(5, 2, 4, 2)
        own.experts = FusedMoE(3, 2, 6, 8)
        module.add_module(f"stage{number}", own)
        return module

    def held(layout: Layout, rank: int) -> dict[str, Any]:
        return {
            name: (entry.shape, boxes, layout.shape_of(entry.parameter, rank))
            for name, entry, boxes in layout.held_on(rank)
        }

    stages = [layout_of(partial(stage, number), size) for number, size in enumerate(sizes)]
    if tokens == 130 and len({*sizes}) > 1:
        with pytest.raises(ValueError, match=r"cut layer\.table\.weight, .* same number of ranks"):
            layout_of_stages(stages)
        return
    whole = layout_of_stages(stages)
    ranks = [(each, rank) for each in stages for rank in range(each.ranks)]
    assert [held(whole, rank) for rank in range(whole.ranks)] == [held(*each) for each in ranks]
    assert parse_layout(layout_json(whole)) == whole


@pytest.mark.parametrize("experts", [0, 2])
def test_stages_may_hold_parts_of_one_tensor(experts: int) -> None:
    """Where an override divides it, for example: other rows, or other experts."""
    build = partial(FusedMoE, 4, 2, 6, 8) if experts else partial(RowParallelLinear, 8, 3)
    whole = layout_of(build, 1 if experts else 2, experts=experts)

    def of_rank(rank: int) -> Layout:
        cuts = [[each for each in cut.held if rank in each.ranks] for cut in whole.partitions]
        return replace(
            whole,
            ranks=1,
            shapes=tuple(
                tuple(((0,), shape) for ranks, shape in each if rank in ranks)
                for each in whole.shapes
            ),
            partitions=tuple(Partition(tuple(replace(e, ranks=(0,)) for e in cut)) for cut in cuts),
        )

    joined = layout_of_stages([of_rank(0), of_rank(1)])
    assert parse_layout(layout_json(joined)) == joined
    for name, _, _ in whole.names():
        assert boxes(joined, name) == boxes(whole, name)
