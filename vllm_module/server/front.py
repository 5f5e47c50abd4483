"""The ASGI application before several servers of one model: each request goes to one of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import pydantic_core
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from vllm_module.server.app import ROUTES, unanswered
from vllm_module.server.backends import (
    DEAD,
    BackendAnswer,
    BackendError,
    Backends,
    prefixes_of,
)
from vllm_module.server.connection import Limits
from vllm_module.server.endpoint import (
    GoneError,
    Keys,
    Right,
    receive_body,
    send_body,
    send_json,
    work_until_gone,
)
from vllm_module.server.errors import ApiError
from vllm_module.server.page import page
from vllm_module.server.protocol import Body

# What each engine has of its own, so all of them have to do it.
_FOR_ALL = (
    "/pause", "/resume", "/update_weights", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
    "/abort",
)  # fmt: skip
_TRIES = 2  # engines that a request is given to, one after the other
_PROMPT = ("model", "system", "instructions", "tools", "messages", "prompt", "input")
_FORWARDED = (b"authorization", b"content-type", b"x-api-key")


def front_application(state: Front, keys: Keys, limits: Limits) -> Starlette:
    """Return the application of a server with several engines; it has the routes of one."""
    routes = [
        Route(path, _Forward(state, path, right, kind, keys, limits), methods=[method])
        for method, path, right, kind, _ in ROUTES
    ]
    routes.append(Route("/", page(), methods=["GET"]))
    return Starlette(routes=routes, exception_handlers={HTTPException: unanswered})


class Front:
    """What the routes share.

    Attributes:
        backends: the engines' servers; ``None`` while they are loading.

    """

    backends: Backends | None = None

    def loaded(self) -> Backends:
        """Return the backends. Raises ``ApiError`` while they load, and if all have ended."""
        if self.backends is None:
            raise ApiError(503, "the model is loading: try again later", code="loading")
        if not self.backends.alive():
            raise _no_engine()
        return self.backends


class _Forward:
    """An ASGI application that gives the requests of one path to backends."""

    def __init__(
        self, state: Front, path: str, right: Right, kind: type[Body], keys: Keys, limits: Limits
    ) -> None:
        self._state, self._path, self._right, self._kind = state, path, right, kind
        self._keys, self._limits = keys, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            self._keys.check(scope, self._right)
            body = await receive_body(scope, receive, self._limits)
            backends = self._state.loaded()
        except GoneError:
            return
        except ApiError as error:
            await send_json(send, error.status, self._kind.told(error))
            return
        headers = [each for each in scope["headers"] if each[0] in _FORWARDED]
        if self._path in _FOR_ALL or self._path == "/metrics":
            # To the end, also if the client goes away: engines should not differ.
            await self._by_all(backends, scope["method"], headers, body, send)
        else:
            work = self._by_one(backends, scope["method"], headers, body, send)
            await work_until_gone(work, receive)

    async def _by_one(
        self, backends: Backends, method: str, headers: Any, body: bytes, send: Send
    ) -> None:
        """Give the request to a backend, and to another if the first has no room or ends before.

        Those that end before they have answered are ``_TRIES`` at most: the request may be what
        ends them.
        """
        prefixes, tried, ended = prefixes_of(_prompt(body)), set[Any](), 0
        refusal: tuple[int, Any, bytes] | None = None
        while ended < _TRIES and (backend := backends.choose(prefixes, tried)) is not None:
            tried.add(backend)
            try:
                async with backend.ask(method, self._path, headers, body) as answer:
                    if _is_stream(answer):
                        await self._stream(answer, send)
                        return
                    data = b"".join([piece async for piece in answer.body])
            except BackendError:
                ended += 1
                continue
            # Its process may outlive a rank of its engine.
            if answer.status >= 500 and await backend.health() == DEAD:
                backend.end()
                ended += 1
                continue
            if answer.status != 503:
                await send_body(send, answer.status, answer.headers, data)
                return
            refusal = answer.status, answer.headers, data
        if refusal is not None:
            await send_body(send, *refusal)
        else:
            await self._refuse(backends, send)

    async def _stream(self, answer: BackendAnswer, send: Send) -> None:
        """Pass whole events on; if the backend ends after the first one, the last is an error."""
        begin = {"type": "http.response.start", "status": 200, "headers": answer.headers}
        begun, rest = False, b""
        try:
            async for piece in answer.body:
                events, end, rest = (rest + piece).rpartition(b"\n\n")
                if end and not begun:
                    begun = True
                    await send(begin)
                if end:
                    body = {"type": "http.response.body", "body": events + end, "more_body": True}
                    await send(body)
        except BackendError:
            if not begun:
                raise
            told = self._kind.told(ApiError(500, "the engine of this request has ended"))
            name = f"event: {told['type']}\n" if "type" in told else ""
            rest = f"{name}data: {json.dumps(told)}\n\n".encode()
        if not begun:
            await send(begin)
        await send({"type": "http.response.body", "body": rest})

    async def _by_all(
        self, backends: Backends, method: str, headers: Any, body: bytes, send: Send
    ) -> None:
        """Give the request to all backends; answer as the first that refused, or the first."""

        async def whole(backend: Any) -> tuple[int, int, Any, bytes] | None:
            try:
                async with backend.ask(method, self._path, headers, body) as answer:
                    data = b"".join([piece async for piece in answer.body])
                    return backend.number, answer.status, answer.headers, data
            except BackendError as error:
                if backend not in backends.alive():  # the others are all
                    return None
                message = f"engine {backend.number} gave no answer, and others may have: {error}"
                told = json.dumps(self._kind.told(ApiError(500, message))).encode()
                return backend.number, 500, [(b"content-type", b"application/json")], told

        gathered = await asyncio.gather(*map(whole, backends.alive()))
        answers = [each for each in gathered if each is not None]
        if not answers:
            await self._refuse(backends, send)
            return
        _, status, kept, data = max(answers, key=lambda each: each[1] >= 400)
        if self._path == "/metrics" and status == 200:
            data = _joined((number, text.decode()) for number, _, _, text in answers).encode()
            kept = [each for each in kept if each[0] != b"content-length"]
            kept.append((b"content-length", b"%d" % len(data)))
        await send_body(send, status, kept, data)

    async def _refuse(self, backends: Backends, send: Send) -> None:
        error = _no_engine()
        if backends.alive():
            message = "the engine of this request has ended, or could not be reached: try again"
            error = ApiError(503, message)
        await send_json(send, error.status, self._kind.told(error))


def _no_engine() -> ApiError:
    return ApiError(
        503, "all engines of this server have ended: start it again", code="engine_dead"
    )


def _is_stream(answer: BackendAnswer) -> bool:
    kind = dict(answer.headers).get(b"content-type", b"")
    return answer.status == 200 and kind.startswith(b"text/event-stream")


def _prompt(body: bytes) -> bytes:
    """Return the bytes of a request that its pages depend on, in the order of the pages."""
    try:
        given = pydantic_core.from_json(body)
    except ValueError:  # a backend refuses it
        return b""
    if not isinstance(given, dict):
        return b""
    return json.dumps([given[name] for name in _PROMPT if name in given]).encode()


def _joined(texts: Iterable[tuple[int, str]]) -> str:
    """Return metrics of several engines as one text, each with the label ``engine``."""
    samples: dict[str, list[str]] = {}
    for number, text in texts:
        head = ""
        for line in text.splitlines():
            if line.startswith("#"):
                head = line
            elif line:
                name, _, rest = line.partition("{")
                samples.setdefault(head, []).append(f'{name}{{engine="{number}",{rest}')
    lines = [line for head, found in samples.items() for line in (head, *found)]
    return "\n".join([*lines, ""])
