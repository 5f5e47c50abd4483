"""The engine: it takes requests and computes their tokens, one step at a time."""

from __future__ import annotations

import logging
import os
import threading
import time
from array import array
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch

from vllm_module.base.messages import describe_error
from vllm_module.errors import CheckpointFormatError
from vllm_module.runtime.devices import queued_on
from vllm_module.runtime.launched import Execute, Launched
from vllm_module.runtime.metrics import StepStats, Totals
from vllm_module.runtime.sampling.bad_words import completing_tokens, encode_bad_words
from vllm_module.runtime.sampling.row import Row
from vllm_module.runtime.sampling.sampler import (
    LogitsError,
    Sampled,
    first_tokens,
    prompt_logprobs,
    sample,
)
from vllm_module.runtime.sampling.token_counts import TokenCounts
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.scheduler import Scheduler
from vllm_module.runtime.sequence import FinishReason, Request, Sequence
from vllm_module.runtime.step_inputs import Step, StepInputs, next_inputs, step_inputs
from vllm_module.runtime.text.prompts import check_vocabulary
from vllm_module.runtime.text.stopping import check_stop, complete_text
from vllm_module.runtime.text.tokenizer import Tokenizer
from vllm_module.runtime.transfers import Wait, synchronize, upload

_log = logging.getLogger(__name__)

_BROKEN_LOGITS = (
    "its logits contain NaN or infinity, or leave no token to choose: check the model's weights, "
    "and penalties and biases if they are extreme"
)


