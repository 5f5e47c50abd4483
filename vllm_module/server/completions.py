"""``/v1/completions``: texts or token ids that are continued."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import zip_longest
from typing import Any, ClassVar

from pydantic import Field

from vllm_module.runtime.sampling.sampler import Logprob
from vllm_module.server.endpoint import Answer
from vllm_module.server.errors import ApiError
from vllm_module.server.generation import (
    ChoiceDelta,
    ChoicesAnswer,
    Continuation,
    bounded,
    ranked,
    token_text,
)
from vllm_module.server.protocol import COMMON, GenerationBody
from vllm_module.server.state import State


class CompletionBody(GenerationBody):
    """The body of /v1/completions."""

    unsupported = {**COMMON, "suffix": ("",), "best_of": (1,)}
    prompt: Any
    max_tokens: int | None = Field(default=None, ge=0)
    echo: bool = False
    add_special_tokens: bool | None = None
    logprobs: int | None = Field(default=None, ge=0)
    prompt_logprobs: int | None = Field(default=None, ge=0)


async def completions(state: State, body: CompletionBody) -> Answer:
    """Continue prompts; with ``echo``, answer with the prompt's text and logprobs, too."""
    most = state.engine(body.model).llm.model_config.max_model_len
    if isinstance(body.prompt, list) and len(body.prompt) > max(most, state.max_prompts):
        # Without a look at each entry, for which the other requests would wait.
        message = f"prompt has {len(body.prompt)} entries: expected at most {state.max_prompts} "
        raise ApiError(400, f"{message}prompts, or {most} tokens of one", "prompt")
    prompts = await state.prompts("prompt", body.prompt, body.add_special_tokens)
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens should be 1 or more, or 0 with echo", "max_tokens")
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(400, "an answer with prompt_logprobs is not streamed", "prompt_logprobs")
    counts = [body.prompt_logprobs, body.logprobs if body.echo else None]
    generation = Continuation(
        state,
        body,
        "cmpl",
        prompts,
        generates=body.max_tokens != 0,
        max_tokens=None if body.max_tokens is None else max(1, body.max_tokens),
        logprobs=body.logprobs,
        prompt_logprobs=max((each for each in counts if each is not None), default=None),
    )
    answer = _Completions(body, generation)
    return answer.events() if body.stream else await answer.whole()


class _Completions(ChoicesAnswer[CompletionBody]):
    """Texts, with the prompt's if it is echoed."""

    kinds = ("text_completion", "text_completion")
    uncounted: ClassVar = {"usage": None}

    def __init__(self, body: CompletionBody, generation: Continuation) -> None:
        super().__init__(body, generation)
        self._offsets: dict[int, int] = {}  # where the next token of a choice begins

    def told(self, delta: ChoiceDelta) -> dict[str, Any]:
        body, output = self.body, delta.output
        echoed = body.echo and delta.first
        told: dict[str, Any] = {"text": delta.text, "logprobs": None}
        if echoed:
            ids, prompt = output.prompt_token_ids, output.prompt
            told["text"] = (self._decode(ids) if prompt is None else prompt) + delta.text
        if body.logprobs is not None:
            told["logprobs"] = self._logprobs(delta, echoed)
        if body.max_tokens == 0:  # the engine has generated one all the same
            told.update(finish_reason="length", stop_reason=None)
        if body.return_token_ids and delta.first:
            told["prompt_token_ids"] = output.prompt_token_ids
        if body.prompt_logprobs is not None:
            # An output that has ended early has none of some tokens.
            known = zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=False)
            told["prompt_logprobs"] = [_entries(*each, body.prompt_logprobs) for each in known]
        return told

    def _decode(self, ids: list[int]) -> str:
        return self._generation.state.tokenizer().decode(ids)

    def _logprobs(self, delta: ChoiceDelta, echoed: bool) -> dict[str, Any]:
        """Return lists with an entry for each token."""
        entries: list[tuple[int, Mapping[int, Logprob] | None]] = []
        if echoed:
            ids = delta.output.prompt_token_ids
            known = delta.output.prompt_logprobs or ()
            entries += zip_longest(ids, known)  # a request that is aborted may have few of them
        entries += zip(delta.token_ids, delta.logprobs, strict=True)
        as_id, count = self.body.return_tokens_as_token_ids, self.body.logprobs or 0
        rows: list[tuple[Any, ...]] = []
        offset = self._offsets.get(delta.index, 0)
        for token, entry in entries:
            if entry is None:  # the first token of a prompt, or not computed
                text = f"token_id:{token}" if as_id else self._decode([token])
                rows.append((text, None, None, offset))
            else:
                text = token_text(token, entry[token], as_id=as_id)
                top: dict[str, float] = {}
                for other, logprob in _most(entry, token, count):
                    # Of two tokens of one text, the first counts.
                    top.setdefault(token_text(other, logprob, as_id=as_id), bounded(logprob))
                rows.append((text, bounded(entry[token]), top, offset))
            offset += len(text)
        self._offsets[delta.index] = offset
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [row[at] for row in rows] for at, name in enumerate(names)}


def _most(entry: Mapping[int, Logprob], own: int, count: int) -> list[tuple[int, Logprob]]:
    """Return the ``count`` most probable tokens of an entry and its own one, in this order."""
    return [each for each in ranked(entry) if each[1].rank <= count or each[0] == own]


def _entries(token: int, entry: Mapping[int, Logprob] | None, count: int) -> Any:
    """Return the logprobs of a token of the prompt as vLLM writes them."""
    if entry is None:
        return None
    listed = _most(entry, token, count)
    return {str(other): {**asdict(each), "logprob": bounded(each)} for other, each in listed}
