"""What the ranks of an engine hold, as one safetensors file that exists nowhere."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from vllm_module.base.messages import printable_name
from vllm_module.core.digests import rank_in, region_of
from vllm_module.core.layout_of import layout_of_module
from vllm_module.errors import UnsupportedModelError
from vllm_module.layout import HeldBox, Layout
from vllm_module.weights.region import Region

PIECE = 4 << 20  # bytes that are taken at once
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip

CallRanks = Callable[[Callable[[nn.Module], Any]], list[Any]]


def _is_whole() -> None:
    """Know that the ranks have whole weights."""


class ServedTensor(NamedTuple):
    """A tensor of the file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    holds_rows: bool  # False if the ranks hold boxes of another view of it
    begin: int  # byte in the file

    @property
    def nbytes(self) -> int:
        """Size of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class ServedFile:
    """A safetensors file that exists nowhere.

    Args:
        listed: name, shape and dtype of each tensor, and whether it is taken by rows.

    Attributes:
        size: bytes of the file.
        beside_steps: whether bytes can be taken at any time, and are those of parameters.

    """

    beside_steps = True

    def __init__(self, listed: Iterable[tuple[str, tuple[int, ...], torch.dtype, bool]]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end, placed = 0, []
        for name, shape, dtype, holds_rows in listed:
            placed.append(ServedTensor(name, shape, dtype, holds_rows, end))
            end += placed[-1].nbytes
            offsets = [placed[-1].begin, end]
            header[name] = {"dtype": _DTYPES[dtype], "shape": [*shape], "data_offsets": offsets}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        first = len(self._header)
        self.size = first + end
        self._tensors = [each._replace(begin=first + each.begin) for each in placed]
        self._begins = [each.begin for each in self._tensors]

    def check(self) -> None:
        """Raise ``RuntimeError`` while there are no whole weights."""

    def current(self) -> ServedFile:
        """Return the file of what is held now: another one, if other tensors lie there since."""
        return self

    def read(self, begin: int, end: int, changes: int) -> Iterator[memoryview]:
        """Yield the bytes from ``begin`` to ``end``, parameters' own memory where it has them.

        ``changes`` is the number of changes of the weights before.
        """
        if begin < len(self._header):
            yield memoryview(self._header)[begin:end]
        at = max(0, bisect_right(self._begins, begin) - 1)
        for tensor in self._tensors[at:]:
            if tensor.begin >= end:
                break
            first = max(begin, tensor.begin) - tensor.begin
            last = min(end, tensor.begin + tensor.nbytes) - tensor.begin
            for start in range(first, last, PIECE):
                yield self._bytes(tensor, start, min(last, start + PIECE), changes)

    def _bytes(self, tensor: ServedTensor, first: int, last: int, changes: int) -> memoryview:
        """Return some bytes of a tensor."""
        raise NotImplementedError


class HeldBoxes(ServedFile):
    """The safetensors file of the boxes that one rank holds before others: its own memory.

    A tensor of the file is a box; its name is that of the checkpoint's tensor, ``@``, and where the
    box starts in it: ``model.norm.weight@0``. Boxes of another view of a tensor are left out.

    Args:
        model: the rank's.
        check: raises ``RuntimeError`` while it has no whole weights.

    """

    def __init__(self, model: nn.Module, check: Callable[[], None]) -> None:
        layout, rank = _layout(model)
        self.check = check  # type: ignore[method-assign]
        self._model, self._layout, self._latest = model, layout, self
        self._boxes: dict[str, tuple[str, HeldBox]] = {}  # with the path of the parameter
        for name, entry, expert in layout.names():
            for ranks, box in layout.held_by(entry, expert):
                plain = entry.tied_to is None and box.view in (None, entry.shape)
                if plain and rank == min(ranks) and entry.shape and box.numel:
                    at = ",".join(map(str, box.start))
                    self._boxes[f"{name}@{at}"] = entry.parameter, box
        super().__init__(
            (name, tuple(box.size), _tensor(model, path).dtype, True)
            for name, (path, box) in self._boxes.items()
        )

    def current(self) -> HeldBoxes:
        """Return a file of the places that experts have now."""
        if self._latest._layout is not _layout(self._model)[0]:
            self._latest = HeldBoxes(self._model, self.check)
        return self._latest

    def _bytes(self, tensor: ServedTensor, first: int, last: int, changes: int) -> memoryview:
        path, box = self._boxes[tensor.name]
        region = region_of(_tensor(self._model, path).detach(), box)
        row = tensor.nbytes // tensor.shape[0]
        begin = first // row
        rows = region.narrow(0, begin, -(-last // row) - begin).contiguous()
        return _memory(rows)[first - begin * row : last - begin * row]


class HeldFile(ServedFile):
    """The safetensors file of what the ranks of an engine hold.

    Args:
        call: calls a function with each rank's model, and returns the results by rank.
        check: raises ``RuntimeError`` while the ranks have no whole weights; by default they have.
        beside_steps: whether that can be done at any time: the only rank is this process, on a CPU.

    Raises ``UnsupportedModelError`` if a parameter has other values than a checkpoint stores, as
    one that is quantized.

    """

    def __init__(
        self, call: CallRanks, check: Callable[[], None] = _is_whole, beside_steps: bool = False
    ) -> None:
        self.check = check  # type: ignore[method-assign]
        self._call, self.beside_steps = call, beside_steps
        check()
        listed: list[tuple[str, tuple[int, ...], torch.dtype, bool]] = []
        # By name, the ranks of one pipeline stage, which hold the tensor whole.
        self._holders: dict[str, range] = {}
        for rank, (size, tensors) in enumerate(call(_list_tensors)):
            listed += [each for each in tensors if each[0] not in self._holders]
            for name, *_ in tensors:
                self._holders.setdefault(name, range(rank, rank + size))
        super().__init__(listed)
        # The last that is not taken by rows, and the number of changes that it is from.
        self._whole: tuple[str, int, torch.Tensor] | None = None

    def regions(self) -> dict[str, Region]:
        """Return name, shape and dtype of each tensor, to plan with."""
        empty = partial(torch.empty, device="meta")
        return {
            each.name: Region.of(each.name, empty(each.shape, dtype=each.dtype))
            for each in self._tensors
        }

    def take(self, name: str) -> torch.Tensor:
        """Return a tensor in host memory, which may be the parameter's; call it between steps."""
        tensor = next(each for each in self._tensors if each.name == name)
        return self._take(tensor, 0, tensor.shape[0] if tensor.shape else 1).view(tensor.shape)

    def _bytes(self, tensor: ServedTensor, first: int, last: int, changes: int) -> memoryview:
        """Return some bytes of a tensor, out of the rows that have them."""
        count = tensor.shape[0] if tensor.shape else 1
        row = tensor.nbytes // count
        rows = (first // row, -(-last // row)) if tensor.holds_rows else (0, count)
        whole = self._whole  # other threads replace it
        if whole is not None and whole[:2] == (tensor.name, changes):
            taken = whole[2]
        else:
            taken = self._take(tensor, *rows)
            if not tensor.holds_rows:
                self._whole = tensor.name, changes, taken
        return _memory(taken)[first - rows[0] * row : last - rows[0] * row]

    def _take(self, tensor: ServedTensor, first: int, last: int) -> torch.Tensor:
        shape = (last - first, *tensor.shape[1:])
        take = partial(_take, name=tensor.name, first=first, last=last, copy=not self.beside_steps)
        of_ranks = self._call(take)
        parts = [part for rank in self._holders[tensor.name] for part in of_ranks[rank]]
        if len(parts) == 1 and parts[0][1] is None and parts[0][2].shape == shape:
            return parts[0][2].contiguous()
        taken, held = torch.empty(shape, dtype=tensor.dtype), 0
        for start, view, values in parts:
            ends = (at + n for at, n in zip(start, values.shape, strict=True))
            where = tuple(slice(*each) for each in zip(start, ends, strict=True))
            taken.view(view or shape)[where] = values
            held += values.numel()
        if held != taken.numel():
            raise RuntimeError(f"ranks hold {held} of {taken.numel()} elements of {tensor.name}")
        return taken


def _memory(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a tensor that is contiguous."""
    data: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return data


def _list_tensors(
    model: nn.Module,
) -> tuple[int, list[tuple[str, tuple[int, ...], torch.dtype, bool]]]:
    """Return the ranks of this stage, and of each tensor name, shape, dtype and if by rows."""
    layout, _ = _layout(model)
    converted = [path for path, each in model.named_modules() if getattr(each, "conversions", None)]
    found = []
    for name, entry, _ in layout.names():
        partition = layout.partitions[entry.partition]
        boxes = [box for of_ranks in partition.held for box in of_ranks.boxes]
        dtype = _tensor(model, entry.parameter).dtype
        quantized = partition.conversion is not None or any(box.held.packed > 1 for box in boxes)
        if quantized or converted or dtype not in _DTYPES:
            what = converted[0] if converted else entry.parameter
            raise UnsupportedModelError(
                f"{printable_name(what)} is quantized, and an engine serves weights that it holds "
                "as a checkpoint stores them: serve those of one without quantization"
            )
        if entry.tied_to is None:
            views = {box.view for box in boxes} - {None, entry.shape}
            found.append((name, tuple(entry.shape), dtype, not views))
    return layout.ranks, found


def _take(
    model: nn.Module, name: str, first: int, last: int, copy: bool
) -> list[tuple[tuple[int, ...], tuple[int, ...] | None, torch.Tensor]]:
    """Return the boxes of some rows of a tensor that this rank holds before others.

    Each with its start, counted from the first row, and the view in which it counts. Copies have a
    memory of their own, because pickle sends the memory of all rows.
    """
    layout, rank = _layout(model)
    try:
        entry, expert = layout.find(name)
    except KeyError:  # another pipeline stage has it
        return []
    tensor = _tensor(model, entry.parameter).detach()
    found: list[tuple[tuple[int, ...], tuple[int, ...] | None, torch.Tensor]] = []
    holders: dict[object, int] = {}  # of each box the first rank; copies lie in different places
    held = [*layout.held_by(entry, expert)]
    for ranks, box in held:
        at = box.start, box.size, box.view
        holders[at] = min(*ranks, holders.get(at, rank))
    for ranks, box in held:
        if rank not in ranks or rank != holders[box.start, box.size, box.view]:
            continue
        region = region_of(tensor, box)
        if not entry.shape:
            found.append(((0,), (1,), region.reshape(1)))
            continue
        if box.view not in (None, entry.shape):
            found.append((box.start, box.view, region))
            continue
        low, high = max(box.start[0], first), min(box.start[0] + box.size[0], last)
        if low < high:
            part = region.narrow(0, low - box.start[0], high - low)
            found.append(((low - first, *box.start[1:]), None, part))
    if copy:
        form = torch.contiguous_format
        return [(at, view, part.cpu().clone(memory_format=form)) for at, view, part in found]
    return found


_layouts: WeakKeyDictionary[nn.Module, tuple[Layout, int]] = WeakKeyDictionary()


def _layout(model: nn.Module) -> tuple[Layout, int]:
    """Return the layout of a model, and the rank that it is of; only moves change them."""
    if model not in _layouts:
        layout = layout_of_module(model)
        _layouts[model] = layout, rank_in(model, layout)
    return _layouts[model]


def forget_layout(model: nn.Module) -> None:
    """Take the layout of a model anew when it is asked for: experts have moved."""
    _layouts.pop(model, None)


def _tensor(model: nn.Module, path: str) -> torch.Tensor:
    owner, _, name = path.rpartition(".")
    tensor: torch.Tensor = getattr(model.get_submodule(owner), name)
    return tensor
