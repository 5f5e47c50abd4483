"""Typed parameters: which numbers each rank keeps, and promises beside the laws (tests/laws/)."""

from __future__ import annotations

import copy
import inspect
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from vllm_module.distributed import tensor_parallel
from vllm_module.errors import ShardingError
from vllm_module.parameters import (
    BasevLLMParameter,
    ColumnvLLMParameter,
    Dim,
    Experts,
    ModelWeightParameter,
    PerSlotVectorParameter,
    PerTensorScaleParameter,
    PerTensorTableParameter,
    RankedColumnParameter,
    Slot,
)
from vllm_module.testing import parameter_layouts, tp_sizes
from vllm_module.testing.strategies import parameter_classes
from vllm_module.weights import read_into

every_class = pytest.mark.parametrize("cls", parameter_classes())
few = settings(max_examples=20)

HEADS = Dim((Slot("q_proj", 8, 4), Slot("k_proj", 4, 2)))
KEPT = {
    "cut": ((Dim.cut(8, 4),), {"": [1, 2, 3, 4, 5, 6, 7, 8]}, [[1, 2], [3, 4], [5, 6], [7, 8]]),
    "whole": ((Dim.whole(2),), {"": [1, 2]}, [[1, 2]] * 4),
    "padded": (
        (Dim.cut(5, 4, padded=8),),
        {"": [1, 2, 3, 4, 5]},
        [[1, 2], [3, 4], [5, 0], [0, 0]],
    ),
    "slots, one of them replicated": (
        (HEADS,),
        {"q_proj": [1, 2, 3, 4, 5, 6, 7, 8], "k_proj": [11, 12, 13, 14]},
        [[1, 2, 11, 12], [3, 4, 11, 12], [5, 6, 13, 14], [7, 8, 13, 14]],
    ),
    "stored fused": (
        (HEADS,),
        {None: [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 14]},
        [[1, 2, 11, 12], [3, 4, 11, 12], [5, 6, 13, 14], [7, 8, 13, 14]],
    ),
    "rows": (
        (Dim.whole(2), Dim.cut(4, 4)),
        {"": [[1, 2, 3, 4], [5, 6, 7, 8]]},
        [[[1], [5]], [[2], [6]], [[3], [7]], [[4], [8]]],
    ),
    "slots of the second dimension": (
        (Dim.whole(1), Dim((Slot("a", 4, 4), Slot("b", 2, 2)))),
        {"b": [[5, 6]], "a": [[1, 2, 3, 4]]},
        [[[1, 5]], [[2, 5]], [[3, 6]], [[4, 6]]],
    ),
}


@pytest.mark.parametrize(("dims", "stored", "kept"), KEPT.values(), ids=KEPT)
def test_what_each_rank_keeps(dims: tuple[Dim, ...], stored: dict[Any, Any], kept: Any) -> None:
    """Each rank gets its numbers of a checkpoint; of new memory only the padding is written."""
    for rank, expected in enumerate(kept):
        meta = BasevLLMParameter(*dims, tp_rank=rank, tp_size=4, dtype=torch.float32)
        real = meta.materialize_on("cpu")
        assert torch.equal(real.isnan(), torch.tensor(expected) != 0)
        for slot, numbers in stored.items():
            tensor = torch.tensor(numbers)
            assert real.accepts(slot, tensor.shape)
            for source, target in real.cut(tensor.float(), slot):
                read_into(source, target)
        assert real.tolist() == expected


@st.composite
def parameters(draw: st.DrawFn, cls: type[BasevLLMParameter]) -> BasevLLMParameter:
    """Draw a parameter of any rank."""
    layout, size = draw(parameter_layouts(cls)), draw(tp_sizes())
    with tensor_parallel(rank=draw(st.integers(0, size - 1)), size=size):
        try:
            return layout.build()
        except ShardingError:
            assume(False)
            raise


@every_class
@few
@given(data=st.data())
def test_materialize_on_keeps_type_and_attributes(cls: type, data: st.DataObject) -> None:
    """materialize_on keeps type, dtype and attributes."""
    parameter = data.draw(parameters(cls))
    assert parameter.is_meta
    real = parameter.materialize_on("cpu")
    assert type(real) is cls
    assert isinstance(real, nn.Parameter)
    assert real.device.type == "cpu"
    assert (real.shape, real.dtype) == (parameter.shape, parameter.dtype)
    assert vars(real) == vars(parameter)
    assert not real.requires_grad
    assert parameter.is_meta
    again = real.materialize_on(torch.device("meta"))
    assert again.is_meta
    assert vars(again) == vars(parameter)


