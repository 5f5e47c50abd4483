"""A checkpoint tensor and the slot it fills: whether it fits, and what is read of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from vllm_module.errors import DuplicateWeightError, WeightReadError
from vllm_module.parameters import Piece
from vllm_module.report import Problem
from vllm_module.tree import Location, expected_shape, is_typed, slots_of
from vllm_module.weights import Destination, Weight, read_into

_COMPARED_BYTES = 16 << 20  # of a tied tensor at a time, so that no second copy is held whole
_PLAIN = (torch.Tensor, nn.Parameter)


class Target(NamedTuple):
    """A tensor that names are assigned to.

    Attributes:
        location: where it is.
        tensor: as the module holds it; ``None`` if there is none.
        path: its full name in the tree.
        slots: the names of its slots.
        claims: the first name for each slot, and the path it was for. Places of a tied tensor share
            them.

    """

    location: Location
    tensor: torch.Tensor | None
    path: str
    slots: Collection[str]
    claims: dict[str, tuple[str, str]]


class Assignment(NamedTuple):
    """One checkpoint tensor and the slot that it fills.

    Attributes:
        name: the checkpoint's full name.
        slot: of the tensor at ``location``; ``None`` where the checkpoint stores all slots as one.
        weight: the tensor or handle.
        location: the parameter or buffer.
        tied_to: another name that fills the same tensor. Nothing is read then but to compare.

    """

    name: str
    slot: str | None
    weight: Weight
    location: Location
    tied_to: str | None

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots that it fills."""
        return tuple(slots_of(self.location.tensor)) if self.slot is None else (self.slot,)

    def pieces(self) -> Iterable[Piece]:
        """Return each piece that this rank keeps, with the view of the parameter it belongs in."""
        tensor = self.location.tensor
        if is_typed(tensor):
            return tensor.pieces(self.weight, self.slot)
        return (Piece(self.weight, tensor.data, ()),) if tensor.numel() else ()

    def jobs(self) -> Iterator[tuple[Weight, Destination]]:
        """Yield each piece to read, and what it is read into: memory, or a conversion's sink."""
        conversion = self.location.conversion
        if conversion is None:
            for piece in self.pieces():
                yield piece.source, piece.destination
        else:
            yield from conversion.jobs(self.location.node.module, self.weight, self.slot)

    def check_tied(self, unread: Iterable[Assignment]) -> None:
        """Raise ``DuplicateWeightError`` where another name gives the tied tensor other bits.

        That name is among ``unread``, or it was read into the tensor before. Both are read in
        pieces, into host memory.
        """
        tensor = self.location.tensor
        others = [each for each in unread if each.tied_to is None]
        sources = {
            _place(piece.target): _in_order(piece)
            for other in others
            if other.location.tensor is tensor
            for piece in other.pieces()
        }
        for piece in self.pieces():
            other = sources.get(_place(piece.target), piece.target)
            same = not (isinstance(other, torch.Tensor) and other.is_meta)  # nothing was read
            if not same or not _same_bits(_in_order(piece), other, tensor.dtype):
                raise DuplicateWeightError(
                    f"{self.name} and {self.tied_to} fill one tensor, to which the "
                    "configuration ties both, but their values differ. Set tie_word_embeddings "
                    "to false in config.json if they are meant to, else drop the wrong one "
                    "from the checkpoint"
                )


class HeldAssignment(Assignment):
    """One tensor of a sharded state: all of a parameter, as this rank holds it."""

    __slots__ = ()

    def pieces(self) -> Iterable[Piece]:
        """Return the whole tensor, unless it is empty; nothing is cut."""
        data = self.location.tensor.data
        return (Piece(self.weight, data, (None,) * data.dim()),) if data.numel() else ()

    def misfit(self) -> str | None:
        """Say why the weight is not what the parameter holds; ``None`` if it is."""
        expected, weight = self.location.tensor, self.weight
        if (weight.shape, weight.dtype) == (expected.shape, expected.dtype):
            return None
        return (
            f"this rank holds {expected.dtype} {list(expected.shape)}, got {weight.dtype} "
            f"{list(weight.shape)}"
        )


Fills: TypeAlias = dict[Location, list[Assignment]]  # by tensor, what fills its slots


