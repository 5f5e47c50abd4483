"""One route: its key, its body, its answer, and the departure of its client."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import math
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Iterable
from contextlib import aclosing
from typing import Any, Literal

import pydantic_core
from starlette.types import Message, Receive, Scope, Send

from vllm_module.server.connection import Limits
from vllm_module.server.errors import ApiError, as_api_error
from vllm_module.server.protocol import Body

Events = AsyncGenerator[dict[str, Any], None]
Answer = dict[str, Any] | list[Any] | str | Events
Right = Literal["open", "api", "admin"]

# Without this, no number of a body becomes infinite when it is read.
_LARGE = re.compile(rb"[0-9][eE]\+?[0-9]{2}|[0-9]{200}")

_log = logging.getLogger(__name__)


class Keys:
    """The keys of a server, of which only digests are kept; they are compared in constant time.

    Raises ``ValueError`` for an empty key, which a request without one would have.
    """

    def __init__(self, api: Collection[str], admin: Collection[str]) -> None:
        if not all((*api, *admin)):
            raise ValueError("a key is empty, as where a variable of the shell is not set")
        self._admin = [_digest(key.encode()) for key in admin]
        self._api = [_digest(key.encode()) for key in api]

    def check(self, scope: Scope, right: Right) -> None:
        """Raise ``ApiError`` if the request has no key for what it wants."""
        if right == "open" or (right == "api" and not self._api):
            return
        if right == "admin" and not self._admin:
            raise ApiError(403, "this is for operators: start the server with an admin key")
        given = _header(scope, b"authorization")
        own = given[7:] if given[:7].lower() == b"bearer " else b""
        digest = _digest(own or _header(scope, b"x-api-key"))  # the latter is Anthropic's
        keys = self._admin if right == "admin" else self._api + self._admin
        if not sum(hmac.compare_digest(digest, key) for key in keys):  # every key is compared
            raise ApiError(
                401, "the key is missing or wrong: send 'Authorization: Bearer KEY'",
                code="invalid_api_key",
            )  # fmt: skip


def _header(scope: Scope, wanted: bytes) -> bytes:
    """Return the first value of a header, or nothing."""
    return next((value for name, value in scope["headers"] if name == wanted), b"")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Endpoint:
    """An ASGI application that answers one path.

    Args:
        handler: function from a checked body to a JSON value, a text, or events to stream. It is
            cancelled when the client goes away.
        kind: the class of the body; without fields, the request has none.
        right: who may ask.
        keys, limits: of the server.

    """

    def __init__(
        self,
        handler: Callable[[Any], Awaitable[Answer]],
        kind: type[Body],
        right: Right,
        keys: Keys,
        limits: Limits,
    ) -> None:
        self._handler, self._kind, self._right = handler, kind, right
        self._keys, self._limits = keys, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            self._keys.check(scope, self._right)
            body = self._checked(scope, await receive_body(scope, receive, self._limits))
        except GoneError:
            return
        except ApiError as error:
            await send_json(send, error.status, self._kind.told(error))
            return
        await work_until_gone(self._work(body, send), receive)

    def _checked(self, scope: Scope, data: bytes) -> Body:
        if not data and not any(each.is_required() for each in self._kind.model_fields.values()):
            return self._kind.of({})
        kind = _header(scope, b"content-type").partition(b";")[0].strip().lower()
        if kind != b"application/json":  # which a page of another origin cannot send unasked
            raise ApiError(415, "send the body with 'Content-Type: application/json'")
        try:
            given = pydantic_core.from_json(data, allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(400, f"the body is no JSON: {error}") from None
        if _LARGE.search(data) and not _is_finite(given):
            raise ApiError(400, "the body has a number that is too large for a float")
        return self._kind.of(given)

    async def _work(self, body: Body, send: Send) -> None:
        try:
            answer = await self._handler(body)
            if isinstance(answer, AsyncGenerator):
                await self._send_events(send, answer)
            elif isinstance(answer, str):
                await _send(send, 200, b"text/plain; charset=utf-8", answer.encode())
            else:
                await send_json(send, 200, answer)
        except Exception as error:
            told = _told(error)
            await send_json(send, told.status, self._kind.told(told))

    async def _send_events(self, send: Send, events: Events) -> None:
        """Send server-sent events; an error before the first one is raised, and later is one.

        Events that have a type are named by it. Others are OpenAI's chunks, which ``[DONE]`` ends,
        unless an error does.
        """
        async with aclosing(events):
            first = await anext(events)
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),  # nginx would hold events back
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send(_event(first))
            end = b"" if "type" in first else b"data: [DONE]\n\n"
            sent = 1
            try:
                async for each in events:
                    await send(_event(each))
                    sent += 1
            except Exception as error:
                await send(_event(self._kind.told_within(_told(error), sent)))
                end = b""
        await send({"type": "http.response.body", "body": end})


class GoneError(Exception):
    """The client went away before its body was complete."""


async def receive_body(scope: Scope, receive: Receive, limits: Limits) -> bytes:
    """Receive a body. Raises ``ApiError`` beyond the limits of size and time, or ``GoneError``."""
    seconds = limits.client_seconds
    try:
        return await asyncio.wait_for(_received(scope, receive, limits.body_bytes), seconds)
    except asyncio.TimeoutError:
        raise ApiError(408, f"the body did not arrive within {seconds:g} s") from None


async def _received(scope: Scope, receive: Receive, limit: int) -> bytes:
    too_large = ApiError(413, f"the body has more than {limit} bytes", code="body_too_large")
    length = _header(scope, b"content-length")
    if length.isdigit() and int(length[:20]) > limit:
        raise too_large
    chunks, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise GoneError
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > limit:
            raise too_large
        more = message.get("more_body", False)
    return b"".join(chunks)


async def work_until_gone(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Do what answers a request; cancel it when the client goes away."""
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        failure, _ = await asyncio.gather(*tasks, return_exceptions=True)
    if isinstance(failure, Exception):
        raise failure


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _told(error: Exception) -> ApiError:
    """Return what a client is told of an error; log those that are no client's."""
    told = as_api_error(error)
    if told.status == 500:
        _log.error("a request failed: %s", told.message, exc_info=error)
    return told


def _encode(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def _event(value: dict[str, Any]) -> Message:
    name = f"event: {value['type']}\n".encode() if "type" in value else b""
    body = b"%bdata: %b\n\n" % (name, _encode(value))
    return {"type": "http.response.body", "body": body, "more_body": True}


async def send_json(send: Send, status: int, value: object) -> None:
    """Send a JSON value as the whole answer."""
    await _send(send, status, b"application/json", _encode(value))


async def _send(send: Send, status: int, kind: bytes, data: bytes) -> None:
    headers = [(b"content-type", kind), (b"content-length", b"%d" % len(data))]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send_body(send, status, headers, data)


async def send_body(
    send: Send, status: int, headers: Iterable[tuple[bytes, bytes]], data: bytes
) -> None:
    """Send a whole answer."""
    await send({"type": "http.response.start", "status": status, "headers": [*headers]})
    await send({"type": "http.response.body", "body": data})
