"""Engines that share their experts: all compute a step at the same time, also without requests."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from vllm_module.base.waiting import SILENCE, SLICE, WaitLimitError, taken
from vllm_module.config import EngineConfig
from vllm_module.distributed import together
from vllm_module.errors import RankError
from vllm_module.runtime.ranks.connections import cut_off, meeting_place
from vllm_module.weights.meeting import init_weight_transfer

_log = logging.getLogger(__name__)

_FOREVER = timedelta(days=365)  # timeout of a thread's wait; the engine has a limit of its own
_EVIDENCE = 2.0  # seconds to wait for the end of an engine that has failed
_GRACE = 0.05  # seconds in which an engine with requests begins a round itself
_LOOK = 0.05  # seconds between two looks whether an engine can run again
_TAG = 1 << 17
_LEFT = -1  # in place of a number of tokens: the engine begins no more rounds


class Rounds:
    """The rounds of one engine: steps that it computes together with the other engines.

    Before a step, the first rank of each engine tells those of the others how many tokens it has.
    An engine without requests waits until another begins a round, and then takes part without
    tokens.

    Args:
        config: of the engine: which one it is, and where all meet.
        timeout: seconds until all have come.

    Attributes:
        rank, size: the engine's number, and that of engines.
        group: the first ranks of the engines; messages between CPUs, without a timeout.
        address: where all ranks of all engines meet.
        number: of the next round.
        awaited: the engine that this one waits for at the beginning of a round.

    Raises ``RankError`` if an engine does not come in time, and ``ValueError`` if two have one
    number, or expect other numbers of engines.

    """

    def __init__(self, config: EngineConfig, timeout: float) -> None:
        assert config.data_parallel_rank is not None
        self.rank, self.size = config.data_parallel_rank, config.data_parallel_size
        self.number = 0
        host, port = config.data_parallel_address, config.data_parallel_rpc_port
        try:
            self.group = init_weight_transfer(host, port, self.rank, self.size, timeout=timeout)
            if self.rank == 0:  # kept for as long as ranks may look into it
                self._store = meeting_place(self.size * config.tensor_parallel_size, (host, 0))
            ports = together(
                lambda: 0 if self.rank else self._store.port, timeout=timeout, group=self.group
            )
        except RankError as error:
            raise RankError(f"the engines of data_parallel_size: {error}", error.ranks) from error
        self.address = host, ports[0]
        others = [each for each in range(self.size) if each != self.rank]
        self._came = {each: queue.SimpleQueue[Any]() for each in others}
        self.awaited: int | None = None
        self._called, self._changed = threading.Event(), threading.Condition()
        self._left: set[int] = set()  # engines that begin no more rounds
        self._ended: set[int] = set()  # engines that ended while others went on
        self._has_left = self._over = self._attended = False
        self._sent: list[Any] = []
        self._telling = threading.Lock()
        for each in others:
            name = f"engine {each}"
            threading.Thread(target=self._listen, args=(each,), name=name, daemon=True).start()

    def name(self, engine: int) -> str:
        """Return an engine's name, for messages."""
        return f"engine {engine} of {self.size} (data_parallel_rank {engine})"

    def agree(self, tokens: int, decodes: bool) -> tuple[int, bool]:
        """Begin the next round with all engines.

        Args:
            tokens: number of this engine's tokens.
            decodes: whether it only decodes.

        Returns the most tokens of an engine, 1 or more, and whether all engines only decode.
        Raises ``RankError`` if an engine has ended, or does not begin the round in time.

        """
        self._tell(tokens, decodes)
        counts, all_decode = [1, tokens], decodes
        for engine, came in self._came.items():
            self.awaited = engine
            try:
                count, others_decode = taken(came)
            except WaitLimitError as error:
                raise RankError(
                    f"{self.name(engine)} takes no part in a step: it hangs, sleeps, or changes "
                    f"its weights ({error})",
                    [engine],
                ) from None
            counts.append(count)
            all_decode &= others_decode
        self.awaited = None
        self.number += 1
        return max(counts), all_decode

    def end_of_others(self) -> RankError | None:
        """Return an error that names engines that have ended, once that is known."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._ended), _EVIDENCE)
        names = ", ".join(map(self.name, sorted(self._ended)))
        return RankError(f"{names} has ended: see what it printed", self._ended) if names else None

    def hung(self, error: WaitLimitError) -> RankError:
        """Return an error for a wait inside of a step, in which an engine did not answer."""
        others = sorted(self._came)
        names = " or ".join(map(self.name, others))
        return RankError(f"{names} hangs in a step, or has been stopped: {error}", others)

    def check(self) -> None:
        """Raise ``RankError`` if another engine has ended while this one went on."""
        if self._ended and (error := self.end_of_others()) is not None:
            raise error

    @property
    def is_called(self) -> bool:
        """True if another engine has begun the next round, or has ended."""
        # One that had left ends because all have, or a round says that it is missing.
        gone = self._left & self._ended
        return any(not came.empty() for each, came in self._came.items() if each not in gone)

    def attend(
        self,
        step: Callable[[int], bool],
        can_step: Callable[[], bool],
        has_requests: Callable[[], bool],
    ) -> None:
        """Let a thread take part in rounds that others begin.

        Args:
            step: takes part in the round of a number without tokens, unless it has begun; returns
                whether to go on.
            can_step: tells whether this engine can compute steps now.
            has_requests: tells whether this engine has requests, and probably begins the round.

        """
        self._attended, self._can_step = True, can_step

        def run() -> None:
            stalls_at = -1  # the number of a round before which this engine, asked, began none
            while not self._over:
                self._called.wait()
                self._called.clear()
                while self.is_called and not self._over:
                    number = self.number
                    if not can_step():
                        time.sleep(_LOOK)
                        continue
                    if number != stalls_at and has_requests():
                        with self._changed:
                            self._changed.wait_for(partial(self._is_past, number), _GRACE)
                    if self.number == number:
                        if not step(number):
                            self._attended = False
                            return
                        stalls_at = self.number

        threading.Thread(target=run, name="rounds", daemon=True).start()

    def leave(self) -> None:
        """Begin no more rounds, and take part in those of others until they do not either.

        It returns at once if this engine cannot compute steps, and after an interrupt.
        """
        waited = 0.0
        try:
            if self._attended and not self._over and not self._has_left:
                self._has_left = True
                self._tell(_LEFT, False)
            while self._attended and not self._over and self._can_step():
                if not (others := self._others()):
                    return
                with self._changed:
                    self._changed.wait(SLICE)
                if waited < SILENCE <= waited + SLICE:
                    names = ", ".join(map(self.name, sorted(others)))
                    _log.warning("taking part in steps until others are closed, too: %s", names)
                waited += SLICE
        finally:
            self._attended = False  # whenever an interrupt comes, the next call waits no more

    def close(self) -> None:
        """End the connections to the other engines."""
        self._over = True
        self._called.set()
        cut_off(self.group)

    def _is_past(self, number: int) -> bool:
        return self.number != number

    def _others(self) -> set[int]:
        """Return the engines that may begin rounds."""
        return self._came.keys() - self._left - self._ended

    def _tell(self, tokens: int, decodes: bool) -> None:
        # Who listens finds that a connection is closed.
        with self._telling, suppress(RuntimeError, ValueError):
            for _, sent in self._sent:  # long ago: the others have answered since
                sent.wait(_FOREVER)
            message = torch.tensor([tokens, decodes], dtype=torch.int64, device="cpu")
            to: dict[str, Any] = {"group": self.group, "tag": _TAG}
            self._sent = [
                (message, dist.isend(message, group_dst=engine, **to)) for engine in self._came
            ]

    def _listen(self, engine: int) -> None:
        came = self._came[engine]
        try:
            while True:
                message = torch.empty(2, dtype=torch.int64, device="cpu")
                work: Any = dist.irecv(message, group=self.group, group_src=engine, tag=_TAG)
                work.wait(_FOREVER)
                tokens, decodes = message.tolist()
                if tokens == _LEFT:
                    self._left.add(engine)
                else:
                    came.put((tokens, bool(decodes)))
                self._note()
        except (RuntimeError, ValueError):
            if not self._over and not (self._has_left and not self._others()):
                self._ended.add(engine)
                came.put(self.end_of_others())
            self._note()

    def _note(self) -> None:
        self._called.set()
        with self._changed:
            self._changed.notify_all()


@contextmanager
def ending(rounds: Rounds | None, always: bool = False) -> Iterator[None]:
    """End the rounds, if there are any, when the block fails, or always."""
    try:
        yield
    except BaseException:
        always = True
        raise
    finally:
        if always and rounds is not None:
            rounds.close()
