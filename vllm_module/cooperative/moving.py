"""Weights sent from rank to rank by a transfer plan, over torch.distributed.

Ranks of the source have the first numbers of the group, those of the target the next ones. All of
them go through the plan's tensors in one order, and know from the plan which messages come: a
message is what one rank sends to another of a batch of tensors. A shorter one goes before it, with
digests of the version and of the boxes: what was left of another round is no part of this one.
Messages begin in the plan's order, and each is packed and unpacked while others are under way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from vllm_module.base.messages import describe_error, printable_name, shorten
from vllm_module.base.process_groups import rank_and_size
from vllm_module.errors import RankError, WeightReadError
from vllm_module.layout import Hop, Layout, Route, TransferPlan
from vllm_module.layout.layout import EXPERT
from vllm_module.layout.messages import GATHERED, RELAYED, SENT, Message
from vllm_module.layout.views import Box, place

_TAG = 1 << 21  # tag of the first stage's messages
_DIGEST = 16  # bytes
_Values: TypeAlias = dict[tuple[str, int], torch.Tensor]  # by name and number of the box


class _Moved(NamedTuple):
    """A tensor that is moved: its name, its expert's number or that of the first, its route."""

    name: str
    expert: int
    route: Route

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.route.dtype)
        return dtype

    def hops(self, hops: Sequence[Hop]) -> Iterator[Hop]:
        return (hop for hop in hops if hop.experts[0] <= self.expert < sum(hop.experts))

    def box(self, number: int) -> Box:
        return self.route.boxes[number]


