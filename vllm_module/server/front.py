"""The ASGI application before several servers of one model: each request goes to one of them."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.requests import Request

from vllm_module.base.messages import shorten
from vllm_module.server.app import routed
from vllm_module.server.backends import (
    DEAD,
    BackendAnswer,
    BackendError,
    Backends,
    prefixes_of,
)
from vllm_module.server.connection import Limits
from vllm_module.server.endpoint import (
    SMALL_BODY,
    CountingSend,
    Endpoint,
    Keys,
    work_until_gone,
)
from vllm_module.server.errors import ApiError, loading
from vllm_module.server.json_body import json_response, read_json

_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
# What each engine has of its own, so all of them have to do it.
_IN_TURN = "/pause", "/sleep", "/wake_up", "/update_weights"
_FOR_ALL = "/resume", "/reset_prefix_cache", "/abort"  # at any time: a pause may wait for them
_SCRAPE = 5.0  # seconds that an engine has to tell its metrics
_GONE = 5.0  # seconds that an engine has to end the requests of clients that have gone
_POLL = 0.05
_TRIES = 2  # engines that a request is given to, one after the other
_PROMPT = ("model", "system", "instructions", "tools", "messages", "prompt", "input")
_FORWARDED = (b"authorization", b"content-type", b"x-api-key")


def front_application(state: Front, keys: Keys, limits: Limits) -> Starlette:
    """Return the application of a server with several engines; it has the routes of one."""
    return routed(_Forward, state, keys, limits)


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
            raise loading()
        if not self.backends.alive():
            raise _ended(self.backends)
        return self.backends


class _Asked(NamedTuple):
    """What a backend is asked, as its method ``ask`` takes it."""

    method: str
    target: str
    headers: list[tuple[bytes, bytes]]
    body: bytes


class _Whole(NamedTuple):
    """The whole answer of a backend, as :class:`BackendAnswer` has it."""

    backend: Any
    status: int
    headers: list[tuple[bytes, bytes]]
    data: bytes

    async def send(self, send: CountingSend) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.data})


class _Forward(Endpoint):
    """Gives the requests of one path to backends."""

    async def answer(self, request: Request, data: bytes, send: CountingSend) -> None:
        """Ask one backend or all of them."""
        backends = self.state.loaded()
        headers = [each for each in request.headers.raw if each[0] in _FORWARDED]
        asked = _Asked(request.method, self.path, headers, data)
        if self.path in (*_IN_TURN, *_FOR_ALL) and request.url.query:
            asked = asked._replace(target=f"{self.path}?{request.url.query}")
        if self.path in (_LOAD, _UNLOAD):
            # To the end, also if the client goes away: engines should not differ.
            await (await self._by_all_or_none(backends, asked)).send(send)
        elif self.path in _IN_TURN:  # in one order in all engines
            async with self.state.changes:
                await (await self._by_all(backends, asked)).send(send)
        elif self.path in _FOR_ALL:
            await (await self._by_all(backends, asked)).send(send)
        elif self.path == "/metrics":
            await work_until_gone(self._metrics(backends, asked, send), request.receive)
        else:
            await work_until_gone(self._by_one(backends, asked, send), request.receive)

    async def _by_one(self, backends: Backends, asked: _Asked, send: CountingSend) -> None:
        """Give the request to a backend, and to another if the first has no room or ends before.

        Those that end before they have answered are ``_TRIES`` at most: the request may be what
        ends them.
        """
        if len(asked.body) > SMALL_BODY:  # other answers are passed on meanwhile
            model, prefixes = await asyncio.to_thread(_aim_of, asked.body, self.limits)
        else:
            model, prefixes = _aim_of(asked.body, self.limits)
        tried, ended = set[Any](), 0
        answer: _Whole | None = None
        async with self.state.asking(model):
            while ended < _TRIES and (backend := backends.choose(prefixes, tried)) is not None:
                tried.add(backend)
                try:
                    answer = await self._ask(backend, asked, send)
                except BackendError:
                    ended += 1
                    continue
                if answer is None:
                    return
                if answer.status != 503:
                    break
            if answer is None:
                raise _ended(backends)
            await answer.send(send)

    async def _ask(
        self, backend: Any, asked: _Asked, send: CountingSend | None = None
    ) -> _Whole | None:
        """Return the whole answer of a backend; ``None`` if it was a stream, passed on to ``send``.

        Raises :class:`BackendError` if the backend ends before it has answered. Its process may
        outlive a rank of its engine.
        """
        async with backend.ask(*asked) as answer:
            if send is not None and _is_stream(answer):
                await self._stream(answer, send)
                return None
            whole = _Whole(backend, answer.status, answer.headers, await answer.read())
        # One that another request has dropped meanwhile may tell its health no more.
        if whole.status >= 500 and (await backend.health() == DEAD or backend.dropped):
            backend.end()
            raise BackendError("its engine has ended")
        return whole

    async def _stream(self, answer: BackendAnswer, send: CountingSend) -> None:
        """Pass whole events on. If the backend ends after the first one, that is an error."""
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
                    await send(body, events.count(b"\n\n") + 1)
        except BackendError as error:
            if not begun:
                raise
            raise ApiError(500, "the engine of this request has ended") from error
        if not begun:
            await send(begin)
        await send({"type": "http.response.body", "body": rest})

    async def _by_all(self, backends: Backends, asked: _Asked) -> _Whole:
        """Give the request to all backends; return the first refusal, or the first answer."""
        return self._one_of(backends, await self._each(backends, backends.alive(), asked))

    async def _metrics(self, backends: Backends, asked: _Asked, send: CountingSend) -> None:
        """Join the metrics of all backends that answer in time."""
        asked = asked._replace(method="GET")  # the length that HEAD is told is of all of them
        told = await self._each(backends, backends.alive(), asked, _SCRAPE)
        answers = [each for each in told if each.status == 200]
        first = self._one_of(backends, answers)
        data = _joined((each.backend.number, each.data.decode()) for each in answers).encode()
        headers = [each for each in first.headers if each[0] != b"content-length"]
        headers.append((b"content-length", b"%d" % len(data)))
        await first._replace(headers=headers, data=data).send(send)

    async def _by_all_or_none(self, backends: Backends, asked: _Asked) -> _Whole:
        """Load or unload an adapter in all engines, or in none of them.

        If one refuses to load it, the others unload it; what ``load_inplace`` wrote is not undone.
        If requests use it, none unloads it; an engine may still have one whose client has gone. One
        that has unloaded it before, when another could not, is no reason to refuse.
        """
        given = _fields(asked.body, self.limits)
        name = str(given.get("lora_name"))
        async with self.state.changing(name):
            if self.path == _UNLOAD and (count := self.state.asked[name]):
                message = f"{count} requests use the adapter {shorten(name)}: wait for them, or "
                raise ApiError(409, f"{message}abort them", "lora_name")
            answers = await self._each(backends, backends.alive(), asked)
            if self.path == _UNLOAD:
                end = time.monotonic() + _GONE
                while any(each.status == 409 for each in answers) and time.monotonic() < end:
                    await asyncio.sleep(_POLL)
                    busy = [each.backend for each in answers if each.status == 409]
                    answers = [each for each in answers if each.status != 409]
                    answers += await self._each(backends, busy, asked)
                answers = [each for each in answers if each.status != 400] or answers
            elif any(each.status >= 400 for each in answers) and not given.get("load_inplace"):
                took = [each.backend for each in answers if each.status in (200, 500)]
                undo = json.dumps({"lora_name": name}).encode()
                undone = await self._each(backends, took, asked._replace(target=_UNLOAD, body=undo))
                kept = [each for each in undone if each.status not in (200, 400)]
                answers = kept or [each for each in answers if each.status >= 400]
        return self._one_of(backends, answers)

    async def _each(
        self,
        backends: Backends,
        whom: Iterable[Any],
        asked: _Asked,
        seconds: float | None = None,
    ) -> list[_Whole]:
        """Give a request to some backends at once; return what those answer that have not ended.

        Those that do not answer within ``seconds`` are left out, too.
        """

        async def whole(backend: Any) -> _Whole | None:
            try:
                return await asyncio.wait_for(self._ask(backend, asked), seconds)
            except asyncio.TimeoutError:
                return None
            except BackendError as error:
                if backend not in backends.alive():  # the others are all
                    return None
                message = f"engine {backend.number} gave no answer, and others may have: {error}"
                answer = json_response(self.kind.told(ApiError(500, message)), 500)
                return _Whole(backend, 500, answer.raw_headers, bytes(answer.body))

        return [each for each in await asyncio.gather(*map(whole, whom)) if each is not None]

    def _one_of(self, backends: Backends, answers: list[_Whole]) -> _Whole:
        """Return the first that refused, or the first. Raises ``ApiError`` if engines differ."""
        if not answers:
            raise _ended(backends)
        first = max(answers, key=lambda each: each.status >= 400)
        did, refused = list[str](), list[str]()
        for each in answers:
            (refused if each.status >= 400 else did).append(str(each.backend.number))
        if did and refused:
            raise ApiError(
                first.status,
                f"of the engines, {', '.join(did)} did this and {', '.join(refused)} did not, so "
                f"they differ until it is sent again: {_message(first.data)}",
            )
        return first


def _ended(backends: Backends) -> ApiError:
    """Return the refusal of a request that no engine has answered."""
    if backends.alive():
        message = "the engine of this request has ended, or could not be reached: try again"
        return ApiError(503, message)
    return ApiError(
        503, "all engines of this server have ended: start it again", code="engine_dead"
    )


def _message(data: bytes) -> str:
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return data.decode(errors="replace")


def _is_stream(answer: BackendAnswer) -> bool:
    kind = dict(answer.headers).get(b"content-type", b"")
    return answer.status == 200 and kind.startswith(b"text/event-stream")


def _fields(body: bytes, limits: Limits) -> dict[str, Any]:
    """Return what a body gives; nothing for one that a backend refuses."""
    try:
        given = read_json(body, limits.body_values)
    except ApiError:
        return {}
    return given if isinstance(given, dict) else {}


def _aim_of(body: bytes, limits: Limits) -> tuple[str, list[int]]:
    """Return the model that a body names, and hashes of prefixes of what its pages depend on."""
    given = _fields(body, limits)
    prompt = json.dumps([given[name] for name in _PROMPT if name in given])
    return str(given.get("model")), prefixes_of(prompt.encode())


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
