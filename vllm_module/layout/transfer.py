"""Who sends which box of which tensor to whom, when ranks of one layout feed those of another.

The plan is made of the two layouts alone. Tensors that both cut alike share a :class:`Route`, so it
grows neither with the number of layers nor with that of experts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from vllm_module.base.garbage import paused_gc
from vllm_module.base.messages import printable_name
from vllm_module.layout.hops import Hop, Route, itemsize_of
from vllm_module.layout.layout import EXPERT, Layout, StoredTensorLayout
from vllm_module.layout.messages import SENT, Message, messages_of
from vllm_module.layout.views import Box, Ints, cut, meeting, refined

_MOST = 64  # boxes in which a rank receives one tensor


class _Holder(NamedTuple):
    """A rank that holds a box, and first and end of the experts that it holds it of."""

    rank: int
    first: int
    end: int


_Viewed = tuple[Box, Ints]  # a box and the shape that it counts in


class TransferPlan:
    """The routes by which boxes of ``source`` get to every rank that keeps them in ``target``.

    Every element arrives exactly once at each rank that keeps it, and at no other one. Where
    several ranks of the source have a box, the one that has least to send so far sends it.

    Args:
        source, target: the layouts. The target's tensors are in the source, by name and shape;
            what else the source has stays there.
        source_node, target_node: number of ranks on a host, which are numbered one after another
            and send to each other much faster than to other hosts. With more than one, boxes of a
            tensor that would arrive in more than ``most`` parts are joined at the source first, and
            what several ranks of a host keep is sent there once.
        most: see above.
        in_place: True if both layouts are of the same ranks, which keep what they have.

    Attributes:
        routes: the :class:`Route` of each kind of tensors.
        source_ranks, target_ranks: numbers of ranks.
        target: as above; who receives compares it with what it has.

    Raises ``ValueError`` that names a tensor which the source lacks, has in another shape, or has
    only in part.

    """

    @paused_gc()
    def __init__(
        self,
        source: Layout,
        target: Layout,
        *,
        source_node: int = 1,
        target_node: int = 1,
        most: int = _MOST,
        in_place: bool = False,
    ) -> None:
        self.source_ranks, self.target_ranks, self.target = source.ranks, target.ranks, target
        if in_place and (source.ranks != target.ranks or source_node > 1 or target_node > 1):
            raise ValueError("moves in place are from each rank to each, and no host gathers them")
        routing = _Routing(source, target, (source_node, target_node), most, in_place)
        kinds: dict[_Kind, list[StoredTensorLayout]] = {}
        for entry in target.tensors:
            # Tied tensors fill the same elements as another one.
            if entry.tied_to is None and 0 not in entry.shape:
                for kind in routing.kinds(entry):
                    kinds.setdefault(kind, []).append(entry)
        self.routes = tuple(routing.route(kind, entries) for kind, entries in kinds.items())

    @cached_property
    def messages(self) -> tuple[tuple[Message, ...], ...]:
        """The messages of each stage (gathered, sent, relayed), in the order in which to begin."""
        return messages_of(self.routes)

    def sent_bytes(self) -> Counter[tuple[int, int]]:
        """Return the bytes that each rank of the source sends to each rank of the target."""
        return Counter({(each.source, each.target): each.nbytes for each in self.messages[SENT]})

    def descriptors(self) -> int:
        """Return the largest number of boxes in which a rank receives one tensor."""
        most = 0
        for route in self.routes:
            experts = {first for hop in route.sent for first in [hop.experts[0]]}
            counts = Counter(
                (hop.target, first)
                for hop in route.sent
                for first in experts
                if hop.experts[0] <= first < sum(hop.experts)
            )
            most = max(most, *counts.values(), 0)
        return most


class _Kind(NamedTuple):
    """What the route of a tensor depends on: partitions, and first and end of the experts."""

    at: tuple[int, ...]
    to: int
    shape: Ints
    dtype: str
    experts: tuple[int, int]
    is_alone: bool  # the source has each expert's tensor under a name of its own


class _Routing:
    """Makes routes, and balances what the ranks of the source send in all of them."""

    def __init__(
        self, source: Layout, target: Layout, nodes: tuple[int, int], most: int, in_place: bool
    ) -> None:
        self.source, self.target, self.in_place = source, target, in_place
        (self.source_node, self.target_node), self.most = nodes, most
        self.load = [0] * source.ranks
        # An override may divide a tensor among several entries.
        self._partitions: dict[str, list[int]] = {}
        for entry in source.tensors:
            self._partitions.setdefault(entry.name, []).append(entry.partition)

    def kinds(self, entry: StoredTensorLayout) -> Iterator[_Kind]:
        """Yield the kinds of a target's entry; several if the source divides its experts."""
        first, count = entry.experts or (0, 1)
        expert = first
        while expert < first + count:
            name = entry.name if entry.experts is None else entry.name.replace(EXPERT, str(expert))
            try:
                stored, number = self.source.find(name)
            except KeyError:
                raise ValueError(
                    f"{printable_name(name)} is kept by the target, and the source's layout lacks "
                    "it: give the source's tensors the checkpoint's names (names=), or make the "
                    "plan to llm.layout(source), the engine's layout in the source's names"
                ) from None
            if stored.shape != entry.shape:
                raise ValueError(
                    f"{printable_name(name)} has shape {list(entry.shape)} in the target's layout, "
                    f"and {list(stored.shape)} in the source's"
                )
            alone = stored.experts is None
            end = expert + 1 if stored.experts is None else min(first + count, sum(stored.experts))
            at = tuple(self._partitions[name]) if alone else (stored.partition,)
            experts = expert, end
            if entry.experts is None and EXPERT in stored.name:  # the target has it under its name
                assert number is not None
                experts = number, number + 1
            yield _Kind(at, entry.partition, entry.shape, stored.dtype, experts, alone)
            expert = end

    def route(self, kind: _Kind, entries: list[StoredTensorLayout]) -> Route:
        name = printable_name(entries[0].name)
        held: dict[_Viewed, list[_Holder]] = {}
        for partition in kind.at:
            held |= _holders(self.source, partition, kind, kind.is_alone)
        kept = _holders(self.target, kind.to, kind)
        try:
            view = refined([kind.shape, *(shape for _, shape in (*held, *kept))])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        stored = [
            _Piece(fine, tuple(holders))
            for (box, shape), holders in held.items()
            for fine in cut(box, shape, view)
        ]
        making = _Making(self, kind, view, entries)
        for (box, shape), receivers in kept.items():
            for fine in cut(box, shape, view):
                pieces = [
                    _Piece(part, piece.holders)
                    for piece in stored
                    if (part := meeting(piece.box, fine)) is not None
                ]
                found = sum(math.prod(piece.box[1]) for piece in pieces)
                if found != math.prod(fine[1]):
                    what = "no rank" if found < math.prod(fine[1]) else "more than one box"
                    raise ValueError(
                        f"{name}: {what} of the source holds some of the elements that rank "
                        f"{receivers[0].rank} of the target keeps"
                    )
                making.add(pieces, receivers)
        return making.route()


