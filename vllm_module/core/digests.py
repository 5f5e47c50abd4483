"""The digest of a loaded model: for each checkpoint tensor a number that no layout changes.

Each rank adds up the boxes that it holds, by the layout. Boxes of several ranks are disjoint or the
same, so ranks need not gather weights: their digests are added, and what several of them hold is
counted once and compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import nn

from vllm_module.base.messages import printable_name
from vllm_module.core.layout_of import layout_of_module
from vllm_module.core.tree import is_typed
from vllm_module.errors import WeightReadError
from vllm_module.kernels.digest.digest import Digest, digest_box, digest_elements
from vllm_module.layout import HeldBox, Layout, StoredTensorLayout
from vllm_module.weights.digests import digest_of_all

Place: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]

_PIECE = 1 << 20  # elements whose places are written out at a time


@dataclass(frozen=True)
class ModelDigest:
    """The digests of the boxes of each tensor that one rank holds, or several ranks together.

    ``+`` adds what another rank holds; :func:`sum` adds all ranks'. Two digests are equal if all
    tensors have the same values, dtypes and shapes, whatever ranks held them.

    Attributes:
        boxes: by name of a tensor and by box (start, size and view), the box's digest.

    """

    boxes: Mapping[str, Mapping[Place, Digest]] = field(default_factory=dict, repr=False)

    def __add__(self, other: ModelDigest) -> ModelDigest:
        """Return the digest of both; raise ``WeightReadError`` where copies of a box differ."""
        boxes = {name: dict(found) for name, found in self.boxes.items()}
        for name, found in other.boxes.items():
            mine = boxes.setdefault(name, {})
            for place, digest in found.items():
                if mine.setdefault(place, digest) != digest:
                    start, size, _ = place
                    raise WeightReadError(
                        f"{printable_name(name)}: ranks hold different values of the same part, of "
                        f"{list(size)} at {list(start)}: load them again from one checkpoint"
                    )
        return ModelDigest(boxes)

    def __radd__(self, other: object) -> ModelDigest:
        """Add to the 0 that :func:`sum` begins with."""
        return self if other == 0 else NotImplemented

    @property
    def tensors(self) -> dict[str, str]:
        """By name, the digest of each tensor: 32 hexadecimal digits.

        Raises ``ValueError`` if the ranks whose digests were added hold only a part of a tensor.
        """
        return {name: digest.hex for name, digest in self._whole()}

    @property
    def hex(self) -> str:
        """One digest of all tensors and their names, of 32 hexadecimal digits."""
        return digest_of_all(self._whole())

    def differences(self, other: ModelDigest | Mapping[str, str]) -> list[str]:
        """Return the names of tensors that differ, or that one of the two lacks, in order."""
        mine = self.tensors
        theirs = other.tensors if isinstance(other, ModelDigest) else other
        return sorted(n for n in mine.keys() | theirs.keys() if mine.get(n) != theirs.get(n))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelDigest) and self.tensors == other.tensors

    __hash__ = None  # type: ignore[assignment]

    def _whole(self) -> Iterator[tuple[str, Digest]]:
        for name, boxes in self.boxes.items():
            first, *others = boxes.values()
            held = sum(math.prod(size) for _, size, _ in boxes)
            if held != math.prod(first.shape):
                raise ValueError(
                    f"{printable_name(name)}: the digest has {held} of {math.prod(first.shape)} "
                    "elements: add those of the other ranks"
                )
            yield name, sum(others, start=first)


def digest_of(module: nn.Module, layout: Layout | None = None) -> ModelDigest:
    """Return the digest of what this rank's ``module`` holds.

    By default tensors have the names of the module's tree, and what is computed while loading, such
    as scales, is a tensor of its own. With the ``layout`` of a plan they are the checkpoint's.

    Raises ``WeightReadError`` if a parameter has another shape than in the layout, holds no values,
    has padding that is not zero, or is quantized while it is loaded where the layout is of full
    precision.
    """
    layout = layout_of_module(module) if layout is None else layout
    rank = _rank_in(module, layout.ranks)
    tensors: dict[str, torch.Tensor] = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    found: dict[str, dict[Place, Digest]] = {}
    for path, parameter in module.named_parameters():
        padding = parameter.padding() if is_typed(parameter) and not parameter.is_meta else ()
        if any(region.any() for region in padding):
            raise WeightReadError(
                f"{printable_name(path)} has padding that is not zero: load or update it again"
            )
    for name, entry, expert in layout.names():
        if entry.tied_to is not None:
            continue
        tensor = tensors.get(entry.parameter)
        boxes = [box for ranks, box in layout.held_by(entry, expert) if rank in ranks]
        if not boxes and 0 not in entry.shape:
            continue
        _check(entry, tensor, layout, rank)
        assert tensor is not None
        of_name = found.setdefault(name, {})
        for box in boxes:
            digest = _of_box(tensor.detach(), entry, box)
            of_name[box.start, _held_size(box), box.view] = digest
        if not boxes:
            of_name[entry.shape, entry.shape, None] = Digest(tensor.dtype, entry.shape)
    for name, entry, _ in layout.names():
        if entry.tied_to in found:
            found[name] = found[entry.tied_to]
    return ModelDigest(found)


def _rank_in(module: nn.Module, ranks: int) -> int:
    """Return the rank that a module's parameters are of."""
    places = set()
    for tensor in module.parameters():
        if is_typed(tensor):
            places.add((tensor.tp_rank, tensor.tp_size))
            if tensor.experts is not None:
                places.add((tensor.experts.rank, tensor.experts.size))
    for rank in range(ranks):
        if all(rank % size == of for of, size in places):
            return rank
    raise WeightReadError(
        f"the module is of no rank of a layout of {ranks} ranks: {sorted(places)}"
    )


