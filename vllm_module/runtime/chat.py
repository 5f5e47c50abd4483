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
    """Formats messages as the text of a prompt, by a checkpoint's own chat template.

    The template is ``chat_template.jinja`` or the entry of ``tokenizer_config.json``, unless it is
    given as ``template``. It runs in a sandbox: it cannot call functions of this process, and
    cannot change the messages.

    Raises ``CheckpointFormatError`` if the folder has none.
    """

    def __init__(self, folder: Path, template: str | None = None) -> None:
        self.folder = folder
        self._variables: set[str] = set()
        path = folder / "tokenizer_config.json"
        self._settings: dict[str, Any] = {}
        if os.path.lexists(path):
            self._settings = read_json(path, folder)
        self._source = self._read() if template is None else template

    def _read(self) -> str:
        template: Any = self._settings.get("chat_template")
        if isinstance(template, list):  # of named templates
            named = [entry for entry in template if isinstance(entry, Mapping)]
            templates = {entry.get("name"): entry.get("template") for entry in named}
            template = templates.get("default")
        if os.path.lexists(path := self.folder / "chat_template.jinja"):
            template = read_file(path, self.folder).decode("utf-8", "replace")
        if not isinstance(template, str):
            raise CheckpointFormatError(
                f"{self.folder} has no chat template, neither chat_template.jinja nor an entry of "
                "tokenizer_config.json: use generate() with prompts that are formatted already"
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

        def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
            # jinja2's own filter escapes HTML.
            return json.dumps(value, ensure_ascii=ensure_ascii, **options)

        def refuse(message: str) -> None:
            raise ValueError(f"the chat template refuses the messages: {message}")

        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._variables = meta.find_undeclared_variables(environment.parse(self._source))
            return environment.from_string(self._source)
        except jinja2.TemplateError as error:
            raise CheckpointFormatError(
                f"the chat template of {self.folder} cannot be read: {error}"
            ) from None

    def render(
        self, messages: Messages, /, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Return the text of a prompt for the next message.

        Args:
            messages: mappings with ``role`` and ``content``. The content may be a list of
                ``{"type": "text", "text": ...}``, whose texts are joined by line breaks.
            add_generation_prompt: end with the beginning of the assistant's message.
            variables: other variables of the template, such as ``enable_thinking``.

        Raises:
            ValueError: there are no messages, the template refuses them or fails on them, or it
                does not read a variable.

        """
        template = self._template
        if unread := variables.keys() - self._variables:
            raise ValueError(
                f"the chat template does not read {', '.join(sorted(unread))}: it reads "
                f"{', '.join(sorted(self._variables))}"
            )
        is_list = messages is not None and not isinstance(messages, (str, Mapping))
        listed = list(messages) if is_list else []
        wrong = [m for m in listed if not isinstance(m, Mapping) or "role" not in m]
        if not listed or wrong:
            got = shorten(wrong[0] if wrong else messages)
            raise ValueError(
                f"messages should be a list of mappings with a role and content, got {got}"
            )
        special_tokens = {
            name: value.get("content") if isinstance(value, Mapping) else value
            for name, value in self._settings.items()
            if name.endswith("_token") and value is not None
        }
        try:
            text: str = template.render(
                messages=[_with_joined_text(message) for message in listed],
                add_generation_prompt=add_generation_prompt,
                **{**special_tokens, "tools": None, "documents": None, **variables},
            )
        except ValueError:
            raise
        except Exception as error:  # a template is a program and can raise anything
            raise ValueError(
                f"the chat template cannot format the messages: {describe_error(error)}"
            ) from None
        return text


def _with_joined_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Join a list of content into one text: many templates would print the list itself."""
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
