"""What the protocols of conversations refuse, by the field's name, and what a salt keeps apart."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import openai
import pytest
from openai.types.chat import ChatCompletionStreamOptionsParam

from vllm_module.server.choices import CompletionBody
from vllm_module.server.protocol import ChatBody, StreamOptions
from vllm_module.server.responses import ResponsesBody
from vllm_module.server.tokens import EmbeddingBody

HI = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
TEXT = {"type": "input_text", "text": "a"}
AUDIO = {"type": "input_audio", "input_audio": {"data": "eA==", "format": "wav"}}


@pytest.mark.parametrize("path", ["responses", "messages"])
def test_a_stream_of_a_refused_request_does_not_begin(server: Any, path: str) -> None:
    """Its status is that of the error, as without a stream; a client tries a 503 again."""
    body = {"input": "Hi"} if path == "responses" else HI
    long = {"input": "Hi " * 2000} if path == "responses" else {**HI, "system": "Hi " * 2000}
    for stream in (False, True):
        status, answer = server.ask(
            "POST", f"/v1/{path}", {"model": "tiny", **long, "stream": stream}
        )
        assert status == 400, answer
        assert "the prompt has" in answer["error"]["message"]
        server.llm._accepted, accepted = 10_000, server.llm._accepted
        try:
            asked = {"model": "tiny", **body, "stream": stream}
            assert server.ask("POST", f"/v1/{path}", asked)[0] == 503
        finally:
            server.llm._accepted = accepted


@pytest.mark.parametrize("path", ["responses", "messages", "chat/completions"])
def test_salts_keep_pages_apart_in_every_protocol(server: Any, path: str) -> None:
    """A prompt with another salt finds no page of the cache; one with the same salt does."""
    text = "a message of more than a page of the cache"
    body = {"model": "tiny", **HI, "messages": [{"role": "user", "content": text}]}
    if path == "responses":
        body = {"model": "tiny", "input": text, "max_output_tokens": 1}
    found = []
    for salt in "aba":
        salted = {**body, "cache_salt": f"{path} {salt}"}
        usage = server.ask("POST", f"/v1/{path}", salted)[1]["usage"]
        details = usage.get("prompt_tokens_details", usage.get("input_tokens_details"))
        found.append(details["cached_tokens"] if details else usage["cache_read_input_tokens"])
    assert found[:2] == [0, 0]
    assert found[2] >= 16


KEEP = {"type": "clear_thinking_20251015", "keep": "all"}
STREAMED = {"stream": True, "stream_options": {"include_obfuscation": False}}
ASKS_NOTHING: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {**HI, "top_logprobs": 0}),
    ("/v1/chat/completions", {**HI, "prompt_cache_retention": "in_memory"}),
    ("/v1/responses", {"input": "a", "prompt_cache_options": {"mode": "implicit"}}),
    ("/v1/chat/completions", {**HI, **STREAMED}),
    ("/v1/completions", {"prompt": "a", **STREAMED}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 2, **STREAMED}),
    ("/v1/chat/completions", {**HI, "stream": True, "stream_options": {"include_usage": None}}),
    ("/v1/responses", {"input": "a", "text": {"format": None, "verbosity": None}}),
    ("/v1/messages", {**HI, "thinking": {"type": "adaptive", "budget_tokens": None}}),
    ("/v1/messages", {**HI, "context_management": {"edits": [KEEP]}}),
    ("/v1/messages", {**HI, "context_management": {"edits": [{**KEEP, "keep": {"type": "all"}}]}}),
    ("/v1/messages", {**HI, "cache_control": {"type": "ephemeral"}, "speed": "standard"}),
]


@pytest.mark.parametrize(("path", "body"), ASKS_NOTHING)
def test_what_asks_for_nothing_is_accepted(server: Any, path: str, body: dict[str, Any]) -> None:
    """Also a null within a field."""
    assert server.ask("POST", path, {"model": "tiny", **body})[0] == 200


def test_no_field_of_openais_client_is_unknown() -> None:
    """Each is supported, or refused as what is not supported here."""
    client = openai.OpenAI(api_key="x")
    for create, kind in (
        (client.chat.completions.create, ChatBody),
        (client.completions.create, CompletionBody),
        (client.responses.create, ResponsesBody),
        (client.embeddings.create, EmbeddingBody),
    ):
        names = {each for each in inspect.signature(create).parameters if each[:6] != "extra_"}
        known = {*kind.model_fields, *kind.unsupported, *kind.sampled, "timeout"}
        assert not names - known
    options = get_type_hints(ChatCompletionStreamOptionsParam)
    assert not options.keys() - StreamOptions.model_fields.keys()


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/chat/completions", {**HI, "moderation": {}}, "moderation is not supported here"),
        (
            "/v1/chat/completions",
            {**HI, "prompt_cache_retention": "24h"},
            "prompt_cache_retention is not supported here",
        ),
        (
            "/v1/responses",
            {"input": "a", "prompt_cache_options": {"ttl": "30m"}},
            "prompt_cache_options is not supported here",
        ),
        ("/v1/responses", {"input": "a", "image": {}}, "image is not supported here"),
        (
            "/v1/chat/completions",
            {**HI, "stream_options": {"include_obfuscation": True}},
            "include_obfuscation should be False",
        ),
        ("/v1/responses", {"input": "a", "n": 2}, "n is not supported here"),
        ("/v1/messages", {**HI, "n": 2}, "n is not supported here"),
        ("/v1/messages", {**HI, "inference_geo": "us"}, "inference_geo is not supported here"),
        ("/v1/responses", {"input": "a", "text": {"verbosity": "low"}}, "verbosity should be 'med"),
        ("/v1/responses", {"input": "a", "text": {"style": "x"}}, "no argument 'style'"),
        (
            "/v1/responses",
            {"input": "a", "reasoning": {"summary": "detailed"}},
            "summary should be",
        ),
        ("/v1/responses", {"input": "a", "reasoning": {"budget": 1}}, "no argument 'budget'"),
        ("/v1/messages", {**HI, "output_config": {"task_budget": {}}}, "no argument 'task_budget'"),
        (
            "/v1/messages",
            {**HI, "output_config": {"format": {"type": "x"}}},
            "response_format shou",
        ),
        ("/v1/messages", {**HI, "thinking": {"type": "x"}}, "thinking: type should be 'enabled'"),
        (
            "/v1/messages",
            {**HI, "thinking": {"type": "adaptive", "display": "omitted"}},
            "display should be 'summarized'",
        ),
        (
            "/v1/chat/completions",
            {**HI, "reasoning": {"summary": "detailed"}},
            "reasoning is not supported here",
        ),
        ("/v1/chat/completions", {**HI, "reasoning": {"effort": "low"}}, "reasoning is not supp"),
        ("/v1/chat/completions", {**HI, "verbosity": "low"}, "verbosity is not supported here"),
        ("/v1/messages", {**HI, "return_token_ids": True}, "return_token_ids is not supported"),
        ("/v1/responses", {"input": [{"type": "web_search_call"}]}, "input[0] is not supported"),
        (
            "/v1/responses",
            {
                "instructions": "a",
                "input": [{"role": "user", "content": [{"type": "input_image"}]}],
            },
            "input[0].content[0] is not supported: only parts of text are, got type 'input_image'",
        ),
        (
            "/v1/responses",
            {
                "input": [
                    {"role": "user", "content": "a"},
                    {"role": "user", "content": [TEXT, AUDIO]},
                ]
            },
            "input[1].content[1] is not supported: only parts of text are, got type 'input_audio'",
        ),
        ("/v1/responses", {"input": [{"type": "input_image"}]}, "input[0] is not supported"),
        (
            "/v1/responses",
            {"input": [{"type": "function_call_output", "call_id": "c", "output": {"a": 1}}]},
            "input[0].content should be text or a list of parts",
        ),
        ("/v1/messages", {**HI, "system": {"a": 1}}, "system.content should be text or a list"),
        (
            "/v1/messages",
            {"system": "a", "messages": [{"role": "x", "content": "a"}], "max_tokens": 1},
            "messages[0].role should be one of",
        ),
        ("/v1/responses", {"input": 3}, "input should be text or a list of items"),
        ("/v1/responses", {"input": []}, "input has no message"),
        ("/v1/responses", {"input": [{"type": "reasoning"}]}, "input has no message"),
        ("/v1/responses", {"input": "a", "previous_response_id": "r"}, "previous_response_id is"),
        ("/v1/responses", {"input": "a", "tools": [{"type": "mcp"}]}, "a tool of type"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 1},
            "messages[0].content[0] is not supported: only text, calls and their results",
        ),
        (
            "/v1/messages",
            {
                "messages": [{"role": "user", "content": "a"}],
                "max_tokens": 1,
                "tool_choice": {"type": "x"},
            },
            "tool_choice.type should be auto, any, tool or none",
        ),
    ],
)
def test_what_is_refused(server: Any, path: str, body: dict[str, Any], says: str) -> None:
    """Each is refused by the name of the field."""
    status, answer = server.ask("POST", path, {"model": "tiny", **body})
    assert status == 400
    assert says in answer["error"]["message"]
