from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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


def check_unicode(text: str) -> None:
    """Raise ``ValueError`` for half of a surrogate pair; the library does not name the cause."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text has {text[error.start]!a} at position {error.start}, which is half of a "
            "surrogate pair and no Unicode: replace it"
        ) from None


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
    def folder(self) -> Path:
        """Where the tokenizer's files are."""
        return self._path.parent

    def get_vocab(self) -> dict[str, int]:
        """Return all tokens, added ones too, with their ids."""
        vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return vocab

    @property
    def vocab_size(self) -> int:
        """The number of tokens without added ones; ``len`` has them all."""
        size: int = self._tokenizer.get_vocab_size(with_added_tokens=False)
        return size

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:
        """Return the id of a token, or a list of ids; ``None`` where there is none."""
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | list[int]) -> Any:
        """Return the token of an id, or a list of tokens; ``None`` where there is none."""
        if isinstance(ids, int):
            return self._tokenizer.id_to_token(ids)
        return [self._tokenizer.id_to_token(token) for token in ids]

    def encode(
        self, text: str, add_special_tokens: bool = True, *, most: int | None = None
    ) -> list[int]:
        """Return the token ids of ``text``, by default with the tokenizer's special tokens.

        Where that is more than ``most`` tokens, the end of the text is left out, and not the
        special tokens.

        Raises ``ValueError`` for text with half of a surrogate pair, which is not Unicode, and for
        text that the tokenizer fails on.
        """
        check_unicode(text)
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

    def encode_pair(
        self, first: str, second: str, most: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Return the token ids and token types of two texts, with special tokens.

        Where that is more than ``most`` tokens, the end of the longer text is left out, token by
        token. Raises what :meth:`encode` raises.
        """
        for text in (first, second):
            check_unicode(text)
        with _refusing(ValueError, f"{printable(self._path)} cannot encode {shorten(first)}"):
            encoding = self._tokenizer.encode(first, second)
            if most is not None and len(encoding.ids) > most:
                special = self._tokenizer.num_special_tokens_to_add(True)
                if most < special:
                    raise ValueError(f"{most} tokens are fewer than the {special} special ones")
                encode = partial(self._tokenizer.encode, add_special_tokens=False)
                one, other = encode(first), encode(second)
                lengths = [len(one.ids), len(other.ids)]
                while sum(lengths) > most - special:
                    lengths[lengths[0] < lengths[1]] -= 1
                one.truncate(lengths[0])
                other.truncate(lengths[1])
                encoding = self._tokenizer.post_process(one, other, True)
        names = self._settings().get("model_input_names")
        if isinstance(names, list) and "token_type_ids" not in names:
            return encoding.ids, [0] * len(encoding.ids)
        return encoding.ids, encoding.type_ids

    def decode(self, ids: int | list[int], skip_special_tokens: bool = False) -> str:
        """Return the text of a token or several, by default with special tokens.

        Raises ``CheckpointFormatError`` if the tokenizer fails on them.
        """
        ids = [ids] if isinstance(ids, int) else ids
        with _refusing(CheckpointFormatError, f"{printable(self._path)} cannot decode tokens"):
            text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def _settings(self) -> Mapping[str, Any]:
        """Return the entries of tokenizer_config.json, none without the file."""
        path = self.folder / "tokenizer_config.json"
        return read_json(path, self.folder) if is_there(path) else {}

    def _special_token(self, name: str) -> str | None:
        """Return the token that an entry of tokenizer_config.json names, if it names one."""
        token: Any = self._settings().get(name)
        if isinstance(token, Mapping):  # an AddedToken
            token = token.get("content")
        return token if isinstance(token, str) else None

    def _special_id(self, name: str) -> int | None:
        token = self._special_token(name)
        found: int | None = None if token is None else self.convert_tokens_to_ids(token)
        return found

    @property
    def eos_token(self) -> str | None:
        """The text of the end token, if tokenizer_config.json names one."""
        return self._special_token("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The token that ``eos_token`` of tokenizer_config.json names, if it names one."""
        return self._special_id("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        """The same of ``bos_token``."""
        return self._special_id("bos_token")

    @property
    def pad_token_id(self) -> int | None:
        """The same of ``pad_token``."""
        return self._special_id("pad_token")

    def __len__(self) -> int:
        return len(self.get_vocab())

    def __call__(
        self, text: str | list[str], add_special_tokens: bool = True
    ) -> dict[str, list[int]] | dict[str, list[list[int]]]:
        """Return ``input_ids`` and ``attention_mask`` of a text, or lists of them for a list."""
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        every = [self.encode(each, add_special_tokens) for each in text]
        return {"input_ids": every, "attention_mask": [[1] * len(ids) for ids in every]}

    def batch_decode(
        self, sequences: list[list[int]], skip_special_tokens: bool = False
    ) -> list[str]:
        """Return the text of each sequence of token ids."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        chat_template: str | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> Any:
        """Format a conversation by the checkpoint's template, or one that is given.

        Returns token ids, or text unless ``tokenize``. Raises what ``LLM.chat`` raises.
        """
        from vllm_module.runtime.chat import ChatTemplate

        template = ChatTemplate(self.folder, chat_template)
        text = template.render(conversation, add_generation_prompt, **variables)
        return self.encode(text, False) if tokenize else text

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


def stop_tokens(
    folder: Path, generation: Path | None = None, override: Mapping[str, Any] | None = None
) -> set[int]:
    """Return ``eos_token_id`` of generation_config.json and of config.json: all that either has.

    A fine-tune may change one of them only. The tokenizer has an end token of its own. The first
    file is in ``folder`` unless ``generation`` is another, and what ``override`` says replaces it.

    Raises ``CheckpointFormatError`` if a file is not a JSON object, or the entry is not integers.
    """
    found: set[int] = set()
    first = folder if generation is None else generation
    for inside, name in ((first, "generation_config.json"), (folder, "config.json")):
        path = inside / name
        entries = read_json(path, inside) if is_there(path) else {}
        if name == "generation_config.json":
            entries = {**entries, **(override or {})}
        if entries:
            eos: Any = entries.get("eos_token_id")
            if eos is not None:
                tokens = eos if isinstance(eos, list) else [eos]
                if not all(type(token) is int for token in tokens):
                    raise CheckpointFormatError(
                        f"{printable(path)}: eos_token_id should be a token or a list of tokens, "
                        f"and is {shorten(eos)}"
                    )
                found.update(tokens)
    return found
