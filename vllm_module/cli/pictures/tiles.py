"""The tensors that each rank keeps, as tiles of a treemap."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from vllm_module.cli.output import grouped
from vllm_module.cli.rank_plan import RankPlan, Read
from vllm_module.report import fold


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
    copies = Counter(_identity(read) for rank in ranks for read in rank.reads())
    read = {read.parameter for rank in ranks for read in rank.reads()}
    return [list(_merged(_tiles(rank, copies, read, len(ranks)))) for rank in ranks]


def layer_of(parameter: str) -> str:
    """Return the path up to the first number: the layer; else the path of the module."""
    components = parameter.split(".")
    for index, component in enumerate(components[:-1]):
        if component.isdecimal():
            return ".".join(components[: index + 1])
    return ".".join(components[:-1]) or parameter


def _identity(read: Read) -> tuple[object, ...]:
    return read.name, read.parameter, read.slot, read.byte_range, read.bytes


def _tiles(
    rank: RankPlan, copies: Counter[tuple[object, ...]], read_anywhere: set[str], tp_size: int
) -> Iterator[Tile]:
    reads = defaultdict(list)
    for read in rank.reads():
        if read.tied_to is None:  # else it is only compared with what another name filled
            reads[read.parameter].append(read)
    for tensor in rank.tensors():
        paths = (tensor.path, *tensor.tied)
        note = f"tied: {', '.join(tensor.tied)}" if tensor.tied else ""
        low = "8" if tensor.quantized else ""
        rest = tensor.nbytes
        for read in (read for path in paths for read in reads[path]):
            nbytes = min(rest, prod(read.shape) * tensor.itemsize)
            rest -= nbytes
            shared = copies[_identity(read)]
            yield Tile(
                layer=layer_of(tensor.path),
                name=read.name,
                parameter=tensor.path,
                slot=read.slot or "",
                kind=("copy" if shared > 1 else "cut") + low,
                bytes=nbytes,
                shape=read.shape,
                of=read.of,
                stored=read.dtype,
                held=tensor.dtype,
                copies=shared,
                tensors=1,
                note=note,
                file=read.file,
                byte_range=read.byte_range,
                pieces=read.pieces,
            )
        if rest:
            filled = not read_anywhere.isdisjoint(paths)
            yield Tile(
                layer=layer_of(tensor.path),
                name=tensor.path,
                parameter=tensor.path,
                slot="",
                kind="other",
                bytes=rest,
                shape=tensor.shape,
                of=tensor.shape,
                stored="",
                held=tensor.dtype,
                copies=tp_size,
                tensors=1,
                note="padding: zeros" if filled else "computed, not read",
                file=None,
                byte_range=None,
                pieces=0,
            )


def _merged(tiles: Iterable[Tile]) -> Iterator[Tile]:
    """Make one tile of tensors that differ in numbers below the layer's, such as the expert's."""
    for group in grouped(
        tiles,
        lambda tile: tile.name,
        lambda tile: (tile.layer, tile.slot, tile.kind, tile.shape, tile.held, tile.note),
    ):
        first = group[0]
        if len(group) == 1:
            yield first
            continue
        files = {tile.file for tile in group}
        yield first._replace(
            name=", ".join(fold(tile.name for tile in group)),
            parameter=", ".join(fold(tile.parameter for tile in group)),
            bytes=sum(tile.bytes for tile in group),
            tensors=len(group),
            file=first.file if len(files) == 1 else None,
            byte_range=None,
        )
