"""What all ranks keep of each checkpoint tensor, and the lines that show it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch

from vllm_module.cli.output import grouped, shape, size
from vllm_module.core.fill import Fill
from vllm_module.core.report import fold
from vllm_module.weights import Weight
from vllm_module.weights.handle import FileHandle

_DOT = re.compile(r"\.(?![^{]*\})")  # and not those of {0..79}
Shapes = tuple[tuple[int, ...], ...]


class KeptPiece(NamedTuple):
    """A piece that a rank keeps of a checkpoint tensor; ``runs`` are what it is read in.

    ``begin`` and ``end`` count bytes from the tensor's first one; both are 0 where it is in no
    file.
    """

    begin: int
    end: int
    bytes: int
    runs: int
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)  # compared by identity: tensors that are kept alike share it
class Kept:
    """What each rank keeps of a checkpoint tensor, and of all that are kept alike.

    ``of`` and ``dtype`` are the tensor's; ``quantized`` tells whether it is quantized while it is
    read. ``pieces`` has an entry a rank. It has several pieces where the checkpoint stores a fused
    tensor, and none where a rank holds only padding. ``own`` tells whether each rank has a file of
    its own, as in a sharded state; then ``of`` is the tensor of rank 0.
    """

    of: tuple[int, ...]
    dtype: str
    quantized: bool
    pieces: tuple[tuple[KeptPiece, ...], ...]
    own: bool = False

    @cached_property
    def shapes(self) -> tuple[Shapes, ...]:
        """By rank, the shapes of the pieces."""
        return tuple(tuple(piece.shape for piece in pieces) for pieces in self.pieces)

    @cached_property
    def bytes(self) -> tuple[int, ...]:
        """By rank, the bytes of all pieces."""
        return tuple(sum(piece.bytes for piece in pieces) for pieces in self.pieces)

    @cached_property
    def copies(self) -> Counter[KeptPiece]:
        """How many ranks keep a piece."""
        return Counter(piece for pieces in self.pieces for piece in pieces)

    @cached_property
    def is_spread(self) -> bool:
        """Whether one of several ranks holds all of it, and the others nothing: an expert."""
        holders = [pieces for pieces in self.shapes if pieces]
        return len(self.pieces) > 1 and holders == [(self.of,)] and not self.own

    @cached_property
    def how(self) -> str:
        """How the ranks hold it: whole, replicated, cut, or each in a file of its own."""
        ranks = len(self.pieces)
        total = sum(prod(piece) for pieces in self.shapes for piece in pieces)
        copies = total // max(1, prod(self.of))
        if self.is_spread:
            how = "whole, on one rank"
        elif ranks == 1:
            how = "whole"
        elif self.own:
            how = "its own"
        elif copies == ranks:
            how = "replicated"
        else:
            how = f"cut in {ranks // max(1, copies)}"
            how += f", {copies} copies" if copies > 1 else ""
        return how


class TensorPlan(NamedTuple):
    """A checkpoint tensor, what the ranks keep of it, and the parameter and slot that it fills.

    ``begin`` is the position of its first byte in the ``file``; both are ``None`` for a source that
    is no folder. ``tied_to`` is another name that fills the same parameter; the tensor is only
    compared then.
    """

    name: str
    kept: Kept
    parameter: str
    slot: str | None
    tied_to: str | None
    file: str | None
    begin: int | None

    @property
    def how(self) -> str:
        """How the ranks hold it."""
        how = self.kept.how if self.tied_to is None else "compared"
        return how + (", quantized" if self.kept.quantized else "")


def slot_kind(slot: str) -> str:
    """Return the slot without the number of an expert."""
    return ".".join(part for part in slot.split(".") if not part.isdecimal())


def kept_pieces(fill: Fill) -> tuple[KeptPiece, ...]:
    """Return what the rank of this plan keeps of the tensor."""
    return tuple(_kept_piece(fill.weight, each.source) for each in fill.pieces())


def _kept_piece(weight: Weight, source: Weight) -> KeptPiece:
    begin, end, runs, kept = 0, 0, 1, tuple(source.shape)
    nbytes = prod(source.shape) * source.dtype.itemsize
    # A source of the user's own may have other handles.
    if isinstance(weight, FileHandle) and isinstance(source, FileHandle):
        first = weight.byte_range[0]
        begin, end = (at - first for at in source.byte_range)
        read = list(source.runs())
        runs, nbytes = sum(run.count for run in read), sum(run.nbytes for run in read)
        if (source.whole or source).shape != (weight.whole or weight).shape:
            # A vector that is read as a matrix: the checkpoint has no rows and columns of it.
            kept = prod(kept) // prod(weight.shape[1:]), *weight.shape[1:]
    return KeptPiece(begin, end, nbytes, runs, kept)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module."""
    return str(dtype).removeprefix("torch.")


