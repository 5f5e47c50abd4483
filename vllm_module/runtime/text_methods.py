"""What an LLM does with a model that generates text: prompts, streams, beams."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from vllm_module.base.messages import shorten
from vllm_module.runtime.arguments import REQUEST_ARGUMENTS, check_type, known_arguments
from vllm_module.runtime.beam_search import BeamSearchOutput, BeamSearchParams, search
from vllm_module.runtime.engine import Engine, Indexed
from vllm_module.runtime.metrics import StepStats, progress
from vllm_module.runtime.outputs import RequestOutput, decode_logprobs, request_output
from vllm_module.runtime.sampling.grammar import Grammar
from vllm_module.runtime.sampling.sampler import Logprob
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.sequence import Request
from vllm_module.runtime.text.prompts import (
    Prompt,
    RequestOptions,
    Tokenization,
    as_list,
    as_prompts,
    prompt_text,
    refused,
    report_refused,
    request_options,
    token_ids,
)
from vllm_module.runtime.text.tokenizer import Tokenizer

Params = SamplingParams | Sequence[SamplingParams] | None


class TextMethods:
    """The methods of :class:`~vllm_module.LLM` for models that generate text."""

    engine: Engine
    tokenizer: Tokenizer | None
    _defaults: SamplingParams
    _max_logprobs: int
    _seeds: random.Random
    _ids: Iterator[int]

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises ``CheckpointFormatError`` if there is none."""
        raise NotImplementedError

    def _with_adapters(self, prompts: Sequence[Any], lora_request: Any) -> list[Any]:
        """Return prompts with the names of their adapters, which are loaded if they have a path."""
        raise NotImplementedError

    def _check(self, method: Literal["generate", "embed"]) -> None:
        """Raise if no request is served, whatever it is, or if the model is for another method."""
        raise NotImplementedError

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Continue prompts in one batch, and return an output for each, in their order.

        Args:
            prompts: text, a list of token ids, :class:`TextPrompt`, :class:`TokensPrompt`, or a
                sequence of these. A ``cache_salt`` of a prompt keeps its cached pages from prompts
                with another one.
            sampling_params: one for all prompts, or a sequence with one for each prompt; without,
                :meth:`get_default_sampling_params`.
            use_tqdm: draw a progress bar on standard error; or what makes one, such as ``tqdm``.
            lora_request: the adapter to compute with, a :class:`~vllm_module.LoRARequest` or the
                name of a loaded one; or a sequence with one, or ``None``, for each prompt.
            tokenization_kwargs: ``add_special_tokens``, ``truncation`` and ``max_length``,
                ``truncate_prompt_tokens``, ``do_lower_case``. What is too long loses its end.
            options: others of vLLM, with the values that change nothing.

        A prompt that is refused has an ``error`` in its output, and the others are not affected;
        if it is the only one, that is raised.

        Raises:
            ValueError: every prompt is refused, ``prompts`` is of another type, or the number of
                sampling parameters is not the number of prompts.
            ModelNotReadyError: the engine sleeps, or an update of the weights failed.
            RankError: a rank ended, hangs or failed, now or before; it is named.
            RuntimeError: a step failed, or the engine was closed. Requests of other threads in that
                step get the reason as their ``error``.

        """
        known_arguments("LLM.generate", options, (), REQUEST_ARGUMENTS)
        self._check("generate")
        most = self.engine.max_model_len - 1  # prompts that are cut leave room for a token
        tokenization = Tokenization.of(tokenization_kwargs, most)
        listed = as_prompts(prompts)
        if lora_request is not None:
            listed = self._with_adapters(listed, lora_request)
        return self._generate(listed, sampling_params, use_tqdm, tokenization)

    def _generate(
        self,
        prompts: Sequence[Prompt | ValueError],
        sampling_params: Params,
        use_tqdm: bool | Callable[..., Any],
        tokenization: Tokenization,
    ) -> list[RequestOutput]:
        """Continue prompts; one that is an error is refused with it."""
        params_list = self._params(sampling_params, len(prompts))
        requests: list[Request | RequestOutput] = []
        try:
            for prompt, params in zip(prompts, params_list, strict=True):
                requests.append(self._add(prompt, params, tokenization))
            ended = {i: each for i, each in enumerate(requests) if isinstance(each, RequestOutput)}
            if ended:
                report_refused(requests)
            with progress(use_tqdm, len(requests), "prompts", len(ended)) as count:
                for index, output in self.engine.serve(requests, self._output):
                    count(index not in ended)
                    ended[index] = output
            return [ended[index] for index in range(len(requests))]
        except BaseException:
            for each in requests:
                if isinstance(each, Request):
                    self.engine.abort(each)  # does nothing for a finished request
            raise

    def serve(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        concurrency: int | None = None,
        every_token: bool = False,
        on_step: Callable[[StepStats], object] | None = None,
    ) -> Indexed:
        """Continue prompts; yield the index of each, and its output as soon as it is complete.

        Args:
            prompts: as for :meth:`generate`, or an iterator, which is read as prompts are begun.
            sampling_params: for all prompts.
            concurrency: most prompts that are served at the same time; by default all.
            every_token: whether the output so far is yielded after each new token, too.
            on_step: called after each step that this iterator makes the engine compute.

        A prompt that is refused has an ``error`` in its output. Closing or dropping the iterator
        aborts its requests.

        Raises, at ``next()``, what :meth:`generate` raises for other reasons.

        """
        self._check("generate")
        (params,) = self._params(sampling_params, 1)
        check_type("concurrency", concurrency, "a number from 1 or None", int, type(None))
        if concurrency is not None and concurrency < 1:
            raise ValueError(f"concurrency should be a number from 1 or None, got {concurrency}")
        listed = prompts if isinstance(prompts, Iterator) else as_prompts(prompts)
        how = Tokenization()
        requests = (self._add(each, params, how, streamed=every_token) for each in listed)
        yield from self.engine.serve(requests, self._output, concurrency, every_token, on_step)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Continue a prompt, and yield the whole output so far after each new token.

        Each step computes all requests, so several streams can be read alternately. Closing or
        dropping the iterator aborts the request.

        Raises, at ``next()``, what :meth:`generate` raises.
        """
        self._check("generate")
        (params,) = self._params(sampling_params, 1)
        request = self._add(prompt, params, Tokenization(), streamed=True)
        if isinstance(request, RequestOutput):
            raise ValueError(request.error)
        for _, output in self.engine.serve([request], self._output, every_token=True):
            yield output

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool | Callable[..., Any] = False,
        **options: Any,
    ) -> list[BeamSearchOutput]:
        """Return the most probable continuations of each prompt that a search of beams finds.

        They end at the context's end, too.

        Args:
            prompts: as for :meth:`generate`.
            params: of the search.
            use_tqdm: draw a progress bar on standard error.
            options: others of vLLM, with the values that change nothing.

        Raises what :meth:`generate` raises, and ``ValueError`` if one prompt is refused.

        """
        known_arguments("LLM.beam_search", options, (), REQUEST_ARGUMENTS)
        self._check("generate")
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params should be BeamSearchParams, got {shorten(params)}")
        how = Tokenization()
        listed = as_prompts(prompts)
        starts = [token_ids(prompt, self.get_tokenizer, how) for prompt in listed]
        next_logprobs = partial(self._next_logprobs, [*map(request_options, listed)])
        ends, most = self.engine.stop_token_ids, self.engine.max_model_len
        found = search(next_logprobs, starts, params, ends, most, use_tqdm)
        for sequence in itertools.chain.from_iterable(each.sequences for each in found):
            if self.tokenizer is not None:
                sequence.text = self.tokenizer.decode(sequence.tokens, params.skip_special_tokens)
                decode_logprobs(sequence.logprobs, self.tokenizer)
        return found

    def _next_logprobs(
        self, options: Sequence[RequestOptions], sequences: list[tuple[int, list[int]]], count: int
    ) -> list[dict[int, Logprob]]:
        """Return the logprobs of ``count`` most probable tokens after each sequence."""
        params = SamplingParams(max_tokens=1, logprobs=count, temperature=0, detokenize=False)
        requests: list[Request] = []
        try:
            for prompt, tokens in sequences:
                name = str(next(self._ids))
                requests.append(self.engine.add(name, tokens, params, **options[prompt]))
            for _ in self.engine.serve(requests, self._output):
                pass
        except BaseException:  # one that is refused, or an interrupt
            for request in requests:
                self.engine.abort(request)
            raise
        for request in requests:
            if request.error is not None:
                raise RuntimeError(request.error)
        return [request.sequences[0].logprobs[0] for request in requests]

    def _params(self, params: Params, count: int) -> list[SamplingParams]:
        is_one = params is None or isinstance(params, SamplingParams)
        listed: list[Any] = [params] * count if is_one else as_list(params, "sampling_params")
        if len(listed) != count:
            raise ValueError(f"there are {len(listed)} sampling_params for {count} prompts")
        for each in listed:
            if each is not None and not isinstance(each, SamplingParams):
                raise ValueError(f"sampling_params should be SamplingParams, got {shorten(each)}")
        return [each or self._defaults for each in listed]

    def _add(
        self,
        prompt: Prompt | ValueError,
        params: SamplingParams,
        tokenization: Tokenization,
        *,
        streamed: bool = False,
        request_id: str | None = None,
        grammar: Grammar | None = None,
    ) -> Request | RequestOutput:
        """Add a prompt to the engine; return its request, or an output with its ``error``."""
        request_id = str(next(self._ids)) if request_id is None else request_id
        text = prompt_text(prompt)
        ids: list[int] = []
        try:
            if isinstance(prompt, ValueError):
                raise prompt
            ids = token_ids(prompt, self.get_tokenizer, tokenization)
            counts = [params.logprobs or 0, params.prompt_logprobs or 0]
            most = self.engine.vocab_size if -1 in counts else max(counts)
            if 0 <= self._max_logprobs < most:
                raise ValueError(
                    f"{most} logprobs are more than max_logprobs={self._max_logprobs}: ask for "
                    "fewer, or give LLM(max_logprobs=-1)"
                )
            if params.seed is None:
                params = params.model_copy(update={"seed": self._seeds.getrandbits(63)})
            return self.engine.add(
                request_id, ids, params, text, streamed=streamed, grammar=grammar,
                **request_options(prompt),
            )  # fmt: skip
        except ValueError as error:
            return refused(request_id, text, ids, error)

    def _output(self, request: Request) -> RequestOutput:
        """Return a request's output so far; the engine's lock is held meanwhile."""
        output = request_output(request)
        if self.tokenizer is not None and request.params.detokenize:
            for entries in (output.prompt_logprobs, *(each.logprobs for each in output.outputs)):
                decode_logprobs(entries, self.tokenizer)
        return output
