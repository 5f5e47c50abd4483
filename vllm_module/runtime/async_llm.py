"""``AsyncLLM``: an engine for callers in an event loop."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Sized,
)
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, get_args

import torch

from vllm_module.base.messages import shorten
from vllm_module.cooperative import SentBoxes
from vllm_module.errors import EngineBusyError
from vllm_module.runtime.engine_thread import EngineThread, Inbox, PauseMode
from vllm_module.runtime.llm import LLM
from vllm_module.runtime.outputs import EmbeddingRequestOutput, RequestOutput
from vllm_module.runtime.sampling.grammar import Grammar
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.text.prompts import (
    Prompt,
    Tokenization,
    as_prompts,
    prompt_text,
    token_ids,
)
from vllm_module.weights import Weight

MAX_WAITING = 1024  # samples that may wait, beside those that a step computes
_FEW_CHARACTERS = (
    2000  # tokenized in less time than another thread takes to begin in a busy process
)

_T = TypeVar("_T")


class AsyncLLM:
    """An :class:`~vllm_module.LLM` for coroutines; a thread of its own steps the engine.

    ``async for output in llm.generate("Once upon a time"): print(output.outputs[0].text)``

    Args:
        model: as for :class:`~vllm_module.LLM`, or an ``LLM``, which :meth:`close` closes.
        max_waiting: most samples, or prompts to embed, that are accepted beside the
            ``max_num_seqs`` of a step. More are refused with
            :class:`~vllm_module.errors.EngineBusyError`.
        arguments: those of :class:`~vllm_module.LLM`.

    A task that is cancelled, or a generator that is closed or dropped, ends its request. Its pages
    are free before the next step. Tokens are those of ``LLM`` for the same requests. If a step
    fails, every call that had a request in it raises ``RuntimeError`` with the reason.

    Attributes:
        llm: the engine; other threads may use its methods, which wait for the end of a step. While
            it is paused and requests wait, those that compute steps raise ``RuntimeError``, as a
            step would compute these, too.

    """

    def __init__(
        self, model: str | LLM, *, max_waiting: int = MAX_WAITING, **arguments: Any
    ) -> None:
        if isinstance(max_waiting, bool) or not isinstance(max_waiting, int) or max_waiting < 0:
            raise ValueError(f"max_waiting should be an integer from 0, got {shorten(max_waiting)}")
        if isinstance(model, LLM) and arguments:
            raise ValueError(f"the LLM exists already: leave out {', '.join(sorted(arguments))}")
        self.llm = model if isinstance(model, LLM) else LLM(model, **arguments)
        if self.llm.executor.every_rank_calls:
            if not isinstance(model, LLM):
                self.llm.close()
            raise ValueError(
                "the ranks of an engine with distributed_executor_backend='external_launcher' have "
                "to make the same calls in one order, and those of an AsyncLLM come at any time: "
                "take LLM, or 'mp', which starts ranks"
            )
        self.max_requests = self.llm.engine.scheduler.max_num_seqs + max_waiting
        self._ids = itertools.count()
        self._lock = threading.Lock()  # several event loops may count
        self._accepted = 0  # samples and prompts to embed, of calls that have not ended
        if not self.llm.no_text:
            self.llm.engine.grammars.prepare()
        self._thread = EngineThread(self.llm)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        every_token: bool = True,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt, and yield the whole output so far as new tokens come.

        Args:
            prompt, sampling_params: as for :meth:`~vllm_module.LLM.generate`.
            request_id: an id for :meth:`abort`, which no running request has.
            every_token: whether outputs before the last one are yielded. Where the caller is slow,
                one output may have several new tokens.

        Raises:
            ValueError: the prompt is refused.
            EngineBusyError: too many requests wait.
            RuntimeError: a step failed, or the engine was closed.

        Otherwise as :meth:`~vllm_module.LLM.generate`.

        """
        outputs = self.serve([prompt], sampling_params, request_id, every_token=every_token)
        try:
            async for _, output in outputs:
                yield output
        finally:
            await outputs.aclose()

    async def serve(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        every_token: bool = False,
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Continue prompts together; yield the index of each, and its output when it is complete.

        Arguments and errors are those of :meth:`generate`. If a prompt is refused, none is served.
        The request with index i has the id ``f"{request_id}-{i}"``, unless it is alone.
        """
        given = sampling_params
        params = self.llm.get_default_sampling_params() if given is None else given
        name = f"async-{next(self._ids)}" if request_id is None else request_id
        ids = [name] if len(prompts) == 1 else [f"{name}-{i}" for i in range(len(prompts))]
        with self._accepting(params.n * len(prompts)):
            inbox = Inbox(name, every_token)
            unfinished = len(prompts)
            try:
                if prompts:
                    self._thread.put(lambda: self._thread.expect(inbox, ids))
                tokenized = await self._tokenize(prompts)
                grammar: Grammar | None = None
                if params.structured_outputs is not None:
                    compiling = self.llm.engine.grammars.submit(params.structured_outputs)
                    grammar = await inbox.compiled(compiling)
                self._thread.put(lambda: self._thread.add(inbox, tokenized, params, grammar))
                while unfinished:
                    for index, output in (await inbox.take()).items():
                        unfinished -= output.finished
                        yield index, output
            finally:
                inbox.left = True
                if unfinished:
                    with suppress(RuntimeError):  # closed: the request has ended
                        self._thread.put(
                            lambda: self._thread.abort(lambda _, whose: whose is inbox)
                        )

    @contextmanager
    def _accepting(self, samples: int) -> Iterator[None]:
        """Count samples while they are served. Raises ``EngineBusyError`` if there are too many.

        Raises ``ValueError`` if there are more than are ever accepted, and ``RuntimeError`` in a
        fork, where the lock of another thread would never be released.
        """
        self.llm.engine.refuse_fork()
        if samples > self.max_requests:
            raise ValueError(
                f"{samples} samples are more than the {self.max_requests} that are accepted "
                "(max_num_seqs + max_waiting)"
            )
        with self._lock:
            accepted = self._accepted
            if accepted + samples > self.max_requests:
                raise EngineBusyError(
                    f"{accepted} samples are computed or wait, and {samples} more would be above "
                    f"{self.max_requests} (max_num_seqs + max_waiting): try again later"
                )
            self._accepted += samples
        try:
            yield
        finally:
            with self._lock:
                self._accepted -= samples

    async def _tokenize(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Replace texts by their tokens; those of long ones are computed by a thread of a pool.

        Raises ``ValueError`` for a prompt that is too long, which the engine's thread need not see.
        """

        def tokenize(index: int, prompt: Prompt) -> Prompt:
            given = prompt if isinstance(prompt, Mapping) else {"prompt": prompt}
            ids = given.get("prompt_token_ids")
            if ids is None and prompt_text(prompt) is not None:
                ids = token_ids(prompt, self.llm.get_tokenizer, Tokenization())
                prompt = {**given, "prompt_token_ids": ids}
            if isinstance(ids, Sized) and not self.llm.no_text:
                engine = self.llm.engine
                if len(ids) >= engine.max_model_len:
                    which = f"prompt {index}: " if len(prompts) > 1 else ""
                    raise ValueError(f"{which}{engine.too_long(len(ids))}")
            return prompt

        def tokenize_all() -> list[Prompt]:
            return [tokenize(index, prompt) for index, prompt in enumerate(prompts)]

        texts = [text for each in prompts if (text := prompt_text(each)) is not None]
        few = sum(map(len, texts)) <= _FEW_CHARACTERS
        return tokenize_all() if few else await asyncio.to_thread(tokenize_all)

    async def call(self, function: Callable[[LLM], _T]) -> _T:
        """Call a function with the ``LLM`` between two steps, in the engine's thread."""
        result: Future[_T] = Future()
        self._thread.put(lambda: self._thread.carry_out(function, result))
        return await asyncio.wrap_future(result)

    async def abort(self, request_id: str) -> None:
        """End the requests of a call of :meth:`generate` or :meth:`serve`, which yields so.

        The id is the call's, or that of one of its requests. Does nothing if there is none with it.
        """
        self._thread.put(
            lambda: self._thread.abort(lambda each, whose: request_id in (each, whose.name))
        )

    async def pause(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> None:
        """Compute no step until :meth:`resume`; new requests wait.

        Args:
            mode: ``"abort"`` ends running requests, ``"wait"`` returns when they are complete, and
                ``"keep"`` lets them continue after :meth:`resume`.
            clear_cache: whether cached pages are evicted. Requests that are kept have theirs.

        """
        if mode not in get_args(PauseMode):
            raise ValueError(f"mode should be 'abort', 'wait' or 'keep', got {shorten(mode)}")
        result: Future[None] = Future()
        self._thread.put(lambda: self._thread.pause(mode, result, lambda llm: None))
        await asyncio.wrap_future(result)
        if clear_cache:
            await self.reset_prefix_cache()

    async def resume(self) -> None:
        """Compute steps again, with the requests that have waited."""
        self._thread.put(self._thread.resume)

    @property
    def is_paused(self) -> bool:
        """True from :meth:`pause` to :meth:`resume`."""
        return self._thread.paused

    async def update_weights(
        self,
        weights: Mapping[str, Weight] | Iterable[tuple[str, Weight]] | SentBoxes,
        *,
        digests: Mapping[str, str] | None = None,
        weight_version: str | None = None,
    ) -> None:
        """Update weights between two steps, as :meth:`~vllm_module.LLM.update_weights`."""
        await self.call(
            lambda llm: llm.update_weights(weights, digests=digests, weight_version=weight_version)
        )

    async def reshard(self, tensor_parallel_size: int) -> None:
        """Go on with another number of ranks, as :meth:`~vllm_module.LLM.reshard`."""

        def change() -> int:
            self.llm.reshard(tensor_parallel_size)
            return torch.get_num_threads()

        threads = await asyncio.to_thread(change)
        await self.call(lambda llm: torch.set_num_threads(threads))  # each thread has its own

    async def rearrange_experts(
        self,
        counts: Sequence[Sequence[float]] | None = None,
        *,
        placements: Mapping[str, Sequence[int]] | None = None,
    ) -> int:
        """Move experts between two steps, as :meth:`~vllm_module.LLM.rearrange_experts`."""
        return await self.call(lambda llm: llm.rearrange_experts(counts, placements=placements))

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Free memory, as :meth:`~vllm_module.LLM.sleep`, once requests have ended as by ``mode``.

        It is ``"abort"`` or ``"wait"``: requests that were kept would need the KV cache. An engine
        that was paused before stays paused. Others go on if this is cancelled during the wait.
        """
        if mode not in ("abort", "wait"):
            raise ValueError(
                "a sleeping engine keeps no requests: mode should be 'abort' or 'wait', got "
                f"{shorten(mode)}"
            )
        paused: list[bool] = []  # as the thread finds it, after the calls that it has not made yet

        def begin() -> Iterable[Any]:
            paused.append(self._thread.paused)
            return self._thread.pause(mode, result, lambda llm: llm.sleep(level))

        result: Future[None] = Future()
        self._thread.put(begin)
        try:  # the wait for running requests may be cancelled
            await asyncio.wrap_future(result)
        finally:
            self._thread.put(lambda: () if paused[0] else self._thread.resume())

    async def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Wake up, as :meth:`~vllm_module.LLM.wake_up`."""
        await self.call(lambda llm: llm.wake_up(tags))

    @property
    def is_sleeping(self) -> bool:
        """True while the weights or the KV cache sleep."""
        return bool(self.llm.executor.sleeping)

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Evict cached pages between two steps, as :meth:`~vllm_module.LLM.reset_prefix_cache`."""
        return await self.call(
            lambda llm: llm.reset_prefix_cache(reset_running_requests, reset_connector)
        )

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method on every rank, as :meth:`~vllm_module.LLM.collective_rpc`."""
        return await self.call(lambda llm: llm.collective_rpc(method, timeout, args, kwargs))

    @property
    def weight_version(self) -> str:
        """Name of the weights, as of :class:`~vllm_module.LLM`."""
        return self.llm.weight_version

    async def embed(
        self, prompts: Sequence[Prompt], **options: Any
    ) -> list[EmbeddingRequestOutput]:
        """Return an embedding of each prompt, as :meth:`~vllm_module.LLM.embed`.

        Each prompt counts as a sample. Raises ``EngineBusyError`` if too many wait.
        """
        given = as_prompts(prompts)
        with self._accepting(len(given)):
            return await self.call(lambda llm: llm.embed(given, use_tqdm=False, **options))

    async def check_health(self) -> None:
        """Raise if the engine has ended, for example because a rank did.

        While requests run, or weights change, which may take minutes, that finds a rank that has
        ended.
        """
        self.llm.engine.refuse_fork()
        if self._thread.idle:
            await self.call(lambda llm: llm.executor.check())
        elif self.llm.executor.end is not None:
            raise RuntimeError(f"the engine has ended: {self.llm.executor.end}")

    def close(self) -> None:
        """End all requests, the thread and the engine. May be called more than once."""
        self._thread.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)
