"""Layouts of tensors that a checkpoint stores in another shape than the one that is expected."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_module import vLLMModule
from vllm_module.core.digests import ModelDigest, digest_of
from vllm_module.kernels.digest.digest import digest_box
from vllm_module.layout import Layout, parse_layout
from vllm_module.layout.layout_file import layout_json
from vllm_module.parameters import (
    BasevLLMParameter,
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    Dim,
    PerSlotVectorParameter,
    PerTensorScaleParameter,
    PerTensorTableParameter,
    Slot,
)
from vllm_module.runtime.planned_layout import check_target, planned_layout
from vllm_module.testing.layouts import cut_by
from vllm_module.weights.region import Region

Build = Callable[[int, int], BasevLLMParameter]
FLOAT = {"dtype": torch.float32}


def fused(size: int) -> Dim:
    return Dim((Slot("a", 4, size), Slot("b", 8, size)))


def table(rank: int, size: int) -> BasevLLMParameter:
    output, place = fused(size), {"tp_rank": rank, "tp_size": size}
    return PerTensorTableParameter(output, length=5, shorter=True, **place, **FLOAT)


def scale(rank: int, size: int) -> BasevLLMParameter:
    return PerTensorScaleParameter(fused(size), tp_rank=rank, tp_size=size, **FLOAT)


def vector(rank: int, size: int) -> BasevLLMParameter:
    place = {"tp_rank": rank, "tp_size": size}
    return PerSlotVectorParameter(fused(size), Dim.cut(6, size), **place, **FLOAT)


def channel(rank: int, size: int) -> BasevLLMParameter:
    place = {"tp_rank": rank, "tp_size": size}
    return ChannelQuantScaleParameter(fused(size), or_tensor=True, **place, **FLOAT)


def block(rank: int, size: int) -> BasevLLMParameter:
    place = {"tp_rank": rank, "tp_size": size, "block": (2, 2)}
    stored = torch.uint8, torch.float8_e8m0fnu
    return BlockQuantScaleParameter(
        fused(size), Dim.whole(3), stored_dtypes=stored, **place, **FLOAT
    )


CASES: dict[str, tuple[Build, dict[str, tuple[int, ...]], torch.dtype]] = {
    "shorter tables": (table, {"a.t": (2,), "b.t": (4,)}, torch.float32),
    "a shorter table and a whole one": (table, {"a.t": (5,), "b.t": (1,)}, torch.float32),
    "a table for all slots": (table, {"t": (5,)}, torch.float32),
    "a shorter table for all slots": (table, {"t": (3,)}, torch.float32),
    "scales without a dimension": (scale, {"a.t": (), "b.t": (1,)}, torch.float32),
    "a scale for all slots": (scale, {"t": ()}, torch.float32),
    "scales of all slots": (scale, {"t": (2,)}, torch.float32),
    "a vector for all slots": (vector, {"t": (6,)}, torch.float32),
    "one scale for all channels": (channel, {"a.t": (), "b.t": (1,)}, torch.float32),
    "exponents": (block, {"a.t": (2, 2), "b.t": (4, 2)}, torch.uint8),
    "exponents of their own dtype": (block, {"t": (6, 2)}, torch.float8_e8m0fnu),
}


class Module(vLLMModule):
    shard_names = ("a", "b")

    def __init__(self, parameter: BasevLLMParameter) -> None:
        super().__init__()
        self.t = parameter
        self.keep_digests = True


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_the_layout_is_what_ranks_load(case: str, size: int) -> None:
    """It is written and read, cuts the stored tensors for each rank, and digests add up.

    A plan to it is taken: of the same names, the ranks' own layout has other shapes.
    """
    build, shapes, dtype = CASES[case]
    stored = {name: torch.randint(1, 200, shape).to(torch.uint8) for name, shape in shapes.items()}
    stored = {n: t.view(dtype) if dtype.itemsize == 1 else t.to(dtype) for n, t in stored.items()}
    regions: Any = {name: Region.of(name, tensor) for name, tensor in stored.items()}
    layout = Module(build(0, size)).plan_weights(regions).layout(size)
    data = layout_json(layout)
    assert parse_layout(data) == layout
    found = []
    for rank in range(size):
        module = Module(build(rank, size))
        module.load_weights(stored)
        cut = cut_by(json.loads(data), stored, rank)
        assert torch.equal(module.t, cut["t"])
        found.append(digest_of(module, layout))
    together = sum(found, start=ModelDigest()).boxes
    for name, tensor in stored.items():
        first, *others = together[name].values()
        assert sum(others, start=first) == digest_box(tensor)

    def own_layout(source: Layout | None = None) -> Layout:
        handles = None if source is None else source.handles()
        return planned_layout(Module(build(0, size)), ranks=size, source=handles)

    assert own_layout(layout) == layout
    check_target(layout, own_layout)
