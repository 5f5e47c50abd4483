"""New weights from a trainer into models that run, bucket by bucket over torch.distributed.

One rank sends and all others receive everything. Before each bucket, after the last one and once
more when every receiver is done with its model, all ranks tell each other how they fare: they go
on together, or all of them stop after the same step and can begin the next round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from vllm_module.errors import RankError, WeightReadError
from vllm_module.messages import describe_error, printable_name, shorten
from vllm_module.weights.handle import Weight, read_into

_ALIGNMENT = 16  # bytes: no dtype needs more
_CUT_TAG = 1 << 19  # of a message that nobody sends
_AGAIN = (
    "Models that say so hold a mixture of old and new weights: send all of them again, and receive "
    "them into load_weights."
)


def send_weights(
    weights: Mapping[str, Weight] | Iterable[tuple[str, Weight]],
    *,
    group: dist.ProcessGroup | None = None,
    bucket_bytes: int = 64 << 20,
    device: torch.device | str | None = None,
    also: Callable[[Iterator[tuple[str, torch.Tensor]]], object] | None = None,
) -> None:
    """Send ``weights`` to all other ranks of ``group``, each of which calls `receive_weights`.

    Args:
        weights: a mapping, or pairs of name and tensor (of a DTensor its ``full_tensor()``) or
            handle, which is read straight into the bucket. Of an iterator that makes tensors, one
            is held at a time, beside the bucket.
        group: by default the world. Nothing else may use it meanwhile.
        bucket_bytes: memory that tensors are packed into, and sent from; a larger tensor is a
            bucket of its own.
        device: where the bucket is, on all ranks the same: by default the CPU if the group's
            backend carries its memory, else the current CUDA device.
        also: takes what is sent, bucket by bucket, of a sender that has such a model itself:
            ``model.update_weights``. As in the block of `receive_weights`, it must take all.

    It returns when every receiver has left its block well. What ``weights`` raises is raised here
    once the others know of it. With NCCL what ranks tell each other travels on the current CUDA
    device as well (set it); that, and buckets on a GPU, were written but not run.

    Raises:
        RankError: receivers failed, which ``ranks`` names by their numbers in the group, or ranks
            do not make calls that belong together: then the group can be used again. Or a
            collective failed, because a rank ended or hangs: then destroy the group.
        WeightReadError: a tensor that cannot be packed (sparse, on the meta device).

    """
    talk = _Round(None, group, device)
    with talk.telling():
        sent = talk.sent(weights, bucket_bytes)
        if also is not None:
            also(sent)
            if next(sent, None) is not None:
                raise ValueError("send_weights(also=...) returned before it had taken every tensor")
        deque(sent, maxlen=0)  # keeps no view, of a bucket that a larger one replaces
        talk.meet()  # every receiver has left its block


@contextmanager
def receive_weights(
    *,
    src: int,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """Give an iterator of (name, tensor) of what rank ``src`` of ``group`` sends.

    ``with receive_weights(src=0) as weights: model.update_weights(weights)``

    Tensors are whole, on every rank the same. Each is a view of the bucket, on ``device`` (see
    `send_weights`), and valid until the next one is asked for: ``update_weights`` has copied it
    by then, and whoever keeps one clones it. The block must take all of them; what it raises is
    told to the other ranks and stays what it is. Leaving the block waits for the other receivers.

    Raises, in the iterator or on leaving the block:
        WeightReadError: the trainer failed; its message is in it.
        RankError: as in `send_weights`; also on a rank that left its block too early.

    """
    talk = _Round(src, group, device)
    with talk.telling():
        tensors = talk.tensors()
        yield tensors
        if talk.failure is not None:
            raise talk.failure  # the block went on as if nothing had happened
        next(tensors, None)  # who took the last tensor need not have asked for another
        early = "left the block of receive_weights before it had taken every tensor: iterate to"
        talk.meet(failure=None if talk.ended else f"{early} the end, or raise what is wrong")


class _Entry(NamedTuple):
    """Where a tensor is in the bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class _Coming(NamedTuple):
    """The bucket that the trainer sends next; ``reserve`` is its new capacity, 0 if it is old."""

    entries: list[_Entry]
    nbytes: int
    reserve: int


