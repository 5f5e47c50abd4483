"""What a model writes is parsed the same however its text is split."""

from __future__ import annotations

import json
import os
import time
from random import Random
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from vllm_module.server.growing_text import ToolCall
from vllm_module.server.parsers import _REASONING, Parser, format_of, reasoning_of, switch_of
from vllm_module.server.tool_formats import CHOSEN, FORMATS
from vllm_module.server.tools import Formats

THINK = ("<think>", "</think>")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "unit": {"type": ["string", "null"]},
                    "where": {"anyOf": [{"type": "object"}, {"type": "null"}]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
PARIS = ToolCall("get_weather", '{"city": "Paris", "days": 3}')
NOW = ToolCall("now", "{}")
Parsed = tuple[str, str, list[ToolCall]]


def parsed(parts: list[str], *args: Any, **options: Any) -> Parsed:
    """Return content, reasoning and calls that a parser's deltas put together."""
    parser = Parser(*args, **{"tools": TOOLS, **options})
    deltas = [delta for part in parts for delta in parser.feed(part)] + parser.finish()
    calls = [each.tool_call for each in deltas if each.tool_call is not None]
    contents, reasonings = "".join(d.content for d in deltas), "".join(d.reasoning for d in deltas)
    return contents, reasonings, calls


# As the models' own chat templates write a message with calls.
WRITTEN = {
    "hermes": (
        'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n'
        '</tool_call>\n<tool_call>\n{"arguments": {}, "name": "now"}\n</tool_call>'
    ),
    "qwen3_coder": (
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>"
    ),
    "glm": (
        "I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n"
        "</tool_call>"
    ),
    "mistral": (
        'I look.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]now[ARGS]{}'
    ),
    "deepseek": (
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        '```json\n{"city": "Paris", "days": 3}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>"
    ),
    "kimi": (
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Paris", "days": 3}<|tool_call_end|>'
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    ),
    "harmony": (
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris", "days": 3}<|call|>'
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_are_found_as_a_template_writes_them(name: str) -> None:
    """Content before calls, arguments in their types, and two calls in order."""
    assert parsed([WRITTEN[name]], name) == ("I look.", "", [PARIS, ToolCall("now", "{}")])


OTHERS: list[tuple[str, str, Parsed]] = [
    # Llama 3 writes a call instead of content.
    (
        "llama3",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}',
        ("", "", [PARIS]),
    ),
    (
        "llama3",
        '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}',
        ("", "", [ToolCall("now", "{}")] * 2),
    ),
    ("llama3", '{"a": 1} is JSON', ('{"a": 1} is JSON', "", [])),
    ("llama3", 'As {"name": "now"}', ('As {"name": "now"}', "", [])),
    ("llama3", '{"name": "now"}', ("", "", [ToolCall("now", "{}")])),
    ("llama3", '{"name": "Bob", "age": 5}', ('{"name": "Bob", "age": 5}', "", [])),
    ("llama3", '{"name": "now"}; bye', ('{"name": "now"}; bye', "", [])),
    # Before version 11, Mistral wrote a list; without its special tokens, a name and JSON.
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}]',
        ("", "", [PARIS]),
    ),
    ("mistral", "[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}", ("", "", [ToolCall("now", "{}")])),
    ("mistral", "[TOOL_CALLS]now{}", ("", "", [ToolCall("now", "{}")])),
    ("mistral", "[TOOL_CALLS] none", ("[TOOL_CALLS] none", "", [])),
    # DeepSeek V3.1 writes the name and JSON.
    (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        ("", "", [ToolCall("now", "{}")]),
    ),
    # A mark within a JSON string ends nothing.
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": "a</tool_call>\\"}"}}</tool_call>',
        ("", "", [ToolCall("f", '{"x": "a</tool_call>\\"}"}')]),
    ),
    # As in vLLM, the last end mark may be missing, but nothing of the call.
    ("hermes", 'a<tool_call>{"name": "now"}\n', ("a", "", [NOW])),
    ("hermes", '<tool_call>{"name": "f"', ('<tool_call>{"name": "f"', "", [])),
    ("hermes", '<tool_call>{"name": "f"}</tool', ('<tool_call>{"name": "f"}</tool', "", [])),
    ("hermes", "<tool_call>f()</tool_call>!", ("<tool_call>f()</tool_call>!", "", [])),
    ("hermes", "a  <b", ("a  <b", "", [])),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
        ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "", []),
    ),
    # Python reads this as infinity, and would write no JSON for it.
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>',
        ('<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>', "", []),
    ),
    ("mistral", '[TOOL_CALLS]f{"x": -1e999}', ('[TOOL_CALLS]f{"x": -1e999}', "", [])),
    (
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=city>\n007\n\n</parameter>"
        '<parameter=where>{"a": [1]}</parameter><parameter=days>many</parameter></function>'
        "</tool_call>",
        (
            "",
            "",
            [ToolCall("get_weather", '{"city": "007\\n", "where": {"a": [1]}, "days": "many"}')],
        ),
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=a>1</function></tool_call>",
        ("<tool_call><function=f><parameter=a>1</function></tool_call>", "", []),
    ),
    # As in Qwen's own parser, which takes the function without the marks around it.
    ("qwen3_coder", "a\n<function=now>\n</function>\n</tool_call>\nb", ("a\nb", "", [NOW])),
    ("qwen3_coder", "<function=now></function><function=now></function>", ("", "", [NOW] * 2)),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n", ("", "", [NOW])),
    ("qwen3_coder", "<function=now> b", ("<function=now> b", "", [])),
    # What only mentions the marks hides no call, as in Qwen's parser, which looks for both first.
    (
        "qwen3_coder",
        "I write <function=name> now.\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        ("I write <function=name> now.", "", [NOW]),
    ),
    ("qwen3_coder", "<function=a b></function>", ("<function=a b></function>", "", [])),
    (
        "glm",
        "<tool_call>get_weather<arg_key>where</arg_key><arg_value>null</arg_value></tool_call> ok",
        (" ok", "", [ToolCall("get_weather", '{"where": null}')]),
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi"
        "<|return|>",
        ("Hi", "Hm.", []),
    ),
    ("harmony", "no header", ("no header", "", [])),
    ("harmony", " to=functions.now<|channel|>commentary json<|message|>{} \n", ("", "", [NOW])),
    # A list that is cut off, or goes on otherwise, has the calls before that.
    (CHOSEN, '[{"name": "now", "parameters": {}},', ("", "", [NOW])),
    (CHOSEN, '[{"name": "now"}, {"name": "f", "pa', (' {"name": "f", "pa', "", [NOW])),
    (CHOSEN, '[{"name": "now"}, 5]', (" 5]", "", [NOW])),
    (CHOSEN, '[{"name": "now"}]!', ("!", "", [NOW])),
    (CHOSEN, '[{"name": 5}, {"name": "now"}]', ('[{"name": 5}, {"name": "now"}]', "", [])),
    (CHOSEN, '[{"na', ('[{"na', "", [])),
    (CHOSEN, "[]", ("[]", "", [])),
    (CHOSEN, "no list", ("no list", "", [])),
]