def _holders(
    layout: Layout, partition: int, kind: _Kind, is_alone: bool = False
) -> dict[_Viewed, list[_Holder]]:
    """Return the ranks that hold each box of the tensors of a kind, and of which experts."""
    found: dict[_Viewed, dict[_Holder, None]] = {}
    for group in layout.partitions[partition].held:
        first, end = kind.experts
        if group.experts is not None and not is_alone:
            first, end = max(first, group.experts[0]), min(end, sum(group.experts))
        if first >= end:
            continue
        for box in group.boxes:
            if box.numel:
                ranks = found.setdefault(((box.start, box.size), box.view or kind.shape), {})
                ranks.update(dict.fromkeys(_Holder(rank, first, end) for rank in group.ranks))
    return {key: list(ranks) for key, ranks in found.items()}


class _Piece(NamedTuple):
    """A box that ranks of the source hold."""

    box: Box
    holders: tuple[_Holder, ...]


class _Making:
    """A route in the making."""

    def __init__(
        self, routing: _Routing, kind: _Kind, view: Ints, entries: list[StoredTensorLayout]
    ) -> None:
        self._routing, self._kind, self._view, self._entries = routing, kind, view, entries
        self._boxes: dict[Box, int] = {}
        self._parts: dict[int, Ints] = {}
        self._sent: list[Hop] = []
        self._relayed: list[Hop] = []
        # Experts that are gathered from one rank to another, by both and the box's number.
        self._gathered: dict[tuple[int, int, int], dict[tuple[int, int], None]] = {}
        self._itemsize = itemsize_of(kind.dtype)

    def add(self, pieces: list[_Piece], receivers: list[_Holder]) -> None:
        """Route the pieces of a box to the ranks that keep it."""
        node = self._routing.target_node
        hosts: dict[tuple[int, int, int], list[int]] = {}
        for rank, first, end in receivers:
            hosts.setdefault((rank // node, first, end), []).append(rank)
        for number, members in enumerate(self._joined(pieces)):
            box = self._box(_around([piece.box for piece in members]))
            for turn, ((_, first, end), ranks) in enumerate(hosts.items()):
                leader = ranks[(number + turn) % len(ranks)]
                if len(members) == 1:
                    self._send(members[0], box, leader, first, end)
                else:
                    at = turn * len(members) // len(hosts) + number
                    self._gather(members, box, at % len(members), leader, first, end)
                self._relayed += [
                    Hop(leader, rank, box, (first, end - first)) for rank in ranks if rank != leader
                ]

    def route(self) -> Route:
        gathered = tuple(
            Hop(source, target, box, (first, end - first))
            for (source, target, box), ranges in self._gathered.items()
            for first, end in _merged(ranges)
        )
        return Route(
            tuple(self._entries), self._kind.experts, self._view, tuple(self._boxes), gathered,
            self._parts, tuple(self._sent), tuple(self._relayed), self._kind.dtype,
        )  # fmt: skip

    def _box(self, box: Box) -> int:
        return self._boxes.setdefault(box, len(self._boxes))

    def _send(self, piece: _Piece, box: int, target: int, first: int, end: int) -> None:
        """Let the rank send that has least to send; several, if each has some of the experts."""
        load = self._routing.load
        weight = math.prod(piece.box[1]) * self._itemsize * len(self._entries)
        own = [each for each in piece.holders if self._routing.in_place and each.rank == target]
        while first < end:
            holders = [each for each in piece.holders if each.first <= first < each.end]
            if not holders:
                raise ValueError(
                    f"{printable_name(self._entries[0].name)}: no rank of the source holds all of "
                    f"expert {first}"
                )
            chosen = min(holders, key=lambda each: (each not in own, load[each.rank]))
            stop = min(end, chosen.end, *(each.first for each in own if each.first > first))
            if chosen not in own:
                load[chosen.rank] += weight * (stop - first)
            self._sent.append(Hop(chosen.rank, target, box, (first, stop - first)))
            first = stop

    def _gather(
        self, members: list[_Piece], box: int, at: int, target: int, first: int, end: int
    ) -> None:
        """Let one of the members' ranks gather their pieces and send them as one box."""
        sender = members[at].holders[0].rank
        numbers = tuple(self._box(piece.box) for piece in members)
        self._parts[box] = numbers
        for piece, number in zip(members, numbers, strict=True):
            key = piece.holders[0].rank, sender, number
            self._gathered.setdefault(key, {})[first, end] = None
        size = math.prod(_around([piece.box for piece in members])[1])
        self._routing.load[sender] += size * self._itemsize * len(self._entries) * (end - first)
        self._sent.append(Hop(sender, target, box, (first, end - first)))

    def _joined(self, pieces: list[_Piece]) -> list[list[_Piece]]:
        """Return the pieces by the boxes in which they are sent, at most ``most`` if possible."""
        joined = [[piece] for piece in pieces]
        if len(pieces) <= self._routing.most:
            return joined
        ordered = sorted(pieces, key=lambda piece: piece.box)
        number = 2
        while number <= self._routing.source_node and len(joined) > self._routing.most:
            if self._routing.source_node % number == 0:
                joined = self._by_rank(ordered, number)
            number += 1
        return joined

    def _by_rank(self, pieces: list[_Piece], number: int) -> list[list[_Piece]]:
        """Join pieces that are a box together and that are held by ``number`` ranks in a row."""
        joined: list[list[_Piece]] = []
        for piece in pieces:
            holder = piece.holders[0]
            if joined and (holder.first, holder.end) == self._kind.experts:
                last = joined[-1]
                boxes = [each.box for each in (*last, piece)]
                same = last[0].holders[0].rank // number == holder.rank // number
                filled = sum(math.prod(size) for _, size in boxes)
                if same and filled == math.prod(_around(boxes)[1]):
                    last.append(piece)
                    continue
            joined.append([piece])
        return joined


def _around(boxes: list[Box]) -> Box:
    """Return the smallest box that contains all of ``boxes``."""
    if len(boxes) == 1:
        return boxes[0]
    start = tuple(map(min, zip(*(begin for begin, _ in boxes), strict=True)))
    ends = [tuple(map(sum, zip(*box, strict=True))) for box in boxes]
    end = tuple(map(max, zip(*ends, strict=True)))
    return start, tuple(last - first for first, last in zip(start, end, strict=True))


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges of experts with those joined that overlap or follow each other."""
    merged: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((first, end))
    return merged
