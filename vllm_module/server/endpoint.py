"""One route: its key, its body, its answer, and the departure of its client."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_type_hints

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Message, Receive, Scope, Send

from vllm_module.base.messages import shorten
from vllm_module.server.connection import Limits
from vllm_module.server.errors import ApiError, as_api_error
from vllm_module.server.json_body import encoded, json_response, read_json
from vllm_module.server.protocol import Body

Events = AsyncGenerator[dict[str, Any], None]
Answer = dict[str, Any] | list[Any] | str | Events
Handler = Callable[[Any, Any], Awaitable[Answer]]
Right = Literal["open", "api", "admin"]
# Sends a message of ASGI, and is told of how many events it is, if not of one.
CountingSend = Callable[..., Awaitable[None]]

SMALL_BODY = 1 << 16  # bytes of a body that is checked before another request is
_STREAMED = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]

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

    def check(self, headers: Headers, right: Right) -> None:
        """Raise ``ApiError`` if the request has no key for what it wants."""
        if right == "open" or (right == "api" and not self._api):
            return
        if right == "admin" and not self._admin:
            raise ApiError(403, "this is for operators: start the server with an admin key")
        given = headers.get("authorization", "")
        own = given[7:] if given[:7].lower() == "bearer " else ""
        key = own or headers.get("x-api-key", "")  # the latter is of the Messages API
        digest = _digest(key.encode("latin-1"))  # the bytes that were sent
        keys = self._admin if right == "admin" else self._api + self._admin
        if not sum(hmac.compare_digest(digest, each) for each in keys):  # every key is compared
            message = "the key is missing or wrong: send 'Authorization: Bearer KEY'"
            if right == "admin":
                message += " with an admin key, because this path is for operators"
            raise ApiError(401, message, code="invalid_api_key")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


@dataclass
class Endpoint:
    """An ASGI application for one path: it checks the key, receives the body, and tells errors.

    What it answers is :meth:`answer`, which a subclass has.

    Attributes:
        path: the path.
        right: who may ask.
        handler: function from the server's state and a checked body to a JSON value, a text, or
            events to stream.
        state: of the server.
        keys, limits: of the server.
        kind: the class of the body, which the handler tells; without fields, there is none.

    """

    path: str
    right: Right
    handler: Handler
    state: Any
    keys: Keys
    limits: Limits

    def __post_init__(self) -> None:
        self.kind: type[Body] = get_type_hints(self.handler)["body"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive)
        sent: int | None = None  # events, once the answer has begun

        async def counting(message: Message, events: int = 1) -> None:
            nonlocal sent
            sent = 0 if sent is None else sent + events
            await send(message)

        try:
            self.keys.check(request.headers, self.right)
            await self.answer(request, await self._received(request), counting)
        except ClientDisconnect:
            return
        except (Exception, asyncio.CancelledError) as error:
            told = as_api_error(error)
            if told.status == 500:
                _log.error("a request failed: %s", told.message, exc_info=error)
            if sent is None:
                await json_response(self.kind.told(told), told.status)(scope, receive, send)
            else:  # its end is an event, too
                await send(await event_message(self.kind.told_within(told, sent)))
                await send({"type": "http.response.body", "body": b""})
            if isinstance(error, asyncio.CancelledError):
                raise

    async def answer(self, request: Request, data: bytes, send: CountingSend) -> None:
        """Answer a request that has a key. What this raises is told to the client.

        It is told as an event if the answer has begun.
        """
        raise NotImplementedError

    async def _received(self, request: Request) -> bytes:
        """Return the body. Raises ``ApiError`` beyond the limits of size and time."""
        seconds, limit = self.limits.client_seconds, self.limits.body_bytes
        too_large = ApiError(413, f"the body has more than {limit} bytes", code="body_too_large")

        async def all_of_it() -> bytes:
            length = request.headers.get("content-length", "")
            if length.isdecimal() and int(length[:20]) > limit:
                raise too_large
            data = bytearray()
            async with aclosing(request.stream()) as pieces:
                async for piece in pieces:
                    data += piece
                    if len(data) > limit:
                        raise too_large
            return bytes(data)

        try:
            return await asyncio.wait_for(all_of_it(), seconds)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body did not arrive within {seconds:g} s") from None


_FLAGS: dict[str, Any] = {"true": True, "false": False}  # of a query


class HandlerEndpoint(Endpoint):
    """Answers with what the handler returns, which is cancelled when the client goes away."""

    async def answer(self, request: Request, data: bytes, send: CountingSend) -> None:
        """Check the body and have the handler answer it."""
        # vLLM's clients send an operation's fields so: /pause?mode=keep.
        query: dict[str, list[Any]] = {}
        if self.right == "admin":
            for name, value in request.query_params.multi_items():
                query.setdefault(name, []).append(_FLAGS.get(value, value))
        check = partial(self._checked, request.headers, query, data)
        large = len(data) > SMALL_BODY  # then other requests are answered meanwhile
        body = await asyncio.to_thread(check) if large else check()
        await work_until_gone(self._work(body, request, send), request.receive)

    def _checked(self, headers: Headers, query: dict[str, list[Any]], data: bytes) -> Body:
        if query and data:
            raise ApiError(400, f"send all fields in the body: {shorten(', '.join(query))}")
        needed = any(each.is_required() for each in self.kind.model_fields.values())
        if query or not (data or needed):
            alone = {name: given[0] for name, given in query.items() if len(given) == 1}
            return self.kind.of(query | alone)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # which a page of another origin cannot send unasked
            raise ApiError(415, "send the body with 'Content-Type: application/json'")
        return self.kind.of(read_json(data, self.limits.body_values))

    async def _work(self, body: Body, request: Request, send: Send) -> None:
        answer = await self.handler(self.state, body)
        if isinstance(answer, AsyncGenerator):
            await self._send_events(send, answer)
            return
        response: Response
        if isinstance(answer, str):
            response = PlainTextResponse(answer)
        else:
            response = Response(await encoded(answer), media_type="application/json")
        await response(request.scope, request.receive, send)

    async def _send_events(self, send: Send, events: Events) -> None:
        """Send server-sent events. The answer begins with the first one, which may raise.

        Events that have a type are named by it. Others are OpenAI's chunks, which ``[DONE]`` ends.
        """
        async with aclosing(events):
            first = await anext(events)
            await send({"type": "http.response.start", "status": 200, "headers": _STREAMED})
            await send(await event_message(first))
            async for each in events:
                await send(await event_message(each))
        end = b"" if "type" in first else b"data: [DONE]\n\n"
        await send({"type": "http.response.body", "body": end})


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


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def event_message(value: dict[str, Any]) -> Message:
    """Return a server-sent event, as ASGI sends it."""
    name = f"event: {value['type']}\n".encode() if "type" in value else b""
    body = b"%bdata: %b\n\n" % (name, await encoded(value))
    return {"type": "http.response.body", "body": body, "more_body": True}
