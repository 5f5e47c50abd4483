"""Calls of tools, reasoning and JSON in /v1/chat/completions, judged by OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import openai
import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from vllm_module.runtime.outputs import CompletionOutput, RequestOutput
from vllm_module.server.protocol import ChatBody
from vllm_module.server.tools import AnswerForm, Formats

MESSAGES: Any = [{"role": "user", "content": "Weather?"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "day": {"$ref": "#/$defs/day"}},
            "required": ["city", "day"],
            "additionalProperties": False,
            "$defs": {"day": {"enum": [1, 2, 3]}},
        },
    },
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
NOW = {"type": "function", "function": {"name": "now", "parameters": NOTHING}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome", "day": 2}}</tool_call>'


@pytest.fixture(autouse=True)
def _formats(server: Any) -> Iterator[None]:
    """Let the model write calls as Hermes does, and reasoning between marks."""
    server.state.formats = Formats("hermes", ("<think>", "</think>"))
    yield
    server.state.formats = Formats()


def create(server: Any, **body: Any) -> Any:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 200, "seed": 1, **body}
    return server.client().chat.completions.create(**body)


def bias(server: Any, of: dict[str, int]) -> dict[str, int]:
    """Return a bias of tokens by their text."""
    tokenizer = server.state.tokenizer()
    return {str(tokenizer.encode(text)[0]): value for text, value in of.items()}


def written(text: str) -> dict[str, Any]:
    """Return fields that make any model write this text."""
    return {"extra_body": {"structured_outputs": {"choice": [text]}}}


def streamed(server: Any, **body: Any) -> tuple[dict[str, Any], str | None]:
    """Return the message and the finish reason that the chunks of a stream put together."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}}
    reason = None
    for chunk in create(server, stream=True, **body):
        for choice in chunk.choices:
            delta = choice.delta
            message["content"] += delta.content or ""
            message["reasoning"] += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or ():
                entry = message["calls"].setdefault(call.index, ["", ""])
                entry[0] += call.function.name or ""
                entry[1] += call.function.arguments or ""
            reason = choice.finish_reason or reason
    return message, reason


