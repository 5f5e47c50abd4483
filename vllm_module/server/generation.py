"""What answers of text have in common: parameters, deltas of choices, and usage."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from vllm_module.runtime.engine import NOTHING_LEFT
from vllm_module.runtime.outputs import RequestOutput
from vllm_module.runtime.sampling.sampler import Logprob
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.server.blocks import new_key
from vllm_module.server.errors import ApiError, field_error
from vllm_module.server.growing_text import Delta
from vllm_module.server.parsers import Parser
from vllm_module.server.protocol import GenerationBody
from vllm_module.server.state import State
from vllm_module.server.tools import AnswerForm

_BEFORE = 4  # tokens of the prompt, on which the text of the first ones after it may depend


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
        weight_versions: versions of the weights that computed all tokens, each with their number.

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
    weight_versions: Sequence[tuple[str, int]] = ()


class Continuation:
    """The prompts of one request, which are continued together.

    Args:
        state, body: the server, and the request.
        kind: the beginning of the answer's id.
        prompts: the prompts, each a mapping.
        form: that of the answers to the only one, a conversation: their texts are parsed.
        wanted: parameters, unless the body has them among those for sampling; those that are
            ``None``, and others, are those of generation_config.json. With 0 as ``max_tokens``, one
            is generated, and not shown.

    Attributes:
        name: id of the request.
        params: the parameters.
        calls: number of calls in each choice so far.
        reasoning_tokens: number of tokens of reasoning in each choice that has ended.
        last: the last piece of a choice that has ended.

    """

    def __init__(
        self,
        state: State,
        body: GenerationBody,
        kind: str,
        prompts: Sequence[Mapping[str, Any]],
        form: AnswerForm | None = None,
        **wanted: Any,
    ) -> None:
        self.state, self.body, self.name = state, body, f"{kind}-{new_key()}"
        about = {"adapter": state.adapter(body.model), "cache_salt": body.cache_salt}
        self.prompts = [{**prompt, **about} for prompt in prompts]
        self._llm = state.engine(body.model)
        defaults = self._llm.llm.get_default_sampling_params()
        recommended = {name: getattr(defaults, name) for name in defaults.model_fields_set}
        if form is not None:  # else a message may be as long as the context allows
            recommended.setdefault("max_tokens", None)
        given = {name: value for name, value in wanted.items() if value is not None}
        self._generates = given.get("max_tokens") != 0
        if not self._generates:
            given["max_tokens"] = 1
        try:
            self.params = SamplingParams.from_optional(**{**recommended, **given, **body.sampling})
        except ValueError as error:
            raise field_error(error) from None
        self._outputs: dict[int, RequestOutput] = {}
        self._form, self._parsers = form, dict[int, Parser]()
        self.calls, self.reasoning_tokens = Counter[int](), Counter[int]()
        self.last: ChoiceDelta | None = None

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """Yield what is new of each choice: for each token of a stream, else once.

        Raises ``ApiError`` if the engine fails on one.
        """
        told: dict[int, tuple[int, int]] = {}  # characters and tokens of each choice
        ended = set[int]()
        nothing = (0, 0) if self._generates else (sys.maxsize, sys.maxsize)
        outputs = self._llm.serve(
            self.prompts, self.params, self.name, every_token=self.body.stream
        )
        async with aclosing(outputs):
            async for prompt, output in outputs:
                self._outputs[prompt] = output
                if output.error is not None:
                    own = output.error.startswith(("structured_outputs: ", NOTHING_LEFT))
                    raise ApiError(400 if own else 500, output.error)  # own: of the request
                samples = [*output.outputs]
                if output.finished:  # before its prompt is computed, there is only the first
                    missing = range(len(samples), self.params.n)
                    samples += [replace(samples[0], index=number) for number in missing]
                for sample in samples:
                    index = prompt * self.params.n + sample.index
                    characters, tokens = told.get(index, nothing)
                    ids = sample.token_ids[tokens:]
                    if index in ended or not (ids or sample.finish_reason):
                        continue
                    delta = ChoiceDelta(
                        index,
                        output,
                        sample.text[characters:],
                        ids,
                        sample.logprobs[tokens:] if sample.logprobs else [],
                        index not in told,
                        sample.finish_reason,
                        sample.stop_reason,
                        weight_versions=sample.weight_versions,
                    )
                    told[index] = max(characters, len(sample.text)), len(sample.token_ids)
                    if sample.finish_reason is not None:
                        ended.add(index)
                        self.last = delta
                    if self._form is not None:
                        await self._parse(delta, self._form)
                    yield delta

    async def _parse(self, delta: ChoiceDelta, form: AnswerForm) -> None:
        """Add the parts that the text has become; at its end, count the tokens of reasoning."""
        if delta.first:
            self._parsers[delta.index] = form.parser(self.prompts[0]["prompt"])
        parser = self._parsers[delta.index]
        parts = parser.feed(delta.text)
        if delta.finish_reason is not None:
            parts += parser.finish()
            if parser.reasoned:  # the text is decoded several times
                count = await asyncio.to_thread(self._count_reasoning, delta)
                self.reasoning_tokens[delta.index] = count
        found = []
        for part in parts:
            if part.tool_call is not None:
                if self.calls[delta.index] == form.most_calls:
                    continue
                self.calls[delta.index] += 1
            found.append(part)
        delta.parts = found

    def _count_reasoning(self, delta: ChoiceDelta) -> int:
        tokenizer, skips = self.state.tokenizer(), self.params.skip_special_tokens
        before = delta.output.prompt_token_ids[-_BEFORE:]
        begin = len(tokenizer.decode(before, skips))
        (ids,) = [each.token_ids for each in delta.output.outputs if each.index == delta.index]
        return self._parsers[delta.index].reasoning_tokens(
            ids, lambda some: tokenizer.decode([*before, *some], skips)[begin:]
        )

    def usage(self, generated: bool = True) -> dict[str, Any]:
        """Return the counts of tokens, so far."""
        outputs = self._outputs.values()
        prompt = sum(len(each.prompt_token_ids) for each in outputs)
        tokens = sum(len(sample.token_ids) for each in outputs for sample in each.outputs)
        tokens = tokens if generated and self._generates else 0
        counts = {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(each.num_cached_tokens or 0 for each in outputs)
            },
        }
        if self._form is not None:
            reasoning = self.reasoning_tokens.total() if generated else 0
            counts["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        return counts
