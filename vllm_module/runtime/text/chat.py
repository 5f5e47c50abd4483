"""Chat templates: formatting messages as the text of a prompt."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from vllm_module.base.messages import printable, shorten
from vllm_module.errors import CheckpointFormatError
from vllm_module.runtime.limited_process import LimitError
from vllm_module.runtime.text.calls import (
    FORMS,
    NAME,
    TRIED,
    TRIED_WITH_THINKING,
    CallForm,
    with_calls,
)
from vllm_module.runtime.text.template_process import TemplateProcess
from vllm_module.weights import read_file, read_json
from vllm_module.weights.hub import TEMPLATES
from vllm_module.weights.regular_file import is_there

Messages = Sequence[Mapping[str, Any]]
ContentFormat = Literal["auto", "string", "openai"]

_log = logging.getLogger(__name__)
# A template's support of text and of lists, by content format.
_FORMATS = {"string": (True, False), "openai": (False, True)}
# Two texts of the same length: a template that shows them writes two different prompts.
_PROBES = ("first message", "other message")
_UNSHOWN = "entry of a part that no template shows"
_END = "the final message ends here"
# Unread variables that are logged, each once, and their characters: clients choose them.
_MOST_UNREAD, _LONGEST = 64, 100
# Key of a message part's text, by the part's type.
_TEXTS = {
    "text": "text", "input_text": "text", "output_text": "text",
    "refusal": "refusal", "thinking": "thinking",
}  # fmt: skip
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning


def template_text(template: str | Path) -> str:
    """Return a template that is given as text, or as the path of its file (as in vLLM).

    Text has a brace or a line break. Raises ``ValueError`` for a path without a file.
    """
    text = str(template)
    if isinstance(template, str) and _is_text(text):
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the chat template {shorten(text)} is no file that can be read, and no template, "
            f"which would have a brace: {error}"
        ) from None


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Return the entries of tokenizer_config.json, or none without the file.

    As in transformers, entries of special_tokens_map.json replace them if the first file has no
    ``added_tokens_decoder``, as in older checkpoints. Raises ``CheckpointFormatError`` for a
    damaged file.
    """
    settings: dict[str, Any] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if is_there(path := folder / name) and "added_tokens_decoder" not in settings:
            settings |= read_json(path, folder)
    return settings


def token_text(token: Any) -> str | None:
    """Return a token's text in these files: a string, or a mapping with ``content``."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def named_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return a checkpoint's chat templates by name, as transformers finds them.

    They are ``chat_template.jinja``, which is ``default``, and those in
    ``additional_chat_templates``; without these files, the entry of ``tokenizer_config.json``.
    """
    files = [(path.stem, path) for path in sorted(folder.glob(TEMPLATES))]
    if is_there(path := folder / "chat_template.jinja"):
        files.append(("default", path))
    if files:
        return {name: read_file(path, folder).decode("utf-8", "replace") for name, path in files}
    entry = settings.get("chat_template")
    entries = entry if isinstance(entry, list) else [{"name": "default", "template": entry}]
    found = [(each.get("name"), each.get("template")) for each in entries if hasattr(each, "get")]
    return {n: text for n, text in found if isinstance(n, str) and isinstance(text, str)}


def template_of(folder: Path, given: str) -> str:
    """Return a template that is given by its name in a checkpoint, as text, or as a path.

    Raises as :func:`template_text`.
    """
    if not _is_text(given):  # else the settings, which may be large, need not be read
        named = named_templates(folder, tokenizer_settings(folder))
        if given in named:
            return named[given]
    return template_text(given)


def _is_text(template: str) -> bool:
    return any(each in template for each in "{}\n")