def test_calls_that_the_model_writes(server: Any) -> None:
    """Content and two calls, whole and streamed, with an id each and the finish reason."""
    body = {"tools": [WEATHER, NOW], **written(f"I look. {CALL}{CALL}")}
    (choice,) = create(server, **body).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    calls = choice.message.tool_calls
    assert [call.function.name for call in calls] == ["get_weather"] * 2
    assert json.loads(calls[1].function.arguments) == {"city": "Rome", "day": 2}
    assert len({call.id for call in calls}) == 2
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", call.id) for call in calls)  # or Mistral's refuse it
    message, reason = streamed(server, **body)
    assert (message["content"], reason) == ("I look.", "tool_calls")
    arguments = calls[0].function.arguments
    assert message["calls"] == {0: ["get_weather", arguments], 1: ["get_weather", arguments]}
    (choice,) = create(server, parallel_tool_calls=False, **body).choices
    assert len(choice.message.tool_calls) == 1


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize(
    "calls", [(1, 0, 0), (0, 1, 0), (1, 0, 1), (0, 0, 0), (1, 1, 1), (2, 0, 3), (0, 3, 2)]
)
def test_each_choice_has_its_own_form(
    server: Any, calls: tuple[int, ...], parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Choices come in turns, some with calls: none has the calls or the reason of another.

    Without parallel calls, each has its own first one.
    """
    texts = [CALL * count or f"text {index}" for index, count in enumerate(calls)]
    left = [count if parallel else min(count, 1) for count in calls]

    async def serve(*_: Any, every_token: bool) -> AsyncIterator[tuple[int, RequestOutput]]:
        samples = [CompletionOutput(index, "", [], None, None) for index in range(3)]
        for length in (5, None) if every_token else (None,):
            for sample, text in zip(samples, texts, strict=True):
                sample.text, sample.token_ids = text[:length], [*sample.token_ids, 1]
                sample.finish_reason = "stop" if length is None else None
                yield 0, RequestOutput("r", None, [1], samples, False)

    # No model writes a given number of calls.
    monkeypatch.setattr(server.llm, "serve", serve)
    body = {"tools": [WEATHER], "n": 3, "parallel_tool_calls": parallel}
    choices = create(server, **body).choices
    assert [choice.index for choice in choices] == [0, 1, 2]
    for index, choice in enumerate(choices):
        called = [call.function.name for call in choice.message.tool_calls or ()]
        assert called == ["get_weather"] * left[index]
        assert choice.message.content == (None if left[index] else f"text {index}")
        assert choice.finish_reason == ("tool_calls" if left[index] else "stop")
    reasons, numbers = {}, [list[int]() for _ in calls]
    for chunk in create(server, stream=True, **body):
        for choice in chunk.choices:
            numbers[choice.index] += [call.index for call in choice.delta.tool_calls or ()]
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert numbers == [list(range(count)) for count in left]
    assert reasons == {i: "tool_calls" if count else "stop" for i, count in enumerate(left)}


def test_a_limit_after_a_call_is_the_reason(server: Any) -> None:
    """A message that was cut off is told as that in each protocol, though it has a call."""
    body = {"tools": [WEATHER], "max_tokens": len(CALL) + 3, **written(f"{CALL}and no end")}
    (choice,) = create(server, **body).choices
    assert (choice.finish_reason, len(choice.message.tool_calls)) == ("length", 1)
    function = WEATHER["function"]
    body |= {"model": "tiny", "messages": MESSAGES, **body.pop("extra_body")}
    body["tools"] = [{"name": function["name"], "input_schema": function["parameters"]}]
    status, answer = server.ask("POST", "/v1/messages", body)
    kinds = [block["type"] for block in answer["content"]]
    assert (status, kinds) == (200, ["tool_use", "text"])
    assert answer["stop_reason"] == "max_tokens"


def test_without_tools_a_call_is_text(server: Any) -> None:
    """Text that looks like a call stays text if there are no tools, or none may be called."""
    for others in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        (choice,) = create(server, **written(CALL), **others).choices
        assert (choice.message.content, choice.finish_reason) == (CALL, "stop")
        assert choice.message.tool_calls is None


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_calls_that_are_required(server: Any, choice: Any) -> None:
    """Any model calls a tool with arguments of its schema, whole and streamed."""
    for seed in range(4):
        body = {"tools": [NOW, WEATHER], "tool_choice": choice, "seed": seed}
        body |= {"parallel_tool_calls": False}
        (found,) = create(server, **body).choices
        assert found.finish_reason == "tool_calls"
        (call,) = found.message.tool_calls
        assert found.message.content is None
        if choice == NAMED:
            assert call.function.name == "get_weather"
        if call.function.name == "get_weather":
            arguments = json.loads(call.function.arguments)
            assert arguments["city"] in ("Paris", "Rome")
            assert arguments["day"] in (1, 2, 3)
        message, _ = streamed(server, **body)
        assert message["calls"] == {0: [call.function.name, call.function.arguments]}


def test_a_function_that_is_named_is_called_once(server: Any) -> None:
    """OpenAI's named choice is one call, also for a model that goes on writing; its end is told."""
    biases = bias(server, {"]": -100})  # a list ends only where the schema has it end
    for body in ({"seed": seed, "logit_bias": biases} for seed in range(4)):
        body |= {"tools": [NOW, WEATHER], "tool_choice": NAMED}
        (found,) = create(server, **body).choices
        assert (found.finish_reason, len(found.message.tool_calls)) == ("tool_calls", 1)
        message, reason = streamed(server, **body)
        assert (len(message["calls"]), reason) == (1, "tool_calls")


def test_a_list_of_required_calls_that_is_cut_off_has_those_before(server: Any) -> None:
    """A model that writes calls up to the limit is told as one that called, and was cut off."""
    call = '{"name":"now","parameters":{}}'
    body = {"tools": [NOW], "tool_choice": "required", "max_tokens": 1 + 3 * len(call)}
    body["logit_bias"] = bias(server, {"]": -100})
    (found,) = create(server, **body).choices
    assert found.finish_reason == "length"
    assert [each.function.name for each in found.message.tool_calls] == ["now"] * 2
    message, reason = streamed(server, **body)
    assert (message["calls"], reason) == ({0: ["now", "{}"], 1: ["now", "{}"]}, "length")
    assert message["content"] == found.message.content == call[:-2]


LETTERS = {"enum": ["aa", "bb"]}
X = {"required": ["x"], "additionalProperties": False}
PARAMETERS: dict[str, dict[str, Any]] = {
    "definitions": {
        "properties": {"x": {"$ref": "#/definitions/E"}}, "definitions": {"E": LETTERS},
    },
    "$defs": {"properties": {"x": {"$ref": "#/$defs/E"}}, "$defs": {"E": LETTERS}},
    "another E": {"properties": {"x": {"$ref": "#/$defs/E"}}, "$defs": {"E": {"enum": [1, 2]}}},
    "a property": {"properties": {"x": {"$ref": "#/properties/y"}, "y": LETTERS}},
    "draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "properties": {"x": {"$ref": "#/definitions/E"}},
        "definitions": {"E": LETTERS},
    },
    "no type": {"properties": {"x": LETTERS}},
    "or null": {"type": ["object", "null"], "properties": {"x": LETTERS}},
    "an id": {"$id": "http://own/id", "properties": {"x": {"$ref": "#/$defs/E"}},
              "$defs": {"E": LETTERS}},
    "itself": {"properties": {"x": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
}  # fmt: skip


@pytest.mark.parametrize("choice", ["required", *PARAMETERS])
def test_arguments_of_required_calls_follow_the_tool_s_own_schema(server: Any, choice: str) -> None:
    """By JSON Schema's validator: references stay within a tool, and arguments are an object."""
    schemas = {name.replace(" ", "_"): {**each, **X} for name, each in PARAMETERS.items()}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in schemas.items()
    ]
    name = choice.replace(" ", "_")
    named = {"type": "function", "function": {"name": name}}
    wanted = choice if choice == "required" else named
    for seed in range(6 if choice == "required" else 1):
        body = {"tools": tools, "tool_choice": wanted, "seed": seed, "parallel_tool_calls": False}
        (found,) = create(server, **body, logit_bias=bias(server, {"{": -50})).choices
        (call,) = found.message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert isinstance(arguments, dict)
        Draft202012Validator(schemas[call.function.name]).validate(arguments)
        assert call.function.name == name or choice == "required"


class Answer(BaseModel):
    city: str
    days: list[int]


def test_answers_of_a_schema(server: Any) -> None:
    """The client's parse() gives the model's answer as an object of a class."""
    biases = bias(server, {" ": -80, '"': 90, "]": 80, "0": 70})  # random texts would be long
    answer = server.client().chat.completions.parse(
        model="tiny", messages=MESSAGES, max_tokens=400, seed=2, response_format=Answer,
        logit_bias=biases,
    )  # fmt: skip
    assert isinstance(answer.choices[0].message.parsed, Answer)
    anything = create(
        server,
        response_format={"type": "json_object"},
        logit_bias=bias(server, {" ": -80, "}": 50}),
    )
    assert isinstance(json.loads(anything.choices[0].message.content), dict)


class Forecast(BaseModel):
    """Weather of a city."""

    city: Literal["Paris", "Rome"]
    day: Literal[1, 2, 3]


def test_openais_async_client_has_tools_and_objects(server: Any) -> None:
    """Its own helpers put calls and answers of schemas together, whole and streamed, at once."""
    tool = openai.pydantic_function_tool(Forecast)
    common: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 200}

    async def streamed_calls(client: openai.AsyncOpenAI, seed: int) -> list[Any]:
        chat, found = client.chat.completions, []
        asked = chat.stream(**common, seed=seed, tools=[tool], tool_choice="required")
        async with asked as stream:
            async for event in stream:
                if event.type == "tool_calls.function.arguments.done":
                    found.append(event.parsed_arguments)
            message = (await stream.get_final_completion()).choices[0].message
        assert [call.function.parsed_arguments for call in message.tool_calls] == found
        return found

    async def streamed_object(client: openai.AsyncOpenAI, seed: int) -> list[Any]:
        chat = client.chat.completions
        async with chat.stream(**common, seed=seed, response_format=Forecast) as stream:
            return [event.parsed async for event in stream if event.type == "content.done"]

    async def whole_objects(client: openai.AsyncOpenAI, seed: int) -> list[Any]:
        answer, response = await asyncio.gather(
            client.chat.completions.parse(**common, seed=seed, response_format=Forecast),
            client.responses.parse(
                model="tiny", input="Weather?", text_format=Forecast, extra_body={"seed": seed}
            ),
        )
        return [answer.choices[0].message.parsed, response.output_parsed]

    async def all_of_them() -> list[list[Any]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="sk-two") as client:
            kinds = (streamed_calls, streamed_object, whole_objects)
            return await asyncio.gather(
                *(kind(client, seed) for seed in range(3) for kind in kinds)
            )

    for found in asyncio.run(all_of_them()):
        assert found
        assert all(isinstance(each, Forecast) for each in found)


