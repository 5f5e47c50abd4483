"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from vllm_module.errors import CheckpointFormatError
from vllm_module.messages import describe_error
from vllm_module.runtime.downloading import Wait, synchronize
from vllm_module.runtime.model_runner import StepInputs, step_inputs
from vllm_module.runtime.prompts import check_vocabulary
from vllm_module.runtime.sampler import LogitsError, Sampled, prompt_logprobs, sample
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.sampling_row import Row
from vllm_module.runtime.scheduler import Scheduler, Step
from vllm_module.runtime.sequence import FinishReason, Request, Sequence
from vllm_module.runtime.stopping import check_stop, complete_text
from vllm_module.runtime.token_counts import TokenCounts
from vllm_module.runtime.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_BROKEN_LOGITS = (
    "its logits contain NaN or infinity, or leave no token to choose: check the model's weights, "
    "and penalties and biases if they are extreme"
)


@dataclass
class Launched:
    """A step that is launched and not finished: the device may still compute it.

    Attributes:
        step: what it computes.
        prompts: requests, each with the positions of the prompt logprobs that the step gives.
        complete: sequences that get a token, because all tokens that they have are computed.
        logits: of all these positions, and then of each complete sequence.

    """

    step: Step
    prompts: list[tuple[Request, range]]
    complete: list[Sequence]
    logits: torch.Tensor


