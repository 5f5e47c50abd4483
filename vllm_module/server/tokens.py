"""``/v1/embeddings``, ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

import asyncio
import base64
import struct
from typing import Any

from pydantic import Field

from vllm_module.runtime.pooling_params import PoolingParams
from vllm_module.server.conversation import checked_messages
from vllm_module.server.errors import ApiError, in_http
from vllm_module.server.protocol import ANY, Body, Listed, TemplateOptions
from vllm_module.server.state import State


class EmbeddingBody(Body):
    """The body of /v1/embeddings."""

    unsupported = {"user": ANY}
    input: Any
    encoding_format: str = Field(default="float", pattern="^(float|base64)$")
    dimensions: int | None = Field(default=None, ge=1)
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)  # vLLM's; -1: as many as fit


class TokenizeBody(Body, TemplateOptions):
    """The body of /tokenize: a prompt, or messages."""

    prompt: str | None = None
    messages: Listed[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """The body of /detokenize."""

    tokens: Listed[int]


async def embeddings(state: State, body: EmbeddingBody) -> dict[str, Any]:
    """Embed prompts with an encoder."""
    llm = state.engine(body.model)
    if state.adapter(body.model) is not None:
        raise ApiError(400, "adapters generate text: ask the model itself", "model")
    prompts = await state.prompts("input", body.input)
    params = PoolingParams(dimensions=body.dimensions)
    cut = {"truncate_prompt_tokens": body.truncate_prompt_tokens}
    outputs = await llm.embed(prompts, pooling_params=params, tokenization_kwargs=cut)
    data = []
    for number, output in enumerate(outputs):
        if output.error is not None:
            raise ApiError(400, in_http(f"input {number}: {output.error}"), "input")
        vector: list[float] | str = output.outputs.embedding
        if body.encoding_format == "base64":
            packed = struct.pack(f"<{len(vector)}f", *output.outputs.embedding)
            vector = base64.b64encode(packed).decode()
        data.append({"object": "embedding", "index": number, "embedding": vector})
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    model = body.model or state.names[0]
    return {"object": "list", "data": data, "model": model, "usage": usage}


async def tokenize(state: State, body: TokenizeBody) -> dict[str, Any]:
    """Return the tokens of a prompt, or of a conversation as its template writes it."""
    llm, tokenizer = state.engine(body.model), state.tokenizer()
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give prompt or messages, and not both", "prompt")
    if body.messages is not None:
        prompt = await state.chat_prompt(checked_messages("messages", body.messages), body)
        ids = prompt["prompt_token_ids"]
    else:
        special = body.add_special_tokens is not False
        ids = await asyncio.to_thread(tokenizer.encode, body.prompt or "", special)
    most = llm.llm.model_config.max_model_len
    answer = {"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": None}
    if body.return_token_strs:
        answer["token_strs"] = await asyncio.to_thread(tokenizer.convert_ids_to_tokens, ids)
    return answer


async def detokenize(state: State, body: DetokenizeBody) -> dict[str, Any]:
    """Return the text of tokens."""
    state.engine(body.model)
    return {"prompt": await asyncio.to_thread(state.tokenizer().decode, body.tokens)}
