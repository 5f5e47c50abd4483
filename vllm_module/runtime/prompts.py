"""Prompts as callers give them, and what is said of those that are refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypedDict

from vllm_module.messages import shorten
from vllm_module.runtime.outputs import CompletionOutput, PoolingRequestOutput, RequestOutput
from vllm_module.runtime.tokenizer import Tokenizer


class _Options(TypedDict, total=False):
    """What a prompt may have besides; ``None`` for what serves multimodal models in vLLM."""

    cache_salt: str | None
    multi_modal_data: None
    multi_modal_uuids: None
    mm_processor_kwargs: None


class TextPrompt(_Options):
    """A prompt as text."""

    prompt: str


class _TokensPrompt(_Options):
    prompt_token_ids: list[int]


class TokensPrompt(_TokensPrompt, total=False):
    """A prompt as token ids, and its text if that is known."""

    prompt: str


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]

_log = logging.getLogger(__name__)
_SHOWN = 3  # refused prompts whose reasons are in one message
_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}
_NONE = {"multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "prompt_embeds"}


def as_list(value: Any, name: str) -> list[Any]:
    """Return one item, or a sequence of items, as a list; raise ``ValueError`` for neither."""
    if isinstance(value, (str, Mapping)):
        return [value]
    if value is None or isinstance(value, (bytes, bytearray)) or not isinstance(value, Iterable):
        raise ValueError(f"{name} should be one or a sequence of them, got {shorten(value)}")
    return list(value)


def as_prompts(value: Any) -> list[Any]:
    """Return one prompt, or a sequence of them, as a list. Token ids are one prompt."""
    return [value] if value and _is_ids(value) else as_list(value, "prompts")


def _is_ids(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(type(token) is int for token in value)


def prompt_text(prompt: Any) -> str | None:
    """Return the text of a prompt that has one."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def cache_salt(prompt: Any) -> str | None:
    """Return the salt of a prompt: it shares cached pages with prompts that have the same one.

    Raises ``ValueError`` for one that is no text, or empty.
    """
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise ValueError(f"cache_salt should be text that is not empty, got {shorten(salt)}")
    return salt


def encoder(
    get_tokenizer: Callable[[], Tokenizer], options: Mapping[str, Any] | None
) -> Callable[[str], list[int]]:
    """Return a function from text to token ids, with the options of transformers' tokenizers.

    Those are ``add_special_tokens``, and ``truncation`` with ``max_length``. Raises ``ValueError``
    for others.
    """
    options = dict(options or {})
    special = options.pop("add_special_tokens", True)
    most = options.pop("max_length", None)
    cuts = options.pop("truncation", False)
    expected = "an integer from 1, with truncation=True"
    if most is not None and (type(most) is not int or most < 1):
        raise ValueError(f"max_length of tokenization_kwargs should be {expected}, got {most!r}")
    if options or not isinstance(special, bool) or not isinstance(cuts, bool):
        raise ValueError(
            "tokenization_kwargs should have add_special_tokens, truncation (True or False) and "
            f"max_length only, got {shorten(options or {'special': special, 'truncation': cuts})}"
        )
    return lambda text: get_tokenizer().encode(text, special, most=most if cuts else None)


def token_ids(prompt: Any, encode: Callable[[str], list[int]]) -> list[int]:
    """Return the token ids of a prompt; raise ``ValueError`` if it is none."""
    if isinstance(prompt, str):
        return encode(prompt)
    if isinstance(prompt, (list, tuple)):
        prompt = {"prompt_token_ids": prompt}
    if isinstance(prompt, Mapping):
        prompt = {k: v for k, v in prompt.items() if v is not None or k not in _NONE}
        if several := sorted(prompt.keys() & _NONE):
            raise ValueError(
                f"{several[0]} is for multimodal models, which are not served: omit it"
            )
    if isinstance(prompt, Mapping) and prompt and prompt.keys() <= _KEYS:
        ids = prompt.get("prompt_token_ids")
        if ids is None and isinstance(prompt.get("prompt"), str):
            return encode(prompt["prompt"])
        if isinstance(ids, (list, tuple)) and _is_ids(ids):
            return list(ids)
    raise ValueError(
        "a prompt should be text, a list of token ids or {'prompt_token_ids': [...]}, got "
        f"{shorten(prompt)}"
    )


def check_vocabulary(token_ids: Collection[int], vocab_size: int) -> None:
    """Raise ``ValueError`` for the first token that a model of ``vocab_size`` tokens lacks."""
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"token {token} is outside of the vocabulary of {vocab_size}")


def refused(request_id: str, text: str | None, ids: list[int], error: ValueError) -> RequestOutput:
    """Return the output of a prompt that is refused."""
    completion = CompletionOutput(0, "", [], None, None, "error")
    return RequestOutput(request_id, text, ids, [completion], True, error=str(error))


def report_refused(requests: Sequence[object]) -> None:
    """Raise ``ValueError`` if every one is a refused prompt's output; log a warning if some are."""
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
