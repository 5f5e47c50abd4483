"""/v1/chat/completions, judged by OpenAI's client and by ``LLM.chat``."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessage
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from vllm_module import LLM, AsyncLLM, SamplingParams

MESSAGES: Any = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
]


def create(server: Any, **body: Any) -> Any:
    body = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 9, **body}
    return server.client().chat.completions.create(**body)


def test_answers_are_those_of_llm(server: Any, sync: LLM) -> None:
    """Whole and streamed, with several samples; the first chunk of each names the role."""
    body: dict[str, Any] = {"n": 2, "seed": 3, "temperature": 1.1}
    params = SamplingParams(max_tokens=9, **body)
    (output,) = sync.chat(MESSAGES, params, use_tqdm=False)
    expected = [(sample.text, sample.finish_reason) for sample in output.outputs]
    answer = create(server, **body)
    assert [(c.message.content, c.finish_reason) for c in answer.choices] == expected
    assert {choice.message.role for choice in answer.choices} == {"assistant"}
    assert answer.usage.prompt_tokens == len(output.prompt_token_ids)
    texts, reasons = ["", ""], [None, None]
    roles: tuple[list[Any], list[Any]] = ([], [])
    for chunk in create(server, stream=True, **body):
        for choice in chunk.choices:
            roles[choice.index].append(choice.delta.role)
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason
    assert [*zip(texts, reasons, strict=True)] == expected
    for each in roles:
        assert each[0] == "assistant"
        assert set(each[1:]) == {None}
    parsed = create(server, max_completion_tokens=4)
    assert parsed.usage.completion_tokens == 4


def test_openais_async_client_has_many_streams(server: Any, sync: LLM) -> None:
    """Conversations that are answered at once have the texts that each has alone."""
    asked = [[MESSAGES[0], {"role": "user", "content": f"Hi {number}"}] for number in range(8)]
    outputs = sync.chat(asked, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)

    async def all_of_them() -> list[tuple[str, int]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="sk-two") as client:

            async def one(messages: Any) -> tuple[str, int]:
                text, usage = "", None
                async for chunk in await client.chat.completions.create(
                    model="tiny", messages=messages, temperature=0, max_tokens=20, stream=True,
                    stream_options={"include_usage": True},
                ):  # fmt: skip
                    text += "".join(choice.delta.content or "" for choice in chunk.choices)
                    usage = chunk.usage or usage
                assert usage is not None
                return text, usage.completion_tokens

            return await asyncio.gather(*map(one, asked))

    assert asyncio.run(all_of_them()) == [
        (output.outputs[0].text, len(output.outputs[0].token_ids)) for output in outputs
    ]


def test_a_limit_of_generation_config(
    folder: Path, server: Any, start: Any, tmp_path: Path
) -> None:
    """A request without one has the file's, in every protocol that may leave it out.

    Without one in the file, a message may be as long as the context allows.
    """
    assert create(server, max_tokens=None).usage.total_tokens == 1024
    own = shutil.copytree(folder, tmp_path / "own")
    GenerationConfig(max_new_tokens=5).save_pretrained(own)
    asked: dict[str, dict[str, Any]] = {
        "completions": {"prompt": "Hi"},
        "chat/completions": {"messages": MESSAGES},
        "responses": {"input": "Hi"},
    }
    llm = LLM(str(own), kv_cache_memory_bytes=4 << 20, dtype="float32", device="cpu")
    with start(AsyncLLM(llm)) as limited:
        for path, body in asked.items():
            name = "max_output_tokens" if path == "responses" else "max_tokens"
            for given, expected in ({}, 5), ({name: 7}, 7), ({name: 2}, 2):
                _, answer = limited.ask("POST", f"/v1/{path}", {"model": "tiny", **body, **given})
                usage = answer["usage"]
                assert usage.get("completion_tokens", usage.get("output_tokens")) == expected, path


ASKS_BY_NAME = (  # whether there are calls, as Llama 3.1's template does
    "{% for m in messages %}{% if 'tool_calls' not in m %}<{{ m.role }}>{{ m.content }}"
    "{% elif m.tool_calls|length != 1 %}{{ raise_exception('only single tool-calls') }}{% else %}"
    "{{ 'no text' if m.content is none }}<call>{{ m.tool_calls[0].function.name }}"  # DeepSeek's
    "{% endif %}{% endfor %}"
)


def test_a_message_without_calls(folder: Path, start: Any, tmp_path: Path) -> None:
    """An answer that a client sends back with all of its entries is a message of those it has.

    Also with an empty list of calls; a call stays one.
    """
    own = shutil.copytree(folder, tmp_path / "own")
    (own / "tokenizer_config.json").write_text(json.dumps({"chat_template": ASKS_BY_NAME}))
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    user = {"role": "user", "content": "Hi"}
    asked = ChatCompletionMessage.model_validate({"role": "assistant", "tool_calls": [call]})
    said = ChatCompletionMessage(role="assistant", content="yo").model_dump()
    reference = PreTrainedTokenizerFast(tokenizer_file=str(own / "tokenizer.json"))
    llm = LLM(str(own), kv_cache_memory_bytes=4 << 20, dtype="float32", device="cpu")
    with start(AsyncLLM(llm)) as server:
        for answer, least in (
            (said, {"role": "assistant", "content": "yo"}),
            (said | {"tool_calls": []}, {"role": "assistant", "content": "yo"}),
            (asked.model_dump(), {"role": "assistant", "content": None, "tool_calls": [call]}),
        ):
            # Its tokenizers' own method leaves out what is null, which this template asks for.
            ([text], _) = render_jinja_template([[user, least, user]], chat_template=ASKS_BY_NAME)
            written = reference.encode(text)
            body = {"model": "tiny", "messages": [user, answer, user], "max_tokens": 1}
            status, got = server.ask(
                "POST", "/v1/chat/completions", {**body, "return_token_ids": True}
            )
            assert (status, got.get("prompt_token_ids")) == (200, written), got


def test_developer_is_system(server: Any) -> None:
    """A developer's message is formatted as a system message."""
    messages = [{"role": "developer", "content": "Be short."}, MESSAGES[1]]
    texts = [create(server, messages=m).choices[0].message.content for m in (messages, MESSAGES)]
    assert texts[0] == texts[1]