@pytest.mark.parametrize(("name", "text", "expected"), OTHERS)
def test_other_forms_and_damaged_calls(name: str, text: str, expected: Parsed) -> None:
    """Other versions of a format are read; what is no call stays content, nothing of it lost."""
    assert parsed([text], name) == expected


@pytest.mark.parametrize("kind", [5, True, {"a": 1}, [5], None])
def test_a_type_that_is_no_schema_s_is_none(kind: Any) -> None:
    """A client's schema may have any JSON there; the value is read as for no type."""
    text = "<tool_call><function=f><parameter=x>1</parameter></function></tool_call>"
    function = {"name": "f", "parameters": {"properties": {"x": {"type": kind}}}}
    tools = [{"type": "function", "function": function}]
    assert parsed([text], "qwen3_coder", tools=tools) == ("", "", [ToolCall("f", '{"x": 1}')])


NAMED: dict[str, Any] = {
    "Zip": {"type": "string", "pattern": "^[0-9]+$"},
    "a/b": {"enum": [1, "auto"]},
    "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "integer"}]},
}
TYPES = ["string", "integer", "number", "boolean", "null", "array", "object"]
VALUES: list[Any] = [
    *("90210", "x", "null", "true", "True", "auto", "[1]", "", "007"),
    *(5, 1, -2.5, True, False, None, ["a"], [1], {"a": "b"}, {}),
]
SCHEMAS = st.recursive(
    st.one_of(
        st.builds(lambda kind: {"type": kind}, st.sampled_from(TYPES)),
        st.builds(lambda kind: {"type": [kind, "null"]}, st.sampled_from(TYPES)),
        st.builds(
            lambda *each: {"enum": [*each]}, st.sampled_from(VALUES), st.sampled_from(VALUES)
        ),
        st.builds(lambda value: {"const": value}, st.sampled_from(VALUES)),
        st.just({"type": "string", "enum": ["x", "90210"]}),
        st.just({"type": "array", "items": {"type": "string"}}),
        st.builds(
            lambda kind, name: {"$ref": f"#/{kind}/{name}"},
            st.sampled_from(["$defs", "definitions"]),
            st.sampled_from(["Zip", "a~1b", "a%7E1b", "Loop"]),
        ),
    ),
    lambda parts: st.builds(
        lambda key, *parts: {key: [*parts]}, st.sampled_from(["anyOf", "oneOf"]), parts, parts
    ),
    max_leaves=4,
)


