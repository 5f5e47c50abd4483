"""Requests in, tokens out: one step at a time, for everything that is going on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

import torch

from vllm_module.messages import describe_error
from vllm_module.runtime.model_runner import StepInputs, step_inputs
from vllm_module.runtime.sampler import LogitsError, Row, SampledToken, prompt_logprobs, sample
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.scheduler import Scheduler, Step
from vllm_module.runtime.sequence import FinishReason, Request, Sequence
from vllm_module.runtime.tokenizer import TextStream, Tokenizer

_NO_TOKEN = (
    "NaN or infinity among its logits, or no token left to choose: that is the model's, unless "
    "penalties or biases are extreme"
)


class Engine:
    """Takes requests at any time and steps through all of them together.

    Several threads may call it: one at a time does something. What is aborted in the middle of
    that, be it by the garbage collector that found a stream, ends after it.

    Args:
        execute: computes a step's tokens on every rank and returns the logits of its rows.
        scheduler: whose turn it is.
        vocab_size: tokens that there are.
        max_model_len: most tokens of a sequence.
        tokenizer: for text and stop strings; token ids do without.
        stop_token_ids: what ends a sequence unless it ignores its end; of those, the tokens that
            there are.

    """

    def __init__(
        self,
        execute: Callable[[StepInputs], torch.Tensor],
        scheduler: Scheduler,
        vocab_size: int,
        max_model_len: int,
        tokenizer: Tokenizer | None = None,
        stop_token_ids: Collection[int] = (),
    ) -> None:
        self.execute = execute
        self.scheduler = scheduler
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.stop_token_ids = frozenset(stop_token_ids).intersection(range(vocab_size))
        pool = scheduler.pool
        self.room = pool.num_pages * pool.page_size
        self.max_model_len = min(max_model_len, self.room)
        self.requests: dict[str, Request] = {}  # unfinished
        self.refuses: str | None = None
        self.lock = threading.RLock()
        self._busy = False
        self._aborted: list[tuple[str, FinishReason]] = []  # while it was busy
        self._arrivals = 0

    def add(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        prompt: str | None = None,
        *,
        streamed: bool = False,
    ) -> Request:
        """Take a request in; with ``streamed``, its text is kept up to date at every step.

        Raises ``ValueError``, and takes nothing, for one that cannot be served.
        """
        with self.alone():
            self._check(request_id, prompt_token_ids, params)
            request = Request(request_id, prompt_token_ids, params, self._arrivals, prompt)
            request.streamed = self.tokenizer is not None and (streamed or bool(params.stops))
            self._arrivals += 1
            self.requests[request_id] = request
            try:
                self.scheduler.add(request.sequences[0])
            except BaseException:  # an interrupt
                self._end_request(request, "abort")
                raise
            return request

    def abort(self, request_id: str, reason: FinishReason = "abort") -> None:
        """End a request, which may have ended already, and free what it held.

        At once, or when what is going on is done: it waits for nothing.
        """
        self._aborted.append((request_id, reason))
        self._end_aborted()

    def step(self) -> list[Request]:
        """Compute what is next and return the requests that have something new.

        Raises whatever computing raised; every request then ends with that as its error.
        """
        with self.alone():
            try:
                step = self.scheduler.schedule()
                return self._compute(step) if step.scheduled else []
            except BaseException as error:
                self._end_everything(f"a step failed: {describe_error(error)}")
                raise

    def fail(self, reason: str) -> None:
        """End everything that is going on with ``reason`` as its error, and take no more."""
        self.refuses = reason
        self._end_everything(reason)

    def resume(self) -> None:
        """Take requests again, for which nothing holds that was computed with other weights."""
        self.refuses = None
        self.scheduler.forget()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other threads out.

        Raises ``RuntimeError`` in the middle of a step of this thread's own, as from a signal
        handler.
        """
        with self.lock:
            if self._busy:
                raise RuntimeError("the engine is in the middle of a step")
            self._busy = True
            try:
                yield
            finally:
                self._busy = False
        self._end_aborted()

    def _end_aborted(self) -> None:
        """End what was aborted, unless somebody is busy, who will do it."""
        while self._aborted and self.lock.acquire(blocking=False):
            try:
                if self._busy:
                    return
                self._busy = True
                try:
                    while self._aborted:
                        request_id, reason = self._aborted.pop(0)
                        if request_id in self.requests:
                            self._end_request(self.requests[request_id], reason)
                finally:
                    self._busy = False
            finally:
                self.lock.release()

    def _compute(self, step: Step) -> list[Request]:
        prompts = [(s, s.prompt_positions(count)) for s, count in step.scheduled]
        prompts = [(sequence, positions) for sequence, positions in prompts if positions]
        complete = [s for s, count in step.scheduled if count == s.remaining]
        logits = self.execute(step_inputs(step, self.scheduler.pool.page_size))
        self.scheduler.computed(step)
        first = 0
        for sequence, positions in prompts:
            rows = logits[first : first + len(positions)]
            self._keep_prompt_logprobs(sequence.request, rows, positions)
            first += len(positions)
        self._sample(complete, logits[first:])
        return list(dict.fromkeys(sequence.request for sequence in complete))

    def _check(self, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        if self.refuses is not None:
            raise ValueError(f"the engine takes no more requests: {self.refuses}")
        if request_id in self.requests:
            raise ValueError(f"request {request_id!r} is there already")
        if not prompt:
            raise ValueError("the prompt has no tokens")
        named = [*prompt, *(params.logit_bias or ()), *params.stop_token_ids]
        for token in named if min(named) < 0 or max(named) >= self.vocab_size else ():
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token {token} is outside of the vocabulary of {self.vocab_size}")
        if len(prompt) >= self.max_model_len:
            limit = (
                "the cache has room for" if self.max_model_len == self.room else "a sequence has"
            )
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

    def _sample(self, sequences: list[Sequence], logits: torch.Tensor) -> None:
        """Choose the next token of each sequence; samples of one prompt part here."""
        rows, chosen = [], []
        for row, sequence in enumerate(sequences):
            request = sequence.request
            if sequence.finish_reason is not None:
                continue  # the logits of its prompt were none
            if len(request.sequences) < request.params.n:
                self.scheduler.fork(request)
                chosen += request.sequences
                rows += [row] * len(request.sequences)
            else:
                chosen.append(sequence)
                rows.append(row)
        if rows != list(range(len(sequences))):
            logits = logits[torch.tensor(rows, dtype=torch.int64, device=logits.device)]
        for sequence, token in self._chosen(chosen, logits):
            sequence.tokens.append(token.token_id)
            if token.logprobs is not None:
                sequence.logprobs.append(token.logprobs)
                sequence.cumulative_logprob += token.logprob or 0.0
            reason = self._end(sequence, token.token_id)
            if reason is not None:
                self._finish(sequence, reason)

    def _chosen(
        self, sequences: list[Sequence], logits: torch.Tensor
    ) -> Iterable[tuple[Sequence, SampledToken]]:
        """Pair sequences with their next tokens; requests whose logits are none end by that."""
        rows = [self._row(sequence) for sequence in sequences]
        try:
            return zip(sequences, sample(logits, rows), strict=True)
        except LogitsError as error:
            broken = {sequences[row].request for row in error.rows}
            for request in broken:
                self._end_request(request, "error", _NO_TOKEN)
            good = [row for row, s in enumerate(sequences) if s.request not in broken]
            if not good:
                return ()
            chosen = [sequences[row] for row in good]
            tokens = sample(logits[torch.tensor(good)], [rows[row] for row in good])
            return zip(chosen, tokens, strict=True)

    def _row(self, sequence: Sequence) -> Row:
        params = sequence.request.params
        banned: Collection[int] = ()
        if params.min_tokens and len(sequence.output) < params.min_tokens:
            banned = self.stop_token_ids | set(params.stop_token_ids)
        uniform = 0.0 if params.greedy else sequence.uniform.random()
        return Row(params, sequence.tokens, sequence.request.prompt_len, uniform, banned)

    def _end(self, sequence: Sequence, token: int) -> FinishReason | None:
        """Tell whether the token that came ends its sequence, and why."""
        params = sequence.request.params
        length = len(sequence.tokens) - sequence.request.prompt_len
        if length >= params.min_tokens:
            if token in self.stop_token_ids and not params.ignore_eos:
                return "stop"
            if token in params.stop_token_ids:
                sequence.stop_reason = token
                return "stop"
        if sequence.request.streamed and self._reads_stop(sequence, token, length):
            return "stop"
        if length == params.max_tokens or len(sequence.tokens) >= self.max_model_len:
            return "length"
        return None

    def _reads_stop(self, sequence: Sequence, token: int, length: int) -> bool:
        """Add the token's text; whether a stop string is there, at which the text is cut."""
        params = sequence.request.params
        if sequence.stream is None:
            assert self.tokenizer is not None
            sequence.stream = TextStream(
                self.tokenizer, sequence.request.prompt_token_ids, params.skip_special_tokens
            )
        seen = len(sequence.text)
        sequence.text += sequence.stream.push(token)
        if length < params.min_tokens:
            return False
        for stop in params.stops:
            found = sequence.text.find(stop, max(0, seen - len(stop) + 1))
            if found >= 0:
                end = found + len(stop) if params.include_stop_str_in_output else found
                sequence.text = sequence.text[:end]
                sequence.stop_reason = stop
                return True
        return False

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self.scheduler.finish(sequence)
        sequence.finish_reason = reason
        self._complete_text(sequence)
        if sequence.request.finished:
            del self.requests[sequence.request.request_id]

    def _complete_text(self, sequence: Sequence) -> None:
        if self.tokenizer is not None and not isinstance(sequence.stop_reason, str):
            request = sequence.request
            sequence.text = self.tokenizer.continuation(
                request.prompt_token_ids, sequence.output, request.params.skip_special_tokens
            )

    def _end_request(
        self, request: Request, reason: FinishReason, error: str | None = None
    ) -> None:
        request.error = error
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                self._finish(sequence, reason)

    def _end_everything(self, error: str) -> None:
        """End all requests, wherever something that failed has left their pages."""
        requests = list(self.requests.values())
        self.requests.clear()
        self.scheduler.reset()
        sequences = [s for r in requests for s in r.sequences if s.finish_reason is None]
        for request in requests:
            request.error = error
        for sequence in sequences:
            sequence.finish_reason = "error"
        for sequence in sequences:
            self._complete_text(sequence)

    def _keep_prompt_logprobs(
        self, request: Request, logits: torch.Tensor, positions: range
    ) -> None:
        kept = request.prompt_logprobs
        assert kept is not None
        following = request.prompt_token_ids[positions.start + 1 : positions.stop + 1]
        try:
            kept += prompt_logprobs(logits, following, request.params.prompt_logprobs or 0)
        except LogitsError:
            self._end_request(request, "error", _NO_TOKEN)