@every_class
@few
@given(data=st.data())
def test_deepcopy(cls: type, data: st.DataObject) -> None:
    """deepcopy keeps type, attributes and ties, and shares no memory."""
    meta = data.draw(parameters(cls))
    real = meta.materialize_on("cpu")
    real.data.fill_(1)
    for parameter in (meta, real):
        twin, same = copy.deepcopy([parameter, parameter])
        assert twin is same
        assert twin is not parameter
        assert type(twin) is cls
        assert vars(twin) == vars(parameter)
        assert (twin.device, twin.shape, twin.dtype) == (
            parameter.device,
            parameter.shape,
            parameter.dtype,
        )
        assert not twin.requires_grad
    twin.data.fill_(0)
    assert (real.to(torch.float64) == 1).all()


@every_class
@few
@given(data=st.data())
def test_nothing_but_what_is_declared_is_on_a_parameter(cls: type, data: st.DataObject) -> None:
    """A typed parameter's __dict__ has only what its class declares (law 5)."""
    parameter = data.draw(parameters(cls))
    classes = cls.__mro__[: cls.__mro__.index(nn.Parameter)]
    assert vars(parameter).keys() == {n for c in classes for n in inspect.get_annotations(c)}


@every_class
def test_rank_and_size_have_no_defaults(cls: type) -> None:
    """tp_rank and tp_size have no defaults: a forgotten rank would load shard 0 everywhere."""
    signature = inspect.signature(cls.__new__).parameters
    for name in ("tp_rank", "tp_size"):
        assert signature[name].default is inspect.Parameter.empty


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_of_its_size_is_refused(rank: int) -> None:
    """A rank must be in range(size)."""
    with pytest.raises(ValueError, match=rf"rank {rank} is outside of range\(2\)"):
        ColumnvLLMParameter(Dim.whole(2), tp_rank=rank, tp_size=2, dtype=torch.float32)


@every_class
@few
@given(data=st.data())
def test_only_the_checkpoints_own_shape_is_accepted(cls: type, data: st.DataObject) -> None:
    """A rank's shard, and tensors with other sizes or more dimensions, are refused."""
    parameter = data.draw(parameters(cls))
    for slot in (*parameter.slots, None):
        shape = list(parameter.checkpoint_shape(slot))
        assert parameter.accepts(slot, torch.Size(shape))
        wrong = [[*shape, 1], [1, *shape], [2, *shape], list(parameter.shape)]
        for dim in range(len(shape)):
            for change in (-1, 1, shape[dim]):
                wrong.append([*shape[:dim], shape[dim] + change, *shape[dim + 1 :]])
        own = [[1]] if cls is PerTensorScaleParameter else [shape]
        if isinstance(parameter, PerTensorTableParameter):  # one for all slots, or shorter
            own += [[length] for length in range(1, parameter.length + 1)]
        if isinstance(parameter, PerSlotVectorParameter) and slot is None:  # one for all slots
            own.append([*shape[:-1], parameter.input.size])
        for other in wrong:
            if other not in (shape, *own):
                assert not parameter.accepts(slot, torch.Size(other)), other


@pytest.mark.parametrize("experts", [None, Experts(3, 1, 2), Experts(3, 0, 1)], ids=str)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_vector_of_a_fused_tensor_fills_every_slot(rank: int, experts: Experts | None) -> None:
    """What a checkpoint stores once for all slots is in each of them, cut as the input is."""
    output, features = Dim((Slot("a", 4, 2), Slot("b", 2, 2))), Dim.cut(6, 2, padded=8)
    parameter = PerSlotVectorParameter(
        output, features, tp_rank=rank, tp_size=2, dtype=torch.float32, experts=experts
    )
    real = parameter.materialize_on("cpu")
    stored = torch.arange(1.0, 7.0) if experts is None else torch.arange(1.0, 19.0).view(3, 6)
    assert real.accepts(None, stored.shape)
    for source, target in real.cut(stored, None):
        read_into(source, target)
    padded = F.pad(stored, (0, 2))[..., rank * 4 : rank * 4 + 4]
    padded = padded if experts is None else padded[list(experts.kept)]
    assert torch.equal(real.vectors(), torch.stack((padded, padded), -2))


def test_slots_of_two_dimensions_are_every_pair() -> None:
    """Where two dimensions have named slots, a slot is one of each, and its name is a path."""
    rows = Dim((Slot("a", 4, 2), Slot("b", 2)))
    columns = Dim((Slot("c", 3), Slot("d", 5)))
    parameter = ModelWeightParameter(rows, columns, tp_rank=1, tp_size=2, dtype=torch.float32)
    assert list(parameter.slots) == ["a.c", "a.d", "b.c", "b.d"]
    assert parameter.checkpoint_shape("a.d") == (4, 5)
    real = parameter.materialize_on("cpu")
    stored = {slot: torch.randn(real.checkpoint_shape(slot)) for slot in real.slots}
    for slot, tensor in stored.items():
        for source, target in real.cut(tensor, slot):
            target.copy_(source)
    whole = torch.cat([torch.cat([stored[f"{r}.{c}"] for c in "cd"], 1) for r in "ab"])
    assert torch.equal(real, whole[2:])