def value_read(name: str, text: str, schema: Any, named: Any = NAMED) -> Any:
    """Return what a format that writes values as text has read for a parameter of this schema."""
    around = {
        "qwen3_coder": "<tool_call><function=f><parameter=x>{}</parameter></function></tool_call>",
        "glm": "<tool_call>f<arg_key>x</arg_key><arg_value>{}</arg_value></tool_call>",
    }
    parameters = {"properties": {"x": schema}, "$defs": named, "definitions": named}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    _, _, (call,) = parsed([around[name].replace("{}", text)], name, tools=tools)
    return json.loads(call.arguments)["x"]


@pytest.mark.parametrize("name", ["qwen3_coder", "glm"])
@given(schema=SCHEMAS, value=st.sampled_from(VALUES))
@example({"anyOf": [{"type": "string"}, {"type": "null"}]}, "90210")
@example({"enum": ["90210", "x"]}, "90210")
@example({"$ref": "#/$defs/Zip"}, "90210")
def test_a_value_is_read_as_one_of_its_schema(name: str, schema: Any, value: Any) -> None:
    """JSON Schema's own validator accepts what is read, which is the value, or has its text."""
    rules = Draft202012Validator({**schema, "$defs": NAMED, "definitions": NAMED})
    assume("Loop" not in json.dumps(schema))  # which the validator follows without end
    assume(rules.is_valid(value))
    text = value if isinstance(value, str) else json.dumps(value)
    read = value_read(name, text, schema)
    assert rules.is_valid(read), read
    assert (type(read), read) == (type(value), value) or text in (read, json.dumps(read))


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("True", {"type": "boolean"}, True),
        ("FALSE", {"anyOf": [{"type": "boolean"}, {"type": "null"}]}, False),
        ("True", {"type": "string"}, "True"),
        ("True", {}, "True"),
        ("yes", {"type": "boolean"}, "yes"),
        ("null", {"type": ["string", "null"]}, None),  # as vLLM; a template writes None so
        ("null", {"type": "string"}, "null"),
        ("5", {"type": ["string", "integer"]}, "5"),
        ("5", {"$ref": "#/$defs/Loop"}, 5),
        ("5", {"$ref": "#/$defs/Absent"}, 5),
        ("5", {"$ref": "other.json#/Zip"}, 5),
        ("91", {"enum": ["90", "x"]}, "91"),  # none of them, but one of their type
        ("5", {"anyOf": 5, "enum": {}, "$ref": [], "type": {}}, 5),
        ("5", {"allOf": [{"$ref": "#/$defs/Zip"}]}, "5"),
        ("5", {"anyOf": [{}] * 5000 + [{"type": "string"}]}, 5),  # more than is looked at
    ],
)
def test_types_of_values(text: str, schema: Any, value: Any) -> None:
    """Words for truth in any case, null, references, and parts that are no schema."""
    for name in ("qwen3_coder", "glm"):
        read = value_read(name, text, schema)
        assert (type(read), read) == (type(value), value)


