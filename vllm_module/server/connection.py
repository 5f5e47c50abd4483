"""One connection: it ends if its client keeps it waiting, or if there are too many."""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from vllm_module.server.errors import ApiError
from vllm_module.server.json_body import json_response


@dataclass(frozen=True)
class Limits:
    """What clients may use of a server.

    Attributes:
        body_bytes: largest size of a body.
        connections: most open connections; more are answered with 503 and closed.
        client_seconds: longest time in which a client sends the headers of a request, its body or
            the next request, or takes some of what was sent to it.
        header_bytes: largest size of the headers of a request that arrive in several pieces.

    """

    body_bytes: int = 16 << 20
    connections: int = 4096
    client_seconds: float = 30.0
    header_bytes: int = 64 << 10

    @property
    def body_values(self) -> int:
        """Most JSON values of a body, names not counted: one for 64 bytes of the largest body."""
        return self.body_bytes >> 6


class Connection(H11Protocol):
    """A connection of uvicorn's, with limits of time that uvicorn has not.

    uvicorn ends one without requests. The endpoint that a body is for waits for it. This class ends
    a connection whose client sends half of the headers, sends a body after its refusal without end,
    or does not take its answer.
    """

    def __init__(self, *arguments: Any, limits: Limits, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.timeout_keep_alive = limits.client_seconds  # type: ignore[assignment]
        self._limits = limits
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to watch the client, or refuse one too many."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            self._refuse(ApiError(503, "there are too many connections: try again later"))
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop watching."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Read a part of a request."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Wait for the rest of the body, or for the next request."""
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """Wait until the client takes what was sent."""
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        """Send more."""
        super().resume_writing()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP; uvicorn's own answer is plain text, and fails after a first one.

        The client is told once.
        """
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(ApiError(400, "this is no HTTP/1.1, or its headers are too large"))
        else:
            self.transport.abort()

    def _watch(self) -> None:
        """Begin the client's time if the server waits for it; end it if not."""
        if not self._waits():
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        elif self._timer is None:
            seconds, untaken = self._limits.client_seconds, self._untaken()
            self._timer = self.loop.call_later(seconds, self._end_unless_taken, untaken)

    def _end_unless_taken(self, before: int) -> None:
        """End the connection, unless it waits for a client that has taken some of its answer."""
        self._timer = None
        takes = self.transport.is_closing() or self.flow.write_paused
        if takes and self._untaken() < before:
            self._watch()
        else:
            self.transport.abort()

    def _untaken(self) -> int:
        """Return how many bytes of answers are not taken: those here, and the system's."""
        queued = b""
        with suppress(OSError, ValueError):  # closed, or another system
            number = self.transport.get_extra_info("socket").fileno()
            queued = fcntl.ioctl(number, termios.TIOCOUTQ, bytes(4))
        return self.transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)

    def _waits(self) -> bool:
        if self.transport.is_closing() or self.flow.write_paused:
            return True
        if self.conn.their_state is h11.SEND_BODY:
            return bool(self.cycle.response_complete)
        if self.conn.their_state is not h11.IDLE:
            return False
        # uvicorn has a timer for the next request, until its first byte.
        return self.cycle is None or bool(self.conn.trailing_data[0])

    def _refuse(self, error: ApiError) -> None:
        answer = json_response(error.body, error.status)
        headers = [*answer.raw_headers, (b"connection", b"close")]
        response = h11.Response(status_code=error.status, headers=headers)
        for event in (response, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