def _check(
    entry: StoredTensorLayout, tensor: torch.Tensor | None, layout: Layout, rank: int
) -> None:
    path = printable_name(entry.parameter)
    expected = layout.shape_of(entry.parameter, rank)
    if tensor is None or tuple(tensor.shape) != expected:
        got = "no such parameter" if tensor is None else list(tensor.shape)
        raise WeightReadError(
            f"{path}: the layout has {list(expected or ())} on rank {rank}, the module has {got}: "
            "take the layout of a model with the same configuration, ranks and quantization"
        )
    if tensor.is_meta:
        raise WeightReadError(f"{path} holds no values: load the weights first")
    if layout.partitions[entry.partition].conversion not in (None, "exponents"):
        raise WeightReadError(
            f"{path} is quantized while it is loaded, so it holds no values of "
            f"{printable_name(entry.name)}: take the digest by the module's own layout"
        )


def _held_size(box: HeldBox) -> tuple[int, ...]:
    """Return the size of a box in elements of the parameter, of which some hold several values."""
    if box.held.packed == 1:
        return box.size
    dim = box.held.strides.index(1)
    return *box.size[:dim], box.size[dim] // box.held.packed, *box.size[dim + 1 :]


def _of_box(tensor: torch.Tensor, entry: StoredTensorLayout, box: HeldBox) -> Digest:
    """Return the digest of the elements that a box fills; some may hold several values."""
    held, shape, start, view = box.held, entry.shape, box.start, box.view
    if held.packed > 1:
        dim, packed = held.strides.index(1), held.packed
        strides = [1 if at == dim else each // packed for at, each in enumerate(held.strides)]
        sizes = [n // packed if at == dim else n for at, n in enumerate(held.shape)]
        region = tensor.as_strided(sizes, strides, held.offset // packed)
        shape = (*shape[:dim], shape[dim] // packed, *shape[dim + 1 :])
        start = (*start[:dim], start[dim] // packed, *start[dim + 1 :])
    elif box.numel == 1:
        region = tensor.as_strided((1,) * len(box.size), (1,) * len(box.size), held.offset)
    else:
        region = tensor.as_strided(held.shape, held.strides, held.offset).reshape(box.size)
    if view is None or view == shape:
        return digest_box(region, start, shape)
    if view[-1:] == shape[-1:]:  # rows are counted in the same order
        return replace(digest_box(region, start, view), shape=tuple(shape))
    return _of_elements(region, start, view, shape)


def _of_elements(
    region: torch.Tensor,
    start: tuple[int, ...],
    view: tuple[int, ...],
    shape: tuple[int, ...],
) -> Digest:
    """Return the digest of a box of a view, element by element."""
    total = Digest(region.dtype, tuple(shape))
    strides = [math.prod(view[dim + 1 :]) for dim in range(len(view))]
    rows = max(1, _PIECE // max(1, math.prod(region.shape[1:])))
    for first in range(0, region.shape[0], rows):
        part = region[first : first + rows]
        places = torch.zeros((), dtype=torch.int64, device=part.device)
        begins = start[0] + first, *start[1:]
        for begin, size, stride in zip(begins, part.shape, strides, strict=True):
            along = torch.arange(begin, begin + size, device=part.device) * stride
            places = places.unsqueeze(-1) + along
        total += digest_elements(places.flatten(), part.flatten(), shape)
    return total