class Engine:
    """Serves requests together: :meth:`add` them, and call :meth:`step` until all have ended.

    Threads may share an engine; one of them runs at a time.

    Args:
        execute: runs the model on every rank and returns the logits of the step's rows.
        scheduler: chooses what each step computes.
        vocab_size: number of tokens that the model knows.
        max_model_len: most tokens of a sequence, prompt and output.
        tokenizer: needed for text and stop strings, not for token ids.
        stop_token_ids: the model's own end tokens; ids outside of the vocabulary are ignored.
        repeatable: whether ``execute`` can be called again after it has raised.
        wait: waits for the device, which may still compute what ``execute`` has returned.

    Attributes:
        requests: those that have not ended, by id.

    """

    def __init__(
        self,
        execute: Callable[[StepInputs], torch.Tensor],
        scheduler: Scheduler,
        vocab_size: int,
        max_model_len: int,
        tokenizer: Tokenizer | None = None,
        stop_token_ids: Collection[int] = (),
        *,
        repeatable: bool = True,
        wait: Wait = synchronize,
    ) -> None:
        self.execute = execute
        self.repeatable = repeatable
        self.wait = wait
        self.scheduler = scheduler
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.stop_token_ids = frozenset(stop_token_ids).intersection(range(vocab_size))
        self.cache_tokens = scheduler.pool.num_pages * scheduler.pool.page_size
        self.max_model_len = min(max_model_len, self.cache_tokens)
        self.requests: dict[str, Request] = {}
        self.token_counts = TokenCounts()
        self.refusal: str | None = None  # why no requests are accepted
        self.lock = threading.RLock()
        self._busy = False
        self._aborts: list[tuple[str, FinishReason]] = []  # to be done when nothing else is
        self._arrivals = 0

    def step(self) -> list[Request]:
        """Compute the next tokens of all requests that fit into one step.

        Returns the requests that got a token or ended. If the model raises, each sequence of the
        step is computed alone, and only requests that fail alone end with the error. If that finds
        no culprit, the error is raised, and all requests end with it.
        """
        with self.alone():
            step = Step()
            try:
                step = self.scheduler.schedule()
                if not step.scheduled:
                    return []
                try:
                    launched = self._launch(step)
                except Exception as error:
                    return self._compute_apart(step, error)
                return self._finish_step(launched)
            except BaseException as error:
                self._end_all(f"a step{_of_requests(step)} failed: {describe_error(error)}")
                raise

    def _launch(self, step: Step) -> Launched:
        """Have the model compute a step, whose logits have the rows that :func:`step_inputs` chose.

        A prompt that is computed in chunks gets a token after its last chunk.
        """
        complete = [s for s, count in step.scheduled if s.num_computed + count == len(s.tokens)]
        prompts = [
            (s.request, s.prompt_logprob_positions(count))
            for s, count in step.scheduled
            if s.request.prompt_logprobs is not None
        ]
        logits = self.execute(step_inputs(step, self.scheduler.pool.page_size))
        self.scheduler.mark_listed(step)
        return Launched(step, prompts, complete, logits)

    def _compute_apart(self, step: Step, error: Exception) -> list[Request]:
        """Compute each sequence of a step that failed by itself; end requests that fail again.

        Raises ``error`` if there is no telling which request is at fault: pages were moved, which
        cannot be repeated, or every sequence fails, or no other request is left.
        """
        if not self.repeatable or step.swapped_out or step.copied or step.swapped_in:
            raise error
        computed: list[Launched] = []
        failed: dict[Request, Exception] = {}
        for sequence, count in step.scheduled:
            apart = Step([(sequence, count)])
            try:
                if len(step.scheduled) == 1:
                    raise error
                computed.append(self._launch(apart))
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

    def _finish_step(self, launched: Launched) -> list[Request]:
        """Use a step's logits: prompt logprobs, then tokens. Return the requests that change."""
        self.scheduler.mark_computed(launched.step)
        row = 0
        for request, positions in launched.prompts:
            if positions:
                rows = launched.logits[row : row + len(positions)]
                self._add_prompt_logprobs(request, rows, positions)
                row += len(positions)
        sequences, sampled = self._sample(launched.complete, launched.logits[row:])
        self._append_tokens(sequences, sampled)
        return list(dict.fromkeys(sequence.request for sequence in launched.complete))

    def _sample(
        self, sequences: list[Sequence], logits: torch.Tensor
    ) -> tuple[list[Sequence], Sampled]:
        """Have the next token of each sequence chosen; return the sequences that get one.

        A request with ``n`` samples has one sequence up to here, and from here on ``n``.
        """
        rows, sampled = [], []
        for row, sequence in enumerate(sequences):
            request = sequence.request
            if len(request.sequences) < request.params.n and sequence.finish_reason is None:
                self.scheduler.fork(request)
                sampled += request.sequences
                rows += [row] * len(request.sequences)
            else:
                sampled.append(sequence)
                rows.append(row)
        if len(rows) > len(sequences):
            logits = logits[torch.tensor(rows, dtype=torch.int64, device=logits.device)]
        return sampled, sample(logits, [self._row(each) for each in sampled], self.token_counts)

    def _append_tokens(self, sequences: list[Sequence], sampled: Sampled) -> None:
        """Wait for the next token of each sequence, and end the sequences that it ends.

        Requests with broken logits end instead.
        """
        tokens = sampled.read(self.wait)
        for sequence, token in zip(sequences, tokens, strict=True):
            if token is None and sequence.finish_reason is None:
                self._end_request(sequence.request, "error", _BROKEN_LOGITS)
        for sequence, token in zip(sequences, tokens, strict=True):
            if token is None or sequence.finish_reason is not None:
                continue
            sequence.tokens.append(token.token_id)
            if token.logprobs is not None:
                sequence.logprobs.append(token.logprobs)
                sequence.cumulative_logprob += token.logprob or 0.0
            try:
                reason = check_stop(sequence, self.stop_token_ids, self.tokenizer)
            except CheckpointFormatError as error:
                self._end_request(sequence.request, "error", str(error))
                continue
            if reason is not None:
                self._finish(sequence, reason)

    def _row(self, sequence: Sequence) -> Row:
        params = sequence.request.params
        banned: Collection[int] = ()
        if params.min_tokens and len(sequence.output) < params.min_tokens:
            banned = self.stop_token_ids | set(params.stop_token_ids)
        uniform = 0.0 if params.greedy else sequence.uniform.random()
        request = sequence.request
        key = (request.arrival, sequence.index)
        return Row(params, sequence.tokens, request.prompt_len, uniform, banned, key)

    def _add_prompt_logprobs(
        self, request: Request, logits: torch.Tensor, positions: range
    ) -> None:
        logprobs = request.prompt_logprobs
        assert logprobs is not None
        next_tokens = request.prompt_token_ids[positions.start + 1 : positions.stop + 1]
        try:
            count = request.params.prompt_logprobs or 0
            logprobs += prompt_logprobs(logits, next_tokens, count, self.wait)
        except LogitsError:
            self._end_request(request, "error", _BROKEN_LOGITS)

    def add(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        prompt: str | None = None,
        *,
        streamed: bool = False,
    ) -> Request:
        """Accept a request; with ``streamed``, its text is updated at every step.

        Raises ``ValueError`` for a request that cannot be served; nothing changes then.
        """
        with self.alone():
            self._check(request_id, prompt_token_ids, params)
            most = len(prompt_token_ids) + (params.max_tokens or self.max_model_len)
            max_len = min(most, self.max_model_len)
            request = Request(request_id, prompt_token_ids, params, self._arrivals, max_len, prompt)
            request.streamed = self.tokenizer is not None and (streamed or bool(params.stops))
            self._arrivals += 1
            self.requests[request_id] = request
            try:
                self.scheduler.add(request.sequences[0])
            except BaseException:  # an interrupt
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
        token_ids = [*prompt, *(params.logit_bias or ()), *params.stop_token_ids]
        check_vocabulary(token_ids, self.vocab_size)
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
        if params.stops and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and the checkpoint has none")

    def abort(self, request_id: str, reason: FinishReason = "abort") -> None:
        """End a request and free its pages; do nothing if it has ended.

        Never waits, so a finalizer can call it: during a step, the request ends after the step.
        """
        self._aborts.append((request_id, reason))
        self._do_aborts()

    def fail(self, reason: str) -> None:
        """End all requests with ``reason`` as their error, and refuse new ones."""
        self.refusal = reason
        self._end_all(reason)

    def resume(self) -> None:
        """Accept requests again, which reuse no keys and values computed before now."""
        self.refusal = None
        self.scheduler.reset_prefix_cache()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the engine's lock: other threads wait, and their aborts are done afterwards.

        Raises ``RuntimeError`` if this thread holds it already, such as a signal handler that
        interrupts a step.
        """
        with self.lock:
            if self._busy:
                raise RuntimeError("the engine is in the middle of a step")
            self._busy = True
            try:
                yield
            finally:
                self._busy = False
        self._do_aborts()

    def _do_aborts(self) -> None:
        """End aborted requests; if the engine is busy, :meth:`alone` does it afterwards."""
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
            del self.requests[sequence.request.request_id]

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
        """End all requests and free all pages, even if a step failed in the middle."""
        requests = list(self.requests.values())
        self.requests.clear()
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
    """Name the requests of a step for a message."""
    ids = list(dict.fromkeys(sequence.request.request_id for sequence, _ in step.scheduled))
    if not ids:
        return ""
    more = f" and {len(ids) - 8} more" if len(ids) > 8 else ""
    noun = "request" if len(ids) == 1 else "requests"
    return f" of {noun} {', '.join(ids[:8])}{more}"
