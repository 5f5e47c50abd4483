"""A JSON parser with limits, which refuses what checkpoints never hold."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

from vllm_module.base.messages import printable, shorten
from vllm_module.errors import CheckpointFormatError
from vllm_module.weights.regular_file import read_file

# Each value has one of these marks before it. A value of three bytes in the file takes a hundred in
# memory, so a bound on bytes is not enough. A tensor has 12 marks in a header and 2 in an index.
MAX_MARKS = 6_000_000
_MARKS = (b"{", b"[", b":", b",")
_MAX_DIGITS = 308  # digits of the largest float; int() takes quadratic time
_TO_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)


def parse_object(
    data: bytes, where: str, advice: str, *, constants: bool = False
) -> dict[str, object]:
    """Parse a JSON object more strictly than Python's parser.

    Raises CheckpointFormatError for a key that occurs twice, half of a surrogate pair, an integer
    of more than 308 digits, more values than any checkpoint has, and, unless ``constants``, NaN,
    Infinity and a float that overflows. The message starts with ``where`` and ends with ``advice``.
    -0 is parsed as a float.
    """
    value = _parse(data, where, advice, constants=constants)
    if not isinstance(value, dict):
        raise CheckpointFormatError(f"{where} is not a JSON object but {shorten(value)}. {advice}")
    return value


def parse_list(data: bytes, where: str, advice: str) -> list[object]:
    """Parse a JSON list with the checks of :func:`parse_object`."""
    value = _parse(data, where, advice, constants=False)
    if not isinstance(value, list):
        raise CheckpointFormatError(f"{where} is not a JSON list but {shorten(value)}. {advice}")
    return value


def _parse(data: bytes, where: str, advice: str, *, constants: bool) -> object:
    marks = sum(data.count(mark) for mark in _MARKS)
    if marks > MAX_MARKS:
        raise CheckpointFormatError(
            f"{where} has {marks} brackets, colons and commas, where at most {MAX_MARKS} are "
            f"accepted. {advice}"
        )
    may_be_odd = b"-0" in data or b"0" * _MAX_DIGITS in data.translate(_TO_ZEROS)
    reason = ""
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=None if constants else _no_constant,
            parse_int=_integer if may_be_odd else None,  # a call for each takes time
            parse_float=None if constants else _finite,
        )
        # Half of a surrogate pair can come from an escape only. Encoding it raises.
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        reason = str(error)
    if reason:  # raised here and not in the except clause, whose error holds the whole text
        raise CheckpointFormatError(f"{where} is not valid JSON: {reason}. {advice}")
    return value


def read_json(path: Path, folder: Path) -> dict[str, object]:
    """Read a JSON object, such as config.json, of the checkpoint ``folder``.

    NaN and Infinity are accepted, because transformers writes them. Raises CheckpointFormatError
    for a file that is refused or cannot be read.
    """
    return parse_config(read_file(path, folder), path)


def parse_config(data: bytes, path: Path) -> dict[str, object]:
    """Parse the bytes of a file as :func:`read_json` does; ``path`` is for messages."""
    return parse_object(data, printable(path), "Download it again.", constants=True)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {shorten(key)} occurs twice")
    return result


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{shorten(text)} is out of range")
    return value


def _integer(text: str) -> float:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"an integer has {len(text)} digits")
    return -0.0 if text == "-0" else int(text)  # int has no -0
