from __future__ import annotations

import json
from pathlib import Path

from vllm_module.errors import CheckpointFormatError


class Tokenizer:
    """A checkpoint's own tokenizer, read from its ``tokenizer.json``.

    Raises ``CheckpointFormatError`` if the folder has none, or one that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as FastTokenizer

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointFormatError(
                f"{folder} has no tokenizer.json, so text cannot be encoded: give token ids "
                "instead, or save the tokenizer beside the weights"
            )
        try:
            self._tokenizer = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise CheckpointFormatError(f"{path} cannot be read: {error}") from None

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, with the special tokens its template adds."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of ``ids``, special tokens left out."""
        text: str = self._tokenizer.decode(ids)
        return text


class TextStream:
    """Turns tokens into pieces of text as they come, whole characters at a time."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt)
        self._shown = tokenizer.decode(self._ids)

    def push(self, token: int) -> str:
        """Return the text that ``token`` completes; empty while a character is cut in two."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if text.endswith("\ufffd") or not text.startswith(self._shown):
            return ""
        piece, self._shown = text[len(self._shown) :], text
        return piece


def stop_tokens(folder: Path) -> set[int]:
    """Return ``eos_token_id`` of generation_config.json or config.json; empty if neither has one."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            eos = json.loads(path.read_bytes()).get("eos_token_id")
            if eos is not None:
                return set(eos) if isinstance(eos, list) else {eos}
    return set()
