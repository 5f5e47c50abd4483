"""The ASGI application before several servers of one model: each request goes to one of them."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pydantic_core
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from vllm_module.base.messages import shorten
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

_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
# What each engine has of its own, so all of them have to do it.
_IN_TURN = "/pause", "/update_weights"
_FOR_ALL = "/resume", "/reset_prefix_cache", "/abort"  # at any time: a pause may wait for them
_SCRAPE = 5.0  # seconds that an engine has to tell its metrics
_GONE = 5.0  # seconds that an engine has to end the requests of clients that have gone
_POLL = 0.05
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
        asked: how many requests are being answered, by the model or adapter that they name.
        changes: held while the engines change what they compute with.

    """

    backends: Backends | None = None

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self._changing: str | None = None
        self.changes = asyncio.Lock()

    @asynccontextmanager
    async def asking(self, model: str) -> AsyncIterator[None]:
        """Count a request for a model; wait first while engines load or unload an adapter of it."""
        while self._changing == model:
            async with self.changes:
                pass
        self.asked[model] += 1
        try:
            yield
        finally:
            self.asked[model] -= 1
            if not self.asked[model]:
                del self.asked[model]

    @asynccontextmanager
    async def changing(self, adapter: str) -> AsyncIterator[None]:
        """Hold up requests for an adapter, and other changes of adapters."""
        async with self.changes:
            self._changing = adapter
            try:
                yield
            finally:
                self._changing = None

    def loaded(self) -> Backends:
        """Return the backends. Raises ``ApiError`` while they load, and if all have ended."""
        if self.backends is None:
            raise ApiError(503, "the model is loading: try again later", code="loading")
        if not self.backends.alive():
            raise _no_engine()
        return self.backends


