from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

from vllm_module.errors import CheckpointFormatError
from vllm_module.messages import printable, shorten
from vllm_module.weights.regular_file import read_file

# Of marks that begin or part values. A value of three bytes takes a hundred in memory, so bytes
# alone bound nothing; a tensor has 12 marks in a header and 2 in an index.
MAX_MARKS = 6_000_000
_MARKS = (b"{", b"[", b":", b",")
_MOST_DIGITS = 308  # no float has more; int() takes quadratic time, unlimited before Python 3.10.7


def parse_object(
    data: bytes, where: str, advice: str, *, constants: bool = False
) -> dict[str, object]:
    """Parse a JSON object, refusing what Python's parser lets pass.

    That is: keys twice, halves of surrogate pairs, NaN and what is or becomes Infinity (unless
    ``constants`` are welcome), integers of more than 308 digits, and more values than any
    checkpoint has; -0 is a float. A CheckpointFormatError starts with ``where`` and ends with
    ``advice``.
    """
    marks = sum(data.count(mark) for mark in _MARKS)
    if marks > MAX_MARKS:
        raise CheckpointFormatError(
            f"{where} has {marks} brackets, colons and commas, where at most {MAX_MARKS} are "
            f"accepted. {advice}"
        )
    reason = ""
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=None if constants else _no_constant,
            parse_int=_integer,
            parse_float=None if constants else _finite,
        )
        # Only an escape can give half of a surrogate pair, which is no character.
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        reason = str(error)
    if reason:  # outside of the except clause: the error holds all of the text
        raise CheckpointFormatError(f"{where} is not valid JSON: {reason}. {advice}")
    if not isinstance(value, dict):
        raise CheckpointFormatError(f"{where} is not a JSON object but {shorten(value)}. {advice}")
    return value


def read_json(path: Path, folder: Path) -> dict[str, object]:
    """Read a JSON object (config.json) of the checkpoint ``folder``; raises as above.

    NaN and Infinity pass, because transformers writes them.
    """
    data = read_file(path, folder)
    return parse_object(data, printable(path), "Download it again.", constants=True)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {shorten(twice)} stands there twice")
    return result


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{shorten(text)} is out of range")
    return value


def _integer(text: str) -> float:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"an integer has {len(text)} digits")
    return -0.0 if text == "-0" else int(text)  # a float, as it is elsewhere: there is no int -0
