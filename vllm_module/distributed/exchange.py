"""Work in a process group that succeeds on every rank or fails on every rank.

Over the group's CPU backend, each rank sends each other rank two messages: the outcome of its work,
and then the ranks that it knows to have failed.
"""

from __future__ import annotations

import json
import logging
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

from vllm_module.base import waiting
from vllm_module.base.messages import describe_error
from vllm_module.base.process_groups import rank_and_size, rank_in_world, sends_between_cpus
from vllm_module.distributed.peer import Peer, framed
from vllm_module.errors import RankError

_log = logging.getLogger(__name__)
T = TypeVar("T")


def together(
    work: Callable[[], T],
    *,
    timeout: float,
    group: dist.ProcessGroup | None = None,
    refusals: tuple[type[Exception], ...] = (),
) -> list[T]:
    """Run ``work`` on every rank of the process group and return all ranks' results, by rank.

    If ``work`` fails on any rank, every rank raises. Every rank of ``group`` makes the same call.

    Args:
        work: a function whose result is pickled.
        timeout: seconds that a rank which has finished waits for the others.
        group: the process group, by default the world.
        refusals: exceptions of ``work`` that leave the group usable. A rank that raises one waits
            for the others as if it had finished. A rank that raises another exception leaves the
            group: it first waits at most 10 seconds for the others to receive its message.

    Raises:
        RankError: other ranks raised, ended, or had not finished in time; it names all of them. It
            is recoverable if they raised ``refusals``; otherwise destroy the group. It is also
            raised in place of the error of a collective in ``work`` that fails because a rank has
            left, and, on a rank that raised one of ``refusals``, if the ranks did not finish the
            exchange.
        RuntimeError: another thread of this process is already in this call, with this group.
        Exception: the exception of ``work`` on this rank.

    """
    rank, size = rank_and_size(group)
    if rank < 0:
        raise ValueError("this process is not a rank of the given process group")
    if size == 1:
        return [work()]
    if not sends_between_cpus(group):
        raise ValueError(
            f"the process group ({dist.get_backend_config(group)}) cannot carry messages between "
            "CPUs, by which its ranks exchange their outcomes: initialize it with "
            "torch.distributed.init_process_group() or init_process_group('cpu:gloo,cuda:nccl')"
        )
    refusal: Exception | None = None

    def attempt() -> T | _Refusal:
        nonlocal refusal
        try:
            return work()
        except refusals as error:
            refusal = error
            lost = isinstance(error, RankError) and not error.recoverable
            return _Refusal(f"failed: {describe_error(error)}", lost)

    depth = _depth.get()
    with _alone(group, depth):
        exchange = _Exchange(group, rank, size, depth)
        try:
            outcomes = _carry_out(attempt, timeout, exchange)
        except RankError as error:
            if refusal is None:
                raise
            raise error from refusal
    if refusal is not None:
        raise refusal
    failures = {
        rank: outcome.how for rank, outcome in enumerate(outcomes) if isinstance(outcome, _Refusal)
    }
    if failures:
        raise exchange.error(failures, recoverable=True)
    return cast(list[T], outcomes)


def failure_of_others() -> Callable[..., str]:
    """Return a function that says which other ranks have failed so far; ``""`` if none has.

    It is about the call of :func:`together` whose work this thread does, and may be called in any
    thread. Where it names ranks, ``work`` may raise ``RuntimeError``: ``together`` turns that into
    the ``RankError`` that names them. Given numbers of ranks that hang, and how that shows, it
    counts these among them.
    """
    exchange = _current.get()
    return exchange.failure if exchange is not None else lambda hanging=(), how="": how


class _Refusal(NamedTuple):
    """The message of a rank that raised one of ``refusals``, in place of a result.

    ``lost``: because another rank had ended or hung, for which it has waited already.
    """

    how: str
    lost: bool


@contextmanager
def _alone(group: dist.ProcessGroup | None, depth: int) -> Iterator[None]:
    """Raise if another thread is inside: its messages would be confused with this thread's."""
    call = (dist.group.WORLD if group is None else group, depth)
    with _active_lock:
        if call in _active:
            raise RuntimeError(
                "another thread of this process works together with the same process group: make a "
                "group for each thread with torch.distributed.new_group()"
            )
        _active.add(call)
    try:
        yield
    finally:
        with _active_lock:
            _active.remove(call)


