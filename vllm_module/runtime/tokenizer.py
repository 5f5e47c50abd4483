from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from vllm_module.errors import CheckpointFormatError
from vllm_module.messages import shorten
from vllm_module.weights import read_file, read_json

_CUT = "\ufffd"  # stands for bytes that are no character, or not one yet
_MOST_CUT = 3  # bytes of a character that can have come before its last one


class Tokenizer:
    """A checkpoint's own tokenizer, read from its ``tokenizer.json``.

    Raises ``CheckpointFormatError`` if the folder has none, or one that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as FastTokenizer

        path = folder / "tokenizer.json"
        if not os.path.lexists(path):
            raise CheckpointFormatError(
                f"{folder} has no tokenizer.json, so text cannot be encoded: give token ids "
                "instead, or save the tokenizer beside the weights"
            )
        data = read_file(path, folder)
        try:
            self._tokenizer = FastTokenizer.from_buffer(data)
        except Exception as error:  # the library raises nothing narrower
            raise CheckpointFormatError(f"{path} cannot be read: {error}") from None
        # A file may have kept how a training script cut and padded its batches.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``, with the special tokens its template adds.

        Raises ``ValueError`` for text that is no Unicode: half of a surrogate pair.
        """
        text.encode()  # of which the library says no more than that it should be text
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``, special tokens left out unless they are asked for."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def continuation(
        self, prompt: list[int], output: list[int], skip_special_tokens: bool = True
    ) -> str:
        """Return the text that ``output`` adds to that of ``prompt``."""
        before = self.decode(prompt, skip_special_tokens)
        whole = self.decode(prompt + output, skip_special_tokens)
        if whole.startswith(before):
            return whole[len(before) :]
        stream = TextStream(self, prompt, skip_special_tokens)  # a character began in the prompt
        return "".join(map(stream.push, output)) + stream.finish()


class TextStream:
    """Turns tokens into pieces of text as they come, whole characters at a time.

    The pieces, with what :meth:`finish` gives, are the text after the prompt. A prompt that ends
    with U+FFFD is taken for one that ends inside a character.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: list[int], skip_special_tokens: bool = True
    ) -> None:
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._ids = list(prompt)
        # Text depends on the tokens before it, but not on those long before it: what is decoded
        # each time starts at the piece before the last one.
        self._start, self._end = 0, len(self._ids)
        self._shown = _whole(self._decode(self._ids))

    def push(self, token: int) -> str:
        """Return the text that ``token`` completes; empty while a character is cut in two."""
        self._ids.append(token)
        text = self._decode(self._ids[self._start :])
        whole = _whole(text)
        if whole != text:
            piece = self._after_shown(whole)
            self._shown += piece
            return piece
        piece = self._after_shown(text)
        if not text.startswith(self._shown):  # what was shown reads otherwise now: go on from here
            piece = self._decode(self._ids[self._end :])
        if piece:
            self._start, self._end = self._end, len(self._ids)
            self._shown = self._decode(self._ids[self._start :])
        return piece

    def finish(self) -> str:
        """Return what was held back: a character that stays cut."""
        return self._after_shown(self._decode(self._ids[self._start :]))

    def _after_shown(self, text: str) -> str:
        return text[len(self._shown) :] if text.startswith(self._shown) else ""


def _whole(text: str) -> str:
    """Leave out the end of ``text`` that bytes still to come could make a character."""
    whole = text.rstrip(_CUT)
    return text[: max(len(whole), len(text) - _MOST_CUT)]


def stop_tokens(folder: Path) -> set[int]:
    """Return ``eos_token_id`` of generation_config.json or config.json; empty if neither has one.

    Raises ``CheckpointFormatError`` for a file that is not a JSON object, or other entries.
    """
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if os.path.lexists(path):
            eos: Any = read_json(path, folder).get("eos_token_id")
            if eos is not None:
                tokens = eos if isinstance(eos, list) else [eos]
                if not all(type(token) is int for token in tokens):
                    raise CheckpointFormatError(
                        f"{path}: eos_token_id should be a token or a list of tokens, and is "
                        f"{shorten(eos)}"
                    )
                return set(tokens)
    return set()
