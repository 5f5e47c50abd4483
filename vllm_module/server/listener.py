"""The socket of a server, and the thread that answers on it."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import stat
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from vllm_module.server.connection import Connection, Limits

_BACKLOG = 2048
_OTHER_FILES = 256  # open files of this process that are no connections


@dataclass(frozen=True)
class Address:
    """Where a server listens: a host and a port (0 for any), or a Unix socket.

    Attributes:
        ssl_certfile, ssl_keyfile: files of TLS, or ``None`` for HTTP without it.

    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None

    def open(self) -> socket.socket:
        """Return a socket that listens. Raises ``OSError`` if the address is taken."""
        if self.uds is None:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            address = (self.host, self.port)
            listening = socket.create_server(address, family=family, backlog=_BACKLOG)
            # Its connections have this, too. Else an event waits until the client has confirmed
            # the one before, which it may put off for 40 ms; asyncio does not see that it is TCP.
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return listening
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(self.uds.stat().st_mode) and not _answers(self.uds):
                self.uds.unlink()  # a server that was killed has left it
        listening = socket.socket(socket.AF_UNIX)
        try:
            listening.bind(str(self.uds))
            listening.listen(_BACKLOG)
        except OSError:
            listening.close()
            raise
        return listening

    def url(self, listening: socket.socket) -> str:
        """Return the URL, for people."""
        scheme = "http" if self.ssl_certfile is None else "https"
        if self.uds is not None:
            return f"{scheme}+unix://{self.uds}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{listening.getsockname()[1]}"


def _allow_files(count: int) -> int:
    """Let this process open so many files for connections; return how many it can."""
    wanted = count + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return min(count, max(1, soft - _OTHER_FILES))
    return count


def _is_fault(record: logging.LogRecord) -> bool:
    """Tell whether a record is of more than a request that a stop has ended."""
    return not isinstance((record.exc_info or (None, None))[1], asyncio.CancelledError)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


class Listener:
    """Answers requests in a thread with an event loop of its own.

    Args:
        app: the application.
        address: where to listen.
        limits: what clients may use; fewer connections if the system allows no more files.
        stop_seconds: how long running requests may take after :meth:`stop`; then they are ended.
        files: open files that a connection needs.

    Attributes:
        url: the server's URL.

    """

    def __init__(
        self,
        app: ASGIApp,
        address: Address,
        limits: Limits,
        stop_seconds: int = 30,
        files: int = 1,
    ) -> None:
        self._address = address
        connections = _allow_files(limits.connections * files) // files
        limits = replace(limits, connections=max(1, connections))
        config = uvicorn.Config(
            app,
            # Not what else is installed: the limits are those of h11.
            http=cast(type[asyncio.Protocol], partial(Connection, limits=limits)),
            loop="auto",  # uvloop, which takes less time for each event
            h11_max_incomplete_event_size=limits.header_bytes,
            ssl_certfile=address.ssl_certfile,
            ssl_keyfile=address.ssl_keyfile,
            log_config=None,
            log_level="error",  # else each client that speaks no HTTP would write a line
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=stop_seconds,
        )
        config.load()  # raises if the files of TLS cannot be read
        logging.getLogger("uvicorn.error").addFilter(_is_fault)
        self._server = uvicorn.Server(config)
        self._socket = address.open()
        self.url = address.url(self._socket)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="http", daemon=True
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Accept no more connections, and let running requests end; a second call ends them.

        Signal handlers may call it.
        """
        self._server.force_exit = self._server.should_exit
        self._server.should_exit = True

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()
        self._socket.close()
        if self._address.uds is not None:
            with suppress(OSError):
                os.unlink(self._address.uds)
