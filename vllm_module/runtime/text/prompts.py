"""Prompts in the forms that callers may give, and the errors for refused ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, TypeGuard

from vllm_module.base.messages import shorten
from vllm_module.runtime.arguments import TOKENIZATION_ARGUMENTS, check_type, known_arguments
from vllm_module.runtime.outputs import CompletionOutput, PoolingRequestOutput, RequestOutput
from vllm_module.runtime.text.tokenizer import Tokenizer


class _Options(TypedDict, total=False):
    """Optional keys of a prompt; those for multimodal models in vLLM must be ``None``."""

    cache_salt: str | None
    adapter: str | None
    multi_modal_data: None
    multi_modal_uuids: None
    mm_processor_kwargs: None


class TextPrompt(_Options):
    """A prompt as text."""

    prompt: str


class _TokensPrompt(_Options):
    prompt_token_ids: list[int]


class TokensPrompt(_TokensPrompt, total=False):
    """A prompt as token ids, with its text if that is known."""

    prompt: str


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]

_log = logging.getLogger(__name__)
_SHOWN = 3  # number of refused prompts whose reasons one message has
_KEYS = {"prompt", "prompt_token_ids", "cache_salt", "adapter"}
_TOKENIZATION = {
    "add_special_tokens", "truncation", "max_length", "truncate_prompt_tokens", "do_lower_case",
}  # fmt: skip
_NONE = {"multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "prompt_embeds"}


def as_list(value: Any, name: str) -> list[Any]:
    """Return one item, or a sequence of items, as a list; raise ``ValueError`` for other types."""
    if isinstance(value, (str, Mapping)):
        return [value]
    if value is None or isinstance(value, (bytes, bytearray)) or not isinstance(value, Iterable):
        raise ValueError(f"{name} should be one or a sequence of them, got {shorten(value)}")
    return list(value)


def as_prompts(value: Any) -> list[Any]:
    """Return one prompt, or a sequence of them, as a list. Token ids are one prompt."""
    return [value] if _is_ids(value) and value else as_list(value, "prompts")


def _is_ids(value: object) -> TypeGuard[Sequence[int]]:
    return isinstance(value, (list, tuple)) and all(type(token) is int for token in value)


def prompt_text(prompt: Any) -> str | None:
    """Return the text of a prompt, or None if it has none."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


class RequestOptions(TypedDict, total=False):
    """What a prompt says of its request: the salt of its cached pages, and its adapter."""

    cache_salt: str
    adapter: str


def request_options(prompt: Any) -> RequestOptions:
    """Return what a prompt says of its request.

    A prompt shares cached pages only with prompts of equal salt.

    Raises ``ValueError`` for a salt that is no text, or empty, and for an adapter that is no name.
    """
    found = RequestOptions()
    if not isinstance(prompt, Mapping):
        return found
    salt, adapter = prompt.get("cache_salt"), prompt.get("adapter")
    if salt is not None:
        if not isinstance(salt, str) or not salt:
            raise ValueError(f"cache_salt should be text that is not empty, got {shorten(salt)}")
        found["cache_salt"] = salt
    if adapter is not None:
        check_type("adapter", adapter, "the name of a loaded one", str)
        found["adapter"] = adapter
    return found


