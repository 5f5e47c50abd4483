"""What the endpoints of a server share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_module.base.messages import shorten
from vllm_module.runtime.async_llm import AsyncLLM
from vllm_module.runtime.text.tokenizer import Tokenizer
from vllm_module.server.errors import ApiError, loading
from vllm_module.server.protocol import TemplateOptions
from vllm_module.server.tools import Formats


@dataclass
class State:
    """An engine, once it is loaded, and the settings of its server.

    Attributes:
        names: names of the model that requests may give; the first one is shown.
        max_prompts: most prompts of a request.
        formats: how the model writes calls of tools and reasoning.
        llm: the engine; ``None`` while it is loading.
        loaded: seconds from 1970 to the end of loading.

    """

    names: Sequence[str]
    max_prompts: int
    llm: AsyncLLM | None = None
    formats: Formats = field(default_factory=Formats)
    loaded: int = 0

    def engine(self, model: str | None = None) -> AsyncLLM:
        """Return the engine. Raises ``ApiError`` if it is loading, or has not this name."""
        if self.llm is None:
            raise loading()
        names = [*self.names, *self.llm.llm.engine.adapters]
        if model is not None and model not in names:
            message = f"the model {model[:200]!r} does not exist: this is {', '.join(names)}"
            raise ApiError(404, message, "model", "model_not_found")
        return self.llm

    def adapter(self, model: str | None) -> str | None:
        """Return the adapter that a request names as its model; ``None`` for the model itself."""
        return None if model in self.names else model

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises ``ValueError`` if there is none."""
        return self.engine().llm.get_tokenizer()

    async def prompts(
        self, name: str, value: Any, special: bool | None = None
    ) -> list[dict[str, Any]]:
        """Return the prompts in a field; a thread tokenizes texts without special tokens."""
        listed = listed_prompts(name, value)
        if len(listed) > self.max_prompts:
            message = f"{name} has {len(listed)} prompts, and a request may have {self.max_prompts}"
            raise ApiError(400, message, name)
        found = []
        for each in listed:
            prompt = {"prompt" if isinstance(each, str) else "prompt_token_ids": each}
            if special is False and isinstance(each, str):
                encode = self.tokenizer().encode
                prompt["prompt_token_ids"] = await asyncio.to_thread(encode, each, False)
            found.append(prompt)
        return found

    async def chat_prompt(
        self, messages: Any, options: TemplateOptions, tools: Sequence[Any] = ()
    ) -> dict[str, Any]:
        """Return a conversation as a prompt, which another process formats."""
        llm, continues = self.engine().llm, options.continue_final_message
        variables = {
            **options.chat_template_kwargs,
            # A message that is continued is followed by no prompt for another one.
            "add_generation_prompt": options.add_generation_prompt and not continues,
            "continue_final_message": continues,
            "tools": list(tools) or None,
        }
        if options.reasoning_effort is not None:
            variables["reasoning_effort"] = options.reasoning_effort
        return await asyncio.to_thread(lambda: llm.chat_prompt(messages, **variables))


def listed_prompts(name: str, value: Any) -> list[Any]:
    """Return a text, token ids, or a list of one of these, as a list of prompts."""

    def is_ids(each: Any) -> bool:
        return isinstance(each, list) and all(type(token) is int for token in each)

    if isinstance(value, str) or (value and is_ids(value)):
        return [value]
    is_list = isinstance(value, list) and value
    if is_list and (all(isinstance(each, str) for each in value) or all(map(is_ids, value))):
        return list(value)
    raise ApiError(
        400,
        f"{name} should be text, a list of texts, token ids or a list of those, got "
        f"{shorten(value)}",
        name,
    )