def in_reading_order(assigned: Iterable[Assignment]) -> Iterable[tuple[nn.Module | None, Fills]]:
    """Return assignments in the order in which a load reads them: one tensor after the other.

    The tensors of a module that processes its weights as soon as it has them are together, so that
    it does so before the next one takes memory. All others come with ``None``.
    """
    fills: Fills = {}
    for each in assigned:
        fills.setdefault(each.location, []).append(each)
    groups: dict[nn.Module | None, Fills] = {}
    for location, fill in fills.items():
        owner = location.node.owner
        module = owner.module if owner.processes_alone else None
        groups.setdefault(module, {})[location] = fill
    return groups.items()


def misfit(
    location: Location, tensor: torch.Tensor, slot: str | None, weight: Weight, *, needs_data: bool
) -> str | None:
    """Say why ``weight`` cannot fill ``slot`` of ``tensor``; ``None`` if it can."""
    if problem := _not_plain(weight, needs_data=needs_data):
        return problem
    shape = weight.shape
    if not (tensor.accepts(slot, shape) if is_typed(tensor) else shape == tensor.shape):
        expected = expected_shape(tensor, slot)
        hint = ", its transpose" if len(shape) == 2 and expected == [*reversed(shape)] else ""
        return f"expected shape {expected}, got {list(weight.shape)}{hint}"
    conversion = location.conversion
    dtype = tensor.dtype if conversion is None else conversion.dtype
    if conversion is None and is_typed(tensor) and tensor.stored_dtypes:
        if weight.dtype in tensor.stored_dtypes:
            return None
        return f"expected dtype {' or '.join(map(str, tensor.stored_dtypes))}, got {weight.dtype}"
    widens = (weight.dtype, dtype) == (torch.int32, torch.int64)  # Kimi-K2's weight_shape
    if weight.dtype != dtype and not widens and not (_converts(weight.dtype) and _converts(dtype)):
        return f"expected dtype {dtype} or one that converts to it, got {weight.dtype}"
    return None


def _not_plain(weight: Any, *, needs_data: bool) -> str | None:
    """Say why ``weight`` is neither a handle nor a tensor that can be narrowed and copied."""
    if not isinstance(weight, torch.Tensor):
        if not all(hasattr(weight, name) for name in ("shape", "dtype", "narrow", "read_into")):
            return f"expected a tensor or a handle, got {type(weight).__name__}"
        kinds = type(weight.shape), type(weight.dtype)
        if kinds != (torch.Size, torch.dtype):
            names = " and ".join(kind.__name__ for kind in kinds)
            return f"expected a handle whose shape and dtype are Size and dtype, got {names}"
        return None
    if weight.layout != torch.strided or weight.is_nested:
        kind = "a nested one" if weight.is_nested else str(weight.layout)
        return f"expected one dense tensor, got {kind}; call its to_dense(), or unbind it"
    if weight.is_quantized:
        return f"expected a tensor that is not quantized, got {weight.dtype}; call its dequantize()"
    if type(weight) not in _PLAIN and is_lazy(weight):
        return "expected a tensor with a shape, got one that is not initialized"
    if not needs_data:
        return None
    if weight.is_meta:
        return "expected a tensor with data, got one on the meta device"
    # What overrides it may have no memory, or that of one rank alone.
    cls = type(weight)
    if cls not in _PLAIN and cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return (
            f"expected a plain tensor, got {cls.__name__}; unwrap it, as DTensor.full_tensor() does"
        )
    return None


def zero_rule(location: Location) -> str | None:
    """Return why a checkpoint may have zeros where no tensor is; ``None`` if it may not."""
    rules: Mapping[str, str] = getattr(location.node.module, "zero_weights", {})
    return rules.get(location.attr)


def not_zeros(weight: Weight) -> str | None:
    """Read ``weight``, and say why it is no vector of zeros; ``None`` if it is one."""
    if problem := _not_plain(weight, needs_data=True):
        return problem
    if len(weight.shape) != 1 or not _converts(weight.dtype):
        return f"expected a vector of zeros, got {weight.dtype} {list(weight.shape)}"
    length, step = weight.shape[0], _COMPARED_BYTES // weight.dtype.itemsize
    for first in range(0, length, step):
        part = weight.narrow(0, first, min(step, length - first))
        values = torch.empty(part.shape, dtype=part.dtype, device="cpu")
        read_into(part, values)
        if bool((wrong := values != 0).any()):
            return f"expected zeros or no such tensor, got {values[wrong][0].item():g}"
    return None


