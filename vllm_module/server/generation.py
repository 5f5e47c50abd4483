"""What answers of text have in common: parameters, deltas of choices, logprobs, usage."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from vllm_module.runtime.async_llm import AsyncLLM
from vllm_module.runtime.outputs import RequestOutput
from vllm_module.runtime.sampling.sampler import Logprob
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.server.errors import ApiError, field_error
from vllm_module.server.metrics import Histograms
from vllm_module.server.protocol import GenerationBody

_LEAST = -9999.0  # JSON has no infinity


def sampling_params(llm: AsyncLLM, body: GenerationBody, **more: Any) -> SamplingParams:
    """Return the parameters that a body asks for; others are generation_config.json's."""
    defaults = llm.llm.get_default_sampling_params()
    recommended = {name: getattr(defaults, name) for name in defaults.model_fields_set}
    given = {name: value for name, value in more.items() if value is not None}
    try:
        return SamplingParams.from_optional(**{**recommended, **body.sampling, **given})
    except ValueError as error:
        raise field_error(error) from None


@dataclass
class ChoiceDelta:
    """What is new of a choice.

    Attributes:
        index: number of the choice: the prompt's samples follow those of the prompt before.
        output: the request of the choice, so far.
        text, token_ids, logprobs: new ones.
        first: True for the first delta of the choice.
        finish_reason, stop_reason: in its last delta.

    """

    index: int
    output: RequestOutput
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]
    first: bool
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass
class _Sent:
    characters: int = 0
    tokens: int = 0
    begun: bool = False
    ended: bool = False


@dataclass
class Continuation:
    """The prompts of one request, which are continued together.

    Attributes:
        name: id of the request.
        stream: whether there is a delta for each new token; else one for each choice.

    """

    llm: AsyncLLM
    histograms: Histograms
    name: str
    prompts: Sequence[Any]
    params: SamplingParams
    stream: bool
    _outputs: dict[int, RequestOutput] = field(default_factory=dict)

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """Yield what is new of each choice. Raises ``ApiError`` if the engine fails on one."""
        sent: dict[int, _Sent] = {}
        outputs = self.llm.serve(self.prompts, self.params, self.name, every_token=self.stream)
        async with aclosing(outputs):
            async for prompt, output in outputs:
                self._outputs[prompt] = output
                if output.error is not None:
                    own = output.error.startswith("structured_outputs: ")  # the client's grammar
                    raise ApiError(400 if own else 500, output.error)
                if output.finished:
                    self.histograms.observe(output.metrics)
                for sample in output.outputs:
                    index = prompt * self.params.n + sample.index
                    done = sent.setdefault(index, _Sent())
                    ids = sample.token_ids[done.tokens :]
                    if done.ended or not (ids or sample.finish_reason):
                        continue
                    yield ChoiceDelta(
                        index,
                        output,
                        sample.text[done.characters :],
                        ids,
                        (sample.logprobs or [])[done.tokens :],
                        not done.begun,
                        sample.finish_reason,
                        sample.stop_reason,
                    )
                    done.characters = max(done.characters, len(sample.text))
                    done.tokens, done.begun = len(sample.token_ids), True
                    done.ended = sample.finish_reason is not None

    def usage(self, generated: bool = True) -> dict[str, Any]:
        """Return the counts of tokens, so far."""
        outputs = self._outputs.values()
        prompt = sum(len(each.prompt_token_ids) for each in outputs)
        tokens = sum(len(sample.token_ids) for each in outputs for sample in each.outputs)
        tokens = tokens if generated else 0
        return {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(each.num_cached_tokens or 0 for each in outputs)
            },
        }


def token_text(token_id: int, logprob: Logprob | None, *, as_id: bool) -> str:
    """Return the text of a token, or ``token_id:`` and its number."""
    if as_id or logprob is None or logprob.decoded_token is None:
        return f"token_id:{token_id}"
    return logprob.decoded_token


def ranked(entry: Mapping[int, Logprob]) -> list[tuple[int, Logprob]]:
    """Return the tokens of an entry, the most probable first."""
    return sorted(entry.items(), key=lambda each: each[1].rank)


def bounded(logprob: Logprob) -> float:
    """Return the number as JSON can have it."""
    return max(logprob.logprob, _LEAST)


def completion_logprobs(
    tokens: Iterable[tuple[str, float | None, Mapping[str, float] | None]], offset: int
) -> dict[str, Any]:
    """Return the logprobs of /v1/completions: lists with an entry for each token."""
    texts, numbers, tops, offsets = [], [], [], []
    for text, number, top in tokens:
        texts.append(text)
        numbers.append(number)
        tops.append(top)
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts, "token_logprobs": numbers, "top_logprobs": tops, "text_offset": offsets,
    }  # fmt: skip
