"""Added tokens that files beside ``tokenizer.json`` declare, and it lacks or has otherwise.

A fine-tune may have the tokens of its chats in tokenizer_config.json or added_tokens.json alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_module.base.messages import printable, shorten
from vllm_module.errors import CheckpointFormatError
from vllm_module.runtime.text.chat import token_text, tokenizer_settings
from vllm_module.weights import read_json
from vllm_module.weights.regular_file import is_there

if TYPE_CHECKING:
    from tokenizers import AddedToken

SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_SEVERAL = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def special_tokens(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of tokenizer_config.json for special tokens, each once, by their text.

    Raises ``CheckpointFormatError`` for an entry of several that is no list or mapping.
    """
    found = _named(settings)
    for name in _SEVERAL:
        if not isinstance(more := settings.get(name) or [], (list, Mapping)):
            raise CheckpointFormatError(
                f"{name} of tokenizer_config.json should be a list of tokens, or tokens by name, "
                f"got {shorten(more)}"
            )
        found += () if isinstance(more, Mapping) else more
    tokens: dict[str, Any] = {}
    for each in found:
        if (text := token_text(each)) is not None:
            tokens.setdefault(text, each)
    return tokens


def _named(settings: Mapping[str, Any]) -> list[Any]:
    """Return the entries for special tokens that have names."""
    found = [settings.get(f"{kind}_token") for kind in SPECIAL]
    for name in _SEVERAL:
        if isinstance(more := settings.get(name), Mapping):
            found += more.values()
    return found


def declared_tokens(folder: Path, present: Mapping[int, AddedToken]) -> list[AddedToken]:
    """Return the tokens to add to a tokenizer that has the added tokens ``present``, by id.

    As in transformers, they are those of ``added_tokens_decoder``, or without it of
    added_tokens.json, and special tokens that are no added tokens yet. Those with a name are
    special, whatever a file says.

    Raises ``CheckpointFormatError`` for an entry that describes no token.
    """
    settings = tokenizer_settings(folder)
    special = special_tokens(settings)
    listed = dict(_listed(folder, settings, special))
    if "added_tokens_decoder" not in settings:
        listed |= present
    known = {repr(each) for each in present.values()}
    named = {*map(token_text, _named(settings))}
    for token in listed.values():
        token.special = token.special or token.content in named
    added = [each for _, each in sorted(listed.items()) if repr(each) not in known]
    names = {each.content for each in (*present.values(), *added)}
    path = folder / "tokenizer_config.json"
    more = (_token(path, each, special=True) for text, each in special.items() if text not in names)
    return [*added, *more]


def _listed(
    folder: Path, settings: Mapping[str, Any], special: Mapping[str, Any]
) -> Iterator[tuple[int, AddedToken]]:
    """Yield the ids and tokens that a file lists."""
    path = folder / "tokenizer_config.json"
    if (decoder := settings.get("added_tokens_decoder")) is not None:
        for at, entry in decoder.items() if isinstance(decoder, Mapping) else [(decoder, None)]:
            if not (isinstance(at, str) and at.isdecimal()):
                raise CheckpointFormatError(
                    f"{printable(path)}: added_tokens_decoder should map ids to tokens, got "
                    f"{shorten(at)}"
                )
            yield int(at), _token(path, entry)
    elif is_there(path := folder / "added_tokens.json"):
        for text, at in read_json(path, folder).items():
            if type(at) is not int:
                raise CheckpointFormatError(
                    f"{printable(path)} should map tokens to ids, got {shorten(at)}"
                )
            yield at, _token(path, text, special=text in special)


def _token(path: Path, entry: Any, special: bool | None = None) -> AddedToken:
    """Return the token of an entry: its text, or an object with its text and flags."""
    from tokenizers import AddedToken

    text, given = token_text(entry), entry if isinstance(entry, Mapping) else {}
    flags = {name: given[name] for name in _FLAGS if name in given}
    if text is None or not all(type(flag) is bool for flag in flags.values()):
        raise CheckpointFormatError(
            f"{printable(path)}: an added token should have a text as content, and flags that are "
            f"true or false, got {shorten(entry)}"
        )
    return AddedToken(text, **flags | ({} if special is None else {"special": special}))
