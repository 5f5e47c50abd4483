"""The thread that steps an engine for callers in event loops, which it gives their outputs."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Literal, TypeVar

from vllm_module.base.messages import describe_error
from vllm_module.runtime.llm import LLM
from vllm_module.runtime.outputs import RequestOutput
from vllm_module.runtime.sampling.grammar import Grammar
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.sequence import Request
from vllm_module.runtime.text.prompts import Prompt, Tokenization

PauseMode = Literal["abort", "wait", "keep"]
Call = Callable[[], Iterable[Request]]  # returns the requests that it has added

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_CLOSED = "the engine was closed"


class _ClosingError(Exception):
    """The engine's thread is to end."""


class Inbox:
    """The latest outputs of the prompts of one call; all of it belongs to the caller's event loop.

    Attributes:
        name: the call's id.
        latest: outputs that the caller has not taken yet, by the index of the prompt.
        every_token: whether outputs before the last one are wanted.
        failure: reason why no output comes any more.
        left: True once the caller takes none any more; the engine's thread reads it.
        aborted: ids of requests that the engine's thread was told to abort before it added them.
        given_up: True once all requests of the caller are.

    """

    def __init__(self, name: str, every_token: bool) -> None:
        self.name = name
        self.loop = asyncio.get_running_loop()
        self.arrived = asyncio.Event()
        self.every_token = every_token
        self.latest: dict[int, RequestOutput] = {}
        self.failure: Exception | None = None
        self.left = False
        self.aborted: set[str] = set()
        self.given_up = False

    def put(self, index: int, output: RequestOutput | Exception | None) -> None:
        """Keep an output, or why there is none, and wake the caller; ``None`` gives up."""
        if isinstance(output, Exception):
            self.failure = output
        elif output is None:
            self.given_up = True
        else:
            self.latest[index] = output
        self.arrived.set()

    async def compiled(self, grammar: Future[Grammar]) -> Grammar | None:
        """Wait for a grammar, and return it; return ``None`` once the requests are given up.

        Raises why there is none, or the failure.
        """
        grammar.add_done_callback(self._wake)
        try:
            while not grammar.done():
                if self.failure is not None:
                    raise self.failure
                if self.given_up:
                    return None
                self.arrived.clear()
                await self.arrived.wait()
            return grammar.result()
        finally:
            grammar.cancel()  # does nothing once it is being compiled

    def _wake(self, _: object) -> None:
        with suppress(RuntimeError):  # the loop is closed, and the caller gone
            self.loop.call_soon_threadsafe(self.arrived.set)

    async def take(self) -> dict[int, RequestOutput]:
        """Wait for outputs, and return them; raise the failure, if there is one."""
        while not self.latest:
            if self.failure is not None:
                raise self.failure
            self.arrived.clear()
            await self.arrived.wait()
        latest, self.latest = self.latest, {}
        return latest


# The index of a prompt, and its output.
_News = tuple[Inbox, int, RequestOutput | Exception | None]