@dataclass(frozen=True)
class Tokenization:
    """Options for tokenizing prompts.

    Attributes:
        special: True if a text gets the tokenizer's special tokens.
        most: number of first tokens kept of a prompt; ``None`` for all.
        lower: True if a text is first converted to lower case.

    """

    special: bool = True
    most: int | None = None
    lower: bool = False

    @classmethod
    def of(
        cls,
        options: Mapping[str, Any] | None,
        limit: int,
        *,
        special: bool = True,
        lower: bool = False,
    ) -> Tokenization:
        """Return options from ``tokenization_kwargs``, with defaults for missing ones.

        As in transformers, ``truncation`` keeps ``max_length`` tokens, or ``limit``, the model's
        maximum. vLLM's ``truncate_prompt_tokens`` stands for both; -1 means ``limit``. Raises
        ``ValueError`` for unknown options.
        """
        what = "tokenization_kwargs"
        if options is None:
            return cls(special, None, lower)
        check_type(what, options, "a mapping or None", Mapping)
        given = known_arguments(what, options, _TOKENIZATION, TOKENIZATION_ARGUMENTS)
        given = {name: value for name, value in given.items() if value is not None}
        special = given.get("add_special_tokens", special)
        lower = given.get("do_lower_case", lower)
        check_type(f"add_special_tokens of {what}", special, "True or False", bool)
        check_type(f"do_lower_case of {what}", lower, "True or False", bool)
        length, most = given.get("max_length", limit), given.get("truncate_prompt_tokens")
        check_type(f"max_length of {what}", length, "an integer from 1", int)
        check_type(f"truncate_prompt_tokens of {what}", most, "-1 or more", int, type(None))
        cuts = given.get("truncation", False)
        if cuts not in (True, False, "longest_first", "do_not_truncate"):
            raise ValueError(f"truncation of {what} should be True or False, got {shorten(cuts)}")
        if cuts in (True, "longest_first"):
            most = length
        most = limit if most == -1 else most
        if length < 1 or (most is not None and most < 1):
            raise ValueError(f"{what} should keep at least 1 token, got {shorten(options)}")
        return cls(special, most, lower)

    def text(self, text: str) -> str:
        """Return the text to tokenize, in lower case if requested."""
        return text.lower() if self.lower else text


def token_ids(prompt: Any, tokenizer: Callable[[], Tokenizer], how: Tokenization) -> list[int]:
    """Return the token ids of a prompt; raise ``ValueError`` if it is no prompt.

    ``tokenizer`` is a function that raises ``CheckpointFormatError`` if there is none.
    """
    text = prompt
    if isinstance(prompt, (list, tuple)):
        prompt = {"prompt_token_ids": prompt}
    if isinstance(prompt, Mapping):
        prompt = {k: v for k, v in prompt.items() if k not in _NONE or not _is_nothing(v)}
        if several := sorted(prompt.keys() & _NONE):
            raise ValueError(
                f"{several[0]} is for multimodal models, which are not served: omit it"
            )
        if prompt.keys() <= _KEYS:
            ids = prompt.get("prompt_token_ids")
            if _is_ids(ids):
                return list(ids)[: how.most]
            text = prompt.get("prompt") if ids is None else None
    if isinstance(text, str):
        return tokenizer().encode(how.text(text), how.special, most=how.most)
    raise ValueError(
        "a prompt should be text, a list of token ids or {'prompt_token_ids': [...]}, got "
        f"{shorten(prompt)}"
    )


def _is_nothing(value: object) -> bool:
    return value is None or (isinstance(value, Mapping) and not value)


def refused(request_id: str, text: str | None, ids: list[int], error: ValueError) -> RequestOutput:
    """Return the output of a refused prompt, with the error."""
    completion = CompletionOutput(0, "", [], None, None, "error")
    return RequestOutput(request_id, text, ids, [completion], True, error=str(error))


def report_refused(requests: Sequence[object]) -> None:
    """Raise ``ValueError`` if all are outputs of refused prompts; log a warning if some are."""
    errors = [
        (number, each.error)
        for number, each in enumerate(requests)
        if isinstance(each, RequestOutput | PoolingRequestOutput) and each.error is not None
    ]
    if not errors:
        return
    if len(requests) == 1:
        raise ValueError(errors[0][1])
    reasons = "; ".join(f"prompt {number}: {error}" for number, error in errors[:_SHOWN])
    more = "; ..." if len(errors) > _SHOWN else ""
    if len(errors) == len(requests):
        raise ValueError(f"all {len(requests)} prompts are refused: {reasons}{more}")
    _log.warning("%d of %d prompts are refused: %s%s", len(errors), len(requests), reasons, more)
