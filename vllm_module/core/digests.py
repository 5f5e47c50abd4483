"""The digest of a loaded model: for each checkpoint tensor a number that no layout changes.

Each rank adds up the boxes that it holds, by the layout. Boxes of several ranks are disjoint or the
same, so ranks need not gather weights: their digests are added, and what several of them hold is
counted once and compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn

from vllm_module.base.messages import printable_name
from vllm_module.core.fill import Fill, Slots
from vllm_module.core.layout_of import layout_of_module, stored_part
from vllm_module.core.tensors import is_typed
from vllm_module.core.tree import loads_itself, state_of
from vllm_module.errors import WeightReadError
from vllm_module.kernels.digest.digest import Digest, digest_box, digest_elements
from vllm_module.layout import HeldBox, Layout, StoredTensorLayout, Strided
from vllm_module.parameters import BasevLLMParameter
from vllm_module.weights import Destination, Handle, Weight, read_into
from vllm_module.weights.changes import Changes
from vllm_module.weights.digests import Digests, Place, digest_of_all
from vllm_module.weights.region import Region

_PIECE = 1 << 20  # elements whose places are written out at a time


@dataclass(frozen=True)
class ModelDigest:
    """The digests of the boxes of each tensor that one rank holds, or several ranks together.

    ``+`` adds what another rank holds; :func:`sum` adds all ranks'. Two digests are equal if all
    tensors have the same values, dtypes and shapes, whatever ranks held them.

    Attributes:
        boxes: by name of a tensor and by box (start, size and view), the box's digest.
        ranks: whose they are, for messages.

    """

    boxes: Mapping[str, Mapping[Place, Digest]] = field(default_factory=dict, repr=False)
    ranks: tuple[int, ...] = ()

    def __add__(self, other: ModelDigest) -> ModelDigest:
        """Return the digest of both; raise ``WeightReadError`` where copies of a box differ."""
        boxes = {name: dict(found) for name, found in self.boxes.items()}
        for name, found in other.boxes.items():
            mine = boxes.setdefault(name, {})
            for place, digest in found.items():
                if mine.setdefault(place, digest) != digest:
                    start, size, _ = place
                    raise WeightReadError(
                        f"{printable_name(name)}: {named_ranks(other.ranks)} and "
                        f"{named_ranks(self.ranks)} hold different values of the same part, of "
                        f"{list(size)} at {list(start)}: load them again from one checkpoint"
                    )
        return ModelDigest(boxes, (*self.ranks, *other.ranks))

    def __radd__(self, other: object) -> ModelDigest:
        """Add to the 0 that :func:`sum` begins with."""
        return self if other == 0 else NotImplemented

    @property
    def parts(self) -> dict[str, str]:
        """By name, the digest of what these ranks hold of each tensor, all of it or not."""
        return {name: _sum(boxes).hex for name, boxes in self.boxes.items()}

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
            whole = _sum(boxes)
            held = sum(math.prod(size) for _, size, _ in boxes)
            if held != math.prod(whole.shape):
                raise ValueError(
                    f"{printable_name(name)}: the digest has {held} of {math.prod(whole.shape)} "
                    "elements: add those of the other ranks"
                )
            yield name, whole


def _sum(boxes: Mapping[Place, Digest]) -> Digest:
    first, *others = boxes.values()
    return sum(others, start=first)


def named_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks' numbers for a message."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, sorted(ranks)))}"


def digest_of(
    module: nn.Module, layout: Layout | None = None, names: Collection[str] | None = None
) -> ModelDigest:
    """Return the digest of what this rank's ``module`` holds.

    By default tensors have the names of the module's tree, and what is computed while loading, such
    as scales, is a tensor of its own; its name has the rank in it if each rank computes it from its
    part of a weight. With the ``layout`` of a plan they are the checkpoint's; what was quantized or
    cast has the digest of what was read, if ``keep_digests`` was set before. With ``names``, only
    those tensors are looked at.

    Raises ``WeightReadError`` if a parameter has another shape than in the layout, holds no values,
    has padding that is not zero, or is quantized while it is loaded where the layout is of full
    precision.
    """
    own = set[str]()
    if layout is None:
        layout, own = layout_of_module(module), computed_by_rank(module)
    rank = rank_in(module, layout)
    ties = {each.name: each.tied_to for each in layout.tensors if each.tied_to is not None}
    wanted = None if names is None else {ties.get(name, name) for name in names}

    def label(name: str, entry: StoredTensorLayout) -> str:
        return name_on_rank(name, rank) if entry.parameter in own else name

    held = [
        (name, entry, boxes)
        for name, entry, boxes in layout.held_on(rank)
        if name not in ties and (wanted is None or label(name, entry) in wanted)
    ]
    paths = None if wanted is None else {entry.parameter for _, entry, _ in held}
    tensors: dict[str, torch.Tensor] = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    for path, parameter in module.named_parameters():
        if is_typed(parameter) and not parameter.is_meta and (paths is None or path in paths):
            _check_padding(path, parameter)
    sources = state_of(module).sources if loads_itself(module) else {}
    found: Digests = {}
    checked = set[str]()
    for name, entry, boxes in held:
        tensor = tensors.get(entry.parameter)
        if entry.name not in checked:
            checked.add(entry.name)
            _check(entry, tensor, layout, rank)
        of_name = found.setdefault(label(name, entry), {})
        if _is_made(layout, entry) and (name in sources or _is_quantized(layout, entry)):
            of_name.update(_kept(sources, name, entry))
            continue
        assert tensor is not None
        for each in boxes:
            shape, box = _in_elements(entry.shape, each)
            region = region_of(tensor.detach(), box)
            digest = _viewed(region, box.start, box.view, shape)
            # One box may fill several places, as one scale does of all slots.
            if of_name.setdefault((box.start, box.size, box.view), digest) != digest:
                raise WeightReadError(
                    f"{entry.parameter} has several copies of {printable_name(name)}, which differ "
                    "now: an update changed some of them, or the memory was written to since it "
                    "was loaded. Load it again, or compare by the layout of the update"
                )
        if not boxes:
            of_name[entry.shape, entry.shape, None] = Digest(tensor.dtype, entry.shape)
    for name, other in ties.items():
        if other in found and (names is None or name in names):
            found[name] = found[other]
    if names is not None:
        for other in {*ties.values()} - {*names}:  # looked at for another name alone
            found.pop(other, None)
    return ModelDigest(found, (rank,))


def source_digests(module: nn.Module) -> ModelDigest:
    """Return the digests of what was quantized, cast or divided, as it came: ``keep_digests``.

    Names, dtypes and shapes are those of the checkpoint, or of what an update was given.
    """
    layout = layout_of_module(module)
    return ModelDigest(state_of(module).sources, (rank_in(module, layout),))


def digested(
    found: Digests, filled: dict[str, Slots]
) -> Callable[[Fill], Iterable[tuple[Weight, Destination]]]:
    """Return ``Fill.jobs`` that adds the digests of what is read to be converted, cast or divided.

    What is divided is a tensor that a checkpoint stores for several of the module's. ``filled``
    gets the slots that are filled, by the names of the digests.
    """

    def jobs(fill: Fill) -> Iterable[tuple[Weight, Destination]]:
        location, part = fill.location, stored_part(fill)
        kept = location.conversion is None and location.tensor.dtype == part.dtype
        if kept and (len(fill.slots) == 1 or isinstance(fill.weight, Changes)):
            return fill.jobs()
        of_name = found.setdefault(part.name, {})
        filled.setdefault(part.name, {}).setdefault(location, set()).update(fill.slots)
        standing_in = fill._replace(weight=cast(Weight, cast(Handle, part)))
        return (
            (weight, _DigestedSink(sink, cast(Region, cast(object, box)), part.sizes, of_name))
            for (weight, sink), (box, _) in zip(fill.jobs(), standing_in.jobs(), strict=True)
        )

    return jobs


class _DigestedSink:
    """A sink that adds the digest of what it receives, before that is converted or cast."""

    def __init__(
        self, sink: Destination, region: Region, shape: torch.Size, found: dict[Place, Digest]
    ) -> None:
        self._sink, self._region, self._shape, self._found = sink, region, shape, found
        self.device = sink.device

    def receive(self, weight: Weight) -> None:
        if not isinstance(weight, torch.Tensor):
            read = torch.empty(weight.shape, dtype=weight.dtype, device=self.device)
            read_into(weight, read)
            weight = read
        start, size = zip(*self._region.box, strict=True) if self._region.box else ((), ())
        view = None if self._region.sizes == self._shape else tuple(self._region.sizes)
        self._found[start, size, view] = _viewed(weight.detach(), start, view, self._shape)
        read_into(weight, self._sink)


def rank_in(module: nn.Module, layout: Layout) -> int:
    """Return the rank that a module's parameters are of, among those that hold all of them."""
    places, shapes = set(), set()
    for path, tensor in module.named_parameters():
        if path in layout.parameters:
            shapes.add(layout.parameters[path].shapes)
        if is_typed(tensor):
            places.add((tensor.tp_rank, tensor.tp_size))
            if tensor.experts is not None:
                places.add((tensor.experts.rank, tensor.experts.size))
    holders = set(range(layout.ranks))  # of a pipeline, the ranks of one stage
    for each in shapes:
        holders &= {rank for ranks, _ in layout.shapes[each] for rank in ranks}
    for rank in sorted(holders):
        if all((rank - min(holders)) % size == of for of, size in places):
            return rank
    raise WeightReadError(
        f"the module is of no rank of a layout of {layout.ranks} ranks: {sorted(places)}"
    )


