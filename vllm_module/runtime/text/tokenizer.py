"""The tokenizer of a checkpoint, read from ``tokenizer.json``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from os.path import commonprefix
from pathlib import Path
from typing import Any

from vllm_module.base.messages import describe_error, printable, shorten
from vllm_module.errors import CheckpointFormatError
from vllm_module.runtime.text.added_tokens import SPECIAL, declared_tokens, special_tokens
from vllm_module.runtime.text.chat import (
    ChatTemplate,
    template_of,
    token_text,
    tokenizer_settings,
)
from vllm_module.weights import read_file
from vllm_module.weights.regular_file import is_there
from vllm_module.weights.written_folder import NO_TOKENIZER

_REPLACEMENT = "\ufffd"  # character that a decoder returns for bytes that are no whole character
_SPACE = "\u2581"  # how SentencePiece writes a space
_SHOWN = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
# Byte-level tokenizers write a byte as its character, or as the next one of those from 256.
_BYTES = {chr(byte): byte for byte in _SHOWN} | {
    chr(256 + at): byte for at, byte in enumerate(sorted({*range(256)}.difference(_SHOWN)))
}
_FEW = 2000  # characters, or tokens, that the library may take while it holds the GIL
_MAX_INCOMPLETE = 3  # a UTF-8 character has at most 4 bytes, so at most 3 before the last


@contextmanager
def _refusing(kind: type[ValueError], what: str) -> Iterator[None]:
    """Turn the library's errors into ``kind``; it raises nothing narrower than Exception."""
    try:
        yield
    except BaseException as error:
        # A panic of the library is no Exception; a signal handler may raise other BaseExceptions.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what}: {describe_error(error)}") from None


def check_unicode(text: str) -> None:
    """Raise ``ValueError`` for a non-string or half of a surrogate pair; the library is unclear."""
    if not isinstance(text, str):
        raise ValueError(f"a text to encode should be a string, got {shorten(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text has {text[error.start]!a} at position {error.start}, which is half of a "
            "surrogate pair and no Unicode: replace it"
        ) from None


