"""A process that runs chat templates, with limits of time and memory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_module.base.messages import printable, shorten
from vllm_module.runtime.limited_process import LimitedProcess, LimitError

SECONDS = 5.0  # limit for one request; a template takes milliseconds
NBYTES = 512 << 20  # bytes of address space
_MOST_SHOWN = 300  # characters of a template's own error message


class TemplateProcess(LimitedProcess):
    """Compiles and runs templates in another process."""

    def __init__(self) -> None:
        super().__init__(Path(__file__).with_name("template_script.py"), SECONDS, NBYTES)

    def names(self, template: str) -> set[str]:
        """Return the variables that ``template`` reads.

        Raises ``SyntaxError`` if it cannot be parsed.
        """
        return set(self._answer(template, None)["names"])

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """Return the text of ``template``.

        Raises ``ValueError`` if the template refuses the variables, fails, or reaches a limit,
        whose ``LimitError`` is the cause then.
        """
        text: str = self._answer(template, variables)["text"]
        return text

    def _answer(self, template: str, variables: Mapping[str, Any] | None) -> dict[str, Any]:
        try:
            values = json.dumps(variables, default=_plain, skipkeys=False)
            request = f'{{"template": {json.dumps(template)}, "variables": {values}}}'
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"messages and variables should be text, numbers, lists and "
                f"mappings with keys of text: {error}"
            ) from None
        try:
            return _checked(self.ask(request))
        except LimitError as error:
            raise ValueError(f"the chat template {error}") from error


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if "unreadable" in answer:
        raise SyntaxError(_shown(answer["unreadable"]))
    if "refusal" in answer:
        why = _shown(answer["refusal"])
        raise ValueError(f"the chat template refuses the messages: {why}")
    if "failure" in answer:
        why = _shown(answer["failure"])
        raise ValueError(f"the chat template cannot format the messages: {why}")
    return answer


def _shown(text: str) -> str:
    """Return a message from outside as one line of about 300 characters at most."""
    lines = map(str.strip, text[:_MOST_SHOWN].splitlines())
    return " ".join(map(printable, lines)) + ("..." if len(text) > _MOST_SHOWN else "")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"got {shorten(value)}")