def _carry_out(work: Callable[[], T], timeout: float, exchange: _Exchange) -> list[T]:
    token, of_work = _depth.set(_depth.get() + 1), _current.set(exchange)
    try:
        result = work()
        outcome = framed(b"+" + _pickled(result))
    except BaseException as error:
        # A collective raises one of these if a peer has left; subclasses have other causes.
        # So does a call of ``together`` inside of this one.
        perhaps_left = type(error) is RuntimeError or isinstance(error, dist.DistError | RankError)
        if perhaps_left and (failures := exchange.abandoned()):
            exchange.tell(framed(b"+" + _pickled(None)))  # this rank did not fail itself
            exchange.tell(framed(json.dumps(failures).encode()))
            exchange.leave(_FAREWELL)
            raise exchange.error(failures) from error
        exchange.tell(framed(b"-" + describe_error(error).encode()))
        exchange.tell(framed(b"{}"))
        exchange.leave(min(timeout, _PATIENCE if isinstance(error, Exception) else _HURRY))
        raise
    finally:
        _current.reset(of_work)
        _depth.reset(token)
    exchange.tell(outcome)
    if isinstance(result, _Refusal) and result.lost:
        timeout = min(timeout, _PATIENCE)
    results = exchange.settle(timeout) | {exchange.rank: result}
    return [results[each] for each in range(exchange.size)]


# A set of the calls in progress. It is global, as a group's connections belong to the process,
# torch's group takes no attributes, and threads that use one group share nothing else.
_active: set[tuple[object, int]] = set()
_active_lock = threading.Lock()

_ADVICE = "it hangs, or needs a longer LoadConfig(timeout=...), or --timeout"

# Work may itself call together, so the messages of each level have their own tags.
_depth: ContextVar[int] = ContextVar("together_depth", default=0)
_current: ContextVar[_Exchange | None] = ContextVar("together_exchange", default=None)

_TAG = 1 << 20  # first tag of the first level; each level has eight
_EVIDENCE = 1.0  # seconds to wait for evidence that a collective failed because a peer left
_FAREWELL = 2.0  # seconds in which the messages of a rank that gives up reach the others
_HURRY = 0.3  # seconds after an interrupt, when the user waits for this process to stop
_PATIENCE = 10.0  # seconds in which the others may enter the call and receive this rank's error


def _pickled(result: object) -> bytes:
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise TypeError(
            f"what work returned cannot be sent to the other ranks: {describe_error(error)}"
        ) from error


