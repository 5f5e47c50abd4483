"""What a request asks of the form of an answer: calls of tools, reasoning, a JSON schema."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_module.base.messages import shorten
from vllm_module.server.errors import ApiError
from vllm_module.server.growing_text import ToolCall
from vllm_module.server.parsers import Parser, format_of, reasoning_of, switch_of
from vllm_module.server.protocol import ChatBody
from vllm_module.server.tool_formats import CHOSEN, FORMATS


@dataclass(frozen=True)
class Formats:
    """How the served model writes calls and reasoning.

    Attributes:
        calls: name of the format of calls; ``None`` if it is not known.
        reasoning: the marks around reasoning; ``None`` if the model writes none.
        switch: the variable of the template by which a request lets the model reason, or not;
            ``None`` if there is none.

    """

    calls: str | None = None
    reasoning: tuple[str, str] | None = None
    switch: str | None = None

    @staticmethod
    def of(
        template: str | None,
        calls: str = "auto",
        reasoning: str = "auto",
        for_tools: str | None = None,
    ) -> Formats:
        """Return the formats that are named; those of ``"auto"`` are read from the template.

        ``calls`` may be ``"none"``, too, and ``reasoning`` is ``"auto"`` or ``"none"``.
        ``for_tools`` is the template of conversations with tools, if it is another one.
        """
        told = template or ""
        return Formats(
            format_of(for_tools or told) if calls == "auto" else None if calls == "none" else calls,
            reasoning_of(told) if reasoning == "auto" else None,
            switch_of(told),
        )

    @property
    def reasons(self) -> bool:
        """Whether the model writes reasoning, if nothing tells it not to."""
        return self.reasoning is not None or self.calls == "harmony"


@dataclass(frozen=True)
class AnswerForm:
    """What one request says of the form of its answer.

    Attributes:
        tools: descriptions of tools for the template.
        structured_outputs: what the text must follow, for ``SamplingParams``.
        calls: name of the format in which calls are looked for.
        reasoning: the marks around reasoning that is looked for.
        most_calls: calls after this number are dropped; ``None`` for no limit.

    """

    tools: Sequence[Mapping[str, Any]]
    structured_outputs: dict[str, Any] | None
    calls: str | None
    reasoning: tuple[str, str] | None
    most_calls: int | None

    @staticmethod
    def of(body: ChatBody, formats: Formats) -> AnswerForm:
        """Read a request. Raises ``ApiError`` for what it cannot have."""
        tools = _checked_tools(body.tools)
        structured = _response_format(body.response_format)
        chosen = _chosen(body.tool_choice, tools)
        if chosen is not None:
            if structured is not None:
                message = "response_format and a tool_choice that wants calls exclude each other"
                raise ApiError(400, message, "response_format")
            several = body.parallel_tool_calls and body.tool_choice == "required"
            structured = {"json": _schema_of_calls(chosen, several)}
        if structured is not None and "structured_outputs" in body.sampling:
            other = "a tool_choice that wants calls" if chosen is not None else "response_format"
            message = f"structured_outputs and {other} exclude each other"
            raise ApiError(400, message, "structured_outputs")
        calls = CHOSEN if chosen is not None else formats.calls
        wants_calls = bool(tools) and body.tool_choice != "none"
        if wants_calls and calls is None:
            raise ApiError(
                400,
                "the chat template does not tell how this model writes calls of tools: start the "
                f"server with --tool-call-parser, one of {', '.join(FORMATS)}",
                "tools",
                "unsupported",
            )
        given = structured is not None or "structured_outputs" in body.sampling
        most = None if body.parallel_tool_calls else 1
        return AnswerForm(
            tools if body.tool_choice != "none" else [],
            structured,
            # A model's channels are parsed without tools, too.
            calls if wants_calls or (calls == "harmony" and not given) else None,
            formats.reasoning if not given else None,
            most,
        )

    @property
    def reads_marks(self) -> bool:
        """Whether the text is parsed, so that it needs the special tokens that are marks."""
        return self.reasoning is not None or self.calls not in (None, CHOSEN)

    def parser(self, prompt: str) -> Parser:
        """Return a parser of the text after ``prompt``, which may have begun the reasoning."""
        begun = self.reasoning is not None and prompt.rstrip().endswith(self.reasoning[0])
        return Parser(self.calls, self.reasoning, reasons=begun, tools=self.tools)


def call_entry(call: ToolCall) -> dict[str, Any]:
    """Return a call as the protocol has it, with a new id."""
    function = {"name": call.name, "arguments": call.arguments}
    number = secrets.token_hex(5)[:9]  # nine letters and digits: Mistral's templates take no other
    return {"id": number, "type": "function", "function": function}


def _checked_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    names = set[str]()
    for number, tool in enumerate(tools):
        where = f"tools[{number}]"
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if tool.get("type") != "function" or not isinstance(name, str) or not name:
            raise ApiError(
                400, f"{where} should be a function with a name, got {shorten(tool)}", "tools"
            )
        if not isinstance(function.get("parameters", {}), dict | None):
            raise ApiError(400, f"{where}.function.parameters should be a JSON schema", "tools")
        if name in names:
            raise ApiError(400, f"{where}: two tools are named {shorten(name)}", "tools")
        names.add(name)
    return list(tools)


def _chosen(choice: Any, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Return the functions of which the answer has to call one; ``None`` if it may be text."""
    functions = [tool["function"] for tool in tools]
    if choice in (None, "auto", "none"):
        return None
    if not functions:
        raise ApiError(400, "tool_choice needs tools", "tool_choice")
    if choice == "required":
        return functions
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    found = [each for each in functions if each["name"] == name]
    if not found:
        raise ApiError(
            400,
            "tool_choice should be auto, none, required or "
            f'{{"type": "function", "function": {{"name": …}}}} of a tool, got {shorten(choice)}',
            "tool_choice",
        )
    return found


def _schema_of_calls(functions: Sequence[Mapping[str, Any]], several: bool) -> dict[str, Any]:
    """Return the schema of a list of calls, as the format :data:`CHOSEN` reads it."""
    items = []
    for number, function in enumerate(functions):
        given = function.get("parameters") or {}
        # With an $id, references are to the tool's own schema. Arguments are always an object.
        parameters = {"$id": f"urn:tool:{number}", **given, "type": "object"}
        call = {"name": {"const": function["name"]}, "parameters": parameters}
        items.append(
            {
                "type": "object",
                "properties": call,
                "required": list(call),
                "additionalProperties": False,
            }
        )
    return {
        "type": "array",
        "minItems": 1,
        **({} if several else {"maxItems": 1}),
        "items": {"anyOf": items},
        "x-guidance": {"whitespace_flexible": False},  # else some models write spaces without end
    }


def _response_format(wanted: Any) -> dict[str, Any] | None:
    """Return what the text must follow; ``None`` for any text."""
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if wanted is None or kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    described = wanted.get("json_schema") if kind == "json_schema" else None
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise ApiError(
            400,
            'response_format should be of type text, json_object or json_schema with {"json_schema"'
            f': {{"schema": …}}}}, got {shorten(wanted)}',
            "response_format",
        )
    return {"json": schema}
