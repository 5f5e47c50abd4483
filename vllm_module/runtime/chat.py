from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm_module.errors import CheckpointFormatError
from vllm_module.messages import describe_error, shorten
from vllm_module.weights import read_file, read_json

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """A checkpoint's own chat template: messages to the text of a prompt.

    It is read from ``chat_template.jinja`` or ``tokenizer_config.json``, unless it is given as
    ``template``, and rendered in a sandbox: it can call nothing and change nothing outside of its
    messages.

    Raises ``CheckpointFormatError`` if the folder has none.
    """

    def __init__(self, folder: Path, template: str | None = None) -> None:
        self.folder = folder
        self._reads: set[str] = set()
        path = folder / "tokenizer_config.json"
        self._settings: dict[str, Any] = {}
        if os.path.lexists(path):
            self._settings = read_json(path, folder)
        self._source = self._read() if template is None else template

    def _read(self) -> str:
        template: Any = self._settings.get("chat_template")
        if isinstance(template, list):  # several by name
            named = [entry for entry in template if isinstance(entry, Mapping)]
            templates = {entry.get("name"): entry.get("template") for entry in named}
            template = templates.get("default")
        if os.path.lexists(path := self.folder / "chat_template.jinja"):
            template = read_file(path, self.folder).decode("utf-8", "replace")
        if not isinstance(template, str):
            raise CheckpointFormatError(
                f"{self.folder} has no chat template, neither chat_template.jinja nor an entry of "
                "tokenizer_config.json: use generate() with prompts that are laid out already"
            )
        return template

    @cached_property
    def _template(self) -> Any:
        import jinja2
        from jinja2 import meta
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )

        def to_json(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
            return json.dumps(value, ensure_ascii=ensure_ascii, **how)  # jinja2's own is for HTML

        def refuse(message: str) -> None:
            raise ValueError(f"the chat template refuses the messages: {message}")

        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._reads = meta.find_undeclared_variables(environment.parse(self._source))
            return environment.from_string(self._source)
        except jinja2.TemplateError as error:
            raise CheckpointFormatError(
                f"the chat template of {self.folder} cannot be read: {error}"
            ) from None

    def render(self, messages: Messages, /, add_generation_prompt: bool = True, **more: Any) -> str:
        """Return the text of a prompt that asks for the next message.

        Args:
            messages: each with ``role`` and ``content``, as the template wants them; content may be
                a list of parts ``{"type": "text", "text": ...}``, which become lines of one text.
            add_generation_prompt: end with the beginning of the assistant's message.
            more: other variables of the template, such as ``enable_thinking``.

        Raises:
            ValueError: messages that are none, or that the template refuses or cannot lay out;
                variables that it does not read.

        """
        template = self._template
        if unread := more.keys() - self._reads:
            raise ValueError(
                f"the chat template does not read {', '.join(sorted(unread))}: it reads "
                f"{', '.join(sorted(self._reads))}"
            )
        several = [] if messages is None or isinstance(messages, (str, Mapping)) else list(messages)
        wrong = [m for m in several if not isinstance(m, Mapping) or "role" not in m]
        if not several or wrong:
            came = shorten(wrong[0] if wrong else messages)
            raise ValueError(
                f"messages should be a list of mappings with a role and content, got {came}"
            )
        tokens = {
            name: value.get("content") if isinstance(value, Mapping) else value
            for name, value in self._settings.items()
            if name.endswith("_token") and value is not None
        }
        try:
            text: str = template.render(
                messages=[_as_text(message) for message in several],
                add_generation_prompt=add_generation_prompt,
                **{**tokens, "tools": None, "documents": None, **more},
            )
        except ValueError:
            raise
        except Exception as error:  # the template is a program
            raise ValueError(
                f"the chat template cannot lay out the messages: {describe_error(error)}"
            ) from None
        return text


def _as_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Make one text of a message's parts, which many templates would write as Python does."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        text = (
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
        )
        if not isinstance(text, str):
            raise ValueError(f"a part of a message's content should be text, got {shorten(part)}")
        texts.append(text)
    return {**message, "content": "\n".join(texts)}