@pytest.mark.parametrize("names", [[], ["", "b"], ["a", "a"]])
def test_slots_without_distinct_names_are_refused(names: list[str]) -> None:
    """Several slots of a dimension need distinct names."""
    with pytest.raises(ValueError, match="need distinct names"):
        Dim(tuple(Slot(name, 4) for name in names))


@pytest.mark.parametrize("slot", [("", 0, 1), ("", 4, 0), ("", 4, 1, 3)])
def test_impossible_slots_are_refused(slot: tuple[Any, ...]) -> None:
    """A slot without features or parts, or padded to fewer than it has, is refused."""
    with pytest.raises(ShardingError, match="impossible slot"):
        Slot(*slot)


class Lenient(ModelWeightParameter):
    """Accepts a checkpoint with rows behind those that it has, or with this rank's rows only."""

    def accepts(self, slot: str | None, shape: torch.Size) -> bool:
        return shape[0] >= 4 or shape == self.shape


@pytest.mark.parametrize(
    ("size", "rows", "kept"), [(1, 6, [0, 1, 2, 3]), (2, 6, [2, 3]), (2, 2, [0, 1])]
)
def test_a_class_that_accepts_other_shapes_cuts_what_it_keeps(
    size: int, rows: int, kept: list[int]
) -> None:
    """A tensor that is longer is cut, and one that is as long as this rank's shard is kept."""
    dims = Dim.cut(4, size), Dim.whole(1)
    last = Lenient(*dims, tp_rank=size - 1, tp_size=size, dtype=torch.float32)
    real = last.materialize_on("cpu")
    for source, target in real.cut(torch.arange(rows).view(rows, 1).float(), None):
        read_into(source, target)
    assert real.flatten().tolist() == kept


def test_experts_may_have_one_number_each() -> None:
    """A parameter without other dimensions than that of the experts is filled expert by expert."""
    kind = {"tp_rank": 0, "tp_size": 1, "dtype": torch.float32}
    real = BasevLLMParameter(experts=Experts(3, 0, 1), **kind).materialize_on("cpu")
    for slot in real.slots:
        for source, target in real.cut(torch.tensor(float(slot)), slot):
            read_into(source, target)
    assert real.tolist() == [0, 1, 2]


def test_slots_may_be_given_as_a_list() -> None:
    """A dimension of a list of slots is that of their tuple."""
    assert Dim([Slot("q", 2), Slot("k", 2)]) == Dim((Slot("q", 2), Slot("k", 2)))  # type: ignore[arg-type]  # as an untyped caller may


def test_zeros_follow_a_table_that_is_stored_shorter() -> None:
    """Its entries are first, in the slot that it is of."""
    output = Dim((Slot("a", 2), Slot("b", 3)))
    parameter = PerTensorTableParameter(
        output, length=4, shorter=True, tp_rank=0, tp_size=1, dtype=torch.float32
    )
    parameter = parameter.materialize_on("cpu")
    for slot, values in {"a": [1.0, 2.0], "b": [3.0, 4.0, 5.0, 6.0]}.items():
        for piece in parameter.pieces(torch.tensor(values), slot):
            source = piece.source if piece.order is None else piece.order.restore(piece.source)
            read_into(source, piece.target)
    assert parameter.tolist() == [1, 2, 0, 0, 3, 4, 5, 6]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_zeros_follow_a_slot_of_a_smaller_rank(number: int) -> None:
    """For all ranks of the slots, cut or not; nothing else is written before a tensor is read."""
    for size, ranks in product((1, 2), product((1, 2, 3), repeat=number)):
        stored = [torch.rand(4, each) + 1 for each in ranks]
        for tp_rank in range(size):
            parts = (each.chunk(size)[tp_rank] for each in stored)
            most = max(ranks)
            expected = torch.cat([F.pad(part, (0, most - part.shape[1])) for part in parts])
            parameter = RankedColumnParameter(
                Dim(tuple(Slot(f"slot{at}", 4, size) for at in range(number))),
                ranks=ranks,
                tp_rank=tp_rank,
                tp_size=size,
                dtype=torch.float32,
            ).materialize_on("cpu")
            assert torch.equal(parameter.isnan(), expected != 0)
            for slot, tensor in zip(parameter.slots, stored, strict=True):
                assert parameter.accepts(slot, tensor.shape)
                assert not parameter.accepts(slot, F.pad(tensor, (0, 1)).shape)
                for source, target in parameter.cut(tensor, slot):
                    read_into(source, target)
                part = tensor.chunk(size)[tp_rank]
                assert torch.equal(parameter.region(slot), part)
            assert torch.equal(parameter, expected)
