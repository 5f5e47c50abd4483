"""New weights from a trainer into models that run, bucket by bucket over torch.distributed.

One rank sends and all others receive everything. Before each bucket, after the last one and when
every receiver has updated its model, all ranks exchange whether one has failed. Either all of them
go on, or all of them stop after the same step and can begin the next round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from vllm_module.base.messages import describe_error, printable_name, shorten
from vllm_module.base.process_groups import (
    cut_off,
    gather_objects,
    rank_and_size,
    rank_in_world,
    sends_between_cpus,
)
from vllm_module.base.shared_memory import Offer
from vllm_module.base.waiting import at_most, interruptibly
from vllm_module.errors import RankError, WeightReadError
from vllm_module.weights.bucket_memory import BucketMemory
from vllm_module.weights.changes import Changes
from vllm_module.weights.handle import Pairs, Weight
from vllm_module.weights.packing import PackedTensor, aligned, digest_of, gaps_of

_T = TypeVar("_T")

_LAST_WORDS = 5.0  # seconds that an interrupted rank waits for the others, to tell them
_CUT_TAG = 1 << 19  # tag of a receive that is posted only to notice a closed connection
_AGAIN = (
    "A model that now refuses to run holds a mixture of old and new weights: send all weights "
    "again, and receive them into load_weights."
)


def send_weights(
    weights: Mapping[str, Weight] | Iterable[tuple[str, Weight]],
    *,
    group: dist.ProcessGroup | None = None,
    bucket_bytes: int = 64 << 20,
    device: torch.device | str | None = None,
    digests: bool = False,
    also: Callable[[Iterator[tuple[str, torch.Tensor]]], object] | None = None,
    weight_version: str | None = None,
) -> None:
    """Send ``weights`` to all other ranks of ``group``, each of which calls `receive_weights`.

    Args:
        weights: a mapping, or pairs of name and tensor or handle. For a DTensor, pass its
            ``full_tensor()``. A handle is read straight into the bucket. If an iterator makes the
            tensors, one at a time is in memory beside the bucket. Of some elements of a tensor
            (``vllm_module.weights.changes``) only these are sent.
        group: the ranks that take part, by default the world. Nothing else may use it at the same
            time.
        bucket_bytes: size of the memory that tensors are packed into and sent from. A larger tensor
            is a bucket of its own. Ranks of one host read it in the sender's memory, where there
            are two: one is filled while the other is read.
        device: device of the bucket, the same on all ranks: by default the CPU if the
            group's backend can send its memory, else the current CUDA device.
        digests: send the digest of each tensor, which receivers compare with what has come: a copy
            more on each rank, about.
        also: a function that takes every pair that is sent, as the block of `receive_weights` does.
            If the sender has a model too, pass its ``model.update_weights``.
        weight_version: name of the weights. Receivers that expect another one refuse them all.

    Returns when every receiver has left its block without an error. If ``weights`` raises, the
    receivers are told, and the same exception is raised here. With NCCL, the ranks' messages go
    through the current CUDA device (set it); that, and buckets on a GPU, were written but not run.

    Raises:
        RankError: receivers failed, and ``ranks`` has their numbers in the group; or the ranks made
            different calls. Both are recoverable. If a collective failed, because a rank ended or
            hangs, destroy the group.
        WeightReadError: a tensor that cannot be packed (sparse, on the meta device).

    """
    transfer = _Transfer(None, group, device, weight_version)
    with transfer.telling():
        sent = transfer.sent(weights, bucket_bytes, digests)
        if also is not None:
            also(sent)
            if next(sent, None) is not None:
                raise ValueError("send_weights(also=...) returned before it had taken every tensor")
        deque(sent, maxlen=0)  # keeps no view of a bucket, which a larger one may replace
        transfer.meet()  # every receiver has left its block


@contextmanager
def receive_weights(
    *,
    src: int,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    weight_version: str | None = None,
) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """Yield an iterator over the (name, tensor) pairs that rank ``src`` of ``group`` sends.

    ``with receive_weights(src=0) as weights: model.update_weights(weights)``

    Every rank receives whole tensors. Each is a view of the bucket, on ``device`` (see
    `send_weights`), and valid until the next is requested: ``update_weights`` has copied it by
    then; clone what you keep. Other ranks may read it in the same memory, so do not write to it.
    The block must take all of them. What it raises is sent to the other ranks and raised here
    unchanged. Leaving the block waits for the other receivers.

    With ``weight_version``, weights that the sender names otherwise, or not at all, are refused
    before the first of them comes: a round that is late or sent twice.

    Raises, in the iterator or on leaving the block:
        WeightReadError: the trainer failed; its message is in it. Or a tensor has another digest
            than was sent.
        RankError: as in `send_weights`; also on a rank that left its block too early.

    """
    transfer = _Transfer(src, group, device, weight_version)
    with transfer.telling():
        tensors = transfer.tensors()
        yield tensors
        if transfer.failure is not None:
            raise transfer.failure  # the block has caught it
        next(tensors, None)  # the block may stop after the last tensor without asking for another
        early = (
            "left the block of receive_weights before it had taken every tensor: iterate to the "
            "end, or raise what is wrong"
        )
        transfer.meet(failure=None if transfer.ended else early)


def _broadcast(memory: torch.Tensor, group: dist.ProcessGroup | None, source: int) -> None:
    work = dist.broadcast(memory, group=group, group_src=source, async_op=True)
    assert work is not None
    work.wait()


class _Coming(NamedTuple):
    """The bucket that the trainer sends next; ``reserve`` is its new capacity, or 0 to keep it.

    It is the first or second of two, by ``turn``, where ranks of one host have the trainer's in
    their memory. Those map what it offers.
    """

    entries: list[PackedTensor]
    nbytes: int
    reserve: int
    turn: int
    offer: Offer | None


class _Status(NamedTuple):
    """The message of one rank to all others at a meeting. The trainer has no ``src``."""

    src: int | None
    device: str
    failure: str | None
    coming: _Coming | None
    version: str | None  # that is sent, or expected
    shares: bool  # True if it has the trainer's bucket in its memory, or may have


class _Transfer:
    """One transfer of weights, on this rank. Every rank takes part in the same meetings."""

    def __init__(
        self,
        src: int | None,
        group: dist.ProcessGroup | None,
        device: torch.device | str | None,
        version: str | None,
    ) -> None:
        self.rank, self.size = rank_and_size(group)
        if self.rank < 0:
            raise ValueError("this process is not a rank of the group that weights are sent in")
        if device is None and sends_between_cpus(group):
            device = "cpu"
        elif device is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.src, self.group, self.device = src, group, torch.device(device)
        self.version = version
        self.bucket = BucketMemory(self.device)
        self.sender = -1  # rank of the trainer, known after the first meeting
        self.last = ""  # name of the last tensor that every rank has
        self.ended = False  # on a receiver: True once every tensor has come
        self.over = False  # True once this rank takes part in no further meeting
        self.failure: Exception | None = None  # the error of any rank

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Send an exception raised in the block to the other ranks, in their next meeting."""
        try:
            yield
        except BaseException as error:
            if not self.over:
                # Who interrupts this does not want to wait long for a rank that hangs.
                limit = nullcontext() if isinstance(error, Exception) else at_most(_LAST_WORDS)
                with suppress(Exception), limit:  # ``error`` is raised instead
                    self.meet(failure=f"failed: {describe_error(error)}")
            raise
        finally:
            self.over = True
            self.bucket.close()  # a traceback may keep this object

    def meet(self, failure: str | None = None, coming: _Coming | None = None) -> _Coming | None:
        """Exchange the ranks' statuses; return the next bucket, or raise what failed."""
        shares, device = self.bucket.shares, self.device.type
        status = _Status(self.src, device, failure, coming, self.version, shares)
        with self._collective():
            statuses: list[Any] = self._wait(partial(gather_objects, status, self.group))
        self.bucket.shares = all(each.shares for each in statuses)
        self.failure = self._verdict(statuses)
        if self.failure is not None:
            self.over = True
            raise self.failure
        following: _Coming | None = statuses[self.sender].coming
        return following

    def carry(self, coming: _Coming) -> None:
        """Broadcast one bucket from the trainer to all receivers, unless they have it."""
        self.bucket.turn = coming.turn
        if coming.reserve:
            self._reserve(coming.reserve, coming.offer)
            if coming.offer is not None and not self.bucket.shares:  # a rank is on another host
                self._reserve(coming.reserve, None)
        if coming.nbytes and not self.bucket.shares:
            with self._collective():
                bucket, source = self.bucket.current[: coming.nbytes], self.sender
                self._wait(partial(_broadcast, bucket, self.group, source))
        self.last = coming.entries[-1].name

    def _reserve(self, nbytes: int, offer: Offer | None) -> None:
        if self.rank != self.sender:
            self.bucket.reserve(nbytes, offer)
        # Allocating may have failed somewhere: send only when every rank has the memory.
        self.meet()

    def tensors(self) -> Iterator[tuple[str, Any]]:
        while (coming := self.meet()) is not None:
            self.carry(coming)
            for entry in coming.entries:
                tensor = self._place(entry)
                if entry.digest is not None and (got := digest_of(tensor)) != entry.digest:
                    raise WeightReadError(
                        f"{printable_name(entry.name)}: {self._name(self.rank)} has received the "
                        f"digest {got}, and {entry.digest} was sent: it was damaged on the way, so "
                        "send it again"
                    )
                yield entry.name, tensor
        self.ended = True

    def sent(
        self, weights: Pairs, bucket_bytes: int, digests: bool = False
    ) -> Iterator[tuple[str, Any]]:
        """Send bucket by bucket, and yield the pairs of each."""
        for coming in self.packed(weights, bucket_bytes, digests):
            self.meet(coming=coming)
            self.carry(coming)
            for entry in coming.entries:
                yield entry.name, self._place(entry)
        self.meet()  # tell the receivers that no bucket follows

    def packed(self, weights: Pairs, bucket_bytes: int, digests: bool = False) -> Iterator[_Coming]:
        """Pack tensors into the bucket; yield its description each time it is full."""
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is {bucket_bytes}; a bucket has at least 1 byte")
        entries: list[PackedTensor] = []
        end = reserve = 0
        for name, weight in weights.items() if isinstance(weights, Mapping) else weights:
            if not isinstance(name, str) or not hasattr(weight, "narrow"):
                got = f"{shorten(name)} and {type(weight).__name__}"
                raise TypeError(f"expected pairs of name and tensor or handle, got {got}")
            # A plain str: the others may not know its subclass.
            number = len(weight.indices) if isinstance(weight, Changes) else None
            place = str.__str__(name), weight.dtype, tuple(weight.shape), aligned(end)
            entry = PackedTensor(*place, elements=number, gaps=gaps_of(weight))
            if entries and entry.start + entry.nbytes > bucket_bytes:
                yield self._coming(entries, end, reserve)
                entries, reserve, entry = [], 0, entry._replace(start=0)
                self.bucket.next()
            if entry.start + entry.nbytes > self.bucket.current.numel():
                reserve = max(entry.nbytes, bucket_bytes)
                self.bucket.reserve(reserve)
            self._demand_open()
            self.bucket.allocate(entry.start, entry.nbytes)
            entry.fill(self.bucket.current, weight)
            if digests:  # of the source: what packs it may be wrong too
                is_here = isinstance(weight, (torch.Tensor, Changes))
                entry = entry._replace(digest=digest_of(weight if is_here else self._place(entry)))
            entries.append(entry)
            end = entry.start + entry.nbytes
            del weight  # or it would be in memory while the source makes the next
        if entries:
            yield self._coming(entries, end, reserve)

    def _coming(self, entries: list[PackedTensor], nbytes: int, reserve: int) -> _Coming:
        offer = self.bucket.offer if reserve else None
        return _Coming(entries, nbytes, reserve, self.bucket.turn, offer)

    def _place(self, entry: PackedTensor) -> Any:
        self._demand_open()
        return entry.within(self.bucket.current)

    def _demand_open(self) -> None:
        if self.over:
            raise RuntimeError(
                "weights were asked for after the block of receive_weights was left or failed: "
                "take them inside, and receive again for new ones"
            )

    @contextmanager
    def _collective(self) -> Iterator[None]:
        self._demand_open()
        # Reset when the collective returns: a rank interrupted inside is out of step.
        self.over = True
        try:
            yield
        except BaseException as error:
            # So others do not wait for this rank until their timeout. With NCCL alone they do.
            cut_off(set(range(self.size)) - {self.rank}, self.group, _CUT_TAG)
            if not isinstance(error, RuntimeError):  # an interrupt, and no collective failed
                raise
            others = [rank for rank in range(self.size) if rank != self.rank]
            ranks = others if len(others) == 1 else []
            who = self._name(ranks[0]) if ranks else "a rank"
            last = f", after {printable_name(self.last)}" if self.last else ""
            self.failure = RankError(
                f"{self._name(self.rank)} lost touch with the others while weights were sent"
                f"{last}: {who} ended, or hung longer than the group's timeout. See what it "
                f"printed, and use another process group. {_AGAIN} torch raised "
                f"{describe_error(error)}",
                ranks,
            )
            raise self.failure from error
        self.over = False

    def _wait(self, collective: Callable[[], _T]) -> _T:
        """Run a collective so that Ctrl-C ends it, where it waits in this thread."""
        return interruptibly(collective) if self.device.type == "cpu" else collective()

    def _verdict(self, statuses: list[_Status]) -> Exception | None:
        """Return the error of every rank that has none of its own, or None if all succeeded."""
        senders = [rank for rank, status in enumerate(statuses) if status.src is None]
        if len(senders) != 1 or self.size == 1:
            return RankError(
                f"one rank calls send_weights and all others receive_weights, but of {self.size} "
                f"ranks {len(senders)} send" + (f": {senders}" if senders else ""),
                senders,
                recoverable=True,
            )
        self.sender = senders[0]
        device, version = statuses[self.sender].device, statuses[self.sender].version
        failures: dict[int, str] = {}
        for rank, status in enumerate(statuses):
            if status.failure is not None:
                failures[rank] = status.failure
            elif status.src not in (None, self.sender):
                failures[rank] = f"receives with src={status.src}, but rank {self.sender} sends"
            elif status.device != device:
                how = f"receives on {status.device}, but rank {self.sender} sends on {device}"
                failures[rank] = f"{how}: pass one device"
            elif status.version not in (None, version):
                failures[rank] = (
                    f"expects the weights {shorten(status.version)}, and rank {self.sender} sends "
                    + (shorten(version) if version is not None else "some without a weight_version")
                )
        if not failures:
            return None
        message = "\n".join(f"{self._name(rank)} {how}" for rank, how in failures.items())
        if self.sender in failures:
            return WeightReadError(f"the sender of the weights failed: {message}\n{_AGAIN}")
        return RankError(f"{message}\n{_AGAIN}", failures, recoverable=True)

    def _name(self, rank: int) -> str:
        name = f"rank {rank} of {self.size}{rank_in_world(self.group, rank)}"
        return name + (" (this one)" if rank == self.rank else "")