class _Exchange:
    """One call of :func:`together` on this rank."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int, depth: int) -> None:
        self._group, self.rank, self.size = group, rank, size
        self._changed = threading.Condition()
        self._hanging: dict[int, str] = {}
        outer = _current.get()
        self._inside = outer is not None and outer._group is group
        tag = _TAG + 8 * depth
        others = (peer for peer in range(size) if peer != rank)
        self._peers = [Peer(peer, group, tag, self._changed) for peer in others]

    def tell(self, frame: torch.Tensor) -> None:
        for peer in self._peers:
            peer.tell(frame)

    def settle(self, timeout: float) -> dict[int, Any]:
        """Return the others' results once every rank knows that no rank has failed."""
        results: dict[int, Any] = {}
        try:
            late = f"had not finished {timeout:g} s after rank {self.rank} had"
            failures = self._hear(1, timeout, late)
            if not failures:
                results = {peer.rank: pickle.loads(peer.received[0][1:]) for peer in self._peers}
            self.tell(framed(json.dumps(failures).encode()))
            if not failures:  # a rank that ended may have sent its outcome to some ranks only
                late = f"sent nothing for {timeout:g} s after rank {self.rank} had finished"
                failures = self._hear(2, timeout, late)
            if failures:
                failures |= self._await_reports()
        except BaseException as error:  # an interrupt, for example: this rank leaves
            stopped = {self.rank: f"stopped: {describe_error(error)}"}
            self.tell(framed(json.dumps(stopped).encode()))
            self.leave(_FAREWELL if isinstance(error, Exception) else _HURRY)
            raise
        if failures:
            self.leave(_FAREWELL)
            raise self.error(failures)
        self._end_threads(self._peers, _FAREWELL)
        return results

    def error(self, failures: Mapping[int, str], *, recoverable: bool = False) -> RankError:
        lines = (f"{self._name(rank)} {how}" for rank, how in sorted(failures.items()))
        return RankError("\n".join(lines), failures, recoverable=recoverable)

    def abandoned(self) -> dict[int, str]:
        """Return the failed ranks, one of which may have made a collective of ``work`` fail."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._failed(2)), _EVIDENCE)
            return self._failed(2)

    def failure(self, hanging: Iterable[int] = (), how: str = "") -> str:
        """Name the ranks that have failed so far, and how; ``""`` if none has."""
        with self._changed:
            self._hanging.update(dict.fromkeys(hanging, f"{how}: {_ADVICE}"))
            failures = self._failed(2)
        return str(self.error(failures)) if failures else ""

    def _name(self, rank: int) -> str:
        name = f"rank {rank} of {self.size}{rank_in_world(self._group, rank)}"
        return name + (" (this one)" if rank == self.rank else "")

    def _hear(self, count: int, timeout: float, late: str) -> dict[int, str]:
        """Wait until every peer has sent ``count`` messages; return why ranks failed to."""

        def know() -> bool:
            heard = all(len(peer.received) >= count or peer.gone for peer in self._peers)
            return heard or bool(self._reported())

        with self._changed:
            silence = min(timeout, waiting.SILENCE)
            if not self._changed.wait_for(know, silence):
                silent = [peer.rank for peer in self._peers if len(peer.received) < count]
                if silence < timeout:
                    _log.warning("waiting for %s", ", ".join(map(self._name, silent)))
                self._changed.wait_for(know, timeout - silence)
            failures = self._failed(count)
            if not self._reported():
                for peer in self._peers:
                    if len(peer.received) < count and not peer.gone and peer.rank not in failures:
                        failures[peer.rank] = f"{late}: {_ADVICE}"
        return failures

    def _failed(self, count: int) -> dict[int, str]:
        failures = self._hanging | self._reported()
        for peer in self._peers:
            if peer.received and peer.received[0][:1] == b"-":
                failures[peer.rank] = f"failed: {peer.received[0][1:].decode()}"
            elif len(peer.received) < count and peer.gone:
                failures[peer.rank] = "ended, or left: its connection is closed"
        return failures

    def _await_reports(self) -> dict[int, str]:
        """Wait for finished ranks' second message, which closing the connections would lose."""
        with self._changed:
            self._changed.wait_for(
                lambda: all(peer.gone or len(peer.received) != 1 for peer in self._peers), _FAREWELL
            )
            return self._reported()

    def _reported(self) -> dict[int, str]:
        """Return the failures that peers report; a report ends all waiting."""
        reported: dict[int, str] = {}
        for peer in self._peers:
            if len(peer.received) > 1:
                report: Mapping[str, str] = json.loads(peer.received[1])
                reported |= {int(rank): how for rank, how in report.items()}
        return reported

    def leave(self, seconds: float) -> None:
        """Wait ``seconds`` at most until messages have arrived, then close all connections.

        They are the group's. If the work of another call with this group made this one, that call
        closes them, once it has told others why.
        """
        try:
            with self._changed:
                self._changed.wait_for(
                    lambda: all(peer.leaves() or not peer.telling for peer in self._peers), seconds
                )
        finally:
            here = [peer for peer in self._peers if not peer.leaves()]
            if not self._inside:
                for peer in self._peers:
                    if not peer.gone:
                        peer.cut_off()
                self._end_threads(here, 1)

    def _end_threads(self, peers: list[Peer], seconds: float) -> None:
        """Wait for threads: one that returns from gloo at interpreter exit aborts the process.

        ``peers`` must not contain gone ones: some of gloo's sends to them never return.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: not any(peer.listening or peer.telling for peer in peers), seconds
            )
