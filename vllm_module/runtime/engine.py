"""The engine: it takes requests and computes their tokens, one step at a time."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import torch

from vllm_module.base.messages import describe_error
from vllm_module.errors import CheckpointFormatError
from vllm_module.runtime.launched import Execute, Launched, leaves_nothing, row_of
from vllm_module.runtime.metrics import StepStats
from vllm_module.runtime.outputs import RequestOutput
from vllm_module.runtime.repeated_steps import RepeatedSteps
from vllm_module.runtime.sampling.sampler import Sampled, first_tokens, sample
from vllm_module.runtime.sampling.token_counts import TokenCounts
from vllm_module.runtime.scheduler import Scheduler
from vllm_module.runtime.sequence import FinishReason, Request, Sequence
from vllm_module.runtime.served_adapter import AdapterMemory
from vllm_module.runtime.step_inputs import Step, StepInputs, next_inputs, step_inputs
from vllm_module.runtime.text.stopping import check_stop
from vllm_module.runtime.text.tokenizer import Tokenizer
from vllm_module.runtime.transfers import Wait, synchronize

Indexed = Iterator[tuple[int, RequestOutput]]
_Output = TypeVar("_Output")

_log = logging.getLogger(__name__)

NOTHING_LEFT = (
    "allowed_token_ids, bad_words, structured_outputs and min_tokens together leave no token to "
    "choose: allow more"
)
_BROKEN_LOGITS = (
    "its logits contain NaN or infinity, or leave no token to choose: check the model's weights, "
    "and penalties and biases if they are extreme"
)


class Engine(RepeatedSteps):
    """Computes requests together: :meth:`add` them, and call :meth:`step` until all have ended.

    Args:
        execute: function that runs the model (:class:`Execute`).
        scheduler: scheduler that chooses the tokens of each step.
        vocab_size, max_model_len, tokenizer, stop_token_ids, eos_token_id, stream,
            adapter_memory: as for :class:`~vllm_module.runtime.requests.Requests`.
        repeatable: whether ``execute`` can be called again after it has raised.
        first_tokens: returns the most probable token of each row of logits that ``execute`` has
            returned.
        wait: waits for the device, which may still compute what ``execute`` has returned.
        async_scheduling: whether a step is launched before the tokens of the one before are read.
        processed_logprobs: whether logprobs are of the distribution that tokens are drawn from.

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
        processed_logprobs: bool = False,
        stream: torch.cuda.Stream | None = None,
        adapter_memory: AdapterMemory | None = None,
    ) -> None:
        super().__init__(
            scheduler, vocab_size, max_model_len, tokenizer, stop_token_ids, eos_token_id,
            stream, adapter_memory,
        )  # fmt: skip
        self.execute = execute
        self.repeatable = repeatable
        self.first_tokens = first_tokens
        self.wait = wait
        self.async_scheduling = async_scheduling
        self.processed_logprobs = processed_logprobs
        self.token_counts = TokenCounts()
        # Steps that are not finished, in their order: with async scheduling, the one that was
        # launched before the current one was finished; of a pipeline, those in flight.
        self._launched: deque[Launched] = deque()
        self._start_over = False  # True if states start over after the current step

    def serve(
        self,
        requests: Iterable[Request | _Output | None],
        output: Callable[[Request], _Output],
        concurrency: int | None = None,
        every_token: bool = False,
        on_step: Callable[[StepStats], object] | None = None,
    ) -> Iterator[tuple[int, _Output]]:
        """Step until all requests have ended; yield the index and the output of each that ends.

        Args:
            requests: requests of this engine, read while fewer than ``concurrency`` of them run. An
                output among them, of a prompt that is refused, is yielded as it is. After ``None``,
                which is for no request now, the running ones go on.
            output: returns a request's output so far.
            concurrency: most requests that run at the same time; by default all.
            every_token: whether the output so far is yielded after each new token, too.
            on_step: as in :meth:`step`.

        Requests that run when the iterator is closed, or when a step fails, are aborted.

        """
        running: dict[Request, tuple[int, int]] = {}  # to its index, and its tokens yielded so far
        coming: Iterator[Request | _Output | None] | None = iter(requests)
        taken = 0
        try:
            while running or coming:
                while coming and len(running) != concurrency:
                    try:
                        request = next(coming)
                    except StopIteration:
                        coming = None
                        break
                    if request is None:
                        break
                    if isinstance(request, Request):
                        running[request] = taken, 0
                    else:
                        yield taken, request
                    taken += 1
                changed = []
                # A step for another caller may have computed tokens of these requests, or ended
                # some. With the lock, no other thread's step adds a token between the count and the
                # output.
                with self.reading():
                    for request, (index, seen) in list(running.items()):
                        count = request.metrics.num_generation_tokens
                        if self.requests.get(request.request_id) is not request:  # it has ended
                            del running[request]
                        elif every_token and count > seen:
                            running[request] = index, count
                        else:
                            continue
                        changed.append((index, output(request)))
                if running and not changed:
                    self.step(on_step)
                yield from changed
        finally:
            for request in running:
                self.abort(request)

    def step(self, on_step: Callable[[StepStats], object] | None = None) -> list[Request]:
        """Compute the next tokens of all requests that fit into one step.

        ``on_step`` is called with the measurements of the step, unless it fails.

        Returns the requests that got a token or ended. If the model raises, each sequence of the
        step is computed alone, and only requests that fail alone end with the error. If no single
        request is at fault, the error is raised, and all requests end with it.

        Raises ``RuntimeError``, and changes nothing, while requests are kept from it.
        """
        begin = time.perf_counter()
        with self.alone():
            if kept := sum(not request.finished for request in tuple(self.kept)):
                raise RuntimeError(
                    f"the engine is paused, and a step would compute {kept} requests that wait: "
                    "resume() it first, or end them"
                )
            step, unread = Step(), list[Request]()
            try:
                if self.async_scheduling and self._launched and self._launched[0].ended:
                    self._launched.clear()
                while len(self._launched) < self.scheduler.batches:
                    step = self.scheduler.schedule()
                    if self.adapters:
                        unread += self._read_adapters(step)
                    if not step.scheduled:
                        break
                    try:
                        self._launched.append(self._launch(step))
                    except Exception as error:
                        return unread + self._compute_apart(step, error)
                if not self._launched:
                    return unread
                launched = self._launched.popleft()
                step = launched.step
                if self.async_scheduling and (following := self._launch_next(launched)):
                    self._launched.append(following)
                used = self.scheduler.pool.num_pages - self.scheduler.pool.free_pages
                changed = unread + self._finish_step(launched)
                if on_step is not None:
                    counts = [count for _, count in step.scheduled]
                    on_step(StepStats(counts, used, time.perf_counter() - begin))
                if self._start_over:
                    self._start_over = False
                    self.scheduler.start_over()
                return changed
            except BaseException as error:
                self._end_all(f"a step{step.of_requests()} failed: {describe_error(error)}")
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
        logits = self._execute(step, step_inputs(step, self.scheduler.pool.page_size))
        if isinstance(logits, torch.Tensor):
            return Launched(step, prompts, complete, logits)
        return Launched(step, prompts, complete, None, rest=logits)

    def _execute(self, step: Step, inputs: StepInputs, *sampled: torch.Tensor) -> Any:
        """Run the model on a step, whose pages are then in the block tables of all ranks.

        If it raises, the pages are sent again, and all saved states are evicted, because copies may
        be missing.
        """
        try:
            logits = self.execute(inputs, *sampled)
        except BaseException:
            self.scheduler.saved.forget_all()
            raise
        self.scheduler.note_launched(step)
        if self.adapters:  # an update before the step is finished is not in its tokens
            found = {sequence.request.adapter for sequence, _ in step.scheduled}
            step.versions = {each: each.version for each in found if each is not None}
        return logits

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
            logits = self._execute(step, inputs, sampled.tokens)
        except Exception as error:
            if not self.repeatable:
                raise
            _log.warning(
                "a step%s failed, and is computed again after the tokens before it are read: %s",
                step.of_requests(),
                describe_error(error),
            )
            self._start_over = self.scheduler.has_states
            return None
        return Launched(step, [], sequences, logits)

    def _finish_step(self, launched: Launched) -> list[Request]:
        """Read a step's prompt logprobs and append its tokens; return the requests that change."""
        if launched.rest is not None:
            launched.logits = launched.rest()
        changed = [s.request for s in launched.complete if s.finish_reason is None]
        if self.adapters:
            changed += self._check_adapters(launched.complete)
        self.scheduler.mark_computed(launched.step)
        sampled = launched.sampled
        if sampled is None:
            if launched.prompts:
                self._read_prompt_logprobs(launched)
            launched.fork(self.scheduler)
            sampled = self._sample(launched)
        self._append_tokens(launched, sampled)
        return list(dict.fromkeys(changed))

    def _read_prompt_logprobs(self, launched: Launched) -> None:
        """Read a step's prompt logprobs; end requests whose logits are broken."""
        for request in launched.read_prompt_logprobs(self.wait):
            self._end_request(request, "error", _BROKEN_LOGITS)

    def _sample(self, launched: Launched) -> Sampled:
        """Launch the choice of the next token of each complete sequence."""
        assert launched.logits is not None
        rows = [row_of(sequence, self.stop_token_ids) for sequence in launched.complete]
        launched.sampled = sample(
            launched.logits, rows, self.token_counts, self.first_tokens,
            processed=self.processed_logprobs,
        )  # fmt: skip
        launched.logits = None  # the next step's take this memory
        return launched.sampled

    def _append_tokens(self, launched: Launched, sampled: Sampled) -> None:
        """Wait for the next tokens, append them, and end sequences that are complete.

        Requests with broken logits end with an error.
        """
        sequences, tokens = launched.complete, sampled.read(self.wait)
        now = time.monotonic()
        for sequence, token in zip(sequences, tokens, strict=True):
            if token is None and sequence.finish_reason is None:
                grammar = sequence.grammar
                error = grammar.error if grammar is not None else None
                left = not leaves_nothing(sequence, self.vocab_size)
                error = error or (_BROKEN_LOGITS if left else NOTHING_LEFT)
                self._end_request(sequence.request, "error", error)
        for sequence, token in zip(sequences, tokens, strict=True):
            if token is None or sequence.finish_reason is not None:
                continue
            sequence.tokens.append(token.token_id)
            versions, adapter = sequence.weight_versions, sequence.request.adapter
            version = self.weight_version
            if adapter is not None:
                version = f"{version}/{launched.step.versions[adapter]}"
            if not versions or versions[-1][0] != version:
                versions.append((version, 0))
            versions[-1] = version, versions[-1][1] + 1
            request, totals = sequence.request, self.totals
            if not request.metrics.num_generation_tokens:
                totals.prompt_tokens += request.prompt_len
                totals.cached_tokens += request.num_cached_tokens or 0
            totals.generation_tokens += 1
            request.metrics.add_token(now)
            if token.logprobs is not None:
                sequence.logprobs.append(token.logprobs)
                sequence.cumulative_logprob += token.logprob or 0.0
            try:
                reason = check_stop(
                    sequence, self.stop_token_ids, self.tokenizer, self.eos_token_id
                )
            except CheckpointFormatError as error:
                self._end_request(request, "error", str(error))
                continue
            if reason is not None:
                self._finish(sequence, reason)

    def fail(self, reason: str) -> None:
        """End all requests with ``reason`` as their error, and refuse new ones."""
        self.refusal = reason
        self._end_all(reason)

    def resume(self, *, start_over: bool = False) -> None:
        """Accept requests again; they reuse no keys and values computed before now.

        Steps that are launched and not finished are computed again; with ``start_over``, all keys
        and values of running requests, too.
        """
        self.refusal = None
        self.drop()
        if start_over:
            self.scheduler.start_over(swapped=True)
        self.scheduler.reset_prefix_cache()

    def keep_logits(self) -> None:
        """Copy the logits of launched steps, where a step of no request may write."""
        for launched in self._launched:
            if launched.logits is not None:
                launched.logits = launched.logits.clone()

    def drop(self) -> None:
        """Drop the launched steps and free their memory; sequences with states start over."""
        if self._launched and self.scheduler.has_states:
            self.scheduler.start_over()
        self._launched.clear()
        self.scheduler.in_flight.clear()

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        super()._finish(sequence, reason)
        if not self.requests and self._launched:
            self._forget_launched()
            self.scheduler.in_flight.clear()

    def _forget_launched(self) -> None:
        """Drop the launched steps once the other stages of a pipeline do not wait for this rank."""
        while self._launched:
            if (rest := self._launched.popleft().rest) is not None:
                with suppress(Exception):  # which ends the engine
                    rest()

    def _end_all(self, error: str) -> None:
        self._forget_launched()
        self._start_over = False
        self.token_counts = TokenCounts()
        super()._end_all(error)
