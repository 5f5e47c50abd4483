"""The formats in which models write calls of tools, as their chat templates show them.

Each format is a generator over a growing text. What looks like a call and is none, for example
because its JSON is damaged, is content.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeAlias
from urllib.parse import unquote

from vllm_module.server.growing_text import (
    SPACE,
    Delta,
    GrowingText,
    ToolCall,
    begins,
    skip_blank,
    take_json,
    take_section,
    take_to,
    until,
)

_NAME = re.compile(r"[^\s<>{}\[\]\"'`|]{1,256}")

Parse: TypeAlias = Generator[Delta | None, None, None]
# The schema of each tool's parameters, for formats that write values as text.
Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]
Format: TypeAlias = Callable[[GrowingText, Schemas], Parse]
_MOST_SCHEMAS = 1000  # schemas and constants that are looked at for one value
_KINDS: dict[type, str] = {
    str: "string", bool: "boolean", int: "number", float: "number", type(None): "null",
    list: "array", dict: "object",
}  # fmt: skip


def _hermes(text: GrowingText, schemas: Schemas) -> Parse:
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``: Qwen 2.5 and 3, Hermes."""
    begin, end = "<tool_call>", "</tool_call>"
    while (yield from until(text, (begin,), "content")):
        body = yield from take_json(text)  # whose strings may have the end mark
        more, raw = yield from take_section(text, begin + (body or ""), end)
        if more is None:  # models may leave out the last end mark
            more = raw.removeprefix(begin + (body or ""))
        wrong = body is None or more.strip(SPACE)
        yield from _calls_or(raw, [] if wrong else [_call(_loads(body or ""))])
        yield from skip_blank(text)


def _qwen3_coder(text: GrowingText, schemas: Schemas) -> Parse:
    """``<tool_call><function=f><parameter=x>1</parameter></function></tool_call>``.

    The outer marks may be missing around a function that there is, as in Qwen's own parser.
    """
    begin, end, opens, closes = "<tool_call>", "</tool_call>", "<function=", "</function>"
    known = [f"{opens}{name}>" for name in schemas]
    while mark := (yield from until(text, (begin, *known), "content")):
        body, raw = yield from take_section(text, mark, end if mark == begin else closes)
        function = (raw.removeprefix(begin) if body is None or mark != begin else body).strip(SPACE)
        name, _, values = function.removeprefix(opens).partition(">")
        pairs = _pairs(values.removesuffix(closes), "<parameter=", ">", "</parameter>")
        wrong = not (function.startswith(opens) and function.endswith(closes))
        call = None if wrong else _of_texts(name, pairs, schemas)
        yield from _calls_or(raw, [call])
        if mark != begin and call is not None:
            yield from begins(text, end)
        yield from skip_blank(text)


def _glm(text: GrowingText, schemas: Schemas) -> Parse:
    """``<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>``: GLM 4.5 to 4.7."""
    begin, end = "<tool_call>", "</tool_call>"
    while (yield from until(text, (begin,), "content")):
        body, raw = yield from take_section(text, begin, end)
        name, key, values = (body or "").partition("<arg_key>")
        pairs = _pairs(key + values, "<arg_key>", "</arg_key>", "</arg_value>", "<arg_value>")
        yield from _calls_or(raw, [None if body is None else _of_texts(name, pairs, schemas)])
        yield from skip_blank(text)


def _pairs(
    values: str, begin: str, middle: str, end: str, opens: str = ""
) -> list[tuple[str, str]] | None:
    """Return the keys and values of ``begin key middle opens value end``; ``None`` if damaged."""
    *written, after = values.split(end)
    found = []
    for each in written:
        key, mark, value = each.lstrip(SPACE).removeprefix(begin).partition(middle)
        value = value.lstrip(SPACE) if opens else value
        if not (each.lstrip(SPACE).startswith(begin) and mark and value.startswith(opens)):
            return None
        found.append((key.strip(SPACE), value.removeprefix(opens)))
    return None if after.strip(SPACE) else found


