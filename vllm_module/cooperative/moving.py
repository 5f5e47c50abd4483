"""Weights sent from rank to rank by a transfer plan, over torch.distributed.

Ranks of the source have the first numbers of the group, those of the target the next ones. All of
them go through the plan's tensors in one order, and know from the plan which messages come: a
message is what one rank sends to another of a batch of tensors. A shorter one goes before it, with
digests of the version and of the boxes: what was left of another round is no part of this one.
Messages begin in the plan's order, and each is packed and unpacked while others are under way.

In a move in place each rank is of both layouts, and its number is the group's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from vllm_module.base.messages import describe_error, printable_name, shorten
from vllm_module.base.process_groups import rank_and_size
from vllm_module.cooperative.moved import (
    HeldValues,
    Moved,
    Read,
    Values,
    boxes_on,
    held_values,
    narrowed,
    nbytes_of,
    packed,
    part_of,
    unpacked,
    write_box,
)
from vllm_module.cooperative.nixl import FRAME, NixlCarrier
from vllm_module.errors import RankError, WeightReadError
from vllm_module.layout import Layout, TransferPlan
from vllm_module.layout.layout import EXPERT
from vllm_module.layout.messages import GATHERED, RELAYED, SENT, Message

_TAG = 1 << 21  # tag of the first stage's messages
_DIGEST = 16  # bytes
Transport: TypeAlias = Literal["group", "nixl"]
_Held: TypeAlias = dict[str, list[HeldValues]]  # by name
_Boxes: TypeAlias = dict[int, list[tuple[Moved, int]]]  # tensors and numbers of boxes, by rank


def send_boxes(
    plan: TransferPlan,
    source: Layout,
    tensors: Mapping[str, torch.Tensor],
    *,
    group: dist.ProcessGroup | None = None,
    bucket_bytes: int = 1 << 28,
    timeout: float = 600.0,
    weight_version: str = "",
    transport: Transport = "group",
) -> None:
    """Send what this rank holds to the ranks that keep it, as ``plan`` says.

    Args:
        plan: the same on every rank.
        source: the plan's source.
        tensors: this rank's parameters, by the paths in ``source`` and of the shapes there.
        group: with ``plan.source_ranks + plan.target_ranks`` ranks, by default the world.
        bucket_bytes: most bytes of whole tensors in a batch, unless one alone has more; the same on
            every rank.
        timeout: seconds that a message may take.
        weight_version: name of the weights, the same on every rank.
        transport: ``"group"`` sends bytes over the group, ``"nixl"`` lets ranks read each other's
            memory by NIXL (the extra ``nixl``), and sends over the group only where it is; the same
            on every rank.

    Raises:
        RankError: a rank has ended or hangs, or has left in the middle; it names that rank.
        ValueError: a tensor is missing here or has another shape, or the group's size is wrong.

    """
    moving = _Moving(plan, group, timeout, weight_version, transport=transport)
    rank = moving.rank
    for batch in moving.batches(bucket_bytes):
        held = {each.name: held_values(source, each, rank, tensors) for each in batch}

        def read(each: Moved, number: int, held: _Held = held) -> torch.Tensor:
            return part_of(each, number, held[each.name])

        parts = moving.stage(batch, GATHERED, read)
        for each in batch:  # what is gathered on this rank from itself
            for hop in each.hops(each.route.gathered):
                if hop.source == hop.target == rank:
                    parts[each.name, hop.box] = read(each, hop.box)

        def give(
            each: Moved, number: int, parts: Values = parts, read: Read = read
        ) -> torch.Tensor:
            if number not in each.route.parts:
                return read(each, number)
            start, size = each.box(number)
            joined = torch.empty(size, dtype=each.dtype)
            for part in each.route.parts[number]:
                narrowed(joined, each.box(part), start).copy_(parts[each.name, part])
            return joined

        moving.stage(batch, SENT, give)


def receive_boxes(
    plan: TransferPlan,
    *,
    group: dist.ProcessGroup | None = None,
    bucket_bytes: int = 1 << 28,
    timeout: float = 600.0,
    weight_version: str = "",
    transport: Transport = "group",
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor of which this rank keeps a part, for ``update_weights`` of this rank.

    A tensor has its whole shape, with zeros outside of the boxes that the rank keeps, where a CPU's
    memory is not touched. Arguments are those of :func:`send_boxes`.

    Raises ``WeightReadError`` if a rank has ended, left or hangs, or sends weights of another
    version or plan; it names that rank. The model refuses to run if it has a mixture of old and new
    weights then.
    """
    moving = _Moving(plan, group, timeout, weight_version, transport=transport)
    for batch in moving.batches(bucket_bytes):
        arrived = moving.stage(batch, SENT, _nothing)

        def relay(each: Moved, number: int, arrived: Values = arrived) -> torch.Tensor:
            return arrived[each.name, number]

        arrived |= moving.stage(batch, RELAYED, relay)
        for each in batch:
            entry = each.route.tensors[0]
            parts = {number for name, number in arrived if name == each.name}
            if not parts:
                continue
            # Zeros, because values that are not kept are looked at as well, for NaN.
            whole = torch.zeros(entry.shape, dtype=each.dtype)
            for number in parts:
                box = each.box(number)
                narrowed(whole.view(each.route.view), box).copy_(arrived[each.name, number])
            yield each.name, whole


