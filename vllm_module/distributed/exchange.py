"""Work in a process group that succeeds on every rank or fails on every rank.

Over the group's CPU backend, each rank sends two messages to each of its neighbours, which are the
ranks at a distance of 1, 2, 4, ... on both sides: what ranks have returned, and that all know it.
What is known of failures is passed on as it comes.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar, cast

import torch.distributed as dist

from vllm_module.base import waiting
from vllm_module.base.messages import describe_error
from vllm_module.base.process_groups import (
    cut_off,
    rank_and_size,
    rank_in_world,
    sends_between_cpus,
)
from vllm_module.distributed.news import ENDED, News, neighbours
from vllm_module.distributed.peer import Peer, end_threads, framed
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

    def attempt() -> tuple[T | _Refusal, bytes]:
        nonlocal refusal
        try:
            result = work()
            return result, _pickled(result)
        except refusals as error:
            refusal = error
            lost = isinstance(error, RankError) and not error.recoverable
            refused = _Refusal(f"failed: {describe_error(error)}", lost)
            return refused, _pickled(refused)

    depth = sum(1 for _ in _calls_with(group))
    with _alone(group, depth):
        exchange = _Exchange(group, rank, size, depth)
        try:
            outcomes = _carry_out(attempt, timeout, exchange)
        except RankError as error:
            if refusal is None:
                raise
            raise error from refusal
        finally:
            exchange.forget_peers()
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


def call_with(group: dist.ProcessGroup | None) -> _Exchange | None:
    """Return the call of :func:`together` with ``group`` whose work this thread does."""
    return next(_calls_with(group), None)


def _calls_with(group: dist.ProcessGroup | None) -> Iterator[_Exchange]:
    """Yield the calls of :func:`together` with ``group`` that this thread is in, from inside."""
    exchange = _current.get()
    while exchange is not None:
        if exchange.is_of(group):
            yield exchange
        exchange = exchange.outer


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


def _carry_out(work: Callable[[], tuple[T, bytes]], timeout: float, exchange: _Exchange) -> list[T]:
    of_work = _current.set(exchange)
    try:
        result, pickled = work()
    except BaseException as error:
        # A collective raises one of these if a peer has left; subclasses have other causes.
        # So does a call of ``together`` inside of this one.
        perhaps_left = type(error) is RuntimeError or isinstance(error, dist.DistError | RankError)
        if perhaps_left and (failures := exchange.abandoned()):
            exchange.leave(failures, _FAREWELL, over=True)  # this rank did not fail itself
            raise exchange.error(failures) from error
        patience = min(timeout, _PATIENCE if isinstance(error, Exception) else _HURRY)
        exchange.leave({exchange.rank: f"failed: {describe_error(error)}"}, patience)
        raise
    finally:
        _current.reset(of_work)
    if isinstance(result, _Refusal) and result.lost:
        timeout = min(timeout, _PATIENCE)
    results = exchange.settle(timeout, pickled) | {exchange.rank: result}
    return [results[each] for each in range(exchange.size)]


# A set of the calls in progress. It is global, as a group's connections belong to the process,
# torch's group takes no attributes, and threads that use one group share nothing else.
_active: set[tuple[object, int]] = set()
_active_lock = threading.Lock()

_ADVICE = "it hangs, or needs a longer LoadConfig(timeout=...), or --timeout"

_current: ContextVar[_Exchange | None] = ContextVar("together_exchange", default=None)

# Work may itself call together, so the messages of each level have their own tags. Calls with other
# groups do not count: some of the ranks may be in one, and others not.
_TAG = 1 << 20  # first tag of the first level; each level has eight
_EVIDENCE = 1.0  # seconds to wait for evidence that a collective failed because a peer left
_ANSWERS = 5.0  # seconds before the limit when ranks are asked who has finished
_PAUSE = 0.05  # seconds between two messages about failures
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
    """One call of :func:`together` on this rank.

    In round ``k`` of the results, a rank sends to those ``2**k`` away what it has of the ``2**k``
    ranks on its other side, with its own. Who has heard its neighbours of all rounds has all
    results. The same rounds of empty messages then tell that all ranks have them: one that ended
    may have sent its result to some only.

    News of failures reach all on any way that is left, as ranks at work pass them on, too.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int, depth: int) -> None:
        self._group, self.rank, self.size = group, rank, size
        self._tag = _TAG + 8 * depth
        self._changed = threading.Condition()
        self.outer = _current.get()
        self._inside = depth > 0
        self._results: dict[int, bytes] = {}
        self._news = News(rank, size)
        self._failures = self._news.failures
        self._closed = self._warned = self._fresh = self._spreading = False
        self._peers: dict[int, Peer] = {}
        self._told: dict[int, bytes] = {}  # the last news of peers
        self._rounds = neighbours(rank, size)
        with self._changed:
            self._reach(rank for ranks in self._rounds for rank in ranks)

    def settle(self, timeout: float, result: bytes) -> dict[int, Any]:
        """Return the others' results once every rank knows that no rank has failed."""
        results: dict[int, Any] = {}
        try:
            with self._changed:
                self._results[self.rank] = result
                self._news.has_finished = True
                self._note(finished=[self.rank])
            late = f"had not finished {timeout:g} s after rank {self.rank} had"
            self._go_round(1, timeout, late)
            if not self._failures:
                others = self._results.keys() - {self.rank}
                results = {rank: pickle.loads(self._results[rank]) for rank in others}
                late = f"sent nothing for {timeout:g} s after rank {self.rank} had finished"
                self._go_round(2, timeout, late)
        except BaseException as error:  # an interrupt, for example: this rank leaves
            stopped = {self.rank: f"stopped: {describe_error(error)}"}
            seconds = _FAREWELL if isinstance(error, Exception) else _HURRY
            self.leave(stopped, seconds, over=True)
            raise
        if self._failures:
            with self._changed:  # in the second round, others may just have ended, too
                self._changed.wait_for(
                    lambda: self._news.over or not self._news.silent(), _EVIDENCE
                )
            self.leave({}, _FAREWELL, over=True)
            raise self.error(self._failures)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        end_threads([*self._peers.values()], self._changed, _FAREWELL)
        return results

    def forget_peers(self) -> None:
        """Forget peers, which know this call: else a group is there until garbage is collected.

        Its rank 0 would go on listening at its address.
        """
        with self._changed:
            self._peers.clear()

    def error(self, failures: Mapping[int, str], *, recoverable: bool = False) -> RankError:
        lines = (f"{self._name(rank)} {how}" for rank, how in sorted(failures.items()))
        return RankError("\n".join(lines), sorted(failures), recoverable=recoverable)

    def abandoned(self) -> dict[int, str]:
        """Return the failed ranks, one of which may have made a collective of ``work`` fail."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._failures), _EVIDENCE)
            return dict(self._failures)

    def failure(self, hanging: Iterable[int] = (), how: str = "", seconds: float = 0.0) -> str:
        """Name the ranks that have failed so far, and how; ``""`` if none has for ``seconds``."""
        with self._changed:
            self._note(dict.fromkeys(hanging, f"{how}: {_ADVICE}"))
            self._changed.wait_for(lambda: bool(self._failures), seconds)
            return str(self.error(self._failures)) if self._failures else ""

    def is_of(self, group: dist.ProcessGroup | None) -> bool:
        """Tell whether this call is one with ``group``."""
        one, other = (dist.group.WORLD if each is None else each for each in (group, self._group))
        return one is other

    def say_waits(self, rank: int, what: str) -> None:
        """Tell all that this rank waits for another one, or for none."""
        with self._changed:
            number = self._news.waits.get(self.rank, (0, -1, ""))[0]
            # Only after a question do ranks pass on what they hear.
            question = max(1, self._news.question)
            self._note(waits={self.rank: (number + 1, rank, what)}, question=question)

    def hanging(self, rank: int, what: str, how: str) -> tuple[int, str]:
        """Count the one that ``rank`` waits for in the end among those that failed; return it."""
        with self._changed:
            rank, what = self._news.awaited(rank, what)
            if rank != self.rank and not self._failures:
                self._note({rank: how.format(what=what)})
        return rank, what

    def _name(self, rank: int) -> str:
        name = f"rank {rank} of {self.size}{rank_in_world(self._group, rank)}"
        return name + (" (this one)" if rank == self.rank else "")

    def _names(self, ranks: list[int]) -> str:
        more = [f"{len(ranks) - 8} more"] if len(ranks) > 8 else []
        return ", ".join([*map(self._name, ranks[:8]), *more])

    def _go_round(self, number: int, timeout: float, late: str) -> None:
        """Send and hear the first or second message of all neighbours, unless ranks fail."""
        begin = time.monotonic()
        for ranks in self._rounds:
            for rank, of in ranks.items():
                results = {each: self._results[each] for each in of} if number == 1 else None
                self._peers[rank].tell(framed(b"+" + pickle.dumps(results) if results else b"."))
            self._hear(number, [self._peers[rank] for rank in ranks], begin, timeout, late)
            if self._failures:
                return

    def _hear(
        self, number: int, peers: list[Peer], begin: float, timeout: float, late: str
    ) -> None:
        """Wait until ``peers`` have sent the message, or all failures are known."""

        def know() -> bool:
            if self._failures:
                # Who has sent its second message has all results, and tells nothing more.
                ended = number == 2 or any(peer.heard > 1 for peer in self._peers.values())
                return self._news.over or ended or not self._news.silent()
            return all(peer.heard >= number for peer in peers)

        def wait(seconds: float) -> bool:
            return self._changed.wait_for(know, begin + seconds - time.monotonic())

        ahead = min(timeout / 2, _ANSWERS)
        with self._changed:
            if wait(min(timeout - ahead, waiting.SILENCE / 2)):
                return
            self._note(question=1)
            if wait(min(timeout - ahead, waiting.SILENCE)):
                return
            if timeout > waiting.SILENCE and not self._warned:
                self._warned = True
                _log.warning("waiting for %s", self._names(self._news.silent()))
            for seconds in (timeout - ahead, timeout, timeout + ahead):
                if wait(seconds):
                    return
                unheard = [peer.rank for peer in peers if peer.heard < number]
                # In the second round, ranks that have all they need no longer answer.
                silent = [each for each in self._news.silent() if number == 1 or each in unheard]
                if silent and seconds >= timeout:
                    break
                if time.monotonic() - self._news.asked_at > ahead:
                    self._note(question=self._news.question + 1)
            named = self._news.hanging(silent) or unheard
            self._note(dict.fromkeys(named, f"{late}: {_ADVICE}"))

    def _reach(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank not in self._peers and rank != self.rank:
                self._peers[rank] = Peer(rank, self._group, self._tag, self._changed, self._learn)

    def _learn(self, peer: Peer, message: bytes | None) -> None:
        """Take in a message, or that a connection is closed, in a thread that holds the lock."""
        if message is None:
            # Who leaves tells its neighbours why, and it may take a while until others know.
            if not any(peer.rank in ranks for ranks in self._rounds):
                self._changed.wait_for(lambda: self._news.over, _EVIDENCE)
            if not (self._news.over or self._closed):
                self._note({peer.rank: ENDED})
        elif message[:1] == b"+":
            self._results |= pickle.loads(message[1:])
        elif message != b".":
            self._told[peer.rank] = message[1:]
            told = News.read(message[1:])
            peer.leaves = peer.leaves or peer.rank in told["failures"]
            self._note(**told)

    def _note(self, failures: Mapping[int, str] | None = None, **told: Any) -> None:
        """Add to what is known of ranks; if it is new, pass it on."""
        new = (failures or {}).keys() - self._failures
        if not self._news.add(failures or {}, **told):
            return
        self._changed.notify_all()
        if self._closed or not self._news.question:
            return
        self._fresh = True
        if new and not self._news.over:
            self._reach(self._news.beyond())
        if not self._spreading:
            self._spreading = True
            threading.Thread(target=self._spread, name="together", daemon=True).start()

    def _spread(self) -> None:
        """Tell the neighbours what is new, in a thread; what comes meanwhile is told at once."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._fresh or self._closed)
                if self._closed:
                    return
                self._fresh = False
                self._tell_news(b"!")
            time.sleep(_PAUSE)

    def _tell_news(self, kind: bytes) -> None:
        news = self._news.written()
        frame = framed(kind + news)
        for peer in self._peers.values():
            if not peer.leaves and (kind != b"!" or self._told.get(peer.rank) != news):
                peer.tell(frame)

    def leave(self, failures: Mapping[int, str], seconds: float, *, over: bool = False) -> None:
        """Tell what failed, wait ``seconds`` at most until that has arrived, and close connections.

        ``over``: nobody need wait for others. Connections are the group's. If the work of another
        call with this group made this one, that call closes them, once it has told others why.
        """
        with self._changed:
            failed = {*self._failures}  # they may hang, and need no other rank's reason
            self._closed = True
            self._note(failures, over=over)
            self._changed.notify_all()
            self._tell_news(b"." if over else b"!")
        peers = self._peers.values()
        try:
            with self._changed:
                self._changed.wait_for(
                    lambda: all(p.leaves or not p.telling or p.rank in failed for p in peers),
                    seconds,
                )
        finally:
            here = [peer for peer in peers if not peer.leaves]
            if not self._inside:
                cut_off(set(range(self.size)) - {self.rank}, self._group, self._tag + 7)
                end_threads(here, self._changed, 1)