def _of_texts(
    name: str, pairs: Sequence[tuple[str, str]] | None, schemas: Schemas
) -> ToolCall | None:
    """Return a call whose values are written as text.

    A line break after the value's mark and one before the next are not part of it.
    """
    name = name.strip(SPACE)
    if pairs is None or not _NAME.fullmatch(name):
        return None
    root, values = schemas.get(name, {}), {}
    given = root.get("properties")
    known: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    for key, value in pairs:
        text = value.removeprefix("\n").removesuffix("\n")
        values[key] = _of_text(text, known[key], root) if key in known else text
    return ToolCall(name, json.dumps(values, ensure_ascii=False))


def _of_text(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the value that a text is: JSON, unless the schema has a string; else the text."""
    types, constants = _allowed(schema, root)
    kinds = types | {_KINDS[type(each)] for each in constants}
    word = text.strip(SPACE).lower()
    if text in constants:
        return text
    if text.strip(SPACE) == "null" and ("null" in kinds or "string" not in kinds):
        return None
    value = word == "true" if "boolean" in kinds and word in ("true", "false") else _loads(text)
    if any(type(each) is type(value) and each == value for each in constants):
        return value
    is_text = "string" in types or ("string" in kinds and _KINDS[type(value)] not in types)
    return text if value is None or is_text else value


def _allowed(schema: Any, root: Mapping[str, Any]) -> tuple[set[str], list[Any]]:
    """Return the types that a schema names, itself or by its parts, and the constants.

    Integers are numbers. ``root`` is what references are of. Damaged parts name none.
    """
    types, constants = set[str](), list[Any]()
    left, followed, looked_at = [schema], set[str](), 0
    while left and looked_at + len(constants) < _MOST_SCHEMAS:
        each = left.pop()
        looked_at += 1
        if not isinstance(each, Mapping):
            continue
        kind, enum, reference = (each.get(key) for key in ("type", "enum", "$ref"))
        enum = [each["const"]] if "const" in each else enum
        if isinstance(enum, list):  # which says more than the type beside it
            constants += enum[:_MOST_SCHEMAS]
        else:
            names = kind if isinstance(kind, list) else [kind]
            types.update("number" if n == "integer" else n for n in names if isinstance(n, str))
        for key in ("anyOf", "oneOf", "allOf"):
            parts = each.get(key)
            left += parts[:_MOST_SCHEMAS] if isinstance(parts, list) else ()
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            left.append(_referenced(reference, root))
    return types, constants


def _referenced(reference: str, root: Mapping[str, Any]) -> Any:
    """Return what a JSON pointer such as ``#/$defs/Name`` points to; None for anything else."""
    first, *names = reference.split("/", 20)
    found: Any = root if first == "#" else None
    for name in names:
        key = unquote(name).replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _llama3(text: GrowingText, schemas: Schemas) -> Parse:
    """``{"name": …, "parameters": {…}}`` and nothing else; several have ``;`` between them."""
    tag = yield from begins(text, "<|python_tag|>")
    raw, calls, separator = tag, [], ";"
    while separator and (body := (yield from take_json(text))) is not None:
        raw += body
        calls.append(_call(_loads(body)))
        separator = yield from begins(text, ";")
        raw += separator
    if calls and not separator:
        yield from skip_blank(text)
    if not calls or separator or text.rest:
        calls = []
    if raw:
        yield from _calls_or(raw, calls)
    yield from until(text, (), "content")


def _mistral(text: GrowingText, schemas: Schemas) -> Parse:
    """``[TOOL_CALLS][{"name": …, "arguments": {…}}]`` or ``[TOOL_CALLS]f[ARGS]{…}``."""
    begin = "[TOOL_CALLS]"
    while (yield from until(text, (begin,), "content")):
        body = yield from take_json(text)
        if body is not None:
            listed = _loads(body)
            calls = [_call(each) for each in listed] if isinstance(listed, list) else []
            yield from _calls_or(begin + body, calls)
        else:
            head = yield from take_to(text, "{")
            if head is not None:
                text.rest = "{" + text.rest
                body = yield from take_json(text)
            name = (head or "").partition("[CALL_ID]")[0].partition("[ARGS]")[0]
            raw = begin + (head or "") + (body or "")
            yield from _calls_or(raw, [_named(name.strip(SPACE), body)])
        yield from skip_blank(text)


def _deepseek(text: GrowingText, schemas: Schemas) -> Parse:
    """``<｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}``: DeepSeek V3.1. V3 and R1 write more beside."""
    sections, section_ends = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    begin, separator, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    block = re.compile(r"([^\n]+)\n```json\n(.*)\n```", re.DOTALL)
    while mark := (yield from until(text, (sections, section_ends, begin), "content")):
        if mark != begin:
            yield from skip_blank(text)
            continue
        body, raw = yield from take_section(text, begin, end)
        name, _, arguments = (body or "").partition(separator)
        if found := block.fullmatch(arguments.strip(SPACE)):
            name, arguments = found[1], found[2]
        yield from _calls_or(raw, [_named(name.strip(SPACE), arguments)])
        yield from skip_blank(text)


def _kimi(text: GrowingText, schemas: Schemas) -> Parse:
    """``<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}``: Kimi K2."""
    sections, section_ends = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    begin, separator = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
    end = "<|tool_call_end|>"
    while mark := (yield from until(text, (sections, section_ends, begin), "content")):
        if mark != begin:
            yield from skip_blank(text)
            continue
        body, raw = yield from take_section(text, begin, end)
        name, _, arguments = (body or "").partition(separator)
        name = re.sub(r"^functions\.|:\d+$", "", name.strip(SPACE))
        yield from _calls_or(raw, [_named(name, arguments)])
        yield from skip_blank(text)


def _harmony(text: GrowingText, schemas: Schemas) -> Parse:
    """gpt-oss: messages in channels, of which a header names channel and recipient.

    https://cookbook.openai.com/articles/openai-harmony. The prompt ends within the first header.
    """
    ends = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
    while (header := (yield from take_to(text, "<|message|>"))) is not None:
        channel = re.search(r"<\|channel\|>\s*(\w+)", header)
        recipient = re.search(r"\bto=functions\.([^\s<]+)", header)
        if recipient is not None:
            body = yield from take_json(text)
            yield from _calls_or(body or "", [_named(recipient[1], body)])
            yield from skip_blank(text)
        is_reasoning = channel is not None and channel[1] == "analysis"
        yield from until(text, ends, "reasoning" if is_reasoning else "content")
    if not text.rest.startswith("<|"):  # else a header without its message
        yield from until(text, ends, "content")


def _call(value: Any) -> ToolCall | None:
    """Return the call that a JSON object describes, if it describes one."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    nothing: Any = {} if value.keys() <= {"name", "id", "type"} else None  # else it is other JSON
    arguments = value.get("arguments", value.get("parameters", nothing))
    if isinstance(arguments, str):  # JSON in JSON
        return ToolCall(value["name"], arguments) if isinstance(_loads(arguments), dict) else None
    if not isinstance(arguments, dict):
        return None
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))


def _named(name: str, arguments: str | None) -> ToolCall | None:
    """Return the call of ``name`` with arguments that are JSON text, if both are well formed."""
    if arguments is None or not _NAME.fullmatch(name) or not isinstance(_loads(arguments), dict):
        return None
    return ToolCall(name, arguments.strip(SPACE))


def _loads(text: str) -> Any:
    """Return the value of JSON text, or ``None``."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(constant)  # NaN and Infinity are no JSON


def _finite(number: str) -> float:
    if math.isinf(float(number)):
        raise ValueError(number)  # as Infinity, which Python would write for it
    return float(number)


def _calls_or(raw: str, calls: Sequence[ToolCall | None]) -> list[Delta]:
    """Return the calls; the raw text if one of them is none, or there are none."""
    if not calls or None in calls:
        return [Delta(content=raw)]
    return [Delta(tool_call=call) for call in calls]


def chosen(text: GrowingText, schemas: Schemas) -> Parse:
    """``[{"name": …, "parameters": {…}}]``, which a schema has made the model write.

    A list that was cut off has the calls before that, and the rest is content.
    """
    mark, raw = (yield from begins(text, "[")), "["
    while mark and mark != "]":
        body = yield from take_json(text)
        call = _call(_loads(body or ""))
        if call is None:
            yield Delta(content=raw + (body or ""))
            break
        yield Delta(tool_call=call)
        mark, raw = (yield from begins(text, ",", "]")), ""
    yield from until(text, (), "content")


CHOSEN = "chosen"  # the format of calls that a request requires, whatever the model's own is
FORMATS: dict[str, Format] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen3_coder,
    "glm": _glm,
    "llama3": _llama3,
    "mistral": _mistral,
    "deepseek": _deepseek,
    "kimi": _kimi,
    "harmony": _harmony,
}
