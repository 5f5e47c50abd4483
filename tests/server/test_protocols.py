"""Three protocols of conversations, judged by llm-comply, which has the specifications."""

from __future__ import annotations

import json
import shutil
import string
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from llm_comply import cli
from llm_comply.config import ComplianceConfig
from llm_comply.runner import TestRunner as Runner
from llm_comply.schema import SpecLoader
from llm_comply.tests.anthropic import ANTHROPIC_TESTS
from llm_comply.tests.open_responses import OPEN_RESPONSES_TESTS
from llm_comply.tests.openai_chat import OPENAI_CHAT_TESTS
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from vllm_module import LLM, AsyncLLM, SamplingParams
from vllm_module.server import messages, responses
from vllm_module.server.protocol import ChatBody, ConversationBody
from vllm_module.server.tools import Formats

# pytest would take this class for a test.
Runner.__test__ = False  # type: ignore[attr-defined]
KEY, ADMIN = "sk-one-of-two", "sk-admin"
MODEL = "gpt-5-claude-4-tiny"  # a name for which the cases of reasoning are run, too
QUICK = "<quick>"  # what the template writes if the model should not reason
SWITCHED = Formats(switch="enable_thinking")
MARKED = Formats(None, (">", "t"))  # the prompt ends with the first
SPECS = Path(cli.__file__).parent / "specs"
HI = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
WEATHER = {"name": "get_weather", "description": "Weather.", "strict": None}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def words(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model that likes letters and ends after some, but not at once."""
    path = tmp_path_factory.mktemp("words") / "checkpoint"
    shutil.copytree(folder, path)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["chat_template"] += f"{{% if enable_thinking is false %}}{QUICK}{{% endif %}}"
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    letters = [tokenizer.token_to_id(letter) for letter in string.ascii_lowercase]
    end = tokenizer.encode("\0").ids[0]
    weights = load_file(path / "model.safetensors")
    for name, tensor in weights.items():
        weights[name] = torch.ones_like(tensor) if "norm" in name else torch.zeros_like(tensor)
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    embedding[:, 0] = 1
    embedding[letters, 1] = 1
    head[:, 0] = -5
    head[letters, 0] = 0
    for mark in '"}]':
        head[tokenizer.token_to_id(mark), 0] = 0.4
    head[end, 1] = 4.8
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "eos_token_id": end}))
    (path / "generation_config.json").unlink(missing_ok=True)
    return path


@pytest.fixture(scope="module")
def served(words: Path, engine: Callable[..., Any], start: Callable[..., Any]) -> Iterator[Any]:
    llm = engine.func(words, max_num_seqs=8)  # type: ignore[attr-defined]
    with start(AsyncLLM(llm)) as served:
        served.state.names, served.state.formats = [MODEL], SWITCHED
        yield served


@pytest.mark.filterwarnings("ignore:jsonschema.RefResolver")  # llm-comply uses it
@pytest.mark.parametrize(
    ("cases", "spec", "without"),
    [
        # Images are refused by name.
        (OPENAI_CHAT_TESTS, "openai_chat", {"chat-image-input"}),
        (OPEN_RESPONSES_TESTS, "openresponses", {"image-input"}),
        (ANTHROPIC_TESTS, "anthropic", {"anth-image-input"}),
    ],
    ids=["chat", "responses", "messages"],
)
def test_every_case_but_images_complies(
    served: Any, cases: list[Any], spec: str, without: set[str]
) -> None:
    """All cases of the protocol pass, by its schema and by what llm-comply asks besides."""
    config = ComplianceConfig(base_url=f"{served.url}/v1", api_key=KEY, model=MODEL)
    loader = SpecLoader(str(SPECS / f"{spec}.json"))
    results = Runner(config, cases, loader).run_all().results
    failed = {each.id: each.errors for each in results if each.status.name != "PASSED"}
    assert {name: errors for name, errors in failed.items() if name not in without} == {}
    assert failed.keys() == without


def events_of(served: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the typed events of a stream; each is named by its type."""
    status, answer = served.ask("POST", path, {"model": MODEL, **body, "stream": True})
    assert status == 200
    found = []
    # A chunked body: the events are between lines of sizes.
    for block in answer.decode().split("\r\n"):
        if block.startswith("event: "):
            name, data = block.strip().split("\n", 1)
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            found.append(event)
    return found


def test_a_conversation_with_tools_in_messages(served: Any) -> None:
    """Anthropic's calls and results are the template's; whole and streamed, the parts agree."""
    tool = {"name": "get_weather", "input_schema": SCHEMA}
    history = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"},
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    body = {
        "system": [{"type": "text", "text": "Be short."}],
        "messages": history,
        "max_tokens": 200,
        "tools": [tool],
        "tool_choice": {"type": "tool", "name": "get_weather"},
    }
    status, answer = served.ask("POST", "/v1/messages", {"model": MODEL, **body})
    assert (status, answer["stop_reason"]) == (200, "tool_use")
    (block,) = answer["content"]
    assert (block["type"], block["name"], block["input"]) == (
        "tool_use", "get_weather", {"city": "Rome"},
    )  # fmt: skip
    events = events_of(served, "/v1/messages", body)
    assert [event["type"] for event in events] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert json.loads(events[2]["delta"]["partial_json"]) == {"city": "Rome"}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    # As the template writes the same conversation for chat completions.
    written = served.llm.llm.chat_prompt(
        [
            {"role": "system", "content": "Be short."},
            history[0],
            {"role": "assistant", "content": ""},
            {"role": "tool", "content": "sunny"},
            {"role": "user", "content": "And now?"},
        ]
    )
    count = len(written["prompt_token_ids"])
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count
    del body["max_tokens"]
    counted = served.ask("POST", "/v1/messages/count_tokens", {"model": MODEL, **body})
    assert counted == (200, {"input_tokens": count})
    wrong = {"model": MODEL, "messages": [{"role": "nobody", "content": "x"}]}
    status, answer = served.ask("POST", "/v1/messages/count_tokens", wrong)
    assert (status, answer["type"]) == (400, "error")
    assert "role should be one of" in answer["error"]["message"]


BLOCKS: dict[str, dict[str, tuple[str, ...]]] = {
    "user": {"text": ("text",), "tool_result": ("tool_use_id", "content")},
    "assistant": {
        "text": ("text",), "tool_use": ("id", "name"), "thinking": ("thinking",),
        "redacted_thinking": ("data",),
    },
}  # fmt: skip


@pytest.mark.parametrize("role", BLOCKS)
def test_no_block_of_messages_is_lost(role: str) -> None:
    """Any three blocks: texts and calls are one message, with their reasoning, each result is one.

    A message without blocks stays one, so that turns alternate as they were given.
    """
    for count in range(4):
        for kinds in product(BLOCKS[role], repeat=count):
            blocks = [
                {"type": kind, **{key: f"{key} {at}" for key in BLOCKS[role][kind]}}
                for at, kind in enumerate(kinds)
            ]
            begun = {"role": "user", "content": "hi"}
            body = messages.MessagesBody(
                model="m", max_tokens=1, messages=[begun, {"role": role, "content": blocks}]
            )
            first, *found = messages._chat_body(body).messages
            assert first == begun
            results = [each for each in found if each["role"] == "tool"]
            of = {kind: [b for b in blocks if b["type"] == kind] for kind in BLOCKS[role]}
            assert found[: len(results)] == results  # as templates expect them: behind their calls
            assert [(each["tool_call_id"], each["content"]) for each in results] == [
                (each["tool_use_id"], each["content"]) for each in of.get("tool_result", ())
            ]
            calls = of.get("tool_use", [])
            own = found[len(results) :]
            assert len(own) == (not blocks or bool(of["text"] or calls))
            for each in own:
                assert each["role"] == role
                assert [part["text"] for part in each["content"]] == [t["text"] for t in of["text"]]
                thoughts = [block["thinking"] for block in of.get("thinking", ())]
                assert each.get("reasoning_content", "") == "\n".join(thoughts)
                listed = each.get("tool_calls", [])
                assert ("tool_calls" in each) == bool(calls)
                assert [(call["id"], call["function"]["name"]) for call in listed] == [
                    (call["id"], call["name"]) for call in calls
                ]


def test_answers_of_a_schema_in_messages(served: Any) -> None:
    """As ``client.messages.parse`` of the client of that protocol asks for them."""
    body = {**HI, "max_tokens": 200, "output_config": {"format": FORMAT}}
    status, answer = served.ask("POST", "/v1/messages", {"model": MODEL, **body})
    (block,) = answer["content"]
    assert (status, json.loads(block["text"])) == (200, {"city": "Rome"})


@pytest.mark.parametrize(
    ("formats", "accepted"),
    [
        (SWITCHED, {"adaptive": "", "enabled": "", "disabled": QUICK}),
        (MARKED, {"adaptive": "", "enabled": "", "disabled": None}),
        (Formats("harmony"), {"adaptive": "", "enabled": "", "disabled": None}),
        (Formats(), {"adaptive": "", "enabled": "", "disabled": ""}),
    ],
    ids=["switched", "marked", "harmony", "plain"],
)
def test_thinking_is_as_the_client_wants_it(
    served: Any, formats: Formats, accepted: dict[str, str | None]
) -> None:
    """The template is told, or the model does so anyway; else the request is refused.

    The prompt has what the template writes: each of its characters is a token.
    """
    served.state.formats = formats
    try:
        counts = {}
        for kind in (None, *accepted):
            thinking = None if kind is None else {"type": kind}
            body = {"model": MODEL, **HI, "max_tokens": 1, "thinking": thinking}
            status, answer = served.ask("POST", "/v1/messages", body)
            usage = answer.get("usage")
            counts[kind] = usage and usage["input_tokens"] + usage["cache_read_input_tokens"]
            if status != 200:
                assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
                assert f"thinking cannot be {kind}" in answer["error"]["message"]
    finally:
        served.state.formats = SWITCHED
    plain = counts.pop(None)
    assert counts == {
        kind: None if written is None else plain + len(written)
        for kind, written in accepted.items()
    }


def test_stop_sequences_and_limits_in_messages(served: Any) -> None:
    """The reason tells at which sequence, or that max_tokens was reached."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 300}
    vowels = ["a", "e", "i", "o", "u"]
    for seed in range(3):
        given = {**body, "stop_sequences": vowels, "seed": seed, "temperature": 1.0}
        answer = served.ask("POST", "/v1/messages", given)[1]
        if answer["stop_reason"] == "stop_sequence":
            assert answer["stop_sequence"] in vowels
            assert not set(answer["content"][0]["text"]) & set(vowels)
            break
    else:
        pytest.fail("no answer had a vowel")
    answer = served.ask("POST", "/v1/messages", {**body, "max_tokens": 1})[1]
    assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("max_tokens", 1)


def test_a_message_without_text_has_an_empty_block(served: Any) -> None:
    """As clients expect one, whatever the model has written; its stream has none."""
    stop = {"stop_sequences": ["a"], "structured_outputs": {"choice": ["a"]}}
    status, answer = served.ask("POST", "/v1/messages", {"model": MODEL, **HI, **stop})
    assert (status, answer["stop_reason"]) == (200, "stop_sequence")
    assert answer["content"] == [{"type": "text", "text": "", "citations": None}]
    events = events_of(served, "/v1/messages", {**HI, **stop})
    kinds = [event["type"] for event in events]
    assert kinds == ["message_start", "message_delta", "message_stop"]
    assert events[0]["message"]["content"] == []


def test_counts_of_tokens_are_those_of_every_protocol(served: Any) -> None:
    """A prompt that was there before: Anthropic's input lacks what was cached, others have all."""
    text = "the same long message of more than a page of the cache " * 3
    asked = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    for cached in (False, True):
        paths = ("chat/completions", "responses", "messages")
        chat, responses, messages = (
            served.ask(
                "POST",
                f"/v1/{path}",
                {"model": MODEL}
                | ({"input": text, "max_output_tokens": 1} if path == "responses" else asked),
            )[1]["usage"]
            for path in paths
        )
        details = chat["prompt_tokens_details"]["cached_tokens"]
        assert not cached or details >= 16
        assert chat["prompt_tokens"] == responses["input_tokens"] > len(text)
        # https://docs.claude.com/en/api/messages: the three counts add up to the whole input.
        counts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        assert sum(messages[name] for name in counts) == chat["prompt_tokens"]
        assert messages["cache_read_input_tokens"] >= 16
        assert responses["input_tokens_details"]["cached_tokens"] >= 16
        for usage, names in ((chat, ("prompt", "completion")), (responses, ("input", "output"))):
            assert usage["total_tokens"] == sum(usage[f"{name}_tokens"] for name in names)


def test_errors_of_messages_have_their_shape(served: Any) -> None:
    """Anthropic's clients know errors by their type; their key is in a header of its own."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    for change, status, kind in (
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"model": "other"}, 404, "not_found_error"),
        ({"container": "x"}, 400, "invalid_request_error"),
    ):
        found, answer = served.ask("POST", "/v1/messages", {**body, **change})
        assert (found, answer["type"], answer["error"]["type"]) == (status, "error", kind)
    found, answer = served.ask("POST", "/v1/messages", body, key=None)
    assert (found, answer["error"]["type"]) == (401, "authentication_error")
    assert served.ask("POST", "/v1/messages", body, key=None, **{"x-api-key": KEY})[0] == 200


def test_responses_stream_items(served: Any) -> None:
    """Reasoning and a message are items; deltas put together are the text that is done."""
    served.state.formats = MARKED
    try:
        body = {"input": "Hi", "max_output_tokens": 300}
        for seed in range(40):
            events = events_of(served, "/v1/responses", {**body, "seed": seed, "top_p": 1.0})
            final = events[-1]["response"]
            if [item["type"] for item in final["output"]] == ["reasoning", "message"]:
                break
        else:
            pytest.fail("no answer had reasoning and a message")
    finally:
        served.state.formats = SWITCHED
    # Each byte is a token, and marks are no reasoning.
    thought = final["output"][0]["content"][0]["text"]
    assert final["usage"]["output_tokens_details"] == {"reasoning_tokens": len(thought.encode())}
    for kind, item in (("reasoning", 0), ("output_text", 1)):
        deltas = [each["delta"] for each in events if each["type"] == f"response.{kind}.delta"]
        (done,) = [each["text"] for each in events if each["type"] == f"response.{kind}.done"]
        assert "".join(deltas) == done == final["output"][item]["content"][0]["text"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_calls_and_outputs_in_responses(served: Any) -> None:
    """A call has an id, and its output is a message of the tool."""
    tool = {"type": "function", **WEATHER, "parameters": SCHEMA}
    body = {
        "model": MODEL,
        "instructions": "Be short.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"type": "reasoning", "summary": [], "content": []},
            {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "sunny"},
        ],
        "tools": [tool],
        "tool_choice": {"type": "function", "name": "get_weather"},
    }
    status, answer = served.ask("POST", "/v1/responses", body)
    assert (status, answer["status"]) == (200, "completed")
    (item,) = answer["output"]
    assert (item["type"], json.loads(item["arguments"])) == ("function_call", {"city": "Rome"})
    assert answer["tools"] == [tool]
    events = events_of(served, "/v1/responses", body)
    items = [event["item"] for event in events if "item" in event]
    items += events[-1]["response"]["output"]
    assert len(items) == 3  # begun, done, and in the whole: clients answer to the id of any
    assert len({item["call_id"] for item in items}) == 1
    wanted = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    answer = served.ask("POST", "/v1/responses", {"model": MODEL, "input": "x", "text": wanted})[1]
    assert json.loads(answer["output"][0]["content"][0]["text"]) == {"city": "Rome"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_last_message_of_the_assistant_is_continued(server: Any, sync: LLM, stream: bool) -> None:
    """In the Messages API, whose answer continues its text; behind calls, a turn begins."""
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    text = {"type": "text", "text": "It is ("}
    begun = "<user>Hi\n<assistant>It is ("
    for content, prompt in (
        ("It is (", begun),
        ([text], begun),
        ([{"type": "thinking", "thinking": "hm", "signature": ""}, text], begun),
        ([text, call], f"{begun}\n<assistant>"),
    ):
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
        body = {"messages": messages, "max_tokens": 8, "temperature": 0, "stream": stream}
        params = SamplingParams(temperature=0, max_tokens=8)
        (expected,) = sync.generate(prompt, params, use_tqdm=False)
        if stream:
            events = events_of(server, "/v1/messages", {**body, "model": "tiny"})
            usage = events[0]["message"]["usage"]
            found = "".join(event["delta"].get("text", "") for event in events if "delta" in event)
        else:
            _, answer = server.ask("POST", "/v1/messages", {**body, "model": "tiny"})
            usage, (block,) = answer["usage"], answer["content"]
            found = block["text"]
        assert found == expected.outputs[0].text
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(prompt)


def test_reasoning_of_a_turn_with_tools_is_in_the_prompt(
    folder: Path, start: Any, tmp_path: Path
) -> None:
    """In each protocol, under the names that templates read, as transformers renders it."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    user, result = {"role": "user", "content": "Hi"}, {"type": "tool_result", "tool_use_id": "c"}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    chat = [user, {**said, "reasoning_content": "hm"}, {"role": "tool", "content": "ok"}]
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "tool_use", "id": "c", "name": "f", "input": {}},
    ]
    items = [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "ok"},
    ]
    source = (  # the second name is gpt-oss's
        "{% for m in messages %}<{{ m.role }}>({{ m.reasoning_content }})({{ m.thinking }})"
        "{{ m.content }}{% endfor %}"
    )
    ([text], _) = render_jinja_template([chat], chat_template=source)
    own = shutil.copytree(folder, tmp_path / "own")
    (own / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    llm = LLM(str(own), kv_cache_memory_bytes=4 << 20, dtype="float32", device="cpu")
    with start(AsyncLLM(llm)) as server:
        turn = [{"role": "assistant", "content": blocks}]
        turn += [{"role": "user", "content": [{**result, "content": "ok"}]}]
        for path, body in {
            "chat/completions": {"messages": chat, "max_tokens": 1},
            "messages": {"messages": [user, *turn], "max_tokens": 1},
            "responses": {"input": [user, *items], "max_output_tokens": 1},
        }.items():
            status, got = server.ask("POST", f"/v1/{path}", {"model": "tiny", **body})
            usage = got["usage"]
            tokens = usage.get("prompt_tokens", usage.get("input_tokens", 0))
            tokens += usage.get("cache_read_input_tokens", 0)
            assert (status, tokens) == (200, len(text)), path


def test_what_one_turn_said_is_one_message() -> None:
    """Any items between two others: calls are in one message, with the text beside them.

    Two texts stay two messages, and reasoning is of the message after it. In chat completions, the
    same turns have such messages.
    """
    kinds = {"t": "message", "c": "function_call", "r": "reasoning"}
    expected = {  # texts and calls of each message
        "c": [(None, "0")], "cc": [(None, "01")], "tc": [("0", "1")], "tcc": [("0", "12")],
        "ct": [("1", "0")], "ctc": [("1", "02")], "t": [("0", "")], "tt": [("0", ""), ("1", "")],
        "ttc": [("0", ""), ("1", "2")], "tct": [("0", "1"), ("2", "")], "rtrcrc": [("1", "35")],
        "r": [], "rt": [("1", "")], "trt": [("0", ""), ("2", "")], "rcc": [(None, "12")],
        "rrc": [(None, "2")], "tr": [("0", "")],
    }  # fmt: skip
    reasoning = {
        "rtrcrc": ["024"], "rt": ["0"], "trt": ["", "1"], "rcc": ["0"], "rrc": ["01"],
    }  # fmt: skip
    user = {"role": "user", "content": "hi"}
    for items, turns in expected.items():
        given: list[dict[str, Any]] = [user]
        for at, kind in enumerate(items):
            item: dict[str, Any] = {"role": "assistant", "content": str(at)} if kind == "t" else {}
            if kind == "r":
                item = {"content": [{"type": "reasoning_text", "text": str(at)}], "summary": []}
            if kind == "c":
                item = {"call_id": str(at), "name": "f", "arguments": "{}"}
            given.append({"type": kinds[kind], **item})
        outputs = [
            {"type": "function_call_output", "call_id": str(at), "output": "o"}
            for at, kind in enumerate(items)
            if kind == "c"
        ]
        body = responses.ResponsesBody(model="m", input=[*given, *outputs, user])
        begun, *found, end = responses._chat_body(body).messages
        assert begun == end == user
        said = [each for each in found if each["role"] == "assistant"]
        results = [("tool", each["call_id"], "o") for each in outputs]
        assert [tuple(each.values()) for each in found[len(said) :]] == results
        told = [
            (each.get("content"), "".join(call["id"] for call in each.get("tool_calls", ())))
            for each in said
        ]
        assert told == turns, items
        thoughts = ["".join(each.get("reasoning_content", "").split()) for each in said]
        assert thoughts == reasoning.get(items, [""] * len(turns)), items


FUNCTION = {"name": "f", "description": "d"}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
SAMPLED = {"temperature": 0.25, "top_p": 0.5, "seed": 7}
SAME = {"model": MODEL, "stream": True, "cache_salt": "s", **SAMPLED}
IN_CHAT = {
    **SAME,
    "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}],
    "max_tokens": 3,
    "tools": [{"type": "function", "function": {**FUNCTION, "parameters": SCHEMA}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "parallel_tool_calls": False,
}


@pytest.mark.parametrize(
    ("module", "given", "only"),
    [
        (
            responses,
            {
                "input": "Hi",
                "instructions": "Be short.",
                "max_output_tokens": 3,
                "tools": [{"type": "function", **FUNCTION, "parameters": SCHEMA}],
                "tool_choice": {"type": "function", "name": "f"},
                "parallel_tool_calls": False,
                "text": {"format": {"type": "text"}, "verbosity": "medium"},
                "reasoning": {"effort": "high", "summary": "auto"},
            },
            {"response_format": {"type": "text"}, "reasoning_effort": "high"},
        ),
        (
            messages,
            {
                "messages": [{"role": "user", "content": "Hi"}],
                "system": "Be short.",
                "max_tokens": 3,
                "tools": [{**FUNCTION, "input_schema": SCHEMA}],
                "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
                "stop_sequences": ["a"],
                "thinking": {"type": "adaptive"},
                "output_config": {"effort": "high", "format": FORMAT},
            },
            {
                "stop": ["a"],
                "response_format": {"type": "json_schema", "json_schema": FORMAT},
                "reasoning_effort": "high",
            },
        ),
    ],
)
def test_each_entry_of_a_request_is_one_of_chat_completions(
    module: Any, given: dict[str, Any], only: dict[str, Any]
) -> None:
    """With its value; an entry that is left out is left out there, too."""
    kind = next(v for n, v in vars(module).items() if n in ("ResponsesBody", "MessagesBody"))
    own = kind.model_fields.keys() - ConversationBody.model_fields.keys()
    assert own - {"metadata"} == given.keys() - {"tools"}  # metadata are for the answer
    assert module._chat_body(kind.of(SAME | given)) == ChatBody.of(IN_CHAT | only)
    names = ("input", "messages", "max_tokens")
    least = {"model": MODEL, **{name: given[name] for name in names if name in given}}
    in_chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    in_chat |= {"max_tokens": 3, "tool_choice": "auto"} if module is messages else {}
    assert module._chat_body(kind.of(least)) == ChatBody.of(in_chat)


@pytest.mark.parametrize("count", [1, 3])
def test_a_response_that_reaches_its_limit_is_incomplete(served: Any, count: int) -> None:
    """Its tokens are as many as were asked for, and it says why it ends."""
    body = {"model": MODEL, "input": "Hi", "max_output_tokens": count, "ignore_eos": True}
    answer = served.ask("POST", "/v1/responses", body)[1]
    assert answer["usage"]["output_tokens"] == answer["max_output_tokens"] == count
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    # The specification: an item that ran out of tokens is incomplete, and it is the last one.
    assert (answer["completed_at"], answer["output"][-1]["status"]) == (None, "incomplete")
    given = {"model": MODEL, "input": "Hi", "max_output_tokens": count}
    with served.client().responses.create(
        stream=True, **given, extra_body={"ignore_eos": True}
    ) as stream:
        events = {event.type: event for event in stream}
    assert events["response.output_item.done"].item.status == "incomplete"
    assert events["response.incomplete"].response.output[-1].status == "incomplete"


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_items_that_end_before_the_limit_are_complete(served: Any, ignore_eos: bool) -> None:
    """Of reasoning and text, a limit cuts off the text alone; what ends by itself is dated."""
    body = {"model": MODEL, "input": "Hi", "max_output_tokens": 300, "ignore_eos": ignore_eos}
    served.state.formats = MARKED
    try:
        for seed in range(40):
            answer = served.ask("POST", "/v1/responses", {**body, "seed": seed, "top_p": 1.0})[1]
            kinds = [item["type"] for item in answer["output"]]
            if (
                kinds == ["reasoning", "message"]
                and (answer["status"] == "incomplete") == ignore_eos
            ):
                break
        else:
            pytest.fail("no answer had reasoning and a message")
    finally:
        served.state.formats = SWITCHED
    assert [item["status"] for item in answer["output"]] == ["completed", answer["status"]]
    assert (answer["completed_at"] is None) == ignore_eos


def test_an_aborted_response_does_not_say_that_it_reached_a_limit(served: Any) -> None:
    body = {"model": MODEL, "input": "Hi", "extra_body": {"ignore_eos": True}}
    with served.client().responses.create(stream=True, **body) as stream:
        name = next(iter(stream)).response.id
        assert served.ask("POST", "/abort", {"request_id": name}, ADMIN)[0] == 200
        *_, last = stream
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")
    assert last.response.incomplete_details.reason == "abort"


def test_every_protocol_counts_tokens_of_reasoning(served: Any) -> None:
    """Whole and streamed, of each choice; a token is a byte, so all but the marks are counted."""
    served.state.formats = MARKED
    body = {**HI, "model": MODEL, "max_tokens": 60, "n": 3, "seed": 1}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    try:
        chat = served.client().chat.completions
        whole = chat.create(**body)
        *_, last = chat.create(**body, **options)
        answer = served.ask("POST", "/v1/messages", {**body, "n": 1})[1]
    finally:
        served.state.formats = SWITCHED
    thoughts = [choice.message.reasoning_content or "" for choice in whole.choices]
    count = sum(len(thought.encode()) for thought in thoughts)
    assert whole.usage.completion_tokens_details.reasoning_tokens == count > 0
    assert last.usage == whole.usage
    thinking = [block["thinking"] for block in answer["content"] if block["type"] == "thinking"]
    assert answer["usage"]["output_tokens_details"] == {
        "thinking_tokens": len(thinking[0].encode())
    }
