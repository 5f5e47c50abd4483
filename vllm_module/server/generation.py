"""What answers of text have in common: parameters, deltas of choices, usage, OpenAI's choices."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from vllm_module.runtime.outputs import RequestOutput
from vllm_module.runtime.sampling.sampler import Logprob
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.server.endpoint import Events
from vllm_module.server.errors import ApiError, field_error
from vllm_module.server.growing_text import Delta
from vllm_module.server.protocol import GenerationBody, StreamOptions
from vllm_module.server.state import State

_Body = TypeVar("_Body", bound=GenerationBody)
_LEAST = -9999.0  # JSON has no infinity
# What makes a chunk worth sending.
_SHOWN = ("text", "delta", "logprobs", "finish_reason", "token_ids")


@dataclass
class ChoiceDelta:
    """What is new of a choice.

    Attributes:
        index: number of the choice: the prompt's samples follow those of the prompt before.
        output: the request of the choice, so far.
        text, token_ids, logprobs: new ones.
        first: True for the first delta of the choice.
        finish_reason, stop_reason: in its last delta.
        parts: what the text has become, in a conversation.

    """

    index: int
    output: RequestOutput
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]
    first: bool
    finish_reason: str | None
    stop_reason: int | str | None
    parts: Sequence[Delta] = ()


class Continuation:
    """The prompts of one request, which are continued together.

    Args:
        state, body: the server, and the request.
        kind: the beginning of the answer's id.
        prompts: the prompts, each a mapping.
        generates: False if generated tokens are not shown.
        wanted: parameters, unless the body has them among those for sampling; those that are
            ``None``, and others, are those of generation_config.json.

    Attributes:
        name: id of the request.
        params: the parameters.

    """

    def __init__(
        self,
        state: State,
        body: GenerationBody,
        kind: str,
        prompts: Sequence[Mapping[str, Any]],
        *,
        generates: bool = True,
        **wanted: Any,
    ) -> None:
        self.state, self.body, self.name = state, body, f"{kind}-{uuid.uuid4().hex}"
        about = {"adapter": state.adapter(body.model), "cache_salt": body.cache_salt}
        self.prompts = [{**prompt, **about} for prompt in prompts]
        self._llm = state.engine(body.model)
        defaults = self._llm.llm.get_default_sampling_params()
        recommended = {name: getattr(defaults, name) for name in defaults.model_fields_set}
        given = {name: value for name, value in wanted.items() if value is not None}
        try:
            self.params = SamplingParams.from_optional(**{**recommended, **given, **body.sampling})
        except ValueError as error:
            raise field_error(error) from None
        self._generates = generates
        self._outputs: dict[int, RequestOutput] = {}

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """Yield what is new of each choice: for each token of a stream, else once.

        Raises ``ApiError`` if the engine fails on one.
        """
        told: dict[int, tuple[int, int]] = {}  # characters and tokens of each choice
        ended = set[int]()
        begin = 0 if self._generates else sys.maxsize
        outputs = self._llm.serve(
            self.prompts, self.params, self.name, every_token=self.body.stream
        )
        async with aclosing(outputs):
            async for prompt, output in outputs:
                self._outputs[prompt] = output
                if output.error is not None:
                    own = output.error.startswith("structured_outputs: ")  # the client's grammar
                    raise ApiError(400 if own else 500, output.error)
                for sample in output.outputs:
                    index = prompt * self.params.n + sample.index
                    characters, tokens = told.get(index, (begin, begin))
                    ids = sample.token_ids[tokens:]
                    if index in ended or not (ids or sample.finish_reason):
                        continue
                    yield ChoiceDelta(
                        index,
                        output,
                        sample.text[characters:],
                        ids,
                        (sample.logprobs or [])[tokens:],
                        index not in told,
                        sample.finish_reason,
                        sample.stop_reason,
                    )
                    told[index] = max(characters, len(sample.text)), len(sample.token_ids)
                    if sample.finish_reason is not None:
                        ended.add(index)

    def usage(self, generated: bool = True) -> dict[str, Any]:
        """Return the counts of tokens, so far."""
        outputs = self._outputs.values()
        prompt = sum(len(each.prompt_token_ids) for each in outputs)
        tokens = sum(len(sample.token_ids) for each in outputs for sample in each.outputs)
        tokens = tokens if generated and self._generates else 0
        return {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(each.num_cached_tokens or 0 for each in outputs)
            },
        }


class ChoicesAnswer(Generic[_Body]):
    """The answer to a request in which OpenAI's clients find choices, whole or as chunks.

    Args:
        body: the request.
        generation: what is answered.

    Attributes:
        kinds: the protocol's names of a whole answer and of a chunk.
        uncounted: what a chunk has in place of ``usage`` if the request does not ask for it.

    """

    kinds: ClassVar[tuple[str, str]]
    uncounted: ClassVar[dict[str, Any]] = {}

    def __init__(self, body: _Body, generation: Continuation) -> None:
        self.body, self._generation = body, generation
        self._head = {
            "id": generation.name,
            "object": self.kinds[body.stream],
            "created": int(time.time()),
            "model": body.model or generation.state.names[0],
        }

    async def whole(self) -> dict[str, Any]:
        """Return all choices."""
        choices, beside = [], dict[str, Any]()
        async with aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                choices.append(self._choice(delta))
                beside = self.beside(delta)
        choices.sort(key=lambda choice: choice["index"])
        usage = self._generation.usage()
        return {**self._head, **beside, "choices": choices, "usage": usage}

    async def events(self) -> Events:
        """Yield chunks, and the counts of tokens if the request asks for them."""
        usage, options = self._generation.usage, self.body.stream_options or StreamOptions()
        counted = options.include_usage and options.continuous_usage_stats
        async with aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                if delta.first and (begin := self.begin(delta)) is not None:
                    counts = {"usage": usage(generated=False)} if counted else self.uncounted
                    yield {**self._head, **self.beside(delta), "choices": [begin], **counts}
                for choice in self.chunks(self._choice(delta)):
                    if any(map(choice.get, _SHOWN)):
                        counts = {"usage": usage()} if counted else self.uncounted
                        yield {**self._head, "choices": [choice], **counts}
        if options.include_usage:
            yield {**self._head, "choices": [], "usage": usage()}

    def _choice(self, delta: ChoiceDelta) -> dict[str, Any]:
        """Return the choice of a whole answer or of a chunk."""
        return {
            "index": delta.index,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "token_ids": delta.token_ids if self.body.return_token_ids else None,
            **self.told(delta),
        }

    def told(self, delta: ChoiceDelta) -> dict[str, Any]:
        """Return what a choice of the protocol has beside what every choice has, or instead."""
        raise NotImplementedError

    def chunks(self, choice: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the choices of the chunks that a choice is told in."""
        return [choice]

    def begin(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        """Return a choice that is told before the first one has anything."""
        return None

    def beside(self, delta: ChoiceDelta) -> dict[str, Any]:
        """Return what a whole answer, or the chunk that begins, has beside its choices."""
        return {}


def token_text(token_id: int, logprob: Logprob, *, as_id: bool) -> str:
    """Return the text of a token, or ``token_id:`` and its number."""
    if as_id or logprob.decoded_token is None:
        return f"token_id:{token_id}"
    return logprob.decoded_token


def ranked(entry: Mapping[int, Logprob]) -> list[tuple[int, Logprob]]:
    """Return the tokens of an entry, the most probable first."""
    return sorted(entry.items(), key=lambda each: each[1].rank)


def bounded(logprob: Logprob) -> float:
    """Return the number as JSON can have it."""
    return max(logprob.logprob, _LEAST)