def test_logprobs(server: Any) -> None:
    """Each token has its own, its bytes, and as many of the most probable as are wanted."""
    answer = create(server, logprobs=True, top_logprobs=2, temperature=1.0, seed=1)
    content = answer.choices[0].logprobs.content
    assert len(content) == 9
    for entry in content:
        assert len(entry.top_logprobs) == 2
        assert entry.logprob <= entry.top_logprobs[0].logprob <= 0
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob > math.log(1 / 256)
        assert bytes(entry.bytes).decode(errors="replace") == entry.token
    chunks = create(server, logprobs=True, top_logprobs=2, temperature=1.0, seed=1, stream=True)
    joined = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]
    assert joined == content
    assert create(server, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    only = {"structured_outputs": {"choice": ["h\u00e9 \u20ac"]}}  # of several tokens each
    (choice,) = create(server, logprobs=True, extra_body=only).choices
    assert [[byte] for byte in choice.message.content.encode()] == [
        entry.bytes for entry in choice.logprobs.content
    ]
    assert choice.message.content == "h\u00e9 \u20ac"


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
AUDIO = {"type": "input_audio", "input_audio": {"data": "eA==", "format": "wav"}}
HEARD = [MESSAGES[0], {"role": "user", "content": [{"type": "text", "text": "Hi"}, AUDIO]}]
REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"tools": [{"type": "function"}]}, "tools", "tools[0] should be a function with a name"),
    ({"tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
    ({"response_format": {"type": "xml"}}, "response_format", "response_format should be of type"),
    (
        {"messages": IMAGE},
        "messages",
        "messages[0].content[0] is not supported: only parts of text",
    ),
    (
        {"messages": HEARD},
        "messages",
        "messages[1].content[1] is not supported: only parts of text are, got type 'input_audio'",
    ),
    ({"messages": [{"role": "king", "content": ""}]}, "messages", "messages[0].role should be one"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages", "messages[0].content should be"),
    ({"messages": []}, "messages", "messages should have at least 1 item"),
    ({"messages": "hi"}, "messages", "messages should be a valid list"),
    ({"top_logprobs": 2}, "top_logprobs", "top_logprobs needs logprobs: true"),
    ({"modalities": ["audio"]}, "modalities", "modalities is not supported"),
    ({"model": None}, "model", "model is missing: the request needs it"),
    ({"chat_template_kwargs": {"content_format": "x"}}, None, "content_format should be one of"),
]


@pytest.mark.parametrize(("body", "param", "says"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_is_refused(server: Any, body: dict[str, Any], param: str | None, says: str) -> None:
    """Images and audio are refused by name, and so are wrong messages, tools and formats."""
    given = {"model": "tiny", "messages": MESSAGES, **body}
    status, answer = server.ask("POST", "/v1/chat/completions", given)
    assert (status, answer["error"]["param"]) == (400, param)
    assert says in answer["error"]["message"]
    nothing = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}}
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1, "store": False, **nothing}
    assert server.ask("POST", "/v1/chat/completions", body)[0] == 200


def test_token_ids_are_where_vllm_has_them(server: Any, sync: LLM) -> None:
    """Those of the prompt are beside the choices; in a stream, in the first chunk."""
    messages = [{"role": "user", "content": "hi"}]
    params = SamplingParams(temperature=0, max_tokens=4)
    (expected,) = sync.chat(messages, params, use_tqdm=False)
    body = {"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0}
    asked = server.client().chat.completions.create
    answer = asked(**body, extra_body={"return_token_ids": True})
    assert answer.prompt_token_ids == expected.prompt_token_ids
    assert answer.choices[0].token_ids == list(expected.outputs[0].token_ids)
    chunks = list(asked(**body, stream=True, extra_body={"return_token_ids": True}))
    found = [(each.model_extra or {}).get("prompt_token_ids") for each in chunks]
    assert found == [expected.prompt_token_ids, *[None] * (len(chunks) - 1)]
    ids = [token for each in chunks[1:] for token in each.choices[0].token_ids]
    assert ids == list(expected.outputs[0].token_ids)
    assert "prompt_token_ids" not in (asked(**body).model_extra or {})
