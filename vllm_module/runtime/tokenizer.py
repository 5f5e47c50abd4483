from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from vllm_module.errors import CheckpointFormatError
from vllm_module.messages import describe_error, printable, shorten
from vllm_module.weights import read_file, read_json
from vllm_module.weights.regular_file import is_there
from vllm_module.weights.written_folder import NO_TOKENIZER

_REPLACEMENT = "\ufffd"  # a decoder's output for bytes that are not a (whole) character
_MAX_INCOMPLETE = 3  # a UTF-8 character has 4 bytes at most, so 3 at most before the last


@contextmanager
def _refusing(kind: type[ValueError], what: str) -> Iterator[None]:
    """Raise what the library raises as ``kind``; it raises nothing narrower than Exception."""
    try:
        yield
    except BaseException as error:
        # A panic of the library is no Exception; a signal handler may raise others.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what}: {describe_error(error)}") from None


class Tokenizer:
    """A checkpoint's own tokenizer, read from its ``tokenizer.json``.

    Raises ``CheckpointFormatError`` if the folder has none, or it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as FastTokenizer

        path = folder / "tokenizer.json"
        if is_there(reason := folder / NO_TOKENIZER) and not is_there(path):
            raise CheckpointFormatError(read_file(reason, folder).decode(errors="replace"))
        if not is_there(path):
            raise CheckpointFormatError(
                f"{printable(folder)} has no tokenizer.json, so text cannot be encoded: give "
                "token ids instead, or save the tokenizer beside the weights"
            )
        data = read_file(path, folder)
        self._path = path
        with _refusing(CheckpointFormatError, f"{printable(path)} cannot be read"):
            self._tokenizer = FastTokenizer.from_buffer(data)
        # The file may contain the truncation and padding that a training script had set.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @property
    def eos_token_id(self) -> int | None:
        """The token that ``eos_token`` of tokenizer_config.json names, if it names one."""
        folder = self._path.parent
        if not is_there(path := folder / "tokenizer_config.json"):
            return None
        token: Any = read_json(path, folder).get("eos_token")
        if isinstance(token, Mapping):  # an AddedToken
            token = token.get("content")
        found: int | None = self._tokenizer.token_to_id(token) if isinstance(token, str) else None
        return found

    def encode(
        self, text: str, add_special_tokens: bool = True, *, most: int | None = None
    ) -> list[int]:
        """Return the token ids of ``text``, by default with the tokenizer's special tokens.

        Where that is more than ``most`` tokens, the end of the text is left out, and not the
        special tokens.

        Raises ``ValueError`` for text with half of a surrogate pair, which is not Unicode, and for
        text that the tokenizer fails on.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:  # the library's message does not name the cause
            raise ValueError(
                f"the text has {text[error.start]!a} at position {error.start}, which is half of a "
                "surrogate pair and no Unicode: replace it"
            ) from None
        with _refusing(ValueError, f"{printable(self._path)} cannot encode {shorten(text)}"):
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            if most is not None and len(encoding.ids) > most:
                special = self._tokenizer.num_special_tokens_to_add(False) * add_special_tokens
                if most < special:
                    raise ValueError(f"{most} tokens are fewer than the {special} special ones")
                encoding = self._tokenizer.encode(text, add_special_tokens=False)
                encoding.truncate(most - special)
                encoding = self._tokenizer.post_process(encoding, None, add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``, by default without special tokens.

        Raises ``CheckpointFormatError`` if the tokenizer fails on them.
        """
        with _refusing(CheckpointFormatError, f"{printable(self._path)} cannot decode tokens"):
            text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def continuation(
        self, prompt: list[int], output: list[int], skip_special_tokens: bool = True
    ) -> str:
        """Return the text that the tokens of ``output`` add after those of ``prompt``.

        A character at its end that is not complete is left out.
        """
        before = self.decode(prompt, skip_special_tokens)
        whole = self.decode(prompt + output, skip_special_tokens)
        if whole.startswith(before):
            return _without_incomplete(whole[len(before) :])
        # The last character of the prompt continues in the output.
        stream = TextStream(self, prompt, skip_special_tokens)
        return "".join(map(stream.push, output))


class TextStream:
    """Decodes tokens one at a time into pieces of text that end with a whole character.

    All pieces and the result of :meth:`finish` together are the text after the prompt. A prompt
    whose text ends with U+FFFD is assumed to end inside a character.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: list[int], skip_special_tokens: bool = True
    ) -> None:
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._ids = list(prompt)
        # A token's text depends on the tokens just before it, but not on all of them. So decoding
        # starts at the piece before the last one (_start), and not at the first token.
        self._start, self._end = 0, len(self._ids)
        self._returned = _without_incomplete(self._decode(self._ids))

    def push(self, token: int) -> str:
        """Return the text that ``token`` completes; empty if its character is incomplete."""
        self._ids.append(token)
        text = self._decode(self._ids[self._start :])
        whole = _without_incomplete(text)
        if whole != text:
            piece = self._new_part(whole)
            self._returned += piece
            return piece
        piece = self._new_part(text)
        if not text.startswith(self._returned):  # the new token changed text before it
            piece = self._decode(self._ids[self._end :])
        if piece:
            self._start, self._end = self._end, len(self._ids)
            self._returned = self._decode(self._ids[self._start :])
        return piece

    def finish(self) -> str:
        """Return the incomplete character at the end, as U+FFFD; empty if there is none."""
        return self._new_part(self._decode(self._ids[self._start :]))

    def _new_part(self, text: str) -> str:
        return text[len(self._returned) :] if text.startswith(self._returned) else ""


def _without_incomplete(text: str) -> str:
    """Return ``text`` without a character at its end that more bytes could complete."""
    whole = text.rstrip(_REPLACEMENT)
    return text[: max(len(whole), len(text) - _MAX_INCOMPLETE)]


def stop_tokens(folder: Path) -> set[int]:
    """Return ``eos_token_id`` of generation_config.json and of config.json: all that either has.

    A fine-tune may change one of them only. The tokenizer has an end token of its own.

    Raises ``CheckpointFormatError`` if a file is not a JSON object, or the entry is not integers.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if is_there(path):
            eos: Any = read_json(path, folder).get("eos_token_id")
            if eos is not None:
                tokens = eos if isinstance(eos, list) else [eos]
                if not all(type(token) is int for token in tokens):
                    raise CheckpointFormatError(
                        f"{printable(path)}: eos_token_id should be a token or a list of tokens, "
                        f"and is {shorten(eos)}"
                    )
                found.update(tokens)
    return found
