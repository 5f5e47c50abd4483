from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_module.errors import CheckpointFormatError
from vllm_module.messages import printable, shorten
from vllm_module.runtime.template_process import TemplateProcess
from vllm_module.weights import read_file, read_json
from vllm_module.weights.regular_file import is_there

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """Formats messages as the text of a prompt, by a checkpoint's own chat template.

    The template is ``chat_template.jinja`` or the entry of ``tokenizer_config.json``, unless it is
    given as ``template``. It runs in a sandbox in a process of its own, for 5 seconds and in 512
    MiB at most, and writes at most 1 MiB of text besides the messages. It cannot call functions of
    this process, and cannot change the messages.

    Raises ``CheckpointFormatError`` if the folder has none, or it cannot be compiled.
    """

    def __init__(
        self, folder: Path, template: str | None = None, process: TemplateProcess | None = None
    ) -> None:
        self.folder = folder
        self._process = process or TemplateProcess()
        path = folder / "tokenizer_config.json"
        self._settings: dict[str, Any] = {}
        if is_there(path):
            self._settings = read_json(path, folder)
        self._source = self._read() if template is None else template
        try:
            self._variables = self._process.names(self._source)
        except (SyntaxError, ValueError) as error:
            whose = f"of {printable(folder)}" if template is None else "that was given"
            raise CheckpointFormatError(
                f"the chat template {whose} cannot be read: {error}"
            ) from None

    def _read(self) -> str:
        template: Any = self._settings.get("chat_template")
        if isinstance(template, list):  # of named templates
            named = [entry for entry in template if isinstance(entry, Mapping)]
            templates = {entry.get("name"): entry.get("template") for entry in named}
            template = templates.get("default")
        if is_there(path := self.folder / "chat_template.jinja"):
            template = read_file(path, self.folder).decode("utf-8", "replace")
        if not isinstance(template, str):
            raise CheckpointFormatError(
                f"{printable(self.folder)} has no chat template, neither chat_template.jinja nor "
                "an entry of tokenizer_config.json: use generate() with prompts that are formatted "
                "already"
            )
        return template

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
        own = {
            "messages": [_with_joined_text(message) for message in listed],
            "add_generation_prompt": add_generation_prompt,
        }
        if twice := own.keys() & variables.keys():
            raise ValueError(f"the chat template got multiple values for {', '.join(twice)}")
        unset = {"tools": None, "documents": None}
        return self._process.render(self._source, {**special_tokens, **unset, **variables, **own})


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