def test_reasoning_is_apart(server: Any) -> None:
    """Reasoning is in a field of its own; the prompt may have begun it."""
    server.state.formats = Formats(None, ("<", ">"))  # marks that two bytes make
    biases = bias(server, {"<": 100})
    (choice,) = create(server, logit_bias=biases, max_tokens=3, temperature=0).choices
    assert choice.message.content in (None, "")
    assert choice.message.reasoning_content == "<<"
    prompt = [*MESSAGES, {"role": "assistant", "content": "<"}]
    extra = {"add_generation_prompt": False, "continue_final_message": True}
    extra["structured_outputs"] = None
    message, _ = streamed(
        server, messages=prompt, max_tokens=3, extra_body=extra,
        logit_bias=bias(server, {">": -100, "x": 100}),
    )  # fmt: skip
    assert (message["reasoning"], message["content"]) == ("xxx", "")


def test_an_unknown_format_is_refused(server: Any) -> None:
    """Tools need a format that the template tells or the operator names."""
    server.state.formats = Formats()
    body = {"model": "tiny", "messages": MESSAGES, "tools": [WEATHER]}
    status, answer = server.ask("POST", "/v1/chat/completions", body)
    assert status == 400
    assert "start the server with --tool-call-parser, one of hermes," in answer["error"]["message"]
    body |= {"tool_choice": "required", "max_tokens": 1}  # which needs none
    assert server.ask("POST", "/v1/chat/completions", body)[0] == 200


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [NOW, NOW]}, "tools[1]: two tools are named"),
    ({"tools": [{"type": "web_search"}]}, "tools[0] should be a function with a name"),
    ({"tools": [NOW], "tool_choice": {"function": {"name": "x"}}}, "tool_choice should be auto"),
    (
        {"tools": [NOW], "tool_choice": "required", "response_format": {"type": "json_object"}},
        "response_format and a tool_choice that wants calls exclude each other",
    ),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs and response_format exclude each other",
    ),
    (
        {"structured_outputs": {"regex": "a"}, "tools": [NOW], "tool_choice": "required"},
        "structured_outputs and a tool_choice that wants calls exclude each other",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "frob"}}}},
        "structured_outputs cannot be followed: Invalid type: frob",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format should be of type text"),
    *(
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "parameters": {**wrong, "properties": {"x": {"$ref": "#/$defs/E"}}},
                        },
                    }
                ],
                "tool_choice": "required",
            },
            "structured_outputs cannot be followed: ",
        )
        for wrong in ({"$defs": []}, {"$defs": None}, {"definitions": {"E": {}}})
    ),
]