def send_boxes(
    plan: TransferPlan,
    source: Layout,
    tensors: Mapping[str, torch.Tensor],
    *,
    group: dist.ProcessGroup | None = None,
    bucket_bytes: int = 1 << 28,
    timeout: float = 600.0,
    weight_version: str = "",
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

    Raises:
        RankError: a rank has ended or hangs, or has left in the middle; it names that rank.
        ValueError: a tensor is missing here or has another shape, or the group's size is wrong.

    """
    moving = _Moving(plan, group, timeout, weight_version)
    rank = moving.rank
    for batch in moving.batches(bucket_bytes):
        held = {each.name: _held_boxes(source, each, rank, tensors) for each in batch}

        def read(each: _Moved, number: int, held: dict[str, list[_Box]] = held) -> torch.Tensor:
            part = each.box(number)
            for box, view, values in held[each.name]:
                if (at := place(box, view, part, each.route.view)) is not None:
                    begin = values.storage_offset() + at.offset  # a shard may be a view of more
                    return values.as_strided(at.shape, at.strides, begin)
            raise AssertionError(f"{each.name}: the plan takes {part} from rank {rank}")

        parts = moving.stage(batch, GATHERED, read)
        for each in batch:  # what is gathered on this rank from itself
            for hop in each.hops(each.route.gathered):
                if hop.source == hop.target == rank:
                    parts[each.name, hop.box] = read(each, hop.box)

        def give(
            each: _Moved, number: int, parts: _Values = parts, read: _Read = read
        ) -> torch.Tensor:
            if number not in each.route.parts:
                return read(each, number)
            start, size = each.box(number)
            joined = torch.empty(size, dtype=each.dtype)
            for part in each.route.parts[number]:
                _narrowed(joined, each.box(part), start).copy_(parts[each.name, part])
            return joined

        moving.stage(batch, SENT, give)


def receive_boxes(
    plan: TransferPlan,
    *,
    group: dist.ProcessGroup | None = None,
    bucket_bytes: int = 1 << 28,
    timeout: float = 600.0,
    weight_version: str = "",
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor of which this rank keeps a part, for ``update_weights`` of this rank.

    A tensor has its whole shape, with zeros outside of the boxes that the rank keeps, where a CPU's
    memory is not touched. Arguments are those of :func:`send_boxes`.

    Raises ``WeightReadError`` if a rank has ended, left or hangs, or sends weights of another
    version or plan; it names that rank. The model refuses to run if it has a mixture of old and new
    weights then.
    """
    moving = _Moving(plan, group, timeout, weight_version)
    for batch in moving.batches(bucket_bytes):
        arrived = moving.stage(batch, SENT, _nothing)

        def relay(each: _Moved, number: int, arrived: _Values = arrived) -> torch.Tensor:
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
                _narrowed(whole.view(each.route.view), box).copy_(arrived[each.name, number])
            yield each.name, whole


_Read: TypeAlias = Callable[[_Moved, int], torch.Tensor]
_Box: TypeAlias = tuple[Box, Sequence[int], torch.Tensor]


def _nothing(each: _Moved, number: int) -> torch.Tensor:
    raise AssertionError(f"{each.name}: a rank of the target sends a box before it arrives")


class _Moving:
    """One rank's part of a transfer."""

    def __init__(
        self, plan: TransferPlan, group: dist.ProcessGroup | None, timeout: float, version: str
    ) -> None:
        self.plan, self.group, self.timeout, self.version = plan, group, timeout, version
        self.rank, size = rank_and_size(group)
        self.first_target = plan.source_ranks
        if size != plan.source_ranks + plan.target_ranks:
            raise ValueError(
                f"the plan is from {plan.source_ranks} to {plan.target_ranks} ranks, and the group "
                f"has {size}: expected {plan.source_ranks + plan.target_ranks}"
            )
        at = self.first_target
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

    def batches(self, bucket_bytes: int) -> Iterator[list[_Moved]]:
        """Yield the plan's tensors, as many at once as fit into a bucket."""
        batch: list[_Moved] = []
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
                    batch.append(_Moved(name, expert, route))
                    filled += nbytes
        if batch:
            yield batch

    def stage(self, batch: Sequence[_Moved], stage: int, read: _Read) -> _Values:
        """Send and receive the boxes of the hops of a stage; return those that arrive here."""
        first = self._first[stage]
        going: dict[int, list[tuple[_Moved, int]]] = {}
        coming: dict[int, list[tuple[_Moved, int]]] = {}
        for each in batch:
            for hop in each.hops(each.route.stage(stage)):
                source, target = hop.source + first[0], hop.target + first[1]
                if source == target:
                    continue
                if source == self.rank:
                    going.setdefault(target, []).append((each, hop.box))
                elif target == self.rank:
                    coming.setdefault(source, []).append((each, hop.box))
        tag = _TAG + first[0] * 2 + first[1]
        senders = [peer for peer in self._peers[stage] if peer in coming]
        heads = {peer: torch.zeros(2 * _DIGEST, dtype=torch.uint8) for peer in senders}
        values: _Values = {}
        comes: list[tuple[int, Any]] = []
        sent: list[tuple[int, Any]] = []
        of: dict[str, Any] = {"group": self.group, "tag": tag}
        limit = timedelta(seconds=self.timeout)
        peer = self.rank
        try:
            for peer, head in heads.items():
                comes.append((peer, dist.irecv(head, group_src=peer, **of)))
            for peer in self._peers[stage]:
                if boxes := going.get(peer):
                    memory = torch.cat([_bytes(read(each, number)) for each, number in boxes])
                    for part in (self._head(boxes), memory):
                        sent.append((peer, dist.isend(part, group_dst=peer, **of)))
            messages = []
            for peer, work in comes:
                _wait(work, limit)
                boxes = coming[peer]
                # Before the receive is posted: gloo ends a process that gets more than it expects.
                self._check_head(peer, heads[peer], boxes)
                message = torch.empty(sum(_nbytes(*box) for box in boxes), dtype=torch.uint8)
                messages.append((peer, dist.irecv(message, group_src=peer, **of), message))
            for peer, work, message in messages:
                _wait(work, limit)
                values |= _unpacked(message, coming[peer])
            for peer, work in sent:  # noqa: B007  # the error below names it
                _wait(work, limit)
        except RuntimeError as error:
            how = (
                f"rank {peer} ended, left or hangs, while weights moved between it and rank "
                f"{self.rank}, the first of them {printable_name(batch[0].name)}. Use another "
                f"process group, and send all weights again: {describe_error(error)}"
            )
            if self.rank < self.first_target:
                raise RankError(how, [peer]) from error
            raise WeightReadError(how) from error  # no rank of the engine has failed
        return values

    def _head(self, boxes: Sequence[tuple[_Moved, int]]) -> torch.Tensor:
        """Return the digests of this rank's version, and of the boxes of a message."""
        about = repr([(each.name, each.route.dtype, each.box(number)) for each, number in boxes])
        both = (hashlib.blake2b(of.encode(), digest_size=_DIGEST) for of in (self.version, about))
        return torch.frombuffer(bytearray().join(each.digest() for each in both), dtype=torch.uint8)

    def _check_head(
        self, peer: int, head: torch.Tensor, boxes: Sequence[tuple[_Moved, int]]
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


def _unpacked(message: torch.Tensor, boxes: Sequence[tuple[_Moved, int]]) -> _Values:
    """Return the boxes of a message."""
    values: _Values = {}
    at = 0
    for each, number in boxes:
        nbytes = _nbytes(each, number)
        part = message[at : at + nbytes].clone()  # aligned for its dtype
        values[each.name, number] = part.view(each.dtype).view(each.box(number)[1])
        at += nbytes
    return values


def _wait(work: dist.Work | None, limit: timedelta) -> None:
    assert work is not None
    work.wait(limit)


def _bytes(box: torch.Tensor) -> torch.Tensor:
    return box.detach().contiguous().view(-1).view(torch.uint8)


def _nbytes(each: _Moved, number: int) -> int:
    return torch.Size(each.box(number)[1]).numel() * each.route.itemsize


def _narrowed(whole: torch.Tensor, box: Box, origin: Sequence[int] | None = None) -> torch.Tensor:
    """Return the part of a tensor that ``box`` is, where the tensor begins at ``origin``."""
    start, size = box
    for dim, (first, count) in enumerate(zip(start, size, strict=True)):
        whole = whole.narrow(dim, first - (origin[dim] if origin is not None else 0), count)
    return whole


def _held_boxes(
    layout: Layout, each: _Moved, rank: int, tensors: Mapping[str, torch.Tensor]
) -> list[_Box]:
    """Return this rank's boxes of a tensor, each with its values in stored order."""
    entry, expert = layout.find(each.name)
    found: list[_Box] = []
    for ranks, box in layout.held_by(entry, expert):
        if rank not in ranks or not box.numel:
            continue
        tensor, shape = tensors.get(entry.parameter), layout.shape_of(entry.parameter, rank)
        if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != each.dtype:
            got = "nothing" if tensor is None else f"{list(tensor.shape)} in {tensor.dtype}"
            raise ValueError(
                f"{printable_name(entry.parameter)} on rank {rank}: the layout has "
                f"{list(shape or ())} in {each.dtype}, got {got}"
            )
        held = box.held
        if held.packed != 1:
            raise WeightReadError(f"{printable_name(each.name)} is packed, and cannot be sent yet")
        flat = tensor.detach().contiguous()
        values = flat.as_strided(held.shape, held.strides, flat.storage_offset() + held.offset)
        found.append(
            ((box.start, box.size), box.view or entry.shape, values.reshape(box.size).contiguous())
        )
    return found
