from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from vllm_module.errors import CheckpointFormatError
from vllm_module.messages import printable, shorten
from vllm_module.runtime.template_process import TemplateProcess
from vllm_module.weights import read_file, read_json
from vllm_module.weights.regular_file import is_there

Messages = Sequence[Mapping[str, Any]]
ContentFormat = Literal["auto", "string", "openai"]

_log = logging.getLogger(__name__)
# Whether a template gets text, and lists.
_FORMATS = {"string": (True, False), "openai": (False, True)}
_PROBE = "Is this message shown?"


def template_text(template: str | Path) -> str:
    """Return a template that is given as text, or as the path of its file, as in vLLM.

    Raises ``ValueError`` for a path without a file. Text has a brace or a line break.
    """
    text = str(template)
    if isinstance(template, str) and any(each in text for each in "{}\n"):
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the chat template {shorten(text)} is no file that can be read, and no template, "
            f"which would have a brace: {error}"
        ) from None


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
        self._shown: tuple[bool, bool] | None = None  # once it was tried
        self._unread: set[str] = set()  # variables that the log has
        try:
            self._variables = self._process.names(self._source)
        except (SyntaxError, ValueError) as error:
            whose = f"of {printable(folder)}" if template is None else "that was given"
            raise CheckpointFormatError(
                f"the chat template {whose} cannot be read: {error}"
            ) from None

    def _takes(self) -> tuple[bool, bool]:
        """Return whether the template shows a message's text, and the texts of a list of parts.

        Where it shows neither, such as one that refuses a first message alone, it gets text.
        """
        if self._shown is None:
            parts = [{"type": "text", "text": _PROBE}]
            shown = [self._shows(content) for content in (_PROBE, parts)]
            self._shown = shown[0] or not shown[1], shown[1]
        return self._shown

    def _shows(self, content: object) -> bool:
        names = [name for name in self._variables if name.endswith("_token")]
        given: dict[str, Any] = {"tools": None, "documents": None} | dict.fromkeys(names, "")
        message = {"role": "user", "content": content}
        try:
            text = self._process.render(self._source, given | {"messages": [message]})
        except ValueError:
            return False
        printed = f"'{_PROBE}'" in text or f'"{_PROBE}"' in text  # the list itself
        return _PROBE in text and (isinstance(content, str) or not printed)

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
        self,
        messages: Messages,
        /,
        add_generation_prompt: bool = True,
        *,
        content_format: ContentFormat = "auto",
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Return the text of a prompt for the next message.

        Args:
            messages: mappings with ``role`` and ``content``. The content is text, a list of
                ``{"type": "text", "text": ...}``, or ``None``, as beside calls of tools. Arguments
                of these calls that are JSON text are read first.
            add_generation_prompt: end with the beginning of the assistant's message.
            content_format: what the template gets as content: ``"string"``, where texts of a list
                are joined by line breaks; ``"openai"``, a list of such mappings; or ``"auto"``,
                what it shows of a message that is tried first, and text if it shows both.
            continue_final_message: end with the text of the last message, so that it is continued.
            variables: other variables of the template, such as ``enable_thinking``. The log has
                those that it does not read.

        Raises:
            ValueError: there are no messages, or the template refuses them or fails on them.

        """
        if unread := variables.keys() - self._variables - self._unread:
            self._unread |= unread
            _log.warning(
                "the chat template does not read %s: it reads %s",
                ", ".join(sorted(unread)),
                ", ".join(sorted(self._variables)),
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
        strings, lists = self._takes() if content_format == "auto" else _FORMATS[content_format]
        formatted = [_formatted(message, strings, lists) for message in listed]
        own = {
            "messages": formatted,
            "add_generation_prompt": add_generation_prompt,
        }
        if twice := own.keys() & variables.keys():
            raise ValueError(f"the chat template got multiple values for {', '.join(twice)}")
        unset = {"tools": None, "documents": None}
        if continue_final_message and add_generation_prompt:
            raise ValueError(
                "continue_final_message continues the last message, and add_generation_prompt "
                "begins a new one: give add_generation_prompt=False"
            )
        text = self._process.render(self._source, {**special_tokens, **unset, **variables, **own})
        return _cut_after(text, formatted[-1]) if continue_final_message else text


def _cut_after(text: str, message: Mapping[str, Any]) -> str:
    """Return a prompt up to the end of its last message's text, which a template may strip.

    Raises ``ValueError`` if the template does not show the text.
    """
    content = message["content"]
    if isinstance(content, list):
        content = content[-1]["text"] if content else ""
    stripped = str(content).strip()
    at = text.rfind(stripped) if stripped else -1
    if at < 0:
        raise ValueError(
            "continue_final_message needs a last message whose text the chat template shows"
        )
    kept = str(content).lstrip()
    return text[: at + len(kept if text.startswith(kept, at) else stripped)]


def _formatted(message: Mapping[str, Any], strings: bool, lists: bool) -> Mapping[str, Any]:
    """Return a message whose content a template takes, which may be text, a list, or either."""
    content: Any = message.get("content")
    if content is None:
        content = "" if strings else []
    elif isinstance(content, list):
        texts = [*map(_text, content)]
        parts = [{"type": "text", "text": text} for text in texts]
        content = parts if lists else "\n".join(texts)
    elif isinstance(content, str) and not strings and lists:
        content = [{"type": "text", "text": content}]
    message = {**message, "content": content}
    if isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [*map(_with_arguments, calls)]
    return message


def _text(part: object) -> str:
    """Return the text of a part of a message's content."""
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
    if not isinstance(text, str):
        raise ValueError(f"a part of a message's content should be text, got {shorten(part)}")
    return text


def _with_arguments(call: Any) -> Any:
    """Return the call of a tool with its arguments as templates take them: read, if JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(arguments, str) or not isinstance(function, Mapping):
        return call
    try:
        read = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": read}}
