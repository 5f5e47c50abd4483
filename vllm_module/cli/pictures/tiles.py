"""The tensors that each rank keeps, as tiles of a treemap."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from math import prod
from typing import NamedTuple

from vllm_module.cli.output import grouped
from vllm_module.cli.rank_plan import RankPlan
from vllm_module.cli.tensor_plan import slot_kind
from vllm_module.core.report import fold


class Tile(NamedTuple):
    """What a rank keeps of one checkpoint tensor, or of some that differ in the expert's number.

    Attributes:
        layer: the layer that it belongs to, such as ``model.layers.2``, or a module without number.
        name: of the checkpoint's tensor; of the parameter if no tensor is read for it.
        parameter, slot: what it fills.
        kind: one of :data:`KINDS`.
        bytes: in the device's memory.
        shape, of: what the rank keeps, and the whole tensor.
        stored, held: the dtype in the file and in memory.
        copies: how many ranks keep the same part.
        tensors: how many tensors this is.
        note: what else there is to know, such as the names that are tied to it.
        file, byte_range, pieces: where it is read; ``None``, ``None`` and 0 for several files.

    """

    layer: str
    name: str
    parameter: str
    slot: str
    kind: str
    bytes: int
    shape: tuple[int, ...]
    of: tuple[int, ...]
    stored: str
    held: str
    copies: int
    tensors: int
    note: str
    file: str | None
    byte_range: tuple[int, int] | None
    pieces: int


# How a tensor is held, and what the legend says of it.
KINDS = {
    "cut": "cut: this rank alone keeps it",
    "cut8": "cut and quantized",
    "copy": "replicated: several ranks keep the same",
    "copy8": "replicated and quantized",
    "other": "computed, or padding",
}


def tiles_of(ranks: Sequence[RankPlan]) -> list[list[Tile]]:
    """Return the tiles of each rank. Their bytes add up to the rank's ``device_bytes``."""
    read = {plan.parameter for plan in ranks[0].plans}
    folded = cache(lambda names: ", ".join(fold(names)))  # mostly the same on all ranks
    return [list(_merged(_tiles(rank, read, len(ranks)), folded)) for rank in ranks]


def layer_of(parameter: str) -> str:
    """Return the path up to the first number: the layer; else the path of the module."""
    components = parameter.split(".")
    for index, component in enumerate(components[:-1]):
        if component.isdecimal():
            return ".".join(components[: index + 1])
    return ".".join(components[:-1]) or parameter


def _tiles(rank: RankPlan, read_anywhere: set[str], num_ranks: int) -> Iterator[Tile]:
    plans = defaultdict(list)
    for plan in rank.plans:
        if plan.tied_to is None:  # else it is only compared with what another name filled
            plans[plan.parameter].append(plan)
    for tensor in rank.tensors():
        paths = (tensor.path, *tensor.tied)
        layer = layer_of(tensor.path)
        note = f"tied: {', '.join(tensor.tied)}" if tensor.tied else ""
        low = "8" if tensor.quantized else ""
        rest = tensor.nbytes
        for plan in (plan for path in paths for plan in plans[path]):
            kept = plan.kept
            for piece in kept.pieces[rank.rank]:
                nbytes = min(rest, prod(piece.shape) * tensor.itemsize)
                rest -= nbytes
                copies = kept.copies[piece]
                begin = plan.begin
                yield Tile(
                    layer=layer,
                    name=plan.name,
                    parameter=tensor.path,
                    slot=plan.slot or "",
                    kind=("copy" if copies > 1 else "cut") + low,
                    bytes=nbytes,
                    shape=piece.shape,
                    of=kept.of,
                    stored=kept.dtype,
                    held=tensor.dtype,
                    copies=copies,
                    tensors=1,
                    note=note,
                    file=plan.file,
                    byte_range=None if begin is None else (begin + piece.begin, begin + piece.end),
                    pieces=piece.runs,
                )
        if rest:
            filled = not read_anywhere.isdisjoint(paths)
            yield Tile(
                layer=layer,
                name=tensor.path,
                parameter=tensor.path,
                slot="",
                kind="other",
                bytes=rest,
                shape=tensor.shape,
                of=tensor.shape,
                stored="",
                held=tensor.dtype,
                copies=num_ranks,
                tensors=1,
                note="padding: zeros" if filled else "computed, not read",
                file=None,
                byte_range=None,
                pieces=0,
            )


def _merged(tiles: Iterable[Tile], folded: Callable[[tuple[str, ...]], str]) -> Iterator[Tile]:
    """Make one tile of tensors that differ in numbers below the layer's, such as the expert's."""
    for group in grouped(
        tiles,
        lambda tile: tile.name,
        lambda tile: (
            tile.layer,
            slot_kind(tile.slot),
            tile.kind,
            tile.shape,
            tile.held,
            tile.note,
        ),
    ):
        first = group[0]
        if len(group) == 1:
            yield first
            continue
        files = {tile.file for tile in group}
        yield first._replace(
            name=folded(tuple(tile.name for tile in group)),
            parameter=folded(tuple(tile.parameter for tile in group)),
            slot=folded(tuple(tile.slot for tile in group)),
            bytes=sum(tile.bytes for tile in group),
            tensors=len(group),
            file=first.file if len(files) == 1 else None,
            byte_range=None,
        )
