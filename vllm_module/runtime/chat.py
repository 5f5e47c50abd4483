from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm_module.errors import CheckpointFormatError
from vllm_module.weights import read_file, read_json
from vllm_module.wording import shorten

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """A checkpoint's own chat template: messages to the text of a prompt.

    It is read from ``chat_template.jinja`` or ``tokenizer_config.json``, and rendered in a sandbox:
    a template can call nothing and change nothing outside of its messages.

    Raises ``CheckpointFormatError`` if the folder has none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / "tokenizer_config.json"
        self._settings: dict[str, Any] = {}
        if os.path.lexists(path):
            self._settings = read_json(path, folder)
        template: Any = self._settings.get("chat_template")
        if isinstance(template, list):  # several by name
            named = {entry.get("name"): entry.get("template") for entry in template}
            template = named.get("default")
        if os.path.lexists(path := folder / "chat_template.jinja"):
            template = read_file(path, folder).decode("utf-8", "replace")
        if not isinstance(template, str):
            raise CheckpointFormatError(
                f"{folder} has no chat template, neither chat_template.jinja nor an entry of "
                "tokenizer_config.json: use generate() with prompts that are laid out already"
            )
        self._source = template

    @cached_property
    def _template(self) -> Any:
        import jinja2
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
            return environment.from_string(self._source)
        except jinja2.TemplateError as error:
            raise CheckpointFormatError(
                f"the chat template of {self.folder} cannot be read: {error}"
            ) from None

    def render(self, messages: Messages, add_generation_prompt: bool = True, **more: Any) -> str:
        """Return the text of a prompt that asks for the next message.

        Args:
            messages: each with ``role`` and ``content``, as the template wants them.
            add_generation_prompt: end with the beginning of the assistant's message.
            more: other variables of the template, such as ``enable_thinking``.

        Raises:
            ValueError: messages that are none, or that the template refuses.

        """
        import jinja2

        wrong = [m for m in messages if not isinstance(m, Mapping) or "role" not in m]
        if not messages or wrong:
            came = shorten(wrong[0]) if wrong else "none"
            raise ValueError(f"messages should be mappings with a role and content, got {came}")
        tokens = {
            name: value["content"] if isinstance(value, Mapping) else value
            for name, value in self._settings.items()
            if name.endswith("_token") and value is not None
        }
        variables = {**tokens, "tools": None, "documents": None, **more}
        try:
            text: str = self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **variables
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template cannot lay out the messages: {error}") from None
        return text