def name_on_rank(name: str, rank: int) -> str:
    """Return the name of what a rank has computed from its part of a weight."""
    return f"{name} (rank {rank})"


def computed_by_rank(module: nn.Module) -> set[str]:
    """Return the paths of scales that each rank computes from its own part of a weight."""
    paths = set[str]()
    for path, each in module.named_modules():
        conversions: Mapping[str, Any] = getattr(each, "conversions", {})
        for attr, conversion in conversions.items():
            if _is_cut(getattr(each, attr)):
                made = (name for name in conversion.makes if not _is_cut(getattr(each, name)))
                paths.update(f"{path}.{name}" if path else name for name in made)
    return paths


def _is_cut(tensor: torch.Tensor) -> bool:
    return is_typed(tensor) and any(slot.parts > 1 for dim in tensor.dims for slot in dim.slots)


def _check_padding(path: str, parameter: BasevLLMParameter) -> None:
    if any(region.any() for region in parameter.padding()):
        raise WeightReadError(
            f"{printable_name(path)} has padding that is not zero: load or update it again"
        )


def _is_quantized(layout: Layout, entry: StoredTensorLayout) -> bool:
    return layout.partitions[entry.partition].conversion not in (None, "exponents")


def _is_made(layout: Layout, entry: StoredTensorLayout) -> bool:
    """Tell whether a parameter has other bits than the tensor that fills it."""
    made = layout.partitions[entry.partition].conversion is not None
    return made or layout.parameters[entry.parameter].dtype != entry.dtype


