"""One checkpoint tensor and the slot it fills: its pieces, and the checks of ties and of NaN."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

import torch

from vllm_module.core.conversions import Conversion
from vllm_module.core.fit import converts
from vllm_module.core.tensors import is_typed, slots_of
from vllm_module.core.tree import Location
from vllm_module.errors import DuplicateWeightError, WeightLoadError, WeightReadError
from vllm_module.parameters import Piece
from vllm_module.weights import Destination, Weight, read_into
from vllm_module.weights.changes import Changes
from vllm_module.weights.handle import FileHandle

_COMPARED_BYTES = 16 << 20  # of a tied tensor at a time, so that no second copy is held whole
_LOOKED_AT_BYTES = 1 << 20  # of a tensor in a file at a time, which the processor's cache holds
_SMALL = 1 << 18  # bytes of a tensor that takes little time to look at on a CPU
_FEW = 4096  # numbers that take less time than the call of an operation


Slots: TypeAlias = dict[Location, set[str]]  # of tensors


class Fill(NamedTuple):
    """One checkpoint tensor and the slot that it fills.

    Attributes:
        name: the checkpoint's full name.
        slot: of the tensor at ``location``; ``None`` where the checkpoint stores all slots as one.
        weight: the tensor or handle.
        location: the parameter or buffer.
        tied_to: another name that fills the same tensor. Nothing is read then but to compare.
        held: the weight is all of the parameter, as this rank holds it; nothing is cut.

    """

    name: str
    slot: str | None
    weight: Weight
    location: Location
    tied_to: str | None = None
    held: bool = False

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots that it fills."""
        return tuple(slots_of(self.location.tensor)) if self.slot is None else (self.slot,)

    def pieces(self) -> Iterable[Piece]:
        """Return each piece that this rank keeps, with the view of the parameter it belongs in."""
        tensor = self.location.tensor
        if is_typed(tensor) and not self.held:
            return tensor.pieces(self.weight, self.slot)
        at = (None,) * tensor.dim() if self.held else ()
        return (Piece(self.weight, tensor.data, at),) if tensor.numel() else ()

    def jobs(self) -> Iterable[tuple[Weight, Destination]]:
        """Return each piece to read, and what it is read into: memory, or a conversion's sink."""
        conversion = self.location.conversion
        if conversion is None:
            return [(piece.source, piece.destination) for piece in self.pieces()]
        return conversion.jobs(self.location.node.module, self.weight, self.slot)

    def is_held(self) -> bool:
        """Tell whether this rank's part of the tensor has the checkpoint's bits already.

        They are read in pieces. False for what is converted.
        """
        if self.location.conversion is not None:
            return False
        dtype = self.location.tensor.dtype
        return all(same_bits(_in_order(each), each.target, dtype) for each in self.pieces())

    def check_tied(self, unread: Iterable[Fill]) -> None:
        """Raise ``DuplicateWeightError`` where another name gives the tied tensor other bits.

        That name is among ``unread``, or it was read into the tensor before. Both are read in
        pieces, into host memory. What was converted before is compared by converting again.
        """
        tensor, conversion = self.location.tensor, self.location.conversion
        others = [
            each for each in unread if each.tied_to is None and each.location.tensor is tensor
        ]
        if conversion is not None and not others:
            if not self._converts_to_what_is_held(conversion):
                raise self._differs()
            return
        sources = {
            _place(piece.target): _in_order(piece) for other in others for piece in other.pieces()
        }
        dtype = tensor.dtype if conversion is None else conversion.dtype
        for piece in self.pieces():
            other = sources.get(_place(piece.target), piece.target)
            same = not (isinstance(other, torch.Tensor) and other.is_meta)  # nothing was read
            if not same or not same_bits(_in_order(piece), other, dtype):
                raise self._differs()

    def _converts_to_what_is_held(self, conversion: Conversion) -> bool:
        """Convert the weight into the tensors that hold it, and tell whether they stay the same."""
        module = self.location.node.module
        held = [self.location.tensor, *(module.get_parameter(name) for name in conversion.makes)]
        if any(tensor.is_meta for tensor in held):
            return False
        before = [tensor.detach().clone() for tensor in held]
        for weight, destination in self.jobs():
            read_into(weight, destination)
        return all(
            same_bits(new.detach(), old, old.dtype) for new, old in zip(held, before, strict=True)
        )

    def _differs(self) -> DuplicateWeightError:
        return DuplicateWeightError(
            f"{self.name} and {self.tied_to} fill one tensor, to which the "
            "configuration ties both, but their values differ. Set tie_word_embeddings "
            "to false in config.json if they are meant to, else drop the wrong one "
            "from the checkpoint"
        )