def exchange_boxes(
    plan: TransferPlan,
    source: Layout,
    target: Layout,
    tensors: Mapping[str, torch.Tensor],
    *,
    group: dist.ProcessGroup | None = None,
    timeout: float = 600.0,
) -> Generator[None, None, int]:
    """Move what this rank and others hold from one layout to the other, in place, in steps.

    Of each parameter all boxes have arrived before one is written: it may lie where another was.
    Each box of the target is one of the source's, in another place.

    It yields when it has all memory to move a parameter, before it sends anything. A rank that goes
    on then waits for what others send: let ranks agree that all of them have come so far.

    Args:
        plan: from ``source`` to ``target``, made with ``in_place``; the same on every rank.
        source, target: where boxes are, and where they are to be.
        tensors: this rank's parameters, by the paths in the layouts and of the shapes in both.
        group: of ``plan.source_ranks`` ranks, by default the world.
        timeout: seconds that a message may take.

    Returns:
        The bytes that other ranks sent.

    Raises:
        RankError: a rank has ended or hangs, or has left in the middle; parameters are a mixture.
        ValueError: a tensor is missing here or has another shape, or the group's size is wrong.

    """
    moving = _Moving(plan, group, timeout, "", in_place=True)
    rank, received = moving.rank, 0
    for batch in moving.parameters():
        held = {each.name: held_values(source, each, rank, tensors) for each in batch}

        def read(each: Moved, number: int, held: _Held = held) -> torch.Tensor:
            return part_of(each, number, held[each.name])

        of_name, own = {each.name: each for each in batch}, dict[tuple[str, int], torch.Tensor]()
        going, coming = moving.messages(batch, SENT)
        outgoing = {peer: packed(boxes, read) for peer, boxes in going.items()}
        for name, each in of_name.items():
            if boxes_on(source, each, rank) == boxes_on(target, each, rank):
                continue  # where they were
            for hop in each.hops(each.route.sent):
                if hop.source == hop.target == rank:
                    own[name, hop.box] = read(each, hop.box).clone()
        held.clear()
        yield
        arrived = moving.transfer(SENT, coming, going, outgoing.__getitem__)
        received += sum(values.nbytes for values in arrived.values())
        arrived |= own
        for (name, number), values in arrived.items():
            write_box(target, of_name[name], number, values, rank, tensors)
    return received


def _nothing(each: Moved, number: int) -> torch.Tensor:
    raise AssertionError(f"{each.name}: a rank of the target sends a box before it arrives")


