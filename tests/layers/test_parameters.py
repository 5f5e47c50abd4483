"""Typed parameters: which part of each checkpoint tensor a rank keeps, and what they promise."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from vllm_module.errors import ShardingError
from vllm_module.layers import RMSNorm
from vllm_module.parameters import (
    BasevLLMParameter,
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    ColumnvLLMParameter,
    Dim,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PackedColumnParameter,
    PackedvLLMParameter,
    PerTensorScaleParameter,
    RowvLLMParameter,
    Slot,
)
from vllm_module.weights import read_into

SIZES = range(1, 9)
N = 840  # every size from 1 to 8 divides it


class Stored(NamedTuple):
    """A slot as a checkpoint stores it: its shape, and into how many parts its ``dim`` is cut."""

    shape: tuple[int, ...]
    dim: int
    parts: int
    padded: int | None = None  # entries of ``dim`` after padding


class Layout(NamedTuple):
    """A kind of parameter: how a size's ranks build it, and what a checkpoint has for it."""

    build: Callable[..., BasevLLMParameter]  # (size, tp_rank=, tp_size=, dtype=)
    stored: Callable[[int], dict[str, Stored]]  # of a size


def column(size: int) -> Dim:
    return Dim.cut(N, size)


def kv_parts(size: int) -> int:
    return math.gcd(size, 2)  # two key-value heads: cut by an even size, else whole


def qkv(size: int) -> Dim:
    heads = kv_parts(size)
    return Dim((Slot("q", N, size), Slot("k", 48, heads), Slot("v", 48, heads)))