def _kept(
    sources: Mapping[str, Mapping[Place, Digest]], name: str, entry: StoredTensorLayout
) -> Mapping[Place, Digest]:
    """Return the digests of what a parameter was made from."""
    if name not in sources:
        raise WeightReadError(
            f"{printable_name(entry.parameter)} is quantized while it is loaded, so it holds no "
            f"values of {printable_name(name)}: take the digest by the module's own layout, or set "
            "keep_digests before loading"
        )
    return sources[name]


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


def _in_elements(shape: tuple[int, ...], box: HeldBox) -> tuple[tuple[int, ...], HeldBox]:
    """Return a tensor's shape and a box of it, counted in elements of the parameter.

    An element may hold several values, which are neighbours along one dimension. It is another one
    of ``held`` than of ``size`` where pairs add dimensions to ``held``, and another one of ``view``
    than of ``shape`` where groups do.
    """
    held, packed, view = box.held, box.held.packed, box.view or shape
    if packed == 1:
        return shape, box
    dim = held.strides.index(1)  # of all others, they are multiples of ``packed``
    at = _dim_before(math.prod(held.shape[dim + 1 :]), box.size)
    last = _dim_before(math.prod(view[at + 1 :]), shape)
    strides = (1 if each == 1 else each // packed for each in held.strides)
    elements = Strided(held.offset // packed, _divided(held.shape, dim, packed), tuple(strides))
    start, size = _divided(box.start, at, packed), _divided(box.size, at, packed)
    viewed = None if box.view is None else _divided(box.view, at, packed)
    return _divided(shape, last, packed), HeldBox(start, size, elements, viewed)


def _dim_before(count: int, shape: Sequence[int]) -> int:
    """Return the dimension, of more than one entry, after which there are ``count`` elements."""
    return next(
        at for at, size in enumerate(shape) if size > 1 and math.prod(shape[at + 1 :]) == count
    )


def _divided(counts: Sequence[int], dim: int, by: int) -> tuple[int, ...]:
    return *counts[:dim], counts[dim] // by, *counts[dim + 1 :]


def region_of(tensor: torch.Tensor, box: HeldBox) -> torch.Tensor:
    """Return the elements of a parameter that a box fills, in the shape of the box."""
    held = box.held
    tensor = tensor.contiguous()  # a layout counts elements in order, from the tensor's first
    begin = tensor.storage_offset() + held.offset
    if box.numel == 1:
        return tensor.as_strided((1,) * len(box.size), (1,) * len(box.size), begin)
    return tensor.as_strided(held.shape, held.strides, begin).reshape(box.size)


def _viewed(
    region: torch.Tensor, start: tuple[int, ...], view: tuple[int, ...] | None, shape: Sequence[int]
) -> Digest:
    """Return the digest of a box of a tensor of ``shape``, which may be a box of a view of it."""
    shape = tuple(shape)
    if view is None or view == shape:
        return digest_box(region, start, shape)
    if view[-1:] == shape[-1:]:  # rows are counted in the same order
        return replace(digest_box(region, start, view), shape=shape)
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