class Encoding(dict[str, Any]):
    """Token ids and attention mask, by key or as attributes, as in transformers."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"an encoding has {', '.join(self)}, and no {name}") from None


class Tokenizer:
    """A checkpoint's own tokenizer, read from its ``tokenizer.json``.

    Tokens that only the files beside it declare are added, as transformers does.

    It has the methods of transformers' tokenizers that scripts use most. Besides ``eos_token``
    and ``eos_token_id`` there are those of ``bos``, ``pad``, ``unk``, ``sep``, ``cls`` and
    ``mask``; ``None`` where tokenizer_config.json names no such token.

    Raises ``CheckpointFormatError`` if the folder has none, or it cannot be read.
    """

    _path: Path
    _template: ChatTemplate | None = None

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
            present = self._tokenizer.get_added_tokens_decoder()
        added = declared_tokens(folder, present)
        with _refusing(CheckpointFormatError, f"{printable(folder)}: tokens cannot be added"):
            self._tokenizer.add_tokens(added)
        # The file may contain a training script's settings of truncation and padding.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def to_str(self) -> str:
        """Return ``tokenizer.json`` as text, without truncation and padding."""
        text: str = self._tokenizer.to_str()
        return text

    @property
    def folder(self) -> Path:
        """Folder of the tokenizer's files."""
        return self._path.parent

    def get_vocab(self) -> dict[str, int]:
        """Return all tokens, with added ones, and their ids."""
        vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return vocab

    @property
    def vocab_size(self) -> int:
        """Number of tokens without added ones; ``len`` counts all."""
        size: int = self._tokenizer.get_vocab_size(with_added_tokens=False)
        return size

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a token, or a list of ids; ``None`` where there is none."""
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """Return the token of an id, or a list of tokens; ``None`` where there is none."""
        if isinstance(ids, int):
            return self._tokenizer.id_to_token(ids)
        left_out = self.all_special_ids if skip_special_tokens else ()
        return [self._tokenizer.id_to_token(each) for each in _listed(ids) if each not in left_out]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character's.

        Joined, those of tokens are their text, with the spaces that a decoder takes off a token
        that is alone.
        """
        named, text = self.convert_ids_to_tokens(token_id), self.decode([token_id])
        token = named if isinstance(named, str) else ""
        spellings = [token.replace(_SPACE, " ").encode()]
        if found := re.fullmatch("<0x([0-9A-F]{2})>", token):
            spellings.append(bytes.fromhex(found[1]))
        if _BYTES.keys() >= {*token}:
            spellings.append(bytes(_BYTES[char] for char in token))
        fitting = (each for each in spellings if each.decode(errors="replace").endswith(text))
        return next(fitting, text.encode())

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """Return the text of tokens."""
        decoder = self._tokenizer.decoder
        text: str = " ".join(tokens) if decoder is None else decoder.decode(list(tokens))
        return text

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """Return the tokens of a text."""
        tokens: list[str] = self.convert_ids_to_tokens(self.encode(text, add_special_tokens))
        return tokens

    def encode(
        self, text: str, add_special_tokens: bool = True, *, most: int | None = None
    ) -> list[int]:
        """Return the token ids of ``text``, by default with the tokenizer's special tokens.

        With ``most``, a longer text loses its end, but not the special tokens.

        Raises ``ValueError`` for text with half of a surrogate pair, which is not Unicode, and for
        text that the tokenizer fails on.
        """
        check_unicode(text)
        with _refusing(ValueError, f"{printable(self._path)} cannot encode {shorten(text)}"):
            encoding = self._encoding(text, add_special_tokens=add_special_tokens)
            if most is not None and len(encoding.ids) > most:
                special = self._tokenizer.num_special_tokens_to_add(False) * add_special_tokens
                if most < special:
                    raise ValueError(f"{most} tokens are fewer than the {special} special ones")
                encoding = self._encoding(text, add_special_tokens=False)
                encoding.truncate(most - special)
                encoding = self._tokenizer.post_process(encoding, None, add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def encode_pair(
        self, first: str, second: str, most: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Return the token ids and token types of two texts, with special tokens.

        With ``most``, the longer text loses its end, token by token, until both fit. Raises the
        errors of :meth:`encode`.
        """
        for text in (first, second):
            check_unicode(text)
        with _refusing(ValueError, f"{printable(self._path)} cannot encode {shorten(first)}"):
            encoding = self._encoding(first, second)
            if most is not None and len(encoding.ids) > most:
                special = self._tokenizer.num_special_tokens_to_add(True)
                if most < special:
                    raise ValueError(f"{most} tokens are fewer than the {special} special ones")
                encode = partial(self._encoding, add_special_tokens=False)
                one, other = encode(first), encode(second)
                lengths = [len(one.ids), len(other.ids)]
                longer = lengths[0] > lengths[1]  # and keeps one more, as in the library
                while sum(lengths) > most - special:
                    lengths[lengths[0] < lengths[1] + longer] -= 1
                one.truncate(lengths[0])
                other.truncate(lengths[1])
                encoding = self._tokenizer.post_process(one, other, True)
        names = self._settings().get("model_input_names")
        if isinstance(names, list) and "token_type_ids" not in names:
            return encoding.ids, [0] * len(encoding.ids)
        return encoding.ids, encoding.type_ids

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids, by default with special tokens.

        ``ids`` is an integer, a sequence or an array. Raises ``CheckpointFormatError`` if the
        tokenizer fails on them.
        """
        ids = _listed(ids)
        with _refusing(CheckpointFormatError, f"{printable(self._path)} cannot decode tokens"):
            if len(ids) <= _FEW:
                text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
            else:  # the library holds the GIL while it decodes one
                (text,) = self._tokenizer.decode_batch(
                    [ids], skip_special_tokens=skip_special_tokens
                )
        return text

    def _encoding(self, *texts: str, add_special_tokens: bool = True) -> Any:
        """Return the library's encoding of a text, or of two; ``offsets`` may be missing."""
        special = {"add_special_tokens": add_special_tokens}
        if sum(map(len, texts)) <= _FEW:
            return self._tokenizer.encode(*texts, **special)  # type: ignore[arg-type]  # bool alone
        # The library holds the GIL while it encodes one text, for a second in a million characters.
        given = texts[0] if len(texts) == 1 else texts
        (encoding,) = self._tokenizer.encode_batch_fast([given], **special)
        return encoding

    def _settings(self) -> Mapping[str, Any]:
        return tokenizer_settings(self.folder)

    def _special_token(self, name: str) -> str | None:
        """Return the token in an entry of tokenizer_config.json, or None."""
        return token_text(self._settings().get(name))

    def _special_id(self, name: str) -> int | None:
        token = self._special_token(name)
        found: int | None = None if token is None else self.convert_tokens_to_ids(token)
        return found

    @property
    def eos_token(self) -> str | None:
        """Text of the end token, if tokenizer_config.json has one."""
        return self._special_token("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end token, if tokenizer_config.json has one."""
        return self._special_id("eos_token")

    def __getattr__(self, name: str) -> Any:
        kind, _, rest = name.partition("_")
        if kind in SPECIAL and rest in ("token", "token_id"):
            read = self._special_token if rest == "token" else self._special_id
            return read(f"{kind}_token")
        raise AttributeError(f"{type(self).__name__} has no {name!r}")

    @property
    def all_special_tokens(self) -> list[str]:
        """Special tokens in tokenizer_config.json, each once."""
        return list(special_tokens(self._settings()))

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of ``all_special_tokens``."""
        ids: list[int] = self.convert_tokens_to_ids(self.all_special_tokens)
        return ids

    @property
    def chat_template(self) -> str | None:
        """The checkpoint's chat template, or ``None``."""
        try:
            return self._chat_template(None).source
        except CheckpointFormatError:
            return None

    def _chat_template(self, given: str | None) -> ChatTemplate:
        """Return a template; the checkpoint's is read once, and its process is kept."""
        if given is not None:
            return ChatTemplate(self.folder, template_of(self.folder, given))
        if self._template is None:
            self._template = ChatTemplate(self.folder)
        return self._template

    def __len__(self) -> int:
        return len(self.get_vocab())

    def __call__(
        self,
        text: str | Sequence[str],
        add_special_tokens: bool = True,
        *,
        truncation: bool = False,
        max_length: int | None = None,
    ) -> Encoding:
        """Return ``input_ids`` and ``attention_mask`` of a text, or lists of them for a list.

        With ``truncation``, the first ``max_length`` tokens are kept.
        """
        most = max_length if truncation else None
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens, most=most)
            return Encoding(input_ids=ids, attention_mask=[1] * len(ids))
        every = [self.encode(each, add_special_tokens, most=most) for each in text]
        return Encoding(input_ids=every, attention_mask=[[1] * len(ids) for ids in every])

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = False) -> list[str]:
        """Return the text of each sequence of token ids."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        return_dict: bool = False,
        **variables: Any,
    ) -> Any:
        """Format a conversation, or a list of them, by the checkpoint's template or another.

        Returns token ids, or an encoding if ``return_dict``, or text unless ``tokenize``. Raises
        the errors of ``LLM.chat``.
        """
        template = self._chat_template(chat_template)
        several = bool(conversation) and not isinstance(conversation[0], Mapping)
        texts = [
            template.render(each, add_generation_prompt, **{"tools": tools, **variables})
            for each in (conversation if several else [conversation])
        ]
        if not tokenize:
            return texts if several else texts[0]
        encoding = self(texts if several else texts[0], False)
        return encoding if return_dict else encoding["input_ids"]

    def continuation(
        self, prompt: list[int], output: list[int], skip_special_tokens: bool = True
    ) -> str:
        """Return the text that the tokens of ``output`` add after those of ``prompt``.

        An incomplete character at its end is left out.
        """
        before = self.decode(prompt, skip_special_tokens)
        whole = self.decode(prompt + output, skip_special_tokens)
        if whole.startswith(before) and _REPLACEMENT not in whole[len(before) :]:
            return whole[len(before) :]
        # The prompt's last character may continue in the output. And where tokens of bytes end
        # inside a character, tokenizers replaces whole characters before it, too.
        stream = TextStream(self, prompt, skip_special_tokens)
        return "".join(map(stream.push, output))


class TextStream:
    """Decodes tokens one at a time into pieces of text that end with a whole character.

    All pieces and the result of :meth:`finish` add up to the text after the prompt. A prompt that
    ends inside a character has U+FFFD there, until the output completes it.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: list[int], skip_special_tokens: bool = True
    ) -> None:
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._ids = list(prompt)
        # A token's text depends on the tokens just before it, but not on all of them. So decoding
        # starts at the piece before the last one (_start), and not at the first token.
        self._start, self._end = 0, len(self._ids)
        self._returned = self._decode(self._ids)
        self._prompts = self._shorter(self._returned)

    def push(self, token: int) -> str:
        """Return the text that ``token`` completes; empty if its character is incomplete."""
        self._ids.append(token)
        text = self._decode(self._ids[self._start :])
        whole = self._without_incomplete(text)
        if self._prompts and not self._returned.startswith(whole):
            self._end_prompt(whole)
        piece = self._new_part(whole)
        if whole != text:
            self._returned += piece
            return piece
        if not text.startswith(self._returned):  # the new token changed the text before it
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

    def _shorter(self, text: str) -> list[str]:
        """Return ``text``, that of the tokens, without the last ones that one character may have.

        Empty if ``text`` ends with a whole character.
        """
        if not text.endswith(_REPLACEMENT):
            return []
        ids = self._ids[self._start :]
        return [self._decode(ids[: max(0, len(ids) - n)]) for n in range(_MAX_INCOMPLETE + 1)]

    def _end_prompt(self, whole: str) -> None:
        """Find what ``whole`` has of the prompt: all, or what is before the character it completes.

        Decoding will start there, or where the prompt's last character begins.
        """
        begun = [less for less, text in enumerate(self._prompts) if whole.startswith(text)]
        if begun:
            less = begun[0] and max(begun, key=lambda less: len(self._prompts[less]))
            self._returned = self._prompts[less]
            ends = (n for n, text in enumerate(self._prompts) if not text.endswith(_REPLACEMENT))
            self._end = max(0, self._end - (less or next(ends, 0)))
        self._prompts = []

    def _without_incomplete(self, text: str) -> str:
        """Return the beginning of ``text`` that more tokens leave as it is."""
        whole = text.rstrip(_REPLACEMENT)
        if len(text) - len(whole) <= _MAX_INCOMPLETE:
            return whole
        # Some decoders write U+FFFD for each byte of whole characters before an incomplete one.
        return commonprefix(self._shorter(text))  # noqa: RUF071  # of texts, which are no paths


def _listed(ids: Any) -> list[int]:
    """Return a token, a sequence or an array of tokens as a list."""
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    return [ids] if isinstance(ids, int) else list(ids)