def absent_weight(location: Location, slot: str) -> torch.Tensor | None:
    """Return what fills a slot that a checkpoint may lack; ``None`` if it has to have it."""
    of_module = getattr(location.node.module, "absent_weight", None)  # none of a plain module
    found: torch.Tensor | None = of_module(location.attr, slot) if of_module else None
    return found


def missing(location: Location, slot: str) -> Problem:
    """Name a slot that nothing fills as a checkpoint would, and say what it is a slot of."""
    expected = f"expected shape {expected_shape(location.tensor, slot)}"
    if slot:
        *_, layer, attr = ("", "this layer", *location.path.split("."))[-3:]
        # Without the number of an expert, which the name has, so that the lines of all can fold.
        expected += f", slot {slot.rpartition('.')[2]!r} of {layer}.{attr}"
    return Problem(location.stored_name(slot), expected)


def refuse_nan(assigned: Iterable[Assignment]) -> None:
    """Raise ``WeightReadError`` if a tensor in memory has a NaN; handles are not read."""
    for each in assigned:
        if isinstance(each, HeldAssignment):  # in memory it is what a model slept with
            continue
        if isinstance(each.weight, torch.Tensor) and _has_nan(each.weight):
            raise _nan_in(each.name)


def refuse_nan_read(fills: Fills) -> None:
    """Raise ``WeightReadError`` if a tensor on a device has a NaN that was read from a handle."""
    for location, assigned in fills.items():
        if not _is_looked_at(location.tensor):
            continue
        handles = [each for each in assigned if not isinstance(each.weight, torch.Tensor)]
        # Slots that nothing has filled yet hold NaN.
        if handles and location.conversion is None and _has_nan(location.tensor):
            for each in handles:
                if any(_has_nan(piece.target) for piece in each.pieces()):
                    raise _nan_in(each.name)


def _is_looked_at(tensor: torch.Tensor) -> bool:
    """Tell whether a look at all numbers takes little time beside reading them.

    A device has the bandwidth. On a CPU a warm load took half as long again; there a NaN that was
    read shows in the first logits.
    """
    return not tensor.is_cpu


def _nan_in(name: str) -> WeightReadError:
    return WeightReadError(
        f"{name} has a NaN, and weights should be numbers: save or download the tensor again, or "
        "set allow_nan to load it as it is"
    )


def _has_nan(values: torch.Tensor) -> bool:
    """Tell whether a number of ``values``, floating point of 16 bits or more, is NaN.

    Quantized values are checked by their method. An infinity is a number that a checkpoint may
    mean: as a bias it excludes a token or an expert.
    """
    if not _converts(values.dtype) or not values.numel():
        return False
    values = values.detach()
    # A sum with a NaN is NaN, and computing it takes a fraction of the time that looking at each
    # number does. A sum of large numbers or infinities may be NaN or infinite, too; the largest
    # number is NaN only if one is.
    return not math.isfinite(values.sum().item()) and math.isnan(values.amax().item())


def _converts(dtype: torch.dtype) -> bool:
    """Tell whether loading converts values: floating point of 16 bits and more, never quantized."""
    return dtype.is_floating_point and dtype.itemsize > 1


def _place(view: torch.Tensor) -> tuple[int, int]:
    """Tell the views of one tensor apart, on the meta device too."""
    return int(view.storage_offset()), view.numel()


def _in_order(piece: Piece) -> Weight:
    """Return what a piece is read from; in memory and in order, if it is stored in another one."""
    if piece.order is None:
        return piece.source
    stored = piece.source if isinstance(piece.source, torch.Tensor) else piece.source.read()
    return piece.order.restore(stored)


def _same_bits(one: Weight, other: Weight, dtype: torch.dtype) -> bool:
    """Tell whether two weights are the same once both are converted to ``dtype``."""
    if one is other:
        return True
    # An expert of a packed tensor has one more dimension than the same expert by itself.
    rows = one.shape[0] if one.shape and len(one.shape) == len(other.shape) else 1
    step = max(1, rows * _COMPARED_BYTES // max(1, one.shape.numel() * dtype.itemsize))
    for first in range(0, rows, step):
        bits = []
        for weight in (one, other):
            if step < rows:
                weight = weight.narrow(0, first, min(step, rows - first))
            copy = torch.empty(weight.shape, dtype=dtype, device="cpu")
            read_into(weight, copy)
            bits.append(copy.reshape(-1).view(torch.uint8))
        if not torch.equal(*bits):
            return False
    return True
