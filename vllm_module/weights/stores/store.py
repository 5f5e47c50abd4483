"""Requests of one load: tried again under a deadline, and many under way at once."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from vllm_module.base.messages import printable
from vllm_module.base.waiting import SLICE, WaitLimitError, interruptibly
from vllm_module.errors import CheckpointFormatError, WeightReadError
from vllm_module.weights.stores.cache import StoreCache
from vllm_module.weights.stores.client import (
    Answer,
    BusyError,
    Client,
    ForbiddenError,
    MissingError,
    RefusedError,
)
from vllm_module.weights.stores.place import Place

_log = logging.getLogger(__name__)

# Requests under way. With REQUEST_BYTES of each, so much memory at most is held for ranges.
UNDER_WAY = 16
RETRY_SECONDS = 60.0  # after a request's first failure
_FIRST_DELAY, _LONGEST_DELAY = 0.1, 8.0

_random = random.Random()  # a user's seed is not to make ranks wait in step
T = TypeVar("T")


def wait_for(futures: Sequence[Future[T]], *, until_failure: bool = False) -> None:
    """Wait until all ``futures`` are done, or one has failed; an interrupt is raised meanwhile.

    A signal that another thread receives is handled only when this one returns to Python.
    """
    ends = FIRST_EXCEPTION if until_failure else ALL_COMPLETED
    while True:
        done, left = wait(futures, SLICE, ends)
        # To wait(), one that a shutdown has cancelled never ends.
        ended = all(future.cancelled() for future in left)
        if ended or (until_failure and any(map(_has_failed, done))):
            return


def _has_failed(future: Future[Any]) -> bool:
    return future.cancelled() or future.exception() is not None


class Store:
    """The files of a folder in a store, for many threads.

    Attributes:
        cache: has what is kept of them.
        patience: seconds in which a request is tried again; by default ``RETRY_SECONDS`` after its
            first failure.

    """

    def __init__(
        self,
        place: Place,
        client: Client,
        cache: StoreCache | None = None,
        patience: float | None = None,
    ) -> None:
        self.place, self.client, self.cache, self.patience = place, client, cache, patience
        self._executor = ThreadPoolExecutor(UNDER_WAY, thread_name_prefix="store-request")
        self._ended = threading.Event()
        self._warned = False

    def close(self) -> None:
        """End the threads, and the waits between requests."""
        self._ended.set()
        self.client.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def fetch(self, name: str, most: int) -> bytes:
        """Return a whole file of at most ``most`` bytes. Raises as :meth:`read` does."""
        return self.persist(lambda: self.client.fetch(name, most), name, "it could not be read")

    def fetch_optional(self, name: str, most: int) -> bytes | None:
        """Return a whole file, ``None`` if it is missing.

        A folder that cannot be listed may answer that it forbids what is missing.
        """
        try:
            return self.fetch(name, most)
        except CheckpointFormatError:
            return None

    def has(self, name: str) -> bool:
        """Tell whether a file can be read. Raises as :meth:`read` does for what is no answer."""
        try:
            self.read(name, 0, memoryview(bytearray(1)))
        except CheckpointFormatError:
            return False
        return True

    def names(self) -> list[str] | None:
        """List the files of the folder; ``None`` where that cannot be. Raises as :meth:`read`."""
        return self.persist(self.client.names, "", "its files could not be read")

    def read(self, name: str, begin: int, view: memoryview) -> Answer:
        """Read bytes from ``begin`` on into ``view``, fewer where the file ends before.

        A file that is missing or may not be read is a CheckpointFormatError; what else stays wrong
        until the deadline is a WeightReadError.
        """
        problem = f"bytes {begin} to {begin + len(view) - 1} could not be read"
        return self.persist(lambda: self.client.read(name, begin, view), name, problem)

    def persist(self, attempt: Callable[[], T], name: str, problem: str) -> T:
        """Return what ``attempt`` returns, tried until the deadline while it raises BusyError.

        ``problem`` says what has failed then. Raises as :meth:`read` does.
        """
        delay, tries = _FIRST_DELAY, 0
        end = 0.0 if self.patience is None else time.monotonic() + self.patience
        while True:
            tries += 1
            try:
                return self._attended(attempt)
            except (MissingError, ForbiddenError) as error:
                raise CheckpointFormatError(f"{self._where(name)}: {error}") from error
            except RefusedError as error:
                raise WeightReadError(f"{self._where(name)}: {error}") from error
            except BusyError as error:
                now = time.monotonic()
                end = end or now + RETRY_SECONDS
                # Half of it at random, so that ranks which failed together do not come together.
                pause = max(delay * _random.uniform(0.5, 1), error.after or 0.0)
                if now + pause > end or self._wait(pause):
                    asked = f", which asks to wait {error.after:g} s" if error.after else ""
                    raise WeightReadError(
                        f"{self._where(name)}: {problem} in {tries} "
                        f"{'try' if tries == 1 else 'tries'}: {error}{asked}; try again when the "
                        "store and the network are well"
                    ) from error
                delay = min(2 * delay, _LONGEST_DELAY)

    def together(self, works: Iterable[Callable[[], T]]) -> list[T]:
        """Call all of ``works``, many at once, and return their results in order.

        If one raises, those that wait are dropped and those under way are waited for, because they
        write to memory of the caller.
        """
        closed = f"{self._where()} was closed; open the checkpoint again"
        futures: list[Future[T]] = []
        try:
            for work in works:
                futures.append(self._executor.submit(work))
            wait_for(futures, until_failure=True)
        except RuntimeError as error:
            if not self._ended.is_set():  # no more threads, and the work is left in the queue
                self.close()
                closed = f"{self._where()}: {error}; raise the limit of threads (ulimit -u)"
            raise WeightReadError(closed) from error
        except BaseException:  # an interrupt, which is not to wait for a store that is away
            self._ended.set()
            self.client.close()
            raise
        finally:
            for future in futures:
                future.cancel()
            wait_for(futures)
        for future in futures:
            if not future.cancelled() and (failure := future.exception()) is not None:
                raise failure
        if any(future.cancelled() for future in futures):  # by the shutdown
            raise WeightReadError(closed)
        return [future.result() for future in futures]

    def warn_of_changes(self) -> None:
        """Log once that the store tells no versions of files, so that a change can be missed."""
        if not self._warned:
            self._warned = True
            _log.warning(
                "%s sends neither ETag nor Last-Modified: a file that changes during the load and "
                "keeps its size is not noticed",
                self._where(),
            )

    def _where(self, name: str = "") -> str:
        return printable(self.place.file(name) if name else str(self.place))

    def _wait(self, seconds: float) -> bool:
        """Wait between two requests; return whether the store was closed."""
        return self._ended.wait(seconds)

    def _attended(self, attempt: Callable[[], T]) -> T:
        """Return ``attempt()``; in the main thread, which handles signals, an interrupt ends it."""
        if threading.current_thread() is not threading.main_thread():
            return attempt()
        try:
            return interruptibly(attempt, self._ended)
        except WaitLimitError as error:
            raise BusyError("the store was closed") from error
        except KeyboardInterrupt:  # the request goes on in its thread until it is ended
            self._ended.set()
            self.client.close()
            raise
