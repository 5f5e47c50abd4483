"""Servers of one model behind one address, each a process with an engine of its own."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple

import h11

from vllm_module.runtime.ranks.guard import Guard
from vllm_module.weights.written_folder import new_folder

DEAD = "engine_dead"
"""The code of the error of a server whose engine has ended."""

_MOST_PREFIXES = 1 << 16
_SLACK = 4  # requests that a backend may have beside twice those of the one with the fewest
_PIECE = 1 << 16
_POLL = 0.05  # seconds
_END = 5.0  # seconds that a backend has to end after the last request


class BackendError(Exception):
    """A backend cannot be reached, or its answer ended before all of it had come."""


class BackendAnswer(NamedTuple):
    """The answer of a backend.

    Attributes:
        status: of HTTP.
        headers: those that are for the client.
        body: its pieces as they come; raises :class:`BackendError`.

    """

    status: int
    headers: list[tuple[bytes, bytes]]
    body: AsyncIterator[bytes]

    async def read(self) -> bytes:
        """Return the rest of the body."""
        return b"".join([piece async for piece in self.body])


class Backend:
    """One server process, on a Unix socket.

    Attributes:
        number: from 0 on.
        running: requests that it has not answered.
        dropped: it gets no more requests, although its process may run.

    """

    def __init__(
        self,
        number: int,
        path: Path,
        command: Sequence[str],
        environment: Mapping[str, str],
        cores: set[int],
    ) -> None:
        self.number, self.running, self.dropped = number, 0, False
        self._path = path
        self._process = subprocess.Popen(
            command,
            env=os.environ | environment,
            start_new_session=True,  # Ctrl-C is for the front, which ends it
        )
        if cores:  # for itself, before torch counts them
            os.sched_setaffinity(self.pid, cores)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code; ``None`` while it runs, and ``-n`` after signal n."""
        return self._process.poll()

    @asynccontextmanager
    async def ask(
        self, method: str, target: str, headers: Iterable[tuple[bytes, bytes]], body: bytes = b""
    ) -> AsyncIterator[BackendAnswer]:
        """Send a request, and yield the answer once its headers have come.

        The end of the block ends the request. Raises :class:`BackendError`.
        """
        self.running += 1
        writer = None
        try:
            reader, writer = await asyncio.open_unix_connection(str(self._path))
            connection = h11.Connection(h11.CLIENT)
            asked = [(b"host", b"backend"), (b"connection", b"close"), *headers]
            if body:
                asked.append((b"content-length", b"%d" % len(body)))
            for event in (
                h11.Request(method=method, target=target, headers=asked),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                writer.write(connection.send(event) or b"")
            await writer.drain()
            events = _events(connection, reader)
            begin = await anext(events)
            assert isinstance(begin, h11.Response), begin
            dropped = (b"connection", b"date", b"transfer-encoding")
            kept = [each for each in begin.headers if each[0] not in dropped]
            body_events = (bytes(e.data) async for e in events if isinstance(e, h11.Data))
            yield BackendAnswer(begin.status_code, kept, body_events)
        except OSError as error:
            raise BackendError(str(error)) from error
        finally:
            self.running -= 1
            if writer is not None:
                writer.close()

    async def health(self) -> str:
        """Return "ok", the code of the error that /health answers, or nothing without an answer."""
        with suppress(BackendError, ValueError, KeyError, TypeError):  # of another shape
            async with self.ask("GET", "/health", ()) as answer:
                data = await answer.read()
                return "ok" if answer.status == 200 else str(json.loads(data)["error"]["code"])
        return ""

    def terminate(self) -> None:
        """Tell the process to end."""
        self.dropped = True
        self._process.terminate()

    def end(self) -> None:
        """Tell the process to end, and see to it, while the server goes on."""
        if self.dropped:  # a second signal would break off the answers that it still gives
            return
        self.terminate()
        Thread(target=self.wait, args=(_END,), name="ending", daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Wait until the process has ended; end it by force after so many seconds."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


async def _events(
    connection: h11.Connection, reader: asyncio.StreamReader
) -> AsyncIterator[h11.Event]:
    while True:
        try:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(_PIECE))
                continue
        except (OSError, h11.RemoteProtocolError) as error:
            raise BackendError(str(error)) from error
        if isinstance(event, h11.EndOfMessage):
            return
        assert isinstance(event, h11.Event), event
        yield event


class Backends:
    """The processes of a server, and the choice of one for each request.

    Args:
        command: what starts one.
        variable: of its environment, which names the Unix socket that it listens on.
        environments: what else is in the environment of each.

    """

    def __init__(
        self, command: Sequence[str], variable: str, environments: Sequence[Mapping[str, str]]
    ) -> None:
        folder = new_folder("several engines", owner=self)  # nobody else may open it
        self._guard = Guard()
        self._prefix_backends: OrderedDict[int, Backend] = OrderedDict()
        self._turn = 0
        self.all: list[Backend] = []
        cores, count = sorted(os.sched_getaffinity(0)), len(environments)
        try:
            for number, environment in enumerate(environments):
                own = {*cores[number::count]} if len(cores) >= count else set[int]()
                path = folder / f"{number}.socket"
                backend = Backend(number, path, command, {**environment, variable: str(path)}, own)
                self.all.append(backend)
                self._guard.add(backend.pid)
        except BaseException:  # such as Ctrl-C
            self.close()
            raise

    def until_ready(self, stopped: Event) -> str | None:
        """Wait until all answer that they are healthy, or for ``stopped``.

        Returns how one ended before, if it did.
        """
        for backend in self.all:
            while not stopped.is_set() and asyncio.run(backend.health()) != "ok":
                for each in self.all:
                    if each.code is not None:
                        return f"engine {each.number} (pid {each.pid}) {ended(each.code)}"
                stopped.wait(_POLL)
        return None

    def alive(self) -> list[Backend]:
        """Return those that run, and whose engine is not known to have ended."""
        return [each for each in self.all if not each.dropped and each.code is None]

    def choose(self, prefixes: Sequence[int], tried: Collection[Backend] = ()) -> Backend | None:
        """Return the backend for a request; ``None`` if none is left that was not tried.

        It is the one that had the longest of these prefixes last, whose pages it has, unless it has
        far more to do than another one. Else the one with the fewest requests, in turn.

        Args:
            prefixes: of the prompt, the shortest one first, each as a number.
            tried: backends that have failed the request.

        """
        usable = [each for each in self.alive() if each not in tried]
        if not usable:
            return None
        fewest = min(each.running for each in usable)
        known = (self._prefix_backends.get(each) for each in reversed(prefixes))
        chosen = next((each for each in known if each in usable), None)
        if chosen is None or chosen.running > 2 * fewest + _SLACK:
            self._turn += 1
            idle = [each for each in usable if each.running == fewest]
            chosen = idle[self._turn % len(idle)]
        for each in prefixes:
            self._prefix_backends[each] = chosen
            self._prefix_backends.move_to_end(each)
        while len(self._prefix_backends) > _MOST_PREFIXES:
            self._prefix_backends.popitem(last=False)
        return chosen

    def close(self) -> None:
        """End all processes."""
        for each in self.all:
            each.terminate()
        for each in self.all:
            each.wait(_END)
        self._guard.end()


def ended(code: int) -> str:
    """Return how a process ended."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def prefixes_of(text: bytes) -> list[int]:
    """Return the hashes of prefixes of a prompt, each twice as long as the one before."""
    return list(_prefixes(text))


def _prefixes(text: bytes) -> Iterator[int]:
    length = 256
    while length <= len(text):
        yield hash(text[:length])
        length *= 2
