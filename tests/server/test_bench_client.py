"""The requests of ``vllm bench serve``, and what it reads of their answers.

Written from its source, ``vllm/benchmarks/serve.py`` and ``lib/endpoint_request_func.py``; vLLM
itself does not install beside this package. Each test sends the fields that it sends.
"""

from __future__ import annotations

import json
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import pytest

from vllm_module import LLM, SamplingParams

PROMPT = "a sky of \u00e9"
# Options that its command line sends if they are given.
SAMPLING = {
    "top_p": 0.9, "top_k": 20, "min_p": 0.0, "temperature": 0.0, "frequency_penalty": 0.1,
    "presence_penalty": 0.1, "repetition_penalty": 1.0,
}  # fmt: skip


def stream(server: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the chunks of an answer, which ends with [DONE]."""
    headers = {
        "Content-Type": "application/json",
        "Authorization": "Bearer sk-two",
        "x-request-id": "bench-3f2a-17",
    }
    with closing(HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read().decode()
    assert answer.status == 200, text
    *messages, end = [each for each in text.split("\n\n") if each.strip()]
    assert end == "data: [DONE]"
    return [json.loads(each.removeprefix("data: ")) for each in messages]


def check_counts(chunks: list[dict[str, Any]], prompt_tokens: int, tokens: int) -> None:
    """Counts come once, in a chunk without choices, after all others: only there they are read."""
    assert [bool(chunk["choices"]) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert not any(chunk.get("usage") for chunk in chunks[:-1])
    usage = chunks[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt_tokens, tokens)
    assert len(chunks) - 1 <= tokens + 1  # none without a token, but for a role


def body_of(sampling: dict[str, Any], **fields: Any) -> dict[str, Any]:
    streamed = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    return {"model": "tiny", **fields, **streamed, **sampling}


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, SAMPLING], ids=["greedy", "all"])
def test_completions(
    server: Any, sync: LLM, logprobs: int | None, as_ids: bool, sampling: dict[str, Any]
) -> None:
    """Backends ``vllm`` and ``openai``; prompts of a trace are token ids."""
    ids = sync.get_tokenizer().encode(PROMPT)
    fields = {"repetition_penalty": 1.0, "max_tokens": 12, "logprobs": logprobs}
    body = body_of(sampling, prompt=ids if as_ids else PROMPT, **fields)
    chunks = stream(server, "/v1/completions", body)
    params = SamplingParams(max_tokens=12, ignore_eos=True, **sampling)
    (expected,) = sync.generate(PROMPT, params, use_tqdm=False)
    text = "".join(chunk["choices"][0].get("text") for chunk in chunks[:-1])
    assert text == expected.outputs[0].text
    check_counts(chunks, len(ids), 12)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, SAMPLING], ids=["greedy", "all"])
def test_chats(server: Any, sync: LLM, sampling: dict[str, Any]) -> None:
    """The backend ``openai-chat`` sends a list of parts."""
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    body = body_of(sampling, messages=messages, max_completion_tokens=12)
    chunks = stream(server, "/v1/chat/completions", body)
    params = SamplingParams(max_tokens=12, ignore_eos=True, **sampling)
    (expected,) = sync.chat(messages, params, use_tqdm=False)
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks[:-1])
    assert text == expected.outputs[0].text
    check_counts(chunks, len(expected.prompt_token_ids or ()), 12)


def test_what_it_asks_before_and_after(server: Any, sync: LLM) -> None:
    """The first model and its path, tokens for prompts of equal length, and counters."""
    first = server.ask("GET", "/v1/models")[1]["data"][0]
    assert (first["id"], first["root"]) == ("tiny", sync.model_config.model)
    body = {"model": "tiny", "prompt": PROMPT, "add_special_tokens": False}
    tokens = server.ask("POST", "/tokenize", body)[1]["tokens"]
    assert tokens == sync.get_tokenizer().encode(PROMPT, False)
    body = {"model": "tiny", "tokens": tokens[:-2]}
    assert server.ask("POST", "/detokenize", body) == (200, {"prompt": PROMPT[:-1]})
    code, text = server.ask("GET", "/metrics", key=None)
    assert (code, b"vllm:spec_decode" in text) == (200, False)
