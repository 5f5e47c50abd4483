"""The script that formats messages by chat templates, which are untrusted programs.

It runs in a separate process (``limited_script.py``) and imports nothing of this package.
"""

import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateRefusedError(Exception):
    """A template called ``raise_exception``."""


class Generation(Extension):
    """The block ``{% generation %}``, by which trainers find the assistant's text."""

    tags = {"generation"}  # attribute that jinja2 requires

    def parse(self, parser: Any) -> Any:
        """Return the nodes inside the block, where variables are set for the block alone."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Serialize to JSON; replaces jinja2's own filter, which escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def refuse(message: object) -> None:
    """Raise the error of a template's ``raise_exception``."""
    raise TemplateRefusedError(str(message))


def make_environment() -> ImmutableSandboxedEnvironment:
    """Return a jinja2 environment with the filters, functions and settings of transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def described(error: BaseException) -> str:
    """Return an error's kind and message."""
    return f"{type(error).__name__}: {error}"[:2000]


ENVIRONMENT = make_environment()
COMPILED: dict[str, Any] = {}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Compile a template and return its variables; or format messages and return the text."""
    source = request["template"]
    try:
        if source not in COMPILED:
            names = sorted(meta.find_undeclared_variables(ENVIRONMENT.parse(source)))
            if len(COMPILED) > 8:
                COMPILED.clear()
            COMPILED[source] = ENVIRONMENT.from_string(source), names
    except MemoryError:
        raise
    except Exception as error:
        wrong = isinstance(error, jinja2.TemplateError)
        return {"unreadable": str(error)[:2000] if wrong else described(error)}
    template, names = COMPILED[source]
    if request["variables"] is None:
        return {"names": names}
    try:
        return {"text": template.render(request["variables"])}
    except MemoryError:
        raise
    except TemplateRefusedError as error:
        return {"refusal": str(error)[:2000]}
    except Exception as error:  # a template may raise anything
        return {"failure": described(error)}
