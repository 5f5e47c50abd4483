"""One rank's part of a transfer: the messages that it sends and receives of each batch."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from vllm_module.base.messages import describe_error, printable_name, shorten
from vllm_module.base.process_groups import cut_off, rank_and_size, sends_between_cpus
from vllm_module.base.waiting import SLICE, interruptibly
from vllm_module.cooperative.moved import Moved, Read, Values, nbytes_of, packed, unpacked
from vllm_module.cooperative.nixl import FRAME, NixlCarrier
from vllm_module.distributed import Waiting
from vllm_module.errors import RankError, WeightReadError
from vllm_module.layout import TransferPlan
from vllm_module.layout.layout import EXPERT
from vllm_module.layout.messages import Message

_TAG = 1 << 21  # tag of the first stage's messages
_DIGEST = 16  # bytes
_NEWS = 1.0  # seconds in which a rank hears why another one has left
# A wait of gloo's that times out closes the connections to all ranks, so the caller has the limit.
_FOREVER = timedelta(days=365)
Transport: TypeAlias = Literal["group", "nixl"]
_Boxes: TypeAlias = dict[int, list[tuple[Moved, int]]]  # tensors and numbers of boxes, by rank


class RankTransfer:
    """One rank's part of a transfer.

    Ranks of the source have the first numbers of ``group``, those of the target the next ones, and
    ``in_place`` all have both. The other arguments are those of :func:`send_boxes`.
    """

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
        self.rank, self._size = rank_and_size(group)
        self._others = Waiting(group)
        self._awaited: tuple[int, str] | None = None  # the peer of a wait, and its first tensor
        self.first_target = plan.source_ranks
        expected = plan.source_ranks + (0 if in_place else plan.target_ranks)
        if self._size != expected:
            raise ValueError(
                f"the plan is from {plan.source_ranks} to {plan.target_ranks} ranks, and the group "
                f"has {self._size}: expected {expected}"
            )
        if not sends_between_cpus(group):
            raise ValueError(
                "boxes are sent in host memory, and the process group cannot carry messages "
                "between CPUs: initialize it with init_process_group('cpu:gloo,cuda:nccl')"
            )
        entries = [entry for route in plan.routes for entry in route.tensors]
        counts = Counter(entry.name for entry in entries if entry.experts is None)
        if (name := next((name for name, count in counts.items() if count > 1), None)) is not None:
            raise ValueError(
                f"{printable_name(name)} is divided among several parameters of the target, and "
                "boxes are sent of tensors that fill one: send it by send_weights"
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
        senders = [peer for peer in self._peers[stage] if peer in coming]
        heads = {
            peer: torch.zeros(2 * _DIGEST, dtype=torch.uint8, device="cpu") for peer in senders
        }
        room = {
            peer: torch.empty(
                sum(nbytes_of(*box) for box in coming[peer]), dtype=torch.uint8, device="cpu"
            )
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
                        done = torch.empty(1, dtype=torch.uint8, device="cpu")
                        sent.append((peer, boxes, dist.irecv(done, group_src=peer, **taken)))
                        offered.append(memory)
        messages: deque[tuple[int, torch.Tensor, Any]] = deque()

        def finish() -> None:
            for peer, work in comes:
                with self._naming(peer, coming[peer]):
                    work.wait(_FOREVER)
                # Before the receive is posted: gloo ends a process that gets more than it expects.
                self._check_head(peer, heads[peer], coming[peer])
                told = (
                    room[peer]
                    if nixl is None
                    else torch.empty(FRAME, dtype=torch.uint8, device="cpu")
                )
                with self._naming(peer, coming[peer]):
                    messages.append((peer, told, dist.irecv(told, group_src=peer, **of)))
            while messages:  # each is freed before the next one is unpacked
                peer, told, work = messages.popleft()
                with self._naming(peer, coming[peer]):
                    work.wait(_FOREVER)
                    if nixl is not None:
                        limit = timedelta(seconds=self.timeout)
                        nixl.finish(nixl.start(told, room[peer]), limit)
                        back = dist.isend(told[:1], group_dst=peer, **taken)
                        sent.append((peer, coming[peer], back))
                del told, work
                values.update(unpacked(room.pop(peer), coming[peer]))
            for peer, boxes, work in sent:
                with self._naming(peer, boxes):
                    work.wait(_FOREVER)

        if comes or sent:
            self._finish(finish)
        if nixl is not None:
            nixl.release()
        return values

    def _finish(self, waits: Callable[[], None]) -> None:
        """Call what waits in a thread, until an interrupt or until one wait takes too long."""
        waited, before, told = 0.0, self._awaited, False
        late: list[Exception] = []
        over = threading.Event()

        def call() -> None:
            try:
                waits()
            finally:
                over.set()

        def lost() -> str:
            nonlocal waited, before, told
            if failure := self._others.failure():
                late.append(self._failed(failure, self._awaited))
            elif self._awaited is not before or before is None:
                waited, before = 0.0, self._awaited
                if told:
                    self._others.say()
                    told = False
            else:
                waited += SLICE
                if waited >= self.timeout / 2 and not told:  # in time for all that wait for this
                    self._others.say(*before)
                    told = True
                if waited >= self.timeout:
                    late.append(self._late(*before))
            return "late" if late else ""

        try:
            interruptibly(call, lost=lost)
        except BaseException:
            self._leave()
            if not self._others.together:
                # A thread that returns from gloo while the interpreter ends aborts the process.
                over.wait(1)
            if late:
                raise late[0] from None
            raise
        if told:
            self._others.say()

    def _leave(self) -> None:
        """Close connections, which ends all waits here, and those of other ranks for this one.

        A call of :func:`together` does that itself, once it has told others why.
        """
        if not self._others.together:
            cut_off({*range(self._size)} - {self.rank}, self.group, _TAG + 15)

    def _late(self, peer: int, name: str) -> Exception:
        """Return the error of a rank that has waited too long for ``peer``."""
        how = f"sent or took nothing of {{what}} for {self.timeout:g} s"
        rank, what = self._others.hanging(peer, name, how)
        if rank == self.rank:  # which waits for itself, by others
            rank, what = peer, name
        through = "" if rank == peer else f" or rank {peer}, which waits for it,"
        return self._error(
            f"rank {rank} ended, left or hangs, while weights moved between it{through} and rank "
            f"{self.rank}, the first of them {what}: it {how.format(what='them')}",
            [rank],
        )

    def _failed(self, failure: str, awaited: tuple[int, str] | None) -> Exception:
        """Return the error of a rank that is told of others' failures in a wait for a message."""
        where = "" if awaited is None else f"\nRank {awaited[0]} was to send or take {awaited[1]}"
        return self._error(failure + where, [])

    def _error(self, what: str, ranks: Sequence[int]) -> Exception:
        what += ". Use another process group, and send all weights again"
        if self.rank < self.first_target:
            return RankError(what, ranks)
        return WeightReadError(what)  # no rank of the engine has failed

    @contextmanager
    def _naming(self, peer: int, boxes: Sequence[tuple[Moved, int]]) -> Iterator[None]:
        """Say that it is ``peer`` if a message fails. What fails on this rank alone is no part."""
        name = printable_name(boxes[0][0].name)
        self._awaited = peer, name
        try:
            yield
        except RuntimeError as error:
            self._leave()
            # For which ``peer`` may have left: what it told may arrive after its connection ended.
            if failure := self._others.failure(_NEWS):
                raise self._failed(failure, (peer, name)) from error
            raise self._error(
                f"rank {peer} ended, left or hangs, while weights moved between it and rank "
                f"{self.rank}, the first of them {name}: {describe_error(error)}",
                [peer],
            ) from error
        finally:
            self._awaited = None

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