def qkv_stored(size: int, unit: int = 1, *rest: int) -> dict[str, Stored]:
    heads = kv_parts(size)
    sizes = {"q": (N, size), "k": (48, heads), "v": (48, heads)}
    return {s: Stored((n // unit, *rest), 0, parts) for s, (n, parts) in sizes.items()}


def vocab(size: int) -> tuple[int, int]:
    """Return a number of rows that no size divides, and that number after padding."""
    return 101, -(-101 // math.lcm(8, size)) * math.lcm(8, size)


LAYOUTS = {
    "weight, columns": Layout(
        lambda size, **tp: ModelWeightParameter(column(size), Dim.whole(3), **tp),
        lambda size: {"": Stored((N, 3), 0, size)},
    ),
    "weight, rows": Layout(
        lambda size, **tp: ModelWeightParameter(Dim.whole(3), column(size), **tp),
        lambda size: {"": Stored((3, N), 1, size)},
    ),
    "weight, replicated": Layout(
        lambda size, **tp: ModelWeightParameter(Dim.whole(3), Dim.whole(5), **tp),
        lambda size: {"": Stored((3, 5), 0, 1)},
    ),
    "weight, fused heads": Layout(
        lambda size, **tp: ModelWeightParameter(qkv(size), Dim.whole(2), **tp),
        lambda size: qkv_stored(size, 1, 2),
    ),
    "weight, padded": Layout(
        lambda size, **tp: ModelWeightParameter(
            Dim.cut(vocab(size)[0], size, padded=vocab(size)[1]), Dim.whole(3), **tp
        ),
        lambda size: {"": Stored((101, 3), 0, size, vocab(size)[1])},
    ),
    "column vector": Layout(
        lambda size, **tp: ColumnvLLMParameter(qkv(size), **tp), lambda size: qkv_stored(size)
    ),
    "row vector": Layout(
        lambda size, **tp: RowvLLMParameter(column(size), **tp),
        lambda size: {"": Stored((N,), 0, size)},
    ),
    "packed, fused along it": Layout(
        lambda size, **tp: PackedvLLMParameter(
            Dim((Slot("a", 4 * N, size), Slot("b", 8 * N, size))),
            Dim.whole(3),
            packed_dim=0,
            packed_factor=4,
            **tp,
        ),
        lambda size: {"a": Stored((N, 3), 0, size), "b": Stored((2 * N, 3), 0, size)},
    ),
    "packed, fused across it": Layout(
        lambda size, **tp: PackedvLLMParameter(
            qkv(size), Dim.whole(24), packed_dim=1, packed_factor=8, **tp
        ),
        lambda size: qkv_stored(size, 1, 3),
    ),
    "packed, rows": Layout(
        lambda size, **tp: PackedvLLMParameter(
            Dim.whole(3), Dim.cut(8 * N, size), packed_dim=1, packed_factor=8, **tp
        ),
        lambda size: {"": Stored((3, N), 1, size)},
    ),
    "packed column vector": Layout(
        lambda size, **tp: PackedColumnParameter(Dim.cut(8 * N, size), packed_factor=8, **tp),
        lambda size: {"": Stored((N,), 0, size)},
    ),
    "scale a tensor": Layout(
        lambda size, **tp: PerTensorScaleParameter(qkv(size), **tp),
        lambda size: {slot: Stored((1,), 0, 1) for slot in "qkv"},
    ),
    "scale a channel": Layout(
        lambda size, **tp: ChannelQuantScaleParameter(qkv(size), **tp),
        lambda size: qkv_stored(size, 1, 1),
    ),
    "scale a group, columns": Layout(
        lambda size, **tp: GroupQuantScaleParameter(qkv(size), Dim.whole(70), group_size=32, **tp),
        lambda size: qkv_stored(size, 1, 3),
    ),
    "scale a group, rows": Layout(
        lambda size, **tp: GroupQuantScaleParameter(
            Dim.whole(3), Dim.cut(32 * N, size), group_size=32, **tp
        ),
        lambda size: {"": Stored((3, N), 1, size)},
    ),
    "scale a block, columns": Layout(
        lambda size, **tp: BlockQuantScaleParameter(
            Dim((Slot("a", 16 * N, size), Slot("b", 32 * N, size))),
            Dim.whole(70),
            block=(16, 32),
            **tp,
        ),
        lambda size: {"a": Stored((N, 3), 0, size), "b": Stored((2 * N, 3), 0, size)},
    ),
    "scale a block, rows": Layout(
        lambda size, **tp: BlockQuantScaleParameter(
            Dim.whole(50), Dim.cut(32 * N, size), block=(16, 32), **tp
        ),
        lambda size: {"": Stored((4, N), 1, size)},
    ),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())


def numbered(stored: dict[str, Stored]) -> dict[str, torch.Tensor]:
    """Return the slots' tensors; no number occurs twice, and none is zero."""
    tensors, first = {}, 1
    for slot, (shape, *_) in stored.items():
        count = math.prod(shape)
        tensors[slot] = torch.arange(first, first + count).view(shape)
        first += count
    return tensors


def ranks(layout: Layout, size: int, dtype: torch.dtype = torch.int64) -> list[BasevLLMParameter]:
    return [layout.build(size, tp_rank=r, tp_size=size, dtype=dtype) for r in range(size)]


def fill(parameter: BasevLLMParameter, tensors: dict[Any, torch.Tensor]) -> torch.Tensor:
    real = parameter.materialize_on("cpu")
    for slot, tensor in tensors.items():
        assert real.accepts(slot, tensor.shape)
        for source, target in real.cut(tensor, slot):
            read_into(source, target)
    return real.data


def padded(tensor: torch.Tensor, slot: Stored) -> torch.Tensor:
    extra = list(tensor.shape)
    extra[slot.dim] = (slot.padded or slot.shape[slot.dim]) - slot.shape[slot.dim]
    return torch.cat([tensor, tensor.new_zeros(extra)], slot.dim)


@pytest.mark.parametrize("size", SIZES)
@every_layout
def test_shards_cover_every_tensor(layout: Layout, size: int) -> None:
    """The ranks hold every element of every slot, as often as the slot is replicated, in order."""
    stored = layout.stored(size)
    tensors = numbered(stored)
    held = [fill(parameter, tensors) for parameter in ranks(layout, size)]

    counted = torch.cat([shard.flatten() for shard in held]).bincount()
    expected = [0]  # of padding, by number
    for slot, tensor in tensors.items():
        expected[0] += math.prod(padded(tensor, stored[slot]).shape) - tensor.numel()
        expected += [size // stored[slot].parts] * tensor.numel()
    assert counted.tolist() == expected

    for rank, shard in enumerate(held):
        parts = [
            padded(tensor, (slot := stored[name])).chunk(slot.parts, slot.dim)[
                rank // (size // slot.parts)
            ]
            for name, tensor in tensors.items()
        ]
        assert torch.equal(shard, torch.cat(parts, next(iter(stored.values())).dim))


@pytest.mark.parametrize("size", SIZES)
@every_layout
def test_stored_fused_or_split_gives_the_same_bits(layout: Layout, size: int) -> None:
    """A tensor stored fused is cut by slot first and then by rank; slots come in any order."""
    stored = layout.stored(size)
    tensors = numbered(stored)
    whole = torch.cat(list(tensors.values()), next(iter(stored.values())).dim)
    for parameter in ranks(layout, size):
        split = fill(parameter, tensors)
        assert torch.equal(fill(parameter, {None: whole}), split)
        assert torch.equal(fill(parameter, dict(reversed(tensors.items()))), split)


@st.composite
def dims(draw: st.DrawFn) -> tuple[int, Dim]:
    """Draw a size and a dimension that it can share, padded or not, of one or several slots."""
    size = draw(st.integers(1, 8))
    divisors = [parts for parts in range(1, size + 1) if size % parts == 0]
    slots = []
    count = draw(st.integers(1, 4))
    for index in range(count):
        parts = draw(st.sampled_from(divisors))
        room = draw(st.integers(1, 5)) * parts
        name = f"slot{index}" if count > 1 else ""
        slots.append(Slot(name, draw(st.integers(1, room)), parts, room))
    return size, Dim(tuple(slots))


@given(dims(), st.booleans())
def test_any_dimension_is_covered_in_order(drawn: tuple[int, Dim], rows: bool) -> None:
    """Distinct ranks' shards of a slot, laid end to end, are the slot and then its padding."""
    size, dim = drawn
    shapes = [(slot.size, 2) if rows else (2, slot.size) for slot in dim.slots]
    axis = 0 if rows else 1
    cut = (dim, Dim.whole(2)) if rows else (Dim.whole(2), dim)
    tensors = numbered(
        {slot.name: Stored(shape, axis, 1) for slot, shape in zip(dim.slots, shapes, strict=True)}
    )
    held = [
        fill(
            ModelWeightParameter(*cut, tp_rank=rank, tp_size=size, dtype=torch.int64),
            tensors if rank % 2 else {None: torch.cat(list(tensors.values()), axis)},
        )
        for rank in range(size)
    ]
    rooms = [slot.padded // slot.parts for slot in dim.slots]
    by_slot = zip(*(shard.split(rooms, axis) for shard in held), strict=True)
    for slot, shards in zip(dim.slots, by_slot, strict=True):
        copies = size // slot.parts
        for rank, shard in enumerate(shards):
            assert torch.equal(shard, shards[rank // copies * copies])
        whole = torch.cat(shards[::copies], axis)
        assert torch.equal(whole.narrow(axis, 0, slot.size), tensors[slot.name])
        assert not whole.narrow(axis, slot.size, slot.padded - slot.size).any()


@every_layout
def test_materialize_on_keeps_type_and_attributes(layout: Layout) -> None:
    """materialize_on gives new memory to the same type, dtype and attributes."""
    for parameter in ranks(layout, 2, torch.bfloat16):
        assert parameter.is_meta
        real = parameter.materialize_on("cpu")
        assert type(real) is type(parameter)
        assert isinstance(real, nn.Parameter)
        assert real.device.type == "cpu"
        assert (real.shape, real.dtype) == (parameter.shape, torch.bfloat16)
        assert real.__dict__ == parameter.__dict__
        assert not real.requires_grad
        assert parameter.is_meta
        again = real.materialize_on(torch.device("meta"))
        assert again.is_meta
        assert again.__dict__ == parameter.__dict__


@every_layout
def test_only_the_padding_of_new_memory_is_written(layout: Layout) -> None:
    """New memory is zero where it is padding and poison everywhere that a checkpoint must fill."""
    for size in (1, 2, 3, 8):
        stored = layout.stored(size)
        for parameter in ranks(layout, size, torch.float32):
            filled = fill(parameter, numbered(stored)) != 0
            real = parameter.materialize_on("cpu")
            assert real[filled].isnan().all()
            assert not real[~filled].any()


@every_layout
def test_deepcopy_is_a_parameter_of_its_own(layout: Layout) -> None:
    """deepcopy keeps type and attributes and shares no memory; one parameter stays one."""
    meta = layout.build(2, tp_rank=1, tp_size=2, dtype=torch.float32)
    real = meta.materialize_on("cpu")
    real.data.fill_(1)
    for parameter in (meta, real):
        twin, same = copy.deepcopy([parameter, parameter])
        assert twin is same
        assert twin is not parameter
        assert type(twin) is type(parameter)
        assert twin.__dict__ == parameter.__dict__
        assert twin.device == parameter.device
        assert twin.shape == parameter.shape
        assert not twin.requires_grad
    twin.data.fill_(2)
    assert (real == 1).all()


@every_layout
def test_nothing_but_what_is_declared_is_on_a_parameter(layout: Layout) -> None:
    """A typed parameter's __dict__ is what its class declares, whether new, filled or copied."""
    parameter = layout.build(2, tp_rank=1, tp_size=2, dtype=torch.int64)
    classes = type(parameter).__mro__[: type(parameter).__mro__.index(nn.Parameter)]
    declared = {name for cls in classes for name in inspect.get_annotations(cls)}
    real = parameter.materialize_on("cpu")
    for slot, tensor in numbered(layout.stored(2)).items():
        for source, target in real.cut(tensor, slot):
            read_into(source, target)
    for one in (parameter, real, copy.deepcopy(real)):
        assert set(one.__dict__) == declared
        assert (one.tp_rank, one.tp_size) == (1, 2)


def test_a_plain_parameter_carries_nothing() -> None:
    """A plain nn.Parameter has an empty __dict__, before and after it is loaded."""
    norm = RMSNorm(4)
    assert norm.weight.__dict__ == {}
    norm.load_weights({"weight": torch.ones(4)})
    assert norm.weight.__dict__ == {}
    assert type(norm.weight) is nn.Parameter


@every_layout
def test_rank_and_size_have_no_defaults(layout: Layout) -> None:
    """A parameter cannot be built without its rank and its size, nor with a rank outside of it."""
    for forgotten in ("tp_rank", "tp_size"):
        arguments = {"tp_rank": 0, "tp_size": 2, "dtype": torch.float32}
        del arguments[forgotten]
        with pytest.raises(TypeError, match=forgotten):
            layout.build(2, **arguments)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=rf"rank {rank} is outside of range\(2\)"):
            layout.build(2, tp_rank=rank, tp_size=2, dtype=torch.float32)


@every_layout
def test_only_the_checkpoints_own_shape_is_accepted(layout: Layout) -> None:
    """A rank's shard, a tensor with more or fewer rows and one with more dimensions are refused."""
    parameter = layout.build(4, tp_rank=1, tp_size=4, dtype=torch.float32)
    for slot, (shape, dim, *_) in layout.stored(4).items():
        assert parameter.accepts(slot, torch.Size(shape))
        wrong = [[*shape, 1], [2, *shape]]
        for change in (-1, 1, shape[dim]):
            other = list(shape)
            other[dim] += change
            wrong.append(other)
        if shape != tuple(parameter.shape):
            wrong.append(list(parameter.shape))
        for other in wrong:
            if not (isinstance(parameter, PerTensorScaleParameter) and other == [1]):
                assert not parameter.accepts(slot, torch.Size(other)), other


def test_two_dimensions_with_slots_are_refused() -> None:
    """Only one dimension of a parameter can have several slots."""
    several = Dim((Slot("a", 4), Slot("b", 4)))
    with pytest.raises(ValueError, match="only one dimension"):
        ModelWeightParameter(several, several, tp_rank=0, tp_size=4, dtype=torch.float32)


@pytest.mark.parametrize("slot", [("", 0, 1), ("", 4, 0), ("", 4, 1, 3)])
def test_impossible_slots_are_refused(slot: tuple[Any, ...]) -> None:
    """A slot without features or parts, or padded to fewer than it has, is refused."""
    with pytest.raises(ShardingError, match="impossible slot"):
        Slot(*slot)