class _Moving:
    """One rank's part of a transfer."""

    def __init__(
        self,
        plan: TransferPlan,
        group: dist.ProcessGroup | None,
        timeout: float,
        version: str,
        *,
        in_place: bool = False,
        transport: Transport = "group",
    ) -> None:
        if transport not in ("group", "nixl"):
            raise ValueError(f"transport should be 'group' or 'nixl', got {shorten(transport)}")
        self._nixl = NixlCarrier() if transport == "nixl" else None
        self.plan, self.group, self.timeout, self.version = plan, group, timeout, version
        self.rank, size = rank_and_size(group)
        self.first_target = plan.source_ranks
        expected = plan.source_ranks + (0 if in_place else plan.target_ranks)
        if size != expected:
            raise ValueError(
                f"the plan is from {plan.source_ranks} to {plan.target_ranks} ranks, and the group "
                f"has {size}: expected {expected}"
            )
        at = 0 if in_place else self.first_target
        self._first = (0, 0), (0, at), (at, at)  # by stage, the group's number of each side's first
        self._peers = [
            list(dict.fromkeys(self._peers_of(messages, *first)))
            for messages, first in zip(plan.messages, self._first, strict=True)
        ]

    def _peers_of(self, messages: Iterable[Message], one: int, other: int) -> Iterator[int]:
        """Yield the ranks that this one sends to or receives from, in the plan's order."""
        for each in messages:
            source, target = each.source + one, each.target + other
            if self.rank in (source, target):
                yield target if source == self.rank else source

    def parameters(self) -> list[list[Moved]]:
        """Return the plan's tensors, those that fill one parameter together."""
        of: dict[str, list[Moved]] = {}
        for batch in self.batches(0):
            for each in batch:
                of.setdefault(each.parameter, []).append(each)
        return list(of.values())

    def batches(self, bucket_bytes: int) -> Iterator[list[Moved]]:
        """Yield the plan's tensors, as many at once as fit into a bucket."""
        batch: list[Moved] = []
        filled = 0
        for route in self.plan.routes:
            for entry in route.tensors:
                for expert in range(*route.experts):
                    name = entry.name
                    if entry.experts is not None:
                        name = name.replace(EXPERT, str(expert))
                    nbytes = torch.Size(entry.shape).numel() * route.itemsize
                    if batch and filled + nbytes > bucket_bytes:
                        yield batch
                        batch, filled = [], 0
                    batch.append(Moved(name, expert, route, entry.parameter))
                    filled += nbytes
        if batch:
            yield batch

    def stage(self, batch: Sequence[Moved], stage: int, read: Read) -> Values:
        """Send and receive the boxes of the hops of a stage; return those that arrive here."""
        going, coming = self.messages(batch, stage)
        return self.transfer(stage, coming, going, lambda peer: packed(going[peer], read))

    def messages(self, batch: Sequence[Moved], stage: int) -> tuple[_Boxes, _Boxes]:
        """Return the boxes that go to each rank and those that come, by the rank's number."""
        source_at, target_at = self._first[stage]
        going: _Boxes = {}
        coming: _Boxes = {}
        for each in batch:
            for hop in each.hops(each.route.stage(stage)):
                source, target = hop.source + source_at, hop.target + target_at
                if source == target:
                    continue
                if source == self.rank:
                    going.setdefault(target, []).append((each, hop.box))
                elif target == self.rank:
                    coming.setdefault(source, []).append((each, hop.box))
        return going, coming

    def transfer(
        self, stage: int, coming: _Boxes, going: _Boxes, message_to: Callable[[int], torch.Tensor]
    ) -> Values:
        """Send messages, which ``message_to`` returns, and return the boxes that arrive here."""
        first = self._first[stage]
        of: dict[str, Any] = {"group": self.group, "tag": _TAG + first[0] * 2 + first[1]}
        taken = of | {"tag": _TAG + of["tag"]}  # two ranks may send to each other in a stage
        limit = timedelta(seconds=self.timeout)
        senders = [peer for peer in self._peers[stage] if peer in coming]
        heads = {peer: torch.zeros(2 * _DIGEST, dtype=torch.uint8) for peer in senders}
        room = {
            peer: torch.empty(sum(nbytes_of(*box) for box in coming[peer]), dtype=torch.uint8)
            for peer in senders
        }
        values: Values = {}
        offered: list[torch.Tensor] = []
        comes: list[tuple[int, Any]] = []
        sent: list[tuple[int, list[tuple[Moved, int]], Any]] = []
        nixl = self._nixl
        for peer, head in heads.items():
            with self._naming(peer, coming[peer]):
                comes.append((peer, dist.irecv(head, group_src=peer, **of)))
        for peer in self._peers[stage]:
            if boxes := going.get(peer):
                memory = message_to(peer)
                told = memory if nixl is None else nixl.offered(memory)
                with self._naming(peer, boxes):
                    for part in (self._head(boxes), told):
                        sent.append((peer, boxes, dist.isend(part, group_dst=peer, **of)))
                    if nixl is not None:  # once the bytes have been read
                        done = torch.empty(1, dtype=torch.uint8)
                        sent.append((peer, boxes, dist.irecv(done, group_src=peer, **taken)))
                        offered.append(memory)
        messages = []
        for peer, work in comes:
            with self._naming(peer, coming[peer]):
                _wait(work, limit)
            # Before the receive is posted: gloo ends a process that gets more than it expects.
            self._check_head(peer, heads[peer], coming[peer])
            told = room[peer] if nixl is None else torch.empty(FRAME, dtype=torch.uint8)
            with self._naming(peer, coming[peer]):
                messages.append((peer, told, dist.irecv(told, group_src=peer, **of)))
        for peer, told, work in messages:
            with self._naming(peer, coming[peer]):
                _wait(work, limit)
                if nixl is not None:
                    nixl.finish(nixl.start(told, room[peer]), limit)
                    sent.append((peer, coming[peer], dist.isend(told[:1], group_dst=peer, **taken)))
            values |= unpacked(room.pop(peer), coming[peer])
        for peer, boxes, work in sent:
            with self._naming(peer, boxes):
                _wait(work, limit)
        if nixl is not None:
            nixl.release()
        return values

    @contextmanager
    def _naming(self, peer: int, boxes: Sequence[tuple[Moved, int]]) -> Iterator[None]:
        """Say that it is ``peer`` if a message fails. What fails on this rank alone is no part."""
        try:
            yield
        except RuntimeError as error:
            how = (
                f"rank {peer} ended, left or hangs, while weights moved between it and rank "
                f"{self.rank}, the first of them {printable_name(boxes[0][0].name)}. Use another "
                f"process group, and send all weights again: {describe_error(error)}"
            )
            if self.rank < self.first_target:
                raise RankError(how, [peer]) from error
            raise WeightReadError(how) from error  # no rank of the engine has failed

    def _head(self, boxes: Sequence[tuple[Moved, int]]) -> torch.Tensor:
        """Return the digests of this rank's version, and of the boxes of a message."""
        about = repr([(each.name, each.route.dtype, each.box(number)) for each, number in boxes])
        both = (hashlib.blake2b(of.encode(), digest_size=_DIGEST) for of in (self.version, about))
        return torch.frombuffer(bytearray().join(each.digest() for each in both), dtype=torch.uint8)

    def _check_head(
        self, peer: int, head: torch.Tensor, boxes: Sequence[tuple[Moved, int]]
    ) -> None:
        """Raise ``WeightReadError`` if ``peer`` sends another message than the plan says."""
        expected = self._head(boxes)
        if torch.equal(head, expected):
            return
        what = "by another plan, or another batch of it,"
        if not torch.equal(head[:_DIGEST], expected[:_DIGEST]):
            what = f"of another version than {shorten(self.version)}"
        raise WeightReadError(
            f"rank {peer} sends weights {what} where rank {self.rank} expects "
            f"{printable_name(boxes[0][0].name)}: it is late, sends twice, or has other "
            "layouts. Use another process group, and send all weights again"
        )


def _wait(work: dist.Work | None, limit: timedelta) -> None:
    assert work is not None
    work.wait(limit)