class _Word(NamedTuple):
    """What a rank tells all others when they meet. The trainer has no ``src``."""

    src: int | None
    device: str
    failure: str | None
    coming: _Coming | None


class _Round:
    """One sending of weights, as this rank sees it. Every rank meets the others equally often."""

    def __init__(
        self, src: int | None, group: dist.ProcessGroup | None, device: torch.device | str | None
    ) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not a rank of the group that weights are sent in")
        if device is None and "cpu" in dist.get_backend_config(group):
            device = "cpu"
        elif device is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.src, self.group, self.device = src, group, torch.device(device)
        self.memory = torch.empty(0, dtype=torch.uint8, device=self.device)
        self.sender = -1  # known when ranks have met
        self.ended = False  # whether a receiver knows that nothing more comes
        self.over = False  # whether the others expect nothing more of this rank
        self.failure: Exception | None = None  # of any rank

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the others what is raised inside; they are at their next meeting, or will be."""
        try:
            yield
        except BaseException as error:
            if not self.over:
                with suppress(Exception):  # ``error`` is what this rank has to say
                    self.meet(failure=f"failed: {describe_error(error)}")
            raise
        finally:
            self.over = True
            self.memory = self.memory.new_empty(0)  # a traceback may keep the round

    def meet(self, failure: str | None = None, coming: _Coming | None = None) -> _Coming | None:
        """Tell the others how this rank fares; return what comes next, or raise what failed."""
        words: list[Any] = [None] * self.size
        word = _Word(self.src, self.device.type, failure, coming)
        with self._collective():
            dist.all_gather_object(words, word, group=self.group)
        self.failure = self._verdict(words)
        if self.failure is not None:
            self.over = True
            raise self.failure
        following: _Coming | None = words[self.sender].coming
        return following

    def carry(self, coming: _Coming) -> None:
        """Move a bucket from the trainer to all others."""
        if coming.reserve:
            if self.rank != self.sender:
                self._reserve(coming.reserve)
            self.meet()  # memory may not suffice: nobody sends before everybody has it
        if coming.nbytes:
            with self._collective():
                bucket = self.memory[: coming.nbytes]
                dist.broadcast(bucket, group=self.group, group_src=self.sender)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        while (coming := self.meet()) is not None:
            self.carry(coming)
            for entry in coming.entries:
                yield entry.name, self._place(entry)
        self.ended = True

    def sent(
        self, weights: Mapping[str, Weight] | Iterable[tuple[str, Weight]], bucket_bytes: int
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Send bucket by bucket, and give what is in it."""
        for coming in self.packed(weights, bucket_bytes):
            self.meet(coming=coming)
            self.carry(coming)
            for entry in coming.entries:
                yield entry.name, self._place(entry)
        self.meet()  # that was all

    def packed(
        self, weights: Mapping[str, Weight] | Iterable[tuple[str, Weight]], bucket_bytes: int
    ) -> Iterator[_Coming]:
        """Fill the bucket again and again."""
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is {bucket_bytes}; a bucket has at least 1 byte")
        entries: list[_Entry] = []
        end = reserve = 0
        for name, weight in weights.items() if isinstance(weights, Mapping) else weights:
            if not isinstance(name, str) or not hasattr(weight, "narrow"):
                got = f"{shorten(name)} and {type(weight).__name__}"
                raise TypeError(f"expected pairs of name and tensor or handle, got {got}")
            shape = torch.Size(weight.shape)
            nbytes = shape.numel() * weight.dtype.itemsize
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            if entries and start + nbytes > bucket_bytes:
                yield _Coming(entries, end, reserve)
                entries, start, reserve = [], 0, 0
            if start + nbytes > self.memory.numel():
                reserve = max(nbytes, bucket_bytes)
                self._reserve(reserve)
            # Not a subclass of str, which the others might not know.
            entry = _Entry(str.__str__(name), weight.dtype, tuple(shape), start)
            self._read(weight, entry)
            entries.append(entry)
            end = start + nbytes
            del weight  # or it would be in memory while the source makes the next
        if entries:
            yield _Coming(entries, end, reserve)

    def _read(self, weight: Weight, entry: _Entry) -> None:
        try:
            read_into(weight, self._place(entry))
        except RuntimeError as error:  # of torch, which does not know the name
            name, kind = printable_name(entry.name), type(weight).__name__
            raise WeightReadError(
                f"{name} ({kind}, {entry.dtype}) cannot be packed into a bucket; send a dense "
                f"tensor with data: {describe_error(error)}"
            ) from error

    def _reserve(self, nbytes: int) -> None:
        self.memory = self.memory.new_empty(0)  # or both would be in memory
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _place(self, entry: _Entry) -> torch.Tensor:
        self._demand_open()
        nbytes = torch.Size(entry.shape).numel() * entry.dtype.itemsize
        place = self.memory[entry.start : entry.start + nbytes]
        return place.view(entry.dtype).view(entry.shape)

    def _demand_open(self) -> None:
        if self.over:
            raise RuntimeError(
                "weights were asked for after the block of receive_weights was left or failed: "
                "take them inside, and receive again for new ones"
            )

    @contextmanager
    def _collective(self) -> Iterator[None]:
        self._demand_open()
        self.over = True  # until it returns: a rank interrupted inside is out of step
        try:
            yield
        except BaseException as error:
            self._cut_off()
            if not isinstance(error, RuntimeError):  # an interrupt, and no collective failed
                raise
            self.failure = RankError(
                f"{self._name(self.rank)} lost touch with the others while weights were sent: a "
                "rank ended, or hung longer than the group's timeout. See what it printed, and "
                f"start anew with another process group. {_AGAIN} torch raised "
                f"{describe_error(error)}"
            )
            raise self.failure from error
        self.over = False

    def _cut_off(self) -> None:
        """Close this rank's connections, so that others do not wait for it until their timeout.

        In gloo a wait that times out does that; with NCCL alone, others wait until theirs.
        """
        for peer in set(range(self.size)) - {self.rank}:
            with suppress(RuntimeError, ValueError):
                nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                work = dist.irecv(nothing, group=self.group, group_src=peer, tag=_CUT_TAG)
                assert work is not None
                work.wait(timedelta(milliseconds=1))

    def _verdict(self, words: list[_Word]) -> Exception | None:
        """Return what all ranks raise, except those that failed, which have an error already."""
        senders = [rank for rank, word in enumerate(words) if word.src is None]
        if len(senders) != 1 or self.size == 1:
            return RankError(
                f"one rank calls send_weights and all others receive_weights, but of {self.size} "
                f"ranks {len(senders)} send" + (f": {senders}" if senders else ""),
                senders,
                recoverable=True,
            )
        self.sender = senders[0]
        device = words[self.sender].device
        failures: dict[int, str] = {}
        for rank, word in enumerate(words):
            if word.failure is not None:
                failures[rank] = word.failure
            elif word.src not in (None, self.sender):
                failures[rank] = f"receives with src={word.src}, but rank {self.sender} sends"
            elif word.device != device:
                failures[rank] = f"receives on {word.device}, but {device} is sent: pass one device"
        if not failures:
            return None
        message = "\n".join(f"{self._name(rank)} {how}" for rank, how in failures.items())
        if self.sender in failures:
            return WeightReadError(f"the weights' sender broke off: {message}\n{_AGAIN}")
        return RankError(f"{message}\n{_AGAIN}", failures, recoverable=True)

    def _name(self, rank: int) -> str:
        name = f"rank {rank} of {self.size}"
        if self.group is not None and self.size < dist.get_world_size():
            name += f" (rank {dist.get_global_rank(self.group, rank)} of the world)"
        return name + (" (this one)" if rank == self.rank else "")