class Engine:
    """Computes requests together: :meth:`add` them, and call :meth:`step` until all have ended.

    Threads may share an engine; one of them runs at a time.

    Args:
        execute: function that runs the model (:class:`Execute`).
        scheduler: scheduler that chooses the tokens of each step.
        vocab_size: number of tokens that the model knows.
        max_model_len: largest number of tokens of a sequence, prompt and output.
        tokenizer: needed for text and stop strings, not for token ids.
        stop_token_ids: the model's own end tokens; ids outside of the vocabulary are ignored.
        eos_token_id: the one of them that is no ``stop_reason``; the others are.
        repeatable: whether ``execute`` can be called again after it has raised.
        first_tokens: returns the most probable token of each row of logits that ``execute`` has
            returned.
        wait: waits for the device, which may still compute what ``execute`` has returned.
        async_scheduling: whether a step is launched before the tokens of the one before are read.
        stream: of a GPU, for all that the engine launches, in whichever thread it is called.

    Attributes:
        requests: requests that have not ended, by id.
        totals: sums over all requests.

    """

    def __init__(
        self,
        execute: Execute,
        scheduler: Scheduler,
        vocab_size: int,
        max_model_len: int,
        tokenizer: Tokenizer | None = None,
        stop_token_ids: Collection[int] = (),
        eos_token_id: int | None = None,
        *,
        repeatable: bool = True,
        first_tokens: Callable[[torch.Tensor], torch.Tensor] = first_tokens,
        wait: Wait = synchronize,
        async_scheduling: bool = False,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.execute = execute
        self.repeatable = repeatable
        self.first_tokens = first_tokens
        self.wait = wait
        self.async_scheduling = async_scheduling
        self.stream = stream
        self.scheduler = scheduler
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self.stop_token_ids = frozenset(stop_token_ids).intersection(range(vocab_size))
        self.cache_tokens = scheduler.pool.num_pages * scheduler.pool.page_size
        self.max_model_len = min(max_model_len, self.cache_tokens)
        self.requests: dict[str, Request] = {}
        self.totals = Totals()
        self.token_counts = TokenCounts()
        self.refusal: str | None = None  # reason why no requests are accepted
        self._pid = os.getpid()
        self.lock = threading.RLock()
        # The step that was launched before the current one was finished.
        self._next: Launched | None = None
        self._start_over = False  # True if states start over after the current step
        self._busy = False
        # Aborts to carry out when the lock is free.
        self._aborts: list[tuple[str, FinishReason]] = []
        self._arrivals = 0

    def step(self, on_step: Callable[[StepStats], object] | None = None) -> list[Request]:
        """Compute the next tokens of all requests that fit into one step.

        ``on_step`` is called with the measurements of the step, unless it fails.

        Returns the requests that got a token or ended. If the model raises, each sequence of the
        step is computed alone, and only requests that fail alone end with the error. If no single
        request is at fault, the error is raised, and all requests end with it.
        """
        begin = time.perf_counter()
        with self.alone():
            step = Step()
            try:
                launched, self._next = self._next, None
                if launched is None or launched.ended:
                    step = self.scheduler.schedule()
                    if not step.scheduled:
                        return []
                    try:
                        launched = self._launch(step)
                    except Exception as error:
                        return self._compute_apart(step, error)
                step = launched.step
                if self.async_scheduling:
                    self._next = self._launch_next(launched)
                used = self.scheduler.pool.num_pages - self.scheduler.pool.free_pages
                changed = self._finish_step(launched)
                if on_step is not None:
                    counts = [count for _, count in step.scheduled]
                    on_step(StepStats(counts, used, time.perf_counter() - begin))
                if self._start_over:
                    self._start_over = False
                    self.scheduler.start_over()
                return changed
            except BaseException as error:
                self._end_all(f"a step{_of_requests(step)} failed: {describe_error(error)}")
                raise

    def _launch(self, step: Step) -> Launched:
        """Launch the model on a step; it returns logits for ``rows`` of :func:`step_inputs`.

        A prompt that is computed in chunks gets a token after its last chunk.
        """
        complete = [s for s, count in step.scheduled if s.num_computed + count == len(s.tokens)]
        prompts = [
            (s.request, s.prompt_logprob_positions(count))
            for s, count in step.scheduled
            if s.request.prompt_logprobs is not None
        ]
        logits = self._execute(step_inputs(step, self.scheduler.pool.page_size))
        self.scheduler.mark_listed(step)
        return Launched(step, prompts, complete, logits)

    def _execute(self, inputs: StepInputs, *sampled: torch.Tensor) -> torch.Tensor:
        """Run the model. If it raises, evict all saved states, because copies may be missing."""
        try:
            return self.execute(inputs, *sampled)
        except BaseException:
            self.scheduler.saved.forget_all()
            raise

    def _launch_next(self, launched: Launched) -> Launched | None:
        """Launch the step after ``launched``, whose tokens stay on the device, if it is known.

        A sequence may turn out to have ended with its token. Then the results for it are dropped.
        Its page may be freed and given to another sequence before this step runs. That sequence's
        writes are queued later on the same stream, so they win.

        If the launch raises, the step is launched again in its turn, which finds the error again;
        sequences with states start over. If nothing can be launched any more, the error is raised.
        """
        rows = launched.rows_of_next(len(self.scheduler.running))
        sequences = [launched.complete[row] for row in rows]
        step = self.scheduler.schedule_next(sequences) if rows else None
        if step is None:
            return None
        sampled = self._sample(launched)
        inputs = next_inputs(step, rows, len(sampled.tokens), self.scheduler.pool.page_size)
        try:
            logits = self._execute(inputs, sampled.tokens)
        except Exception as error:
            if not self.repeatable:
                raise
            _log.warning(
                "a step%s failed, and is computed again after the tokens before it are read: %s",
                _of_requests(step),
                describe_error(error),
            )
            self._start_over = self.scheduler.has_states
            return None
        self.scheduler.mark_listed(step)
        return Launched(step, [], sequences, logits)

    def _compute_apart(self, step: Step, error: Exception) -> list[Request]:
        """Compute each sequence of a failed step by itself; end requests that fail again.

        If layers have states, which the step may have advanced, all running sequences start over,
        and each of the step is computed from its first token.

        Raises ``error`` if the request at fault cannot be found: pages were moved, which cannot be
        repeated, or every sequence fails, or no other request is left.
        """
        if not self.repeatable or step.moves:
            raise error
        computed: list[Launched] = []
        failed: dict[Request, Exception] = {}
        ends = [sequence.num_computed + count for sequence, count in step.scheduled]
        if self.scheduler.has_states and len(step.scheduled) > 1:
            self.scheduler.start_over()
        for (sequence, _), end in zip(step.scheduled, ends, strict=True):
            try:
                if len(step.scheduled) == 1:
                    raise error
                if (alone := self._launch_alone(sequence, end)) is not None:
                    assert alone.logits is not None
                    alone.logits = alone.logits.clone()  # the next graph writes where these are
                    computed.append(alone)
            except Exception as again:
                failed[sequence.request] = again
        if not computed and (len(step.scheduled) > 1 or len(self.requests) == 1):
            raise error
        _log.warning(
            "a step%s failed and was repeated for each of its sequences alone: %s",
            _of_requests(step),
            describe_error(error),
        )
        for request, cause in failed.items():
            reason = f"a step with this request alone failed: {describe_error(cause)}"
            self._end_request(request, "error", reason)
        changed = list(failed)
        for launched in computed:
            if launched.step.scheduled[0][0].finish_reason is None:
                changed += self._finish_step(launched)
        return list(dict.fromkeys(changed))

    def _launch_alone(self, sequence: Sequence, end: int) -> Launched | None:
        """Compute the tokens of one sequence up to ``end``; return its last step, launched.

        Returns None if other sequences, which start over too, have left too few pages.
        """
        while True:
            step = self.scheduler.schedule_alone(sequence, end)
            if step is None:
                return None
            launched = self._launch(step)
            if sequence.num_computed + step.scheduled[0][1] == end:
                return launched
            self.scheduler.mark_computed(step)
            self._add_prompt_logprobs(launched)

    def _finish_step(self, launched: Launched) -> list[Request]:
        """Read a step's prompt logprobs and append its tokens; return the requests that change."""
        changed = [s.request for s in launched.complete if s.finish_reason is None]
        self.scheduler.mark_computed(launched.step)
        sampled = launched.sampled
        if sampled is None:
            self._add_prompt_logprobs(launched)
            self._fork(launched)
            sampled = self._sample(launched)
        self._append_tokens(launched.complete, sampled)
        return list(dict.fromkeys(changed))

    def _add_prompt_logprobs(self, launched: Launched) -> None:
        """Read a step's prompt logprobs, and drop their rows of the logits."""
        assert launched.logits is not None
        row = 0
        for request, positions in launched.prompts:
            if positions:
                rows = launched.logits[row : row + len(positions)]
                row += len(positions)
                assert request.prompt_logprobs is not None
                tokens = request.prompt_token_ids[positions.start + 1 : positions.stop + 1]
                count = request.params.prompt_logprobs or 0
                try:
                    request.prompt_logprobs += prompt_logprobs(rows, tokens, count, self.wait)
                except LogitsError:
                    self._end_request(request, "error", _BROKEN_LOGITS)
        launched.logits = launched.logits[row:]

    def _fork(self, launched: Launched) -> None:
        """Add the other samples of complete prompts, each with a row of the logits."""
        assert launched.logits is not None
        rows, sequences = [], []
        for row, sequence in enumerate(launched.complete):
            request = sequence.request
            if len(request.sequences) < request.params.n and sequence.finish_reason is None:
                self.scheduler.fork(request)
                sequences += request.sequences
                rows += [row] * len(request.sequences)
            else:
                sequences.append(sequence)
                rows.append(row)
        if len(rows) > len(launched.complete):
            (index,) = upload([array("q", rows)], launched.logits.device)
            launched.complete, launched.logits = sequences, launched.logits[index]

    def _sample(self, launched: Launched) -> Sampled:
        """Launch the choice of the next token of each complete sequence."""
        assert launched.logits is not None
        rows = [self._row(sequence) for sequence in launched.complete]
        launched.sampled = sample(launched.logits, rows, self.token_counts, self.first_tokens)
        launched.logits = None  # the next step's take this memory
        return launched.sampled

    def _append_tokens(self, sequences: list[Sequence], sampled: Sampled) -> None:
        """Wait for the next tokens, append them, and end sequences that are complete.

        Requests with broken logits end with an error.
        """
        tokens = sampled.read(self.wait)
        now = time.monotonic()
        for sequence, token in zip(sequences, tokens, strict=True):
            if token is None and sequence.finish_reason is None:
                self._end_request(sequence.request, "error", _BROKEN_LOGITS)
        for sequence, token in zip(sequences, tokens, strict=True):
            if token is None or sequence.finish_reason is not None:
                continue
            sequence.tokens.append(token.token_id)
            self._count(sequence.request, now)
            if token.logprobs is not None:
                sequence.logprobs.append(token.logprobs)
                sequence.cumulative_logprob += token.logprob or 0.0
            try:
                reason = check_stop(
                    sequence, self.stop_token_ids, self.tokenizer, self.eos_token_id
                )
            except CheckpointFormatError as error:
                self._end_request(sequence.request, "error", str(error))
                continue
            if reason is not None:
                self._finish(sequence, reason)

    def _count(self, request: Request, now: float) -> None:
        """Count a token of a request that became known at ``now``."""
        totals, metrics = self.totals, request.metrics
        if not metrics.num_generation_tokens:
            totals.prompt_tokens += request.prompt_len
            totals.cached_tokens += request.num_cached_tokens or 0
        totals.generation_tokens += 1
        metrics.add_token(now)

    def _row(self, sequence: Sequence) -> Row:
        params = sequence.request.params
        banned: Collection[int] = ()
        if params.min_tokens and len(sequence.output) < params.min_tokens:
            banned = self.stop_token_ids | set(params.stop_token_ids)
        if sequence.request.bad_words:
            words = completing_tokens(sequence.request.bad_words, sequence.output)
            banned = words.union(banned)
        uniform = 0.0 if params.greedy else sequence.uniform.random()
        request = sequence.request
        key = (request.arrival, sequence.index)
        return Row(params, sequence.tokens, request.prompt_len, uniform, banned, key)

    def add(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        prompt: str | None = None,
        *,
        streamed: bool = False,
        cache_salt: str | None = None,
    ) -> Request:
        """Add a request; with ``streamed``, its text is updated at every step.

        It reuses only cached pages of requests with the same ``cache_salt``. Its parameters are
        copied.

        Raises ``ValueError`` for a request that cannot be served, and then changes nothing.
        """
        with self.alone():
            self._check(request_id, prompt_token_ids, params)
            every = {"logprobs": params.logprobs, "prompt_logprobs": params.prompt_logprobs}
            update = {name: self.vocab_size for name, count in every.items() if count == -1}
            params = params.model_copy(update=update, deep=True)
            most = len(prompt_token_ids) + (params.max_tokens or self.max_model_len)
            max_len = min(most, self.max_model_len)
            request = Request(request_id, prompt_token_ids, params, self._arrivals, max_len, prompt)
            shows_text = self.tokenizer is not None and params.detokenize
            request.streamed = shows_text and (streamed or bool(params.stop))
            request.cache_salt = cache_salt
            if params.bad_words:
                assert self.tokenizer is not None, "as _check made sure"
                request.bad_words = encode_bad_words(params.bad_words, self.tokenizer)
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

    def _check(self, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        if self.refusal is not None:
            raise ValueError(f"the engine takes no more requests: {self.refusal}")
        if request_id in self.requests:
            raise ValueError(f"request {request_id!r} exists already: choose another id")
        if not prompt:
            raise ValueError("the prompt has no tokens")
        named = *(params.logit_bias or ()), *(params.allowed_token_ids or ())
        check_vocabulary([*prompt, *params.stop_token_ids, *named], self.vocab_size)
        if len(prompt) >= self.max_model_len:
            limited_by_cache = self.max_model_len == self.cache_tokens
            limit = "the cache has room for" if limited_by_cache else "a sequence has"
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, and with one more {limit} at most "
                f"{self.max_model_len}"
            )
        if params.n > self.scheduler.max_num_seqs:
            raise ValueError(
                f"n={params.n} samples are more than the {self.scheduler.max_num_seqs} sequences "
                "of a step (max_num_seqs)"
            )
        if (params.stop or params.bad_words) and self.tokenizer is None:
            what = "stop strings" if params.stop else "bad words"
            raise ValueError(f"{what} need a tokenizer, and the checkpoint has none")

    def abort(self, request_id: str, reason: FinishReason = "abort") -> None:
        """End a request and free its pages; do nothing if it has ended.

        Never waits, so a finalizer can call it. During a step, the request ends after the step.
        """
        self._aborts.append((request_id, reason))
        self._do_aborts()

    def fail(self, reason: str) -> None:
        """End all requests with ``reason`` as their error, and refuse new ones."""
        self.refusal = reason
        self._end_all(reason)

    def resume(self) -> None:
        """Accept requests again; they reuse no keys and values computed before now.

        A step that is launched and not finished is computed again.
        """
        self.refusal = None
        self.drop()
        self.scheduler.reset_prefix_cache()

    @property
    def is_fork(self) -> bool:
        """True if this process is a fork of the process that made the engine."""
        return os.getpid() != self._pid

    def drop(self) -> None:
        """Drop the launched step and free its memory; sequences with states start over."""
        if self._next is not None and self.scheduler.has_states:
            self.scheduler.start_over()
        self._next = None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold the engine's lock; other threads wait, and their aborts are carried out afterwards.

        Raises ``RuntimeError`` in a fork, where another thread's lock would never be released.
        """
        if self.is_fork:
            raise RuntimeError(
                f"an engine belongs to the process that made it (pid {self._pid}), and this one, a "
                "fork of it, has none of its threads: make an LLM in each process, or fork before"
            )
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
                        request_id, reason = self._aborts.pop(0)
                        if request_id in self.requests:
                            self._end_request(self.requests[request_id], reason)
                finally:
                    self._busy = False
            finally:
                self.lock.release()

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self.scheduler.finish(sequence)
        sequence.finish_reason = reason
        complete_text(sequence, self.tokenizer)
        if sequence.request.finished:
            ended = self.totals.requests
            ended[reason] = ended.get(reason, 0) + 1
            del self.requests[sequence.request.request_id]
            if not self.requests:
                self._next = None

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
        self._next, self._start_over = None, False
        self.token_counts = TokenCounts()
        self.scheduler.reset()
        sequences = [s for r in requests for s in r.sequences if s.finish_reason is None]
        for request in requests:
            request.error = error
        for sequence in sequences:
            sequence.finish_reason = "error"
        for sequence in sequences:
            complete_text(sequence, self.tokenizer)


def _of_requests(step: Step) -> str:
    """Return the request ids of a step, for a message."""
    ids = list(dict.fromkeys(sequence.request.request_id for sequence, _ in step.scheduled))
    if not ids:
        return ""
    more = f" and {len(ids) - 8} more" if len(ids) > 8 else ""
    noun = "request" if len(ids) == 1 else "requests"
    return f" of {noun} {', '.join(ids[:8])}{more}"