def tensor_rows(plans: Sequence[TensorPlan], *, every: bool) -> tuple[list[str], list[list[str]]]:
    """Return the header and the lines of a table; one line stands for all layers, or ``every``.

    Ranks that keep different shapes have lines of their own, and the table has a column for them.
    Experts that are spread over the ranks share a line.
    """
    groups = (
        [[plan] for plan in plans]
        if every
        else grouped(
            plans,
            lambda plan: f"{plan.name}.->.{plan.parameter}",
            lambda plan: (
                plan.kept.of,
                plan.how,
                None if plan.kept.is_spread else (slot_kind(plan.slot or ""), plan.kept.shapes),
            ),
        )
    )
    uneven = any(len(set(kept.shapes)) > 1 for kept in {plan.kept for plan in plans})
    header = ["tensor", "shape kept", "how", "per rank", "fills"]
    rows = []
    for group in groups:
        plan, kept = group[0], group[0].kept
        counts = Counter(each.kept for each in group)
        nbytes = [
            sum(count * of_rank for of_rank, count in zip(each, counts.values(), strict=True))
            for each in zip(*(each.bytes for each in counts), strict=True)
        ]
        names = ", ".join(fold(each.name for each in group))
        fills = _fills(names, group)
        if kept.is_spread:
            least, most = size(min(nbytes)), size(max(nbytes))
            each = least if least == most else f"{least} to {most}"
            shown = _kept((kept.of,), kept.of)
            rows.append([names, "one each", shown, plan.how, each, fills])
            continue
        for shapes in dict.fromkeys(kept.shapes):
            ranks = [rank for rank, each in enumerate(kept.shapes) if each == shapes]
            row = [names, _kept(shapes, kept.of), plan.how, size(nbytes[ranks[0]]), fills]
            which = "all" if len(ranks) == len(kept.shapes) else rank_list(ranks)
            rows.append([row[0], which, *row[1:]] if uneven else row)
    return ([header[0], "ranks", *header[1:]] if uneven else header), rows


def rank_list(ranks: Sequence[int]) -> str:
    """Write ranks as ``0..2,4``."""
    return ", ".join(fold(map(str, ranks))).strip("{}")


def _kept(kept: Shapes, of: tuple[int, ...]) -> str:
    """Write shapes as ``[8192/8, 128]``, or ``[2 of 130, 128]`` where that is no whole part."""
    if not kept:
        return f"nothing of {shape(of)}"
    alike = len(set(kept)) == 1  # pieces of several sizes are no parts of one division
    pieces = [
        f"[{', '.join(_part(n, all_, alike) for n, all_ in zip(piece, of, strict=True))}]"
        for piece in kept
    ]
    if len(pieces) > 3:  # of many experts, which a checkpoint stores as one tensor
        counts = Counter(pieces).items()
        pieces = [f"{count} x {piece}" if count > 1 else piece for piece, count in counts]
    return " + ".join(pieces)


def _part(kept: int, of: int, is_quotient: bool) -> str:
    if kept == of:
        return str(of)
    return f"{of}/{of // kept}" if is_quotient and kept and of % kept == 0 else f"{kept} of {of}"


def _fills(name: str, group: Sequence[TensorPlan]) -> str:
    """Write the parameter and the slot, without the modules that the tensors' ``name`` has too."""
    parameter = ", ".join(fold(plan.parameter for plan in group))
    tied_to = group[0].tied_to
    slot = ", ".join(fold(each.slot or "" for each in group))
    if name == parameter:
        return "" if tied_to is None else "tied"
    of_name, of_parameter = (_DOT.split(text) for text in (name, parameter))
    alike = [a == b for a, b in zip(of_name, of_parameter[:-2], strict=False)]
    shared = [*alike, False].index(False)
    shown = ("…" if shared else "") + ".".join(of_parameter[shared:])
    return f"{slot} of {shown}" if slot else shown
