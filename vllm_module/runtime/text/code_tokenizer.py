"""Tokenizers in Python files of a checkpoint, for a user who trusts them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_module.base.messages import install, printable, shorten
from vllm_module.base.outside import blamed
from vllm_module.errors import CheckpointFormatError
from vllm_module.runtime.text.tokenizer import Tokenizer
from vllm_module.weights import read_json
from vllm_module.weights.regular_file import is_there
from vllm_module.wrapped.custom_code import code_file, importing


def read_tokenizer(folder: Path, trust_remote_code: bool) -> Tokenizer:
    """Return the tokenizer of ``folder``: from its ``tokenizer.json``, else from its code.

    Raises ``CheckpointFormatError`` if none can be read, or its code is not trusted.
    """
    if is_there(folder / "tokenizer.json") or (code := _code(folder)) is None:
        return Tokenizer(folder)
    if not trust_remote_code:
        raise CheckpointFormatError(
            f"{printable(folder)} has no tokenizer.json, and its tokenizer is code of the "
            f"checkpoint ({shorten(code)}), which is not run unless you trust it: read it, then "
            "give trust_remote_code=True (--trust-remote-code), or give token ids instead"
        )
    _check_references(code, folder)
    return CodeTokenizer(folder)


def _code(folder: Path) -> object:
    return _auto_map(folder, "tokenizer_config.json").get("AutoTokenizer")


def _auto_map(folder: Path, name: str) -> Mapping[str, object]:
    path = folder / name
    auto_map = read_json(path, folder).get("auto_map") if is_there(path) else None
    return auto_map if isinstance(auto_map, Mapping) else {}


def _check_references(code: object, folder: Path) -> None:
    """Raise ``UnsupportedModelError`` if transformers would run code that is not in ``folder``.

    ``code`` is one reference, or two for a slow and a fast tokenizer, either of them ``None``.
    Transformers may first read the model's configuration, whose class can be code as well.
    """
    pair = code if isinstance(code, list) else [code]
    for reference in filter(None, pair):
        code_file(reference, "AutoTokenizer", folder, "tokenizer_config.json")
    if (config := _auto_map(folder, "config.json").get("AutoConfig")) is not None:
        code_file(config, "AutoConfig", folder, "config.json")


class CodeTokenizer(Tokenizer):
    """A tokenizer that transformers loads by running code of the checkpoint in ``folder``."""

    def __init__(self, folder: Path) -> None:
        try:
            import transformers
        except ImportError:
            raise CheckpointFormatError(
                f"the tokenizer of {printable(folder)} is code for the transformers library: "
                f"{install('transformers')}"
            ) from None
        library: Any = transformers  # transformers has few type hints
        self._path = folder
        whose = f"the tokenizer of {printable(folder)}, code of the checkpoint, cannot be read"
        with blamed(whose, CheckpointFormatError), importing():
            self._library = library.AutoTokenizer.from_pretrained(
                str(folder), trust_remote_code=True, local_files_only=True
            )

    def to_str(self) -> str:  # noqa: D102 # of Tokenizer
        raise ValueError("it is code of the checkpoint, and has no tokenizer.json")

    @property
    def folder(self) -> Path:  # noqa: D102 # of Tokenizer
        return self._path

    def _special_token(self, name: str) -> str | None:
        with self._refusing(CheckpointFormatError, f"has no {name}"):
            found = getattr(self._library, name, None)
        return found if isinstance(found, str) else None

    def _special_id(self, name: str) -> int | None:
        with self._refusing(CheckpointFormatError, f"has no {name}_id"):
            found = getattr(self._library, f"{name}_id", None)
        return found if type(found) is int else None

    def get_vocab(self) -> dict[str, int]:  # noqa: D102 # of Tokenizer
        with self._refusing(CheckpointFormatError, "has no vocabulary"):
            return dict(self._library.get_vocab())

    @property
    def vocab_size(self) -> int:  # noqa: D102 # of Tokenizer
        with self._refusing(CheckpointFormatError, "has no vocab_size"):
            return int(self._library.vocab_size)

    def convert_tokens_to_ids(  # noqa: D102 # of Tokenizer
        self, tokens: str | Sequence[str]
    ) -> Any:
        with self._refusing(CheckpointFormatError, "cannot convert tokens"):
            return self._library.convert_tokens_to_ids(tokens)

    def convert_ids_to_tokens(  # noqa: D102 # of Tokenizer
        self, ids: Any, skip_special_tokens: bool = False
    ) -> Any:
        with self._refusing(CheckpointFormatError, "cannot convert ids"):
            return self._library.convert_ids_to_tokens(ids, skip_special_tokens)

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:  # noqa: D102 # of Tokenizer
        with self._refusing(CheckpointFormatError, "cannot decode tokens"):
            return str(self._library.convert_tokens_to_string(tokens))

    def encode_pair(  # noqa: D102 # of Tokenizer
        self, first: str, second: str, most: int | None = None
    ) -> tuple[list[int], list[int]]:
        cut = {} if most is None else {"truncation": "longest_first", "max_length": most}
        with self._refusing(ValueError, f"cannot encode {shorten(first)}"):
            (first + second).encode()
            found = self._library(first, second, **cut)
            ids = [*map(int, found["input_ids"])]
            return ids, [*map(int, found.get("token_type_ids") or [0] * len(ids))]

    def encode(  # noqa: D102 # of Tokenizer
        self, text: str, add_special_tokens: bool = True, *, most: int | None = None
    ) -> list[int]:
        cut = {} if most is None else {"truncation": True, "max_length": most}
        with self._refusing(ValueError, f"cannot encode {shorten(text)}"):
            text.encode()
            ids = self._library.encode(text, add_special_tokens=add_special_tokens, **cut)
        return [*map(int, ids)]

    def decode(  # noqa: D102 # of Tokenizer
        self, ids: Any, skip_special_tokens: bool = False
    ) -> str:
        with self._refusing(CheckpointFormatError, "cannot decode tokens"):
            text: str = self._library.decode(
                ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        return text

    @contextmanager
    def _refusing(self, kind: type[ValueError], what: str) -> Iterator[None]:
        """Turn errors of code from outside into ``kind``; also refuse half of a surrogate pair."""
        with blamed(f"the tokenizer of {printable(self._path)} {what}", kind):
            yield
