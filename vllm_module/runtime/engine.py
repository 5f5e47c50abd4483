"""Requests in, tokens out: one step at a time, for everything that is going on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch

from vllm_module.runtime.model_runner import StepInputs, step_inputs
from vllm_module.runtime.sampler import LogitsError, Row, SampledToken, prompt_logprobs, sample
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.scheduler import Scheduler
from vllm_module.runtime.sequence import FinishReason, Request, Sequence
from vllm_module.runtime.tokenizer import TextStream, Tokenizer


class Engine:
    """Takes requests at any time and steps through all of them together.

    Args:
        execute: computes a step's tokens on every rank and returns the logits of its rows.
        scheduler: whose turn it is.
        vocab_size: tokens that there are.
        max_model_len: most tokens of a sequence.
        tokenizer: for text and stop strings; token ids do without.
        stop_token_ids: what ends a sequence unless it ignores its end.

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
        self.stop_token_ids = frozenset(stop_token_ids)
        pool = scheduler.pool
        self.room = pool.num_pages * pool.page_size
        self.max_model_len = min(max_model_len, self.room)
        self.requests: dict[str, Request] = {}  # unfinished
        self.refuses: str | None = None
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
        self._check(request_id, prompt_token_ids, params)
        request = Request(request_id, prompt_token_ids, params, self._arrivals, prompt)
        request.streamed = self.tokenizer is not None and (streamed or bool(params.stops))
        self._arrivals += 1
        self.requests[request_id] = request
        self.scheduler.add(request.sequences[0])
        return request

    def abort(self, request_id: str, reason: FinishReason = "abort") -> None:
        """End a request, which may have ended already, and free what it held."""
        request = self.requests.get(request_id)
        if request is None:
            return
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                self._finish(sequence, reason)

    def step(self) -> list[Request]:
        """Compute what is next and return the requests that have something new.

        Raises whatever computing raised; every request then ends with that as its error, and no
        more are taken.
        """
        step = self.scheduler.schedule()
        if not step.scheduled:
            return []
        prompts = [(s, s.prompt_positions(count)) for s, count in step.scheduled]
        prompts = [(sequence, positions) for sequence, positions in prompts if positions]
        complete = [s for s, count in step.scheduled if count == s.remaining]
        try:
            logits = self.execute(step_inputs(step, self.scheduler.pool.page_size))
        except BaseException as error:
            self.fail(f"a step failed: {type(error).__name__}: {error}")
            raise
        self.scheduler.computed(step)
        first = 0
        for sequence, positions in prompts:
            rows = logits[first : first + len(positions)]
            self._keep_prompt_logprobs(sequence.request, rows, positions)
            first += len(positions)
        self._sample(complete, logits[first:])
        return list(dict.fromkeys(sequence.request for sequence in complete))

    def fail(self, reason: str) -> None:
        """End everything that is going on with ``reason`` as its error, and take no more."""
        self.refuses = reason
        for request in list(self.requests.values()):
            request.error = reason
            self.abort(request.request_id, "error")

    def resume(self) -> None:
        """Take requests again, for which nothing holds that was computed with other weights."""
        self.refuses = None
        self.scheduler.forget()

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
            if len(request.sequences) < request.params.n:
                self.scheduler.fork(request)
                chosen += request.sequences
                rows += [row] * len(request.sequences)
            else:
                chosen.append(sequence)
                rows.append(row)
        if len(rows) > len(sequences):
            logits = logits[torch.tensor(rows, device=logits.device)]
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
                request.error = "the model gave NaN or infinity, or left no token to choose"
                self.abort(request.request_id, "error")
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
        sequence.finish_reason = reason
        self.scheduler.finish(sequence)
        request = sequence.request
        if self.tokenizer is not None and not isinstance(sequence.stop_reason, str):
            sequence.text = self.tokenizer.continuation(
                request.prompt_token_ids, sequence.output, request.params.skip_special_tokens
            )
        if request.finished:
            del self.requests[request.request_id]

    def _keep_prompt_logprobs(
        self, request: Request, logits: torch.Tensor, positions: range
    ) -> None:
        kept = request.prompt_logprobs
        assert kept is not None
        following = request.prompt_token_ids[positions.start + 1 : positions.stop + 1]
        kept += prompt_logprobs(logits, following, request.params.prompt_logprobs or 0)
