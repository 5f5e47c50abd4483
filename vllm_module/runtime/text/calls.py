"""Calls of tools in messages, in the form that a chat template takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

# What becomes of an id, from the name of the function and the number of the call.
_IDS: dict[str, Callable[[str, str, int], str]] = {
    "given": lambda given, name, number: given,
    "nine": lambda given, name, number: given[-9:].rjust(9, "0"),  # of Mistral; as vLLM cuts it
    "named": lambda given, name, number: f"functions.{name}:{number}",  # Kimi writes no other name
}
NAME = "function_that_is_tried"
_CALL = {"id": "1", "type": "function"}  # which is too short for some
_FUNCTION = {"name": NAME, "arguments": {"city": "Rome"}}
_TURN: list[dict[str, Any]] = [
    {"role": "user", "content": "weather"},
    {"role": "assistant", "content": None, "tool_calls": [{**_CALL, "function": _FUNCTION}]},
    {"role": "tool", "tool_call_id": "1", "content": "rain"},
]
# Some templates write the turns before the last one in another way.
TRIED = [*_TURN, {"role": "assistant", "content": "rain"}, *_TURN]
_ALL_THREE = {"content": "I look", "thinking": "it asks"}  # with the calls
TRIED_WITH_THINKING = [{**each, **_ALL_THREE} if "tool_calls" in each else each for each in TRIED]


class CallForm(NamedTuple):
    """A form of messages with calls.

    Attributes:
        null: whether a message that has calls and no content has null as its content.
        as_text: whether arguments are JSON text; else they are a mapping.
        ids: what ids of calls are, a key of ``_IDS``.
        thinking: whether ``thinking`` may stand beside calls and content that is not empty.

    """

    null: bool = False
    as_text: bool = False
    ids: str = "given"
    thinking: bool = False


FORMS = [
    CallForm(null, as_text, ids)
    for ids, as_text, null in product(_IDS, (False, True), (True, False))
]


def with_calls(messages: Sequence[Mapping[str, Any]], form: CallForm) -> list[Mapping[str, Any]]:
    """Return messages with their calls, and the ids of results, in this form."""
    found: list[Mapping[str, Any]] = []
    ids: dict[Any, str] = {}
    taken: dict[str, str] = {}  # ids as they were given, by those that they became
    number = 0
    for message in messages:
        if isinstance(calls := message.get("tool_calls"), (list, tuple)):
            own = []
            for call in calls:
                function = call.get("function") if isinstance(call, Mapping) else None
                if isinstance(function, Mapping):
                    call = {**call, "function": _function(function, form.as_text)}
                    if isinstance(given := call.get("id"), str):
                        name = str(function.get("name"))
                        own_id = _IDS[form.ids](given, name, number)
                        if taken.setdefault(own_id, given) != given:  # two that end alike
                            own_id = f"{number:09}"
                        call["id"] = ids[given] = own_id
                own.append(call)
                number += 1
            message = {**message, "tool_calls": own}
        elif isinstance(given := message.get("tool_call_id"), str) and given in ids:
            message = {**message, "tool_call_id": ids[given]}
        found.append(message)
    return found


def _function(function: Mapping[str, Any], as_text: bool) -> Mapping[str, Any]:
    """Return a function with its arguments as JSON text, or read from it; damaged text stays."""
    arguments = function.get("arguments")
    try:
        read = json.loads(arguments) if isinstance(arguments, str) and arguments else arguments
        if as_text and not (isinstance(arguments, str) and read):
            arguments = json.dumps(read or {}, ensure_ascii=False, default=dict)
    except (TypeError, ValueError, RecursionError):
        return function
    return {**function, "arguments": arguments if as_text else read or {}}
