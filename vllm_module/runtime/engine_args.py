"""The arguments of an ``LLM`` as a dataclass, for code that was written for vLLM's."""

from __future__ import annotations

import inspect
import json
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from dataclasses import field, fields, make_dataclass
from typing import Any

from vllm_module.config import EngineConfig
from vllm_module.runtime.arguments import LLM_ARGUMENTS
from vllm_module.runtime.llm import LLM


def _fields() -> list[tuple[str, Any, Any]]:
    """Return name, type and default of all arguments; arguments without effect are not shown."""
    own = list(inspect.signature(LLM.__init__).parameters.values())[1:-1]
    found: list[tuple[str, Any, Any]] = []
    for each in own:
        default = None if each.default is each.empty else each.default
        found.append((each.name, each.annotation, field(default=default)))
    for name, entry in EngineConfig.model_fields.items():
        found.append((name, entry.annotation, field(default=entry.default)))
    names = {name for name, _, _ in found}
    others = [name for name in LLM_ARGUMENTS if name not in names]
    return found + [(name, Any, field(default=None, repr=False)) for name in others]


def _add_cli_args(parser: ArgumentParser) -> ArgumentParser:
    """Add an option for each argument, such as ``--max-model-len``, and return the parser."""
    for each in fields(EngineArgs):
        option = f"--{each.name.replace('_', '-')}"
        if isinstance(each.default, bool):
            parser.add_argument(option, action=BooleanOptionalAction, default=each.default)
        else:
            read = str if str(each.type).startswith(("str", "Literal")) else _value
            parser.add_argument(option, type=read, default=each.default)
    return parser


def _value(text: str) -> Any:
    """Parse ``text`` as JSON; return it unchanged if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _from_cli_args(args: Namespace) -> Any:
    """Make engine arguments from a command's; missing ones have their defaults."""
    names = [each.name for each in fields(EngineArgs) if hasattr(args, each.name)]
    return EngineArgs(**{name: getattr(args, name) for name in names})


EngineArgs = make_dataclass(
    "EngineArgs",
    _fields(),
    namespace={
        "add_cli_args": staticmethod(_add_cli_args),
        "from_cli_args": staticmethod(_from_cli_args),
        "__doc__": """The arguments of :class:`~vllm_module.LLM`, with its defaults.

        ``LLM.from_engine_args(args)`` makes one, and so does ``LLM(**vars(args))``.
        """,
    },
)
EngineArgs.__module__ = __name__