@pytest.mark.parametrize("other", [{}, *({"type": each} for each in TYPES)])
@pytest.mark.parametrize("constant", [None, False, True, 0, 1, -2.5, "", "x", "null", "5"])
def test_a_constant_is_an_enumeration_of_one(constant: Any, other: dict[str, Any]) -> None:
    """``const`` and ``enum`` of any one value read any text alike, beside any other type."""
    texts = ("", "x", "5", "0", "1", "null", "NULL", "true", "False", "-2.5")
    one, many = ({"anyOf": [each, other]} for each in ({"const": constant}, {"enum": [constant]}))
    for text in texts:
        read, expected = (value_read("glm", text, schema) for schema in (one, many))
        assert (type(read), read) == (type(expected), expected), text


@given(st.lists(st.text("~/01%2Fé ", max_size=5), min_size=1, max_size=3))
@example(["~1"])
@example(["~01"])
@example(["/", "~1"])
@example(["%2F", "~0"])
def test_references_are_json_pointers(names: list[str]) -> None:
    """Whatever a schema is called, at any depth, it is the one that JSON Schema's own finds."""
    schema: Any = {"type": "string"}
    for each in reversed(names):
        schema = {each: schema}
    # RFC 6901, sections 3 and 6.
    escaped = [each.replace("~", "~0").replace("/", "~1") for each in names]
    reference = {"$ref": "#/$defs/" + "/".join(map(quote, escaped))}
    assert Draft202012Validator({**reference, "$defs": schema}).is_valid("5")
    assert not Draft202012Validator({**reference, "$defs": schema}).is_valid(5)
    assert value_read("qwen3_coder", "5", reference, schema) == "5"


def test_reasoning_is_apart_from_content() -> None:
    """Reasoning is what is between the marks, whether the prompt or the text begins it."""
    both = ("Yes.", "Let me see.", [])
    assert parsed(["<think>\nLet me see.\n</think>\n\nYes."], None, THINK) == both
    assert parsed(["Let me see.\n</think>\n\nYes."], None, THINK, reasons=True) == both
    assert parsed(["Yes. <think>no</think>"], None, THINK) == ("Yes. <think>no</think>", "", [])
    assert parsed(["<think>cut off"], None, THINK) == ("", "cut off", [])
    called = parsed(["<think>a</think>" + WRITTEN["hermes"]], "hermes", THINK)
    assert called == ("I look.", "a", [PARIS, ToolCall("now", "{}")])


def test_without_tools_and_marks_text_is_content_at_once() -> None:
    """A plain message is passed on whole, spaces included, without waiting."""
    parser = Parser()
    assert [delta.content for delta in parser.feed(" a <tool_call>\n")] == [" a <tool_call>\n"]
    assert parser.finish() == []


def test_a_call_is_told_when_it_is_complete() -> None:
    """Content is not kept back longer than it may be the beginning of a mark."""
    parser = Parser("hermes")
    assert parser.feed("I look <tool")[0].content == "I look"
    assert parser.feed('_call>{"name": "now"}</tool_call') == []
    assert [each.tool_call for each in parser.feed(">")] == [ToolCall("now", "{}")]
    parser = Parser(CHOSEN)
    assert parser.feed('[{"name": "now", "parameters": {}') == []
    assert [each.tool_call for each in parser.feed("}")] == [NOW]
    assert [each.tool_call for each in parser.feed(',{"name": "now"}')] == [NOW]
    assert parser.feed("]") + parser.finish() == []


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("<function=f>", "</function>", "<parameter=a>", "</parameter>", "<arg_key>", "</arg_key>"),
    *("<arg_value>", "</arg_value>", "<|python_tag|>", "<｜tool▁calls▁begin｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *("<|channel|>analysis", "<|channel|>final", "<|message|>", "<|start|>assistant", "<|end|>"),
    *("<|call|>", " to=functions.f", '{"name": "f", "arguments": {"a": "b"}}', '{"name": "f"}'),
    *("{", "}", "[", "]", '"', "\\", ";", ",", "null", "1", "f", " ", "\n", "<", "|", "é"),
    *("```json\n", "[THINK]", "[/THINK]"),
]  # fmt: skip

