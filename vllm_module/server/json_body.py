"""The JSON values of bodies, read and written so that no body holds up the others for long."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import numpy as np
import pydantic_core
from starlette.responses import Response

from vllm_module.server.errors import ApiError

_PIECE = 1 << 16  # bytes that are looked at together, even
_DOUBLED = 1, 2, 4, 8, 16, 32  # of 64 digits in a row
_AT_ONCE = 1000  # values that are encoded together
_INNER = frozenset((dict, list, tuple))
_ENCODER = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":"))
_HEADERS = {503: {"retry-after": "1"}, 401: {"www-authenticate": "Bearer"}}


def read_json(data: bytes, most: int) -> Any:
    """Return the value of a body that has ``most`` JSON values at most, names not counted.

    The parser holds the GIL, for a time that grows with the number of values and not with the
    length of texts. Raises ``ApiError`` for more values, for what is no JSON, and for a number
    that no finite float has.
    """
    large = len(data) > min(_PIECE, most)
    count, may_be_infinite = looked_over(data) if large else (0, True)
    if count > most:
        raise ApiError(
            413, f"the body has more than {most} JSON values: send less in one request, or start "
            "the server with a larger --max-body-mib", code="body_too_large",
        )  # fmt: skip
    try:
        given = pydantic_core.from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON: {error}") from None
    try:
        if may_be_infinite:
            json.dumps(given, allow_nan=False)  # raises for a number that became infinite
    except ValueError:
        raise ApiError(400, "the body has a number that is too large for a float") from None
    return given


def looked_over(data: bytes) -> tuple[int, bool]:
    """Return how many values JSON may have, and whether a number of it may become infinite.

    Values are counted without names: one for each ``,``, ``[`` and ``{``, and so a few too many: an
    empty list is two. Only a number with an exponent, or with 128 digits in a row, can become
    infinite. Of what is no JSON, it sees what a parser reads before it finds that. Other threads
    run meanwhile.
    """
    count, infinite, begin, within = 1, False, 0, False  # within: a text has begun and not ended
    while piece := data[begin : begin + _PIECE]:
        # A backslash and what it stands before are in one piece.
        odd = (len(piece) - len(piece.rstrip(b"\\"))) % 2
        piece = piece[:-1] if odd and len(piece) == _PIECE else piece
        begin += len(piece)
        text = np.frombuffer(piece.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
        quotes = text == ord('"')
        outside = ~(np.logical_xor.accumulate(quotes) ^ within)
        begins = (text == ord(",")) | (text == ord("[")) | (text == ord("{"))
        count += int(np.count_nonzero(begins & outside))
        infinite = infinite or _has_large_number(text, outside)
        within ^= bool(np.count_nonzero(quotes) % 2)
    return count, infinite


def _has_large_number(text: Any, outside: Any) -> bool:
    """Return whether a piece has an exponent, or half of 128 digits, outside of texts."""
    digits = (text >= ord("0")) & (text <= ord("9")) & outside
    exponents = ((text | 0x20) == ord("e")) & outside  # also those of true and false
    if np.any(exponents[1:] & digits[:-1]) or np.any(exponents[:1]):
        return True
    for step in _DOUBLED:
        digits = digits[step:] & digits[:-step]
    return bool(np.any(digits))


async def encoded(value: object) -> bytes:
    """Return a value as JSON; half of a surrogate pair becomes a question mark.

    At once, the encoder would hold the GIL until all of it is encoded. So a large value is encoded
    in parts, and other tasks and threads run between them.
    """
    if _count(value) <= _AT_ONCE:
        return _ENCODER.encode(value).encode(errors="replace")
    pieces, text = list[bytes](), ""
    for part in _parts(value):
        text += part
        if len(text) >= _PIECE:
            pieces.append(text.encode(errors="replace"))
            text = ""
            await asyncio.sleep(0)
    return b"".join([*pieces, text.encode(errors="replace")])


def _parts(value: Any) -> Iterator[str]:
    """Yield the JSON of a value in parts, each of which has few values."""
    if _count(value) <= _AT_ONCE:
        yield _ENCODER.encode(value)
    elif isinstance(value, dict):
        for separator, (key, each) in zip(chain("{", repeat(",")), value.items(), strict=False):
            yield separator + _ENCODER.encode({key: 0})[1:-2]
            yield from _parts(each)
        yield "}"
    else:
        yield "["
        yield from _items(value)
        yield "]"


def _items(values: Sequence[Any]) -> Iterator[str]:
    """Yield the JSON of a list without its brackets."""
    if _count(values) <= _AT_ONCE:
        yield _ENCODER.encode(values)[1:-1]
    elif len(values) == 1:
        yield from _parts(values[0])
    else:
        middle = len(values) // 2
        yield from _items(values[:middle])
        yield ","
        yield from _items(values[middle:])


def _count(value: Any) -> int:
    """Return how many values are in one, or a number above the most that are encoded at once."""
    count = len(value) if type(value) in _INNER else 0
    if 0 < count <= _AT_ONCE:
        for each in value.values() if type(value) is dict else value:
            if type(each) in _INNER and count <= _AT_ONCE:
                count += _count(each)
    return count


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a small JSON value as an answer."""
    data = _ENCODER.encode(value).encode(errors="replace")
    headers = {**_HEADERS.get(status, {}), **(headers or {})}
    return Response(data, status, headers, "application/json")
