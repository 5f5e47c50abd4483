"""The requests of an engine, which threads add and abort, and which end one by one."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from copy import copy
from itertools import chain

import torch

from vllm_module.base.messages import describe_error, shorten
from vllm_module.errors import RankError
from vllm_module.runtime.devices import queued_on
from vllm_module.runtime.metrics import Totals
from vllm_module.runtime.sampling.grammar import Grammar, Grammars
from vllm_module.runtime.sampling.row import check_tokens, encode_bad_words
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.scheduler import Scheduler
from vllm_module.runtime.sequence import FinishReason, Request, Sequence
from vllm_module.runtime.served_adapter import AdapterMemory, ServedAdapter
from vllm_module.runtime.step_inputs import Step
from vllm_module.runtime.text.stopping import complete_text
from vllm_module.runtime.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


class Requests:
    """Requests from their arrival to their end. Threads may share them; one of them runs at a time.

    Args:
        scheduler: gets the sequences of each request.
        vocab_size: number of tokens that the model knows.
        max_model_len: largest number of tokens of a sequence, prompt and output.
        tokenizer: needed for text and stop strings, not for token ids.
        stop_token_ids: the model's own end tokens; ids outside of the vocabulary are ignored.
        eos_token_id: the one of them that is no ``stop_reason``; the others are.
        stream: of a GPU, for all that the engine launches, in whichever thread it is called.
        adapter_memory: reads the adapters of requests.

    Attributes:
        grammars: compiles what requests must follow.
        requests: requests that have not ended, by id.
        adapters: adapters that requests may ask for, by name.
        totals: sums over all requests.
        refusal: reason why no requests are accepted, or ``None``.
        kept: requests that no step may compute now.
        weight_version: name of the weights, which updates change.
        weight_changes: number of changes of the weights that have begun.
        weights_lock: is held while they change.
        lock: held while a thread reads or changes the requests.

    """

    def __init__(
        self,
        scheduler: Scheduler,
        vocab_size: int,
        max_model_len: int,
        tokenizer: Tokenizer | None,
        stop_token_ids: Collection[int],
        eos_token_id: int | None,
        stream: torch.cuda.Stream | None,
        adapter_memory: AdapterMemory | None,
    ) -> None:
        self.stream, self.adapter_memory = stream, adapter_memory
        self.scheduler = scheduler
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self.stop_token_ids = frozenset(stop_token_ids).intersection(range(vocab_size))
        self.cache_tokens = scheduler.pool.num_pages * scheduler.pool.page_size
        self.max_model_len = min(max_model_len, self.cache_tokens)
        self.grammars = Grammars(tokenizer, vocab_size, self.stop_token_ids)
        self.requests: dict[str, Request] = {}
        self.adapters: dict[str, ServedAdapter] = {}
        self.totals = Totals()
        self.refusal: str | None = None
        self.kept: Collection[Request] = ()
        self.weight_version = "0"
        self.weight_changes, self.weights_lock = 0, threading.RLock()
        self.lock = threading.RLock()
        self._pid = os.getpid()
        self._busy = False
        # Aborts to carry out when the lock is free.
        self._aborts: list[tuple[str | Request, FinishReason]] = []
        self._arrivals = 0

    def add(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        prompt: str | None = None,
        *,
        streamed: bool = False,
        cache_salt: str | None = None,
        adapter: str | None = None,
        grammar: Grammar | None = None,
    ) -> Request:
        """Add a request; with ``streamed``, its text is updated at every step.

        It reuses only cached pages of requests with the same ``cache_salt``, and the same weights
        of the ``adapter`` of this name. Its parameters are copied. ``grammar`` is that of its
        ``structured_outputs``, which is compiled here if it is not given.

        Raises ``ValueError`` for a request that cannot be served, and then changes nothing.
        """
        structured = params.structured_outputs
        if structured is not None and grammar is None:
            grammar = self.grammars.compile(structured)
        with self.alone():
            self._check(request_id, prompt_token_ids, params)
            served = None if adapter is None else self.adapter(adapter)
            every = {"logprobs": params.logprobs, "prompt_logprobs": params.prompt_logprobs}
            update = {name: self.vocab_size for name, count in every.items() if count == -1}
            # Copies of lists; of their numbers it would take long.
            held = params.__dict__.items()
            lists = {name: copy(value) for name, value in held if isinstance(value, list | dict)}
            params = params.model_copy(update=lists | update)
            most = len(prompt_token_ids) + (params.max_tokens or self.max_model_len)
            max_len = min(most, self.max_model_len)
            request = Request(
                request_id, prompt_token_ids, params, self._arrivals, max_len, prompt,
                grammar=grammar,
            )  # fmt: skip
            shows_text = self.tokenizer is not None and params.detokenize
            request.streamed = shows_text and (streamed or bool(params.stop))
            request.cache_salt, request.adapter = cache_salt, served
            if params.bad_words:
                assert self.tokenizer is not None, "as _check made sure"
                request.bad_words = encode_bad_words(params.bad_words, self.tokenizer)
                check_tokens(chain.from_iterable(request.bad_words), self.vocab_size)
            request.metrics.arrival_time = time.time()
            request.metrics.queued_ts = time.monotonic()
            self._arrivals += 1
            self.requests[request_id] = request
            try:
                self.scheduler.add(request.sequences[0])
            except BaseException:  # an interrupt, for example
                self._end_request(request, "abort")
                raise
            return request

    def too_long(self, tokens: int) -> str:
        """Return why a prompt of ``max_model_len`` tokens or more is refused."""
        limited_by_cache = self.max_model_len == self.cache_tokens
        limit = "the cache has room for" if limited_by_cache else "a sequence has"
        return (
            f"the prompt has {tokens} tokens, and with one more {limit} at most "
            f"{self.max_model_len}"
        )

    def _check(self, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        if self.refusal is not None:
            raise ValueError(f"the engine takes no more requests: {self.refusal}")
        if request_id in self.requests:
            raise ValueError(f"request {request_id!r} exists already: choose another id")
        if not prompt:
            raise ValueError("the prompt has no tokens")
        if len(prompt) >= self.max_model_len:
            raise ValueError(self.too_long(len(prompt)))
        named = *(params.logit_bias or ()), *(params.allowed_token_ids or ())
        check_tokens([*prompt, *params.stop_token_ids, *named], self.vocab_size)
        if params.n > self.scheduler.max_num_seqs:
            raise ValueError(
                f"n={params.n} samples are more than the {self.scheduler.max_num_seqs} sequences "
                "of a step (max_num_seqs)"
            )
        if (params.stop or params.bad_words) and self.tokenizer is None:
            what = "stop strings" if params.stop else "bad words"
            raise ValueError(f"{what} need a tokenizer, and the checkpoint has none")

    def continue_with(self, scheduler: Scheduler, max_model_len: int) -> None:
        """Compute all requests with another scheduler, and all of their tokens again.

        Raises ``ValueError`` if one may become longer than its cache; then nothing has changed.
        """
        tokens = scheduler.pool.num_pages * scheduler.pool.page_size
        longest = max((each.max_len for each in self.requests.values()), default=0)
        if longest > tokens:
            raise ValueError(
                f"a running request may have {longest} tokens, and the cache would have room for "
                f"{tokens}: wait for its end, or abort it"
            )
        scheduler.take_over(self.scheduler)
        self.scheduler = scheduler
        self.cache_tokens, self.max_model_len = tokens, min(max_model_len, tokens)

    def adapter(self, name: str) -> ServedAdapter:
        """Return the adapter of this name. Raises ``ValueError`` if there is none."""
        if name not in self.adapters:
            known = ", ".join(map(shorten, self.adapters)) or "none"
            raise ValueError(f"no adapter is called {shorten(name)}; loaded are: {known}")
        return self.adapters[name]

    def _read_adapters(self, step: Step) -> list[Request]:
        """Read the adapters of a step that are not in memory.

        Requests of one that cannot be read end with the error, and are returned.
        """
        memory, failed = self.adapter_memory, list[Request]()
        # In an order that is the same in every process of one engine.
        found = (sequence.request.adapter for sequence, _ in step.scheduled)
        adapters = list(dict.fromkeys(each for each in found if each is not None))
        if memory is None or not adapters:
            return failed
        memory.use(adapters)
        running = self.scheduler.running_adapters()
        for adapter in [each for each in adapters if not each.in_memory]:
            try:
                memory.load(adapter, running)
            except Exception as error:
                requests = [s.request for s, _ in step.scheduled if s.request.adapter is adapter]
                failed += self._end_for(error, requests)
        if failed:
            step.scheduled = [each for each in step.scheduled if each[0].request not in failed]
            if not step.scheduled:
                self.scheduler.undo(step)
        return failed

    def _check_adapters(self, computed: list[Sequence]) -> list[Request]:
        """End the requests of adapters that a layer of the model ignores, and return them.

        ``computed`` are sequences all of whose tokens are computed now, for the first time.
        """
        memory, ended = self.adapter_memory, list[Request]()
        found = (each.request.adapter for each in computed if each.finish_reason is None)
        for adapter in dict.fromkeys(each for each in found if each is not None):
            assert memory is not None, "as it has read them"
            try:
                memory.check(adapter)
            except Exception as error:
                requests = [each for each in self.requests.values() if each.adapter is adapter]
                ended += self._end_for(error, requests)
        return ended

    def _end_for(self, error: Exception, requests: list[Request]) -> list[Request]:
        """End these requests of an adapter because of it, and return them.

        Raises ``error`` if ranks have ended; after any other, all wait for the next step.
        """
        if isinstance(error, RankError) and not error.recoverable:
            raise error
        ended = list(dict.fromkeys(requests))
        for request in ended:
            self._end_request(request, "error", describe_error(error))
        return ended

    def abort(self, request: str | Request, reason: FinishReason = "abort") -> None:
        """End a request, given by itself or its id, and free its pages; do nothing if it has ended.

        Never waits for others, so a finalizer can call it. During a step, the request ends after
        the step. With pipeline stages, the end of the last one computes steps that others wait for.
        """
        self._aborts.append((request, reason))
        self._do_aborts()

    @property
    def is_fork(self) -> bool:
        """True if this process is a fork of the process that made the engine."""
        return os.getpid() != self._pid

    def refuse_fork(self) -> None:
        """Raise ``RuntimeError`` in a fork: the engine's threads do not run there."""
        if self.is_fork:
            raise RuntimeError(
                f"an engine belongs to the process that made it (pid {self._pid}), and this one, a "
                "fork of it, has none of its threads: make an LLM in each process, or fork before"
            )

    @property
    def is_interrupted(self) -> bool:
        """True if this thread is in the middle of a step, as a signal handler may be."""
        if not self.lock.acquire(blocking=False):
            return False
        try:
            return self._busy
        finally:
            self.lock.release()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold the engine's lock; other threads wait, and their aborts are carried out afterwards.

        Raises ``RuntimeError`` in a fork, where another thread's lock would never be released.
        """
        if os.getpid() != self._pid:
            self.refuse_fork()
        try:
            with self.lock:
                yield
        finally:
            self._do_aborts()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the engine's lock, as :meth:`reading` does, to change the engine.

        Work launched inside the block runs on the engine's stream.

        Raises ``RuntimeError`` if this thread already holds the lock, for example in a signal
        handler that interrupts a step.
        """
        with self.reading():
            if self._busy:
                raise RuntimeError("the engine is in the middle of a step")
            self._busy = True
            try:
                with queued_on(self.stream):
                    yield
            finally:
                self._busy = False

    def _do_aborts(self) -> None:
        """End aborted requests; if the lock is held, its holder does that in :meth:`reading`."""
        while self._aborts and self.lock.acquire(blocking=False):
            try:
                if self._busy:
                    return
                self._busy = True
                try:
                    while self._aborts:
                        which, reason = self._aborts.pop(0)
                        request = self.requests.get(which) if isinstance(which, str) else which
                        if request and self.requests.get(request.request_id) is request:
                            self._end_request(request, reason)
                finally:
                    self._busy = False
            finally:
                self.lock.release()

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self.scheduler.finish(sequence)
        sequence.finish_reason = reason
        complete_text(sequence, self.tokenizer)
        if sequence.request.finished:
            request = sequence.request
            longest = max(len(each.tokens) for each in request.sequences) - request.prompt_len
            self.totals.end(reason, request.metrics, longest)
            del self.requests[request.request_id]

    def _end_request(
        self, request: Request, reason: FinishReason, error: str | None = None
    ) -> None:
        request.error = error
        if error is not None:
            _log.warning("request %s ends with an error: %s", request.request_id, error)
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                self._finish(sequence, reason)

    def _end_all(self, error: str) -> None:
        """End all requests and free all pages, even after a failure in the middle of a step."""
        requests = list(self.requests.values())
        self.requests.clear()
        self.scheduler.reset()
        sequences = [s for r in requests for s in r.sequences if s.finish_reason is None]
        for request in requests:
            request.error = error
        for sequence in sequences:
            sequence.finish_reason = "error"
        for sequence in sequences:
            complete_text(sequence, self.tokenizer)