class ChatTemplate:
    """Formats messages as the text of a prompt, by a checkpoint's own chat template.

    The template is the default one of :func:`named_templates`, or ``tool_use`` for a conversation
    with tools, as in transformers, unless it is given as ``template``. It runs in a sandbox in a
    separate process, for at most 5 seconds and in 512 MiB, and writes at most 1 MiB of text besides
    its input. It cannot call functions of this process or change the messages.

    Attributes:
        named: the folder's templates by their names; none if one was given.
        source: text of the given or default one.

    Raises ``CheckpointFormatError`` if the folder has none, or it cannot be compiled.

    """

    def __init__(
        self, folder: Path, template: str | None = None, process: TemplateProcess | None = None
    ) -> None:
        self.folder = folder
        self._process = process or TemplateProcess()
        self._settings = tokenizer_settings(folder)
        self.named = named_templates(folder, self._settings) if template is None else {}
        self.source = self._default() if template is None else template
        self._tools_template: ChatTemplate | None = None  # once it was used
        self._shown: tuple[bool, bool] | None = None  # known after the first try
        self._call_form: CallForm | None = None
        self._reached_limit = False  # in a try: each further one could take as long
        self._unread: set[str] = set()  # variables that were logged as unread
        try:
            self._variables = self._process.names(self.source)
        except (SyntaxError, ValueError) as error:
            whose = f"of {printable(folder)}" if template is None else "that was given"
            raise CheckpointFormatError(
                f"the chat template {whose} cannot be read: {error}"
            ) from None

    def _takes(self) -> tuple[bool, bool]:
        """Return whether the template shows a message's text, and the texts of a list of parts.

        A template that shows neither, for example one that refuses a user's message, gets text.
        """
        if self._shown is None:
            shown = [self._shows(as_content) for as_content in (str, _probing_parts)]
            self._shown = shown[0] or not shown[1], shown[1]
        return self._shown

    def _shows(self, as_content: Callable[[str], object]) -> bool:
        """Return whether the prompt depends on a user's text, alone or after a system message.

        A list that is written as a Python list does not count.
        """
        for before in ([], [{"role": "system", "content": as_content("a system")}]):
            written = []
            for text in _PROBES:
                messages = [*before, {"role": "user", "content": as_content(text)}]
                if (shown := self._tried(messages)) is None:
                    break
                written.append(shown)
            if len(set(written)) == len(_PROBES):
                return _UNSHOWN not in written[0].lower()
        return False

    def _tried(self, messages: Messages) -> str | None:
        """Return what the template writes of messages; ``None`` if it fails on them.

        Nothing more is tried of a template that reached a limit.
        """
        if self._reached_limit:
            return None
        names = [name for name in self._variables if name.endswith("_token")]
        given: dict[str, Any] = {"tools": None, "documents": None} | dict.fromkeys(names, "")
        try:
            return self._process.render(self.source, {**given, "messages": messages})
        except ValueError as error:
            self._reached_limit = isinstance(error.__cause__, LimitError)
            return None

    def _form_of_calls(self) -> CallForm:
        """Return the first form of calls in which the template shows the function's name.

        Content that is null is no form of a template that writes "None" for it. A template that
        shows no call gets what most take.
        """
        if self._call_form is None:
            form = next(filter(self._shows_calls, FORMS), CallForm())
            with_thinking = form._replace(thinking=True)
            self._call_form = with_thinking if self._shows_calls(with_thinking) else form
        return self._call_form

    def _shows_calls(self, form: CallForm) -> bool:
        messages = TRIED_WITH_THINKING if form.thinking else TRIED
        tried = [_formatted(message, *self._takes(), form) for message in messages]
        text = self._tried(with_calls(tried, form)) or ""
        return NAME in text and not (form.null and "None" in text)

    def _default(self) -> str:
        if "default" in self.named:
            return self.named["default"]
        others = ", ".join(map(shorten, self.named))
        raise CheckpointFormatError(
            f"{printable(self.folder)} has "
            + (f"the chat templates {others}, and none that is the default: " if others else "")
            + (
                "choose one by LLM(chat_template=)"
                if others
                else "no chat template, neither chat_template.jinja nor an entry of "
                "tokenizer_config.json: save the model's as chat_template.jinja beside "
                "config.json, or generate from prompts that are formatted already"
            )
        )

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
                and ids of these calls are given in the form that the template takes.
            add_generation_prompt: end with the beginning of the assistant's message.
            content_format: what the template gets as content: ``"string"``, where texts of a list
                are joined by line breaks, but for empty ones; ``"openai"``, a list of such
                mappings; or ``"auto"``, what it shows of a message that is tried first, and text if
                it shows both.
            continue_final_message: end with the text of the last message, so that it is continued.
            variables: other variables of the template, such as ``enable_thinking``. The log has
                those that it does not read.

        Raises:
            ValueError: there are no messages, or the template refuses them or fails on them.

        """
        if variables.get("tools") is not None and "tool_use" in self.named:
            if self._tools_template is None:
                source = self.named["tool_use"]
                self._tools_template = ChatTemplate(self.folder, source, self._process)
            return self._tools_template.render(
                messages,
                add_generation_prompt,
                content_format=content_format,
                continue_final_message=continue_final_message,
                **variables,
            )
        if content_format not in get_args(ContentFormat):
            known = ", ".join(map(repr, get_args(ContentFormat)))
            raise ValueError(
                f"content_format should be one of {known}, got {shorten(content_format)}"
            )
        given = {name for name, value in variables.items() if value is not None}
        named = (each for each in given - self._variables - self._unread if len(each) <= _LONGEST)
        if unread := sorted(named)[: _MOST_UNREAD - len(self._unread)]:
            self._unread.update(unread)
            _log.warning(
                "the chat template does not read %s: it reads %s",
                ", ".join(map(printable, unread)),
                ", ".join(sorted(self._variables)),
            )
        is_list = isinstance(messages, Iterable) and not isinstance(messages, (str, Mapping))
        listed = list(messages) if is_list else []
        wrong = [m for m in listed if not isinstance(m, Mapping) or "role" not in m]
        if not listed or wrong:
            got = shorten(wrong[0] if wrong else messages)
            raise ValueError(
                f"messages should be a list of mappings with a role and content, got {got}"
            )
        special_tokens = {
            name: text
            for name, value in self._settings.items()
            if name.endswith("_token") and (text := token_text(value)) is not None
        }
        strings, lists = self._takes() if content_format == "auto" else _FORMATS[content_format]
        if continue_final_message and add_generation_prompt:
            raise ValueError(
                "continue_final_message continues the last message, and add_generation_prompt "
                "begins a new one: give add_generation_prompt=False"
            )
        has_calls = any(message.get("tool_calls") for message in listed)
        form = self._form_of_calls() if has_calls else CallForm()
        formatted = [_formatted(message, strings, lists, form) for message in listed]
        formatted = with_calls(formatted, form)
        if continue_final_message:
            formatted[-1] = _with_end(formatted[-1])
        own = {
            "messages": formatted,
            "add_generation_prompt": add_generation_prompt,
        }
        if twice := own.keys() & variables.keys():
            raise ValueError(f"the chat template got multiple values for {', '.join(twice)}")
        unset = {"tools": None, "documents": None}
        text = self._process.render(self.source, {**special_tokens, **unset, **variables, **own})
        return _cut_at_end(text) if continue_final_message else text


def _probing_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text, _UNSHOWN: ""}]


def _with_end(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with a mark after its text, to find where a template writes that."""
    content: Any = message["content"]
    mark = f"{_END} "
    if isinstance(content, list):
        last = [{"type": "text", "text": (content[-1]["text"] if content else "") + mark}]
        return {**message, "content": content[:-1] + last}
    return {**message, "content": f"{content or ''}{mark}"}