class _Whole(NamedTuple):
    """The whole answer of a backend, as :class:`BackendAnswer` has it."""

    backend: Any
    status: int
    headers: list[tuple[bytes, bytes]]
    data: bytes


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
        if self._path in (_LOAD, _UNLOAD):
            # To the end, also if the client goes away: engines should not differ.
            await self._by_all_or_none(backends, headers, body, send)
        elif self._path in _IN_TURN:  # in one order in all engines
            async with self._state.changes:
                await self._by_all(backends, headers, body, send)
        elif self._path in _FOR_ALL:
            await self._by_all(backends, headers, body, send)
        elif self._path == "/metrics":
            await work_until_gone(self._metrics(backends, headers, send), receive)
        else:
            work = self._by_one(backends, scope["method"], headers, body, send)
            await work_until_gone(work, receive)

    async def _by_one(
        self, backends: Backends, method: str, headers: Any, body: bytes, send: Send
    ) -> None:
        """Give the request to a backend."""
        given = _fields(body)
        async with self._state.asking(str(given.get("model"))):
            await self._try(backends, method, headers, body, prefixes_of(_prompt(given)), send)

    async def _try(
        self, backends: Backends, method: str, headers: Any, body: bytes, prefixes: Any, send: Send
    ) -> None:
        """Give the request to a backend, and to another if the first has no room or ends before.

        Those that end before they have answered are ``_TRIES`` at most: the request may be what
        ends them.
        """
        tried, ended = set[Any](), 0
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
        begun, rest, sent = False, b"", 0
        try:
            async for piece in answer.body:
                events, end, rest = (rest + piece).rpartition(b"\n\n")
                if end and not begun:
                    begun = True
                    await send(begin)
                if end:
                    sent += events.count(b"\n\n") + 1
                    body = {"type": "http.response.body", "body": events + end, "more_body": True}
                    await send(body)
        except BackendError:
            if not begun:
                raise
            error = ApiError(500, "the engine of this request has ended")
            told = self._kind.told_within(error, sent)
            name = f"event: {told['type']}\n" if "type" in told else ""
            rest = f"{name}data: {json.dumps(told)}\n\n".encode()
        if not begun:
            await send(begin)
        await send({"type": "http.response.body", "body": rest})

    async def _by_all(self, backends: Backends, headers: Any, body: bytes, send: Send) -> None:
        """Give the request to all backends; answer as the first that refused, or the first."""
        answers = await self._each(backends, backends.alive(), "POST", headers, body)
        await self._answer(backends, answers, send)

    async def _metrics(self, backends: Backends, headers: Any, send: Send) -> None:
        """Join the metrics of all backends that answer in time."""
        asked = self._each(backends, backends.alive(), "GET", headers, b"", seconds=_SCRAPE)
        answers = [each for each in await asked if each.status == 200]
        if answers:
            data = _joined((each.backend.number, each.data.decode()) for each in answers).encode()
            kept = [each for each in answers[0].headers if each[0] != b"content-length"]
            answers = [_Whole(answers[0].backend, 200, [*kept, _length(data)], data)]
        await self._answer(backends, answers, send)

    async def _by_all_or_none(
        self, backends: Backends, headers: Any, body: bytes, send: Send
    ) -> None:
        """Load or unload an adapter in all engines, or in none of them.

        If one refuses to load it, the others unload it; what ``load_inplace`` wrote is not undone.
        If requests use it, none unloads it; an engine may still have one whose client has gone. One
        that has unloaded it before, when another could not, is no reason to refuse.
        """
        given = _fields(body)
        name = str(given.get("lora_name"))
        async with self._state.changing(name):
            if self._path == _UNLOAD and (count := self._state.asked[name]):
                message = f"{count} requests use the adapter {shorten(name)}: wait for them, or "
                error = ApiError(409, f"{message}abort them", "lora_name")
                await send_json(send, error.status, self._kind.told(error))
                return
            answers = await self._each(backends, backends.alive(), "POST", headers, body)
            if self._path == _UNLOAD:
                end = time.monotonic() + _GONE
                while any(each.status == 409 for each in answers) and time.monotonic() < end:
                    await asyncio.sleep(_POLL)
                    busy = [each.backend for each in answers if each.status == 409]
                    answers = [each for each in answers if each.status != 409]
                    answers += await self._each(backends, busy, "POST", headers, body)
                answers = [each for each in answers if each.status != 400] or answers
            elif any(each.status >= 400 for each in answers) and not given.get("load_inplace"):
                took = [each.backend for each in answers if each.status in (200, 500)]
                undo = json.dumps({"lora_name": name}).encode()
                undone = await self._each(backends, took, "POST", headers, undo, _UNLOAD)
                kept = [each for each in undone if each.status not in (200, 400)]
                answers = kept or [each for each in answers if each.status >= 400]
        await self._answer(backends, answers, send)

    async def _each(
        self, backends: Backends, asked: Iterable[Any], method: str, headers: Any, body: bytes,
        path: str | None = None, seconds: float | None = None,
    ) -> list[_Whole]:  # fmt: skip
        """Give a request to some backends at once; return what those answer that have not ended.

        Those that do not answer within ``seconds`` are left out, too.
        """

        async def whole(backend: Any) -> _Whole | None:
            try:
                async with backend.ask(method, path or self._path, headers, body) as answer:
                    data = b"".join([piece async for piece in answer.body])
            except BackendError as error:
                if backend not in backends.alive():  # the others are all
                    return None
                message = f"engine {backend.number} gave no answer, and others may have: {error}"
                told = json.dumps(self._kind.told(ApiError(500, message))).encode()
                return _Whole(backend, 500, [(b"content-type", b"application/json")], told)
            if answer.status >= 500 and await backend.health() == DEAD:
                backend.end()
                return None
            return _Whole(backend, answer.status, answer.headers, data)

        async def in_time(backend: Any) -> _Whole | None:
            try:
                return await asyncio.wait_for(whole(backend), seconds)
            except asyncio.TimeoutError:
                return None

        return [each for each in await asyncio.gather(*map(in_time, asked)) if each is not None]

    async def _answer(self, backends: Backends, answers: list[_Whole], send: Send) -> None:
        """Answer as the first that refused, or the first; say so if others did what was asked."""
        if not answers:
            await self._refuse(backends, send)
            return
        first = max(answers, key=lambda each: each.status >= 400)
        did, refused = list[str](), list[str]()
        for each in answers:
            (refused if each.status >= 400 else did).append(str(each.backend.number))
        if not did or not refused:
            await send_body(send, first.status, first.headers, first.data)
            return
        message = (
            f"of the engines, {', '.join(did)} did this and {', '.join(refused)} did not, so they "
            f"differ until it is sent again: {_message(first.data)}"
        )
        await send_json(send, first.status, self._kind.told(ApiError(first.status, message)))

    async def _refuse(self, backends: Backends, send: Send) -> None:
        error = _no_engine()
        if backends.alive():
            message = "the engine of this request has ended, or could not be reached: try again"
            error = ApiError(503, message)
        await send_json(send, error.status, self._kind.told(error))


def _message(data: bytes) -> str:
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return data.decode(errors="replace")


def _no_engine() -> ApiError:
    return ApiError(
        503, "all engines of this server have ended: start it again", code="engine_dead"
    )


def _length(data: bytes) -> tuple[bytes, bytes]:
    return b"content-length", b"%d" % len(data)


def _is_stream(answer: BackendAnswer) -> bool:
    kind = dict(answer.headers).get(b"content-type", b"")
    return answer.status == 200 and kind.startswith(b"text/event-stream")


def _fields(body: bytes) -> dict[str, Any]:
    """Return what a body gives; nothing for one that a backend refuses."""
    try:
        given = pydantic_core.from_json(body)
    except ValueError:
        return {}
    return given if isinstance(given, dict) else {}


def _prompt(given: dict[str, Any]) -> bytes:
    """Return the bytes of a request that its pages depend on, in the order of the pages."""
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
