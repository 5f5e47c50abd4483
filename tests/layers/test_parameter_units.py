"""Per-tensor scales, and edges inside of units (packed elements, groups, blocks)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_module.errors import ShardingError
from vllm_module.parameters import (
    BasevLLMParameter,
    BlockQuantScaleParameter,
    ColumnvLLMParameter,
    Dim,
    Experts,
    GroupQuantScaleParameter,
    PackedColumnParameter,
    PackedModelWeightParameter,
    PackedvLLMParameter,
    PerTensorScaleParameter,
    Slot,
)
from vllm_module.weights import read_into

TP = {"tp_rank": 0, "tp_size": 4, "dtype": torch.float32}


def fill(parameter: BasevLLMParameter, tensors: dict[Any, torch.Tensor]) -> torch.Tensor:
    real = parameter.materialize_on("cpu")
    for slot, tensor in tensors.items():
        assert real.accepts(slot, tensor.shape)
        for source, target in real.cut(tensor, slot):
            read_into(source, target)
    return real.data


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_per_tensor_scale_as_scalar_or_one_entry(shape: tuple[int, ...]) -> None:
    """A per-tensor scale is stored as [] or [1], and every rank gets the scale of each slot."""
    tensors = {slot: torch.full(shape, float(i + 2)) for i, slot in enumerate("qkv")}
    output = Dim(tuple(Slot(slot, 8, 4) for slot in "qkv"))
    for rank in range(4):
        parameter = PerTensorScaleParameter(output, **TP | {"tp_rank": rank})
        assert fill(parameter, tensors).tolist() == [2, 3, 4]
        assert fill(parameter, {None: torch.full(shape, 7.0)}).tolist() == [7, 7, 7]
        assert fill(parameter, {None: torch.tensor([5.0, 6, 7])}).tolist() == [5, 6, 7]
        for wrong in ([2], [4], [1, 1], [3, 1], [0]):
            assert not parameter.accepts(None, torch.Size(wrong))
        for wrong in ([3], [1, 1]):
            assert not parameter.accepts("q", torch.Size(wrong))


BYTES = {"tp_rank": 0, "tp_size": 4, "dtype": torch.int32}


@pytest.mark.parametrize(
    ("build", "numbers"),
    [
        (lambda: Dim.cut(10, 4), ["10 features", "4 equal parts", "10 % 4 = 2"]),
        (lambda: Dim((Slot("k_proj", 6, 4),)), ["'k_proj'", "6 % 4 = 2"]),
        (lambda: ColumnvLLMParameter(Dim.cut(9, 3), **TP), ["3 parts", "4 tensor-parallel"]),
        (
            lambda: PackedvLLMParameter(
                Dim.cut(48, 4), Dim.whole(8), packed_dim=0, packed_factor=8, **BYTES
            ),
            ["12 features", "48 in 4 parts", "packed element of 8"],
        ),
        (
            lambda: PackedvLLMParameter(
                Dim((Slot("a", 12), Slot("b", 20))),
                Dim.whole(8),
                packed_dim=0,
                packed_factor=8,
                **BYTES,
            ),
            ["'a'", "12 features", "packed element of 8"],
        ),
        (
            lambda: PackedvLLMParameter(
                Dim.whole(8), Dim.whole(12), packed_dim=1, packed_factor=8, **BYTES
            ),
            ["12 features", "packed element of 8"],
        ),
        (
            lambda: PackedColumnParameter(Dim.cut(48, 4), packed_factor=8, **BYTES),
            ["12 features", "packed element of 8"],
        ),
        (
            lambda: GroupQuantScaleParameter(Dim.whole(4), Dim.cut(96, 4), group_size=32, **TP),
            ["24 features", "96 in 4 parts", "scale group of 32"],
        ),
        (
            lambda: BlockQuantScaleParameter(Dim.cut(96, 4), Dim.whole(64), block=(32, 32), **TP),
            ["24 features", "scale block of 32"],
        ),
        (
            lambda: BlockQuantScaleParameter(Dim.whole(64), Dim.cut(96, 4), block=(32, 32), **TP),
            ["24 features", "scale block of 32"],
        ),
        (
            lambda: BlockQuantScaleParameter(
                Dim((Slot("gate", 48, 1), Slot("up", 64, 1))), Dim.whole(64), block=(32, 32), **TP
            ),
            ["'gate'", "48 features", "scale block of 32"],
        ),
        (
            lambda: BlockQuantScaleParameter(
                Dim((Slot("gate", 128, 4), Slot("up", 48 * 4, 4))),
                Dim.whole(64),
                block=(32, 32),
                **TP,
            ),
            ["'up'", "48 features", "scale block of 32"],
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(build: Callable[[], Any], numbers: list[str]) -> None:
    """An edge that falls inside of a unit is refused, with the numbers in the message."""
    with pytest.raises(ShardingError) as refused:
        build()
    for number in numbers:
        assert number in str(refused.value)


@given(
    experts=st.sampled_from([None, Experts(3, 0, 1), Experts(4, 1, 2)]),
    factor=st.sampled_from([2, 4, 8]),
    rows=st.integers(1, 9),
    padding=st.integers(0, 2),
    inputs=st.integers(1, 3),
    ranks=st.sampled_from([(1, 1), (3, 1), (1, 3)]),
)
def test_each_element_of_a_packed_weight_is_read_once_or_is_padding(
    experts: Experts | None,
    factor: int,
    rows: int,
    padding: int,
    inputs: int,
    ranks: tuple[int, int],
) -> None:
    """A slot's region has the elements that its pieces are read to, on every rank."""
    size = max(ranks)
    padded = -(-rows // ranks[0]) * ranks[0] + padding * ranks[0]
    output = Dim(tuple(Slot(name, rows, ranks[0], padded=padded) for name in "ab"))
    width = factor * inputs * ranks[1]
    for rank in range(size):
        weight = PackedModelWeightParameter(
            output,
            Dim.cut(width, ranks[1]),
            packed_factor=factor,
            tp_rank=rank,
            tp_size=size,
            dtype=torch.int32,
            experts=experts,
        )
        assert weight.shape[-1] == inputs
        counted = weight._like(torch.zeros(weight.shape, dtype=torch.int32))
        read = torch.zeros_like(counted.data)
        for slot in counted.slots:
            stored = torch.empty(counted.checkpoint_shape(slot), device="meta")
            for piece in counted.pieces(stored, slot):
                piece.target.add_(1)
            slots_own, before = counted.data - read, read
            read = counted.data.clone()
            counted.region(slot).add_(1)  # what is read of it, again
            assert torch.equal(counted.data - before, 2 * slots_own)
            counted.data.copy_(read)
        for region in counted.padding():
            region.add_(1)
        assert counted.data.eq(1).all()