BEGINS = [
    f"{before}{begin}{thought}"
    for begin, end in _REASONING
    for before in ("", "\n")
    for thought in ("", f"é{end}")
]


ALL_WRITTEN = {
    **WRITTEN,
    "llama3": '{"name": "now", "parameters": {"a": ";"}}; {"name": "now", "parameters": {}}',
    CHOSEN: '[{"name": "now", "parameters": {"a": ["]"]}}, {"name": "f", "arguments": {}}]',
}
SPLITS = int(os.environ.get("SPLITS", "2000"))  # of each format


def drawn_text(random: Random, name: str | None) -> str:
    """Draw a text of marks and fragments, some of them cut short.

    Half of them have calls that are whole.
    """
    text = random.choice(["", " ", '{"name": "f"};', *BEGINS])
    calls = ALL_WRITTEN.get(str(name), " ")
    if random.randint(0, 1):
        text += calls
    for _ in range(random.randint(0, 10)):
        piece = random.choice([*FRAGMENTS, calls, " "])
        text += piece[: random.randint(1, len(piece))]
    return text


def drawn_split(random: Random, text: str) -> list[str]:
    """Cut a text at up to eight places, or between all of its characters."""
    if not random.randint(0, 9):
        return list(text)
    cuts = sorted(random.randint(0, len(text)) for _ in range(random.randint(0, 8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("name", [*FORMATS, CHOSEN, None])
def test_for_every_split_the_deltas_are_those_of_the_whole(name: str | None) -> None:
    """The law of this room: no delta depends on where the text was split."""
    random, found, calls = Random(str(name)), set[Any](), 0
    for _ in range(0, SPLITS, 10 * (1 + len(_REASONING))):
        text, reasons = drawn_text(random, name), bool(random.randint(0, 1))
        for reasoning in (None, *_REASONING):
            whole = parsed([text], name, reasoning, reasons=reasons)
            if whole[0] and whole[1]:
                found.add(reasoning)
            calls += len(whole[2])
            for call in whole[2]:
                assert call.name
                assert isinstance(json.loads(call.arguments), dict)
            for _ in range(10):
                parts = drawn_split(random, text)
                assert parsed(parts, name, reasoning, reasons=reasons) == whole, parts
    if name != "harmony":  # whose channels are reasoning, whatever the marks
        assert found >= {*_REASONING}, "no text had reasoning and content"
    assert bool(calls) == (name is not None)


@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        ("hermes", "<tool_call>", 30_000),
        ("hermes", "<tool_call></tool_call>", 30_000),
        ("hermes", "<tool_call>{</tool_call>", 2_000),
        ("mistral", "[TOOL_CALLS]x{", 2_000),
        ("kimi", "<|tool_call_begin|>x<|tool_call_end|>", 10_000),
        ("harmony", "to=functions.f<|message|>{<|end|>", 4_000),
    ],
)
def test_time_does_not_grow_with_the_square_of_the_text(name: str, text: str, count: int) -> None:
    """Texts that a client can have any model write; other clients wait for their parse."""
    begin = time.thread_time()
    parsed([text * count], name)
    assert time.thread_time() - begin < 2


def test_a_text_without_marks_of_the_format_is_content() -> None:
    """Where a format's first mark does not occur, nothing is lost and nothing is a call."""
    random = Random(1)
    for _ in range(100):
        for name, mark in (("hermes", "<tool_call>"), ("mistral", "[TOOL_CALLS]")):
            text = drawn_text(random, name)
            if mark not in text:
                assert parsed(drawn_split(random, text), name) == (text, "", [])
            assert parsed(drawn_split(random, text)) == (text, "", [])


def test_a_template_tells_its_format() -> None:
    """Marks that a template writes name the format; without one there is none."""
    for name, text in WRITTEN.items():
        assert format_of(text) == name
    assert format_of("<|python_tag|>") == "llama3"
    assert format_of("{{ messages }}") is None
    assert reasoning_of("{{ content.split('</think>') }}") == THINK
    assert reasoning_of("{{ '[THINK]' + thought + '[/THINK]' }}") == ("[THINK]", "[/THINK]")
    assert reasoning_of("{{ messages }}") is None
    # As Qwen 3, GLM 4.5, DeepSeek V3.1, Granite 3.3 and Llama 3 write it.
    for template, switch in (
        ("{%- if enable_thinking is defined and enable_thinking is false %}", "enable_thinking"),
        ("'/nothink' if (enable_thinking is defined and not enable_thinking)", "enable_thinking"),
        ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}", "thinking"),
        ("{%- if thinking %}", "thinking"),
        ("{%- if message.thinking %}{{ message.thinking }}{% endif %}", None),
        ("{%- if thinking_budget %}", None),
    ):
        assert switch_of(template) == Formats.of(template).switch == switch