def refuse_elements(fills: Iterable[Fill]) -> None:
    """Raise ``WeightLoadError`` for some elements of a tensor among what a whole load fills."""
    for fill in fills:
        if isinstance(fill.weight, Changes):
            raise WeightLoadError(
                f"{fill.name}: some elements of a tensor are for update_weights, and a load fills "
                "all of them: send the tensor whole"
            )


def refuse_nan(fills: Iterable[Fill], *, stored: bool = False) -> None:
    """Raise ``WeightReadError`` if a tensor in memory has a NaN; if ``stored``, one in a file too.

    What is in files of this host is read for it, in pieces.
    """
    # What a rank holds itself is in memory where a model slept with it.
    sent = ((fill.name, fill.weight) for fill in fills if not fill.held)
    refuse_nan_sent(sent, stored=stored)


def refuse_nan_sent(weights: Iterable[tuple[str, Weight]], *, stored: bool = True) -> None:
    """Do the same for the tensors of an update."""
    for name, given in weights:
        weight = given.values if isinstance(given, Changes) else given
        if any(map(_has_nan, _values(weight, stored))):
            raise _nan_in(name)


def _values(weight: Weight, stored: bool) -> Iterator[torch.Tensor]:
    """Yield a tensor in memory whole; if ``stored``, a floating-point one in a file in pieces."""
    if isinstance(weight, torch.Tensor):
        yield weight
    elif stored and isinstance(weight, FileHandle) and not weight.file_bytes.remote:
        if not converts(weight.dtype) or not weight.shape.numel():
            return
        rows = weight.shape[0] if weight.shape else 1
        step = min(rows, max(1, rows * _LOOKED_AT_BYTES // weight.nbytes))
        buffer = torch.empty((step, *weight.shape[1:]), dtype=weight.dtype, device="cpu")
        for first in range(0, rows, step):
            part = weight.narrow(0, first, min(step, rows - first)) if step < rows else weight
            target = buffer[: rows - first].view(part.shape)
            part.read_into(target)
            yield target


def refuse_nan_read(fills: Iterable[Fill]) -> None:
    """Raise ``WeightReadError`` if a tensor has a NaN that was read from a handle.

    It is a small one, or on a device.
    """
    clean = set()  # of tensors without a NaN, which several fills share
    for fill in fills:
        location = fill.location
        if isinstance(fill.weight, torch.Tensor) or location in clean:
            continue
        tensor = location.tensor
        # Slots that nothing has filled yet hold NaN.
        if not _is_looked_at(tensor) or location.conversion is not None or not _has_nan(tensor):
            clean.add(location)
        elif any(_has_nan(piece.target) for piece in fill.pieces()):
            raise _nan_in(fill.name)


def _is_looked_at(tensor: torch.Tensor) -> bool:
    """Tell whether a look at all numbers takes little time beside reading them.

    A device has the bandwidth. On a CPU a warm load took half as long again; there only small
    tensors, such as norms and biases, are looked at, and another NaN shows in the first logits.
    """
    return not tensor.is_cpu or tensor.nbytes <= _SMALL


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
    if not converts(values.dtype) or not values.numel():
        return False
    if values.is_cpu and values.numel() < _FEW:
        return not torch.equal(values, values)  # one operation, and no NaN equals itself
    # A sum with a NaN is NaN, and computing it takes a fraction of the time that looking at each
    # number does. A sum of large numbers or infinities may be NaN or infinite, too; the largest
    # number is NaN only if one is.
    return not math.isfinite(values.sum().item()) and math.isnan(values.amax().item())


def _place(view: torch.Tensor) -> tuple[int, int]:
    """Tell the views of one tensor apart, on the meta device too."""
    return int(view.storage_offset()), view.numel()


def _in_order(piece: Piece) -> Weight:
    """Return what a piece is read from; in memory and in order, if it is stored in another one."""
    if piece.order is None:
        return piece.source
    stored = piece.source if isinstance(piece.source, torch.Tensor) else piece.source.read()
    return piece.order.restore(stored)


def same_bits(one: Weight, other: Weight, dtype: torch.dtype) -> bool:
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