class EngineThread:
    """Steps the engine of an ``LLM``, and carries out calls between two steps, one after another.

    Whatever changes the engine is such a call, so nobody waits for the engine's lock.

    Attributes:
        running: running requests, each with its caller's inbox and the index of its prompt.
        coming: callers whose requests are not added yet, each with the ids of these, and the call
            that adds them if it waits for the end of the running ones.
        paused: True from :meth:`pause` to :meth:`resume`.
        idle: True while the thread waits for a call.

    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.running: dict[Request, tuple[Inbox, int]] = {}
        self.coming: dict[Inbox, tuple[Sequence[str], Call | None]] = {}
        self.paused, self.idle = False, False
        self._lock = threading.Lock()  # nothing is put behind None, which ends the thread
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._closed = False
        self._news: dict[asyncio.AbstractEventLoop, list[_News]] = {}
        self._draining = False  # running requests end first, and new ones are held
        self._drained: list[tuple[Future[None], Callable[[LLM], None]]] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def put(self, call: Call | None) -> None:
        """Have the thread carry out a call after those before it; ``None`` is the last one.

        Raises ``RuntimeError`` once it was closed, and in a fork, where the thread does not run.
        """
        self.llm.engine.refuse_fork()
        with self._lock:
            if self._closed:
                raise RuntimeError(_CLOSED)
            self._closed = call is None
            self._calls.put(call)

    def close(self) -> None:
        """End all requests, the thread and the engine. May be called more than once."""
        with suppress(RuntimeError):
            self.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # From here on, everything runs in the thread.

    def pause(
        self, mode: PauseMode, result: Future[None], then: Callable[[LLM], None]
    ) -> Iterable[Request]:
        """Compute no more steps, once running requests have ended as ``mode`` says.

        ``then`` is called before those that wait for that are added, and ``result`` has what it
        returns or raises.
        """
        self.paused = True
        self._drained.append((result, then))
        if mode == "keep":
            return self._stop_draining()
        self._draining = True
        self._keep(())
        if mode == "abort":
            self._abort_running(lambda *_: True)
        return ()

    def resume(self) -> Iterable[Request]:
        """Compute steps again; return the requests that have waited."""
        self.paused = False
        return self._stop_draining()

    def _keep(self, requests: Collection[Request]) -> None:
        """Keep requests from the steps of other threads, after the one that goes on."""
        with self.llm.engine.reading():
            self.llm.engine.kept = requests

    def _stop_draining(self) -> list[Request]:
        """Carry out what waits for the end of requests, and add those that have waited, too."""
        self._draining = False
        self._keep(self.running if self.paused else ())
        drained, self._drained = self._drained, []
        for result, then in drained:
            self.carry_out(then, result)
        held = [add for _, add in self.coming.values() if add is not None]
        return [request for add in held for request in add()]

    def carry_out(self, function: Callable[[LLM], _T], result: Future[_T]) -> Iterable[Request]:
        """Call a function with the ``LLM``, unless the caller of ``result`` was cancelled."""
        if result.set_running_or_notify_cancel():
            try:
                result.set_result(function(self.llm))
            except Exception as error:
                result.set_exception(error)
            except BaseException as error:  # sys.exit() in a function, for example
                result.set_exception(RuntimeError(describe_error(error)))
        return ()

    def _run(self) -> None:
        engine = self.llm.engine
        while True:
            try:
                for _, news in engine.serve(self._arrivals(), self._output, every_token=True):
                    self._deliver(*news)
            except _ClosingError:
                break
            except BaseException as error:
                _log.exception("a step failed, and all requests end with its error")
                self._fail(f"a step failed: {describe_error(error)}", error)
        self.idle = True  # as far as callers know, whose calls are refused
        self._fail(_CLOSED)
        try:
            self.llm.close()
        except Exception:
            _log.exception("the engine could not be closed")

    def _arrivals(self) -> Iterator[Request | None]:
        """Carry out calls; yield new requests, and ``None`` where a step is to be computed."""
        while True:
            self._tell()
            if self._draining and not self.running:
                yield from self._stop_draining()
            goes_on = bool(self.running)
            if self.paused and not self._draining:  # no step, but the end of what was aborted
                goes_on = any(request.finished for request in self.running)
            if not goes_on:
                self.llm.executor.settle()
            self.idle = not goes_on
            try:
                call = self._calls.get(block=self.idle)
            except queue.Empty:
                yield None
                continue
            self.idle = False
            if call is None:
                raise _ClosingError
            yield from call()

    def expect(self, inbox: Inbox, ids: Sequence[str]) -> Iterable[Request]:
        """Know the requests that :meth:`add` will add, which may be aborted before."""
        self.coming[inbox] = ids, None
        return ()

    def add(
        self,
        inbox: Inbox,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        grammar: Grammar | None,
    ) -> Iterable[Request]:
        """Add the requests of a call, or none if one is refused.

        ``grammar`` is that of ``params``; ``None`` if it has none, or all requests were aborted.
        """
        if inbox not in self.coming:  # its caller has left, or it was told of the end
            return ()
        ids, _ = self.coming.pop(inbox)
        given_up = inbox.aborted.issuperset(ids)
        if self._draining and not given_up:
            self.coming[inbox] = ids, lambda: self.add(inbox, prompts, params, grammar)
            return ()
        if given_up:  # no step computes them
            params = params.model_copy(update={"structured_outputs": None})
        added: list[Request] = []
        with self.llm.engine.reading():  # no other thread's step comes in between
            try:
                self.llm._check("generate")
                for index, (request_id, prompt) in enumerate(zip(ids, prompts, strict=True)):
                    request = self.llm._add(
                        prompt,
                        params,
                        Tokenization(),
                        streamed=inbox.every_token,
                        request_id=request_id,
                        grammar=grammar,
                    )
                    if isinstance(request, RequestOutput):
                        which = f"prompt {index}: " if len(prompts) > 1 else ""
                        raise ValueError(f"{which}{request.error}")
                    added.append(request)
            except Exception as error:
                for request in added:
                    self.llm.engine.abort(request)
                self._note(inbox, 0, error)
                return ()
            for index, request in enumerate(added):
                self.running[request] = inbox, index
                if request.request_id in inbox.aborted:
                    self.llm.engine.abort(request)
            return added

    def abort(self, which: Callable[[str, Inbox], bool]) -> Iterable[Request]:
        """End the requests that ``which`` chooses by their id and their caller.

        Returns those that are added only to be ended.
        """
        self._abort_running(which)
        added: list[Request] = []
        for inbox, (ids, add) in list(self.coming.items()):
            inbox.aborted.update(each for each in ids if which(each, inbox))
            if inbox.left:
                del self.coming[inbox]
            elif inbox.aborted.issuperset(ids):
                self._note(inbox, 0, None)
                added += add() if add is not None else ()
        return added

    def _abort_running(self, which: Callable[[str, Inbox], bool]) -> None:
        for request, (inbox, _) in self.running.items():
            if which(request.request_id, inbox):
                self.llm.engine.abort(request)

    def _output(self, request: Request) -> tuple[Request, bool, RequestOutput | None]:
        """Return whether a request has ended, and its output, unless nobody wants it so far."""
        inbox, _ = self.running[request]
        wanted = (inbox.every_token or request.finished) and not inbox.left
        return request, request.finished, self.llm._output(request) if wanted else None

    def _deliver(self, request: Request, ended: bool, output: RequestOutput | None) -> None:
        inbox, index = self.running[request]
        if ended:
            del self.running[request]
        if output is not None:
            self._note(inbox, index, output)

    def _note(self, inbox: Inbox, index: int, output: RequestOutput | Exception | None) -> None:
        self._news.setdefault(inbox.loop, []).append((inbox, index, output))

    def _tell(self) -> None:
        """Give event loops what is new in their inboxes, in one call for each loop."""
        news, self._news = self._news, {}
        for loop, entries in news.items():
            try:
                loop.call_soon_threadsafe(_put_all, entries)
            except RuntimeError:  # the loop is closed, and its callers are gone
                for inbox, _, _ in entries:
                    inbox.left = True
                self.abort(lambda _, inbox: inbox.left)

    def _fail(self, reason: str, cause: BaseException | None = None) -> None:
        """End every call that has requests with ``reason``."""
        for request, (inbox, _) in self.running.items():
            self.llm.engine.abort(request)  # does nothing for those that the engine has ended
            failure = RuntimeError(reason)
            failure.__cause__ = cause
            self._note(inbox, 0, failure)
        self.running.clear()
        if self._closed:
            for inbox in self.coming:
                self._note(inbox, 0, RuntimeError(reason))
            self.coming.clear()
            for result, _ in self._drained:
                if result.set_running_or_notify_cancel():
                    result.set_exception(RuntimeError(reason))
            self._drained.clear()
        self._tell()


def _put_all(news: list[_News]) -> None:
    for inbox, index, output in news:
        inbox.put(index, output)