@pytest.fixture(scope="module")
def pairs() -> Tokenizer:
    """Return a tokenizer of bytes that joins some, also across spaces and marks."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator(["<think>Let me see. </think> Yes.", "a b  c\n\nd, a b"], trainer)
    return tokenizer


@pytest.mark.parametrize("name", [None, "harmony"])
def test_tokens_of_reasoning_are_those_that_begin_in_it(pairs: Tokenizer, name: str | None) -> None:
    """Beside the places of tokens in the text that tokenizers tells, for texts split anywhere.

    Letters of several tokens are whole on one side. Spaces beside marks are no reasoning.
    """
    random, found = Random(str(name)), set[int]()
    begin, end = THINK if name is None else ("<|channel|>analysis<|message|>", "<|end|>")
    for _ in range(200):
        texts = [
            "".join(random.choice(["a b", " c", "é", "𝄞", "\n", ". ", "d,"]) for _ in range(count))
            for count in (random.randint(0, 12), random.randint(0, 12))
        ]
        thought = texts[0].strip(" \n") if name is None else texts[0].rstrip(" \n")
        text = f"{begin}{texts[0]}{end}{texts[1]}"
        encoding, parser = pairs.encode(text), Parser(name, THINK)
        assert pairs.decode(encoding.ids) == text
        for part in drawn_split(random, text):
            parser.feed(part)
        parser.finish()
        start = text.index(thought, len(begin))
        within = range(start, start + len(thought))
        count = sum(at in within for at, _ in encoding.offsets)
        assert parser.reasoning_tokens(encoding.ids, pairs.decode) == count
        assert parser.reasoned == bool(thought)
        found.add(count - len(thought))
    assert min(found) < 0 < max(found)  # fewer and more tokens than letters


def test_an_unknown_format_is_named() -> None:
    """The message has the formats that there are."""
    with pytest.raises(ValueError, match="no format of tool calls is named 'x': hermes, "):
        Parser("x")


def test_calls_are_in_the_format_of_the_template_for_tools() -> None:
    """It may be another one than the default, which may tell none, or the reasoning alone."""
    default, for_tools = "<think></think>", "<tool_call>"
    assert Formats.of(default).calls is None
    formats = Formats.of(default, for_tools=for_tools)
    assert formats.calls == format_of(for_tools)
    assert formats.calls is not None
    assert formats.reasoning == ("<think>", "</think>")
    assert Formats.of(default, "none", for_tools=for_tools).calls is None
    assert Formats.of("<|python_tag|>", for_tools=for_tools).calls == formats.calls