def _cut_at_end(text: str) -> str:
    """Return a prompt up to the mark of :func:`_with_end`.

    A template that strips the message also strips the mark's space. Raises ``ValueError`` if the
    template does not write the mark.
    """
    at = text.rfind(_END)
    if at < 0:
        raise ValueError(
            "continue_final_message needs a last message whose text the chat template shows"
        )
    return text[:at] if text.startswith(f"{_END} ", at) else text[:at].rstrip()


def _formatted(
    message: Mapping[str, Any], strings: bool, lists: bool, form: CallForm
) -> Mapping[str, Any]:
    """Return a message with its content in a form that the template takes: text or a list.

    What stands beside calls has their form.
    """
    content: Any = message.get("content")
    if content is None:
        content = "" if strings else []
    elif isinstance(content, (list, tuple)):
        texts = [text for text in map(_text, content) if text is not None]
        parts = [{"type": "text", "text": text} for text in texts]
        content = parts if lists else "\n".join(filter(None, texts))  # as vLLM
    elif isinstance(content, str) and not strings and lists:
        content = [{"type": "text", "text": content}]
    if form.null and not content and message.get("tool_calls"):
        content = None
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    if reasoning is not None:  # each template reads one of the first two, as of transformers
        message = {**message, "reasoning_content": reasoning}
        if form.thinking or not (content and message.get("tool_calls")):  # gpt-oss's refuses them
            message = {"thinking": reasoning, **message}
    return {**message, "content": content}


def _text(part: object) -> str | None:
    """Return the text of a part of a message's content; ``None`` for a part without text."""
    text = part
    if isinstance(part, Mapping):
        name = _TEXTS.get(str(part.get("type")))
        text = part.get(name) if name is not None else part
    if text is not None and not isinstance(text, str):
        raise ValueError(f"a part of a message's content should be text, got {shorten(part)}")
    return text