@pytest.mark.parametrize(("body", "says"), REFUSED)
def test_what_is_refused(server: Any, body: dict[str, Any], says: str) -> None:
    """Each mistake is told by the name of its field."""
    status, answer = server.ask(
        "POST", "/v1/chat/completions", {"model": "tiny", "messages": MESSAGES, **body}
    )
    assert status == 400
    assert says in answer["error"]["message"]


@pytest.mark.parametrize("end", ["", "\n", "\n\n", " "])
def test_a_prompt_that_ends_in_the_mark_has_begun_the_reasoning(end: str) -> None:
    """Templates write a line's end behind it: those of DeepSeek-R1 and of QwQ do."""
    form = AnswerForm.of(ChatBody(model="m", messages=MESSAGES), Formats(None, ("<t>", "</t>")))
    for prompt, begun in ((f"Hi<t>{end}", True), (f"Hi<t>x{end}", False)):
        parser = form.parser(prompt)
        deltas = [*parser.feed("a</t>b"), *parser.finish()]
        assert "".join(each.reasoning for each in deltas) == ("a" if begun else "")
        assert "".join(each.content for each in deltas) == ("b" if begun else "a</t>b")


CHOICES: list[Any] = [None, "auto", "none", "required", NAMED]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("parallel", [True, False])
def test_the_template_gets_the_tools_as_they_were_given(choice: Any, parallel: bool) -> None:
    """Definitions of a schema too, which the answer has to follow, in each request alike."""
    tools = [WEATHER, NOW, {"type": "function", "function": {"name": "bare"}}]
    before = json.dumps(tools)
    for _ in range(2):
        body = ChatBody(
            model="m", messages=MESSAGES, tools=tools, tool_choice=choice,
            parallel_tool_calls=parallel,
        )  # fmt: skip
        form = AnswerForm.of(body, Formats("hermes"))
        assert json.dumps(form.tools) == ("[]" if choice == "none" else before)
        assert json.dumps(tools) == json.dumps(body.tools) == before
        if choice not in ("required", NAMED):
            assert form.structured_outputs is None
            continue
        assert form.structured_outputs is not None
        schema = Draft202012Validator(form.structured_outputs["json"])

        def call(name: str, **arguments: Any) -> dict[str, Any]:
            return {"name": name, "parameters": arguments}

        weather, others = call("get_weather", city="Rome", day=2), choice == "required"
        assert schema.is_valid([weather])
        assert schema.is_valid([weather, weather]) == (parallel and others)
        assert schema.is_valid([call("now")]) == schema.is_valid([call("bare", x=1)]) == others
        for wrong in (
            [], [call("get_weather", city="Rome", day=4)], [call("get_weather", city="Rome")],
            [call("now", x=1)], [call("other")], [{"name": "now"}], weather,
        ):  # fmt: skip
            assert not schema.is_valid(wrong)
