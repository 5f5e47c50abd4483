"""The JSON value of a body, read so that no client's body holds up the others for long."""

from __future__ import annotations

from math import isinf
from typing import Any

import numpy as np
import pydantic_core

from vllm_module.server.errors import ApiError

_PIECE = 1 << 16  # bytes in which values are counted, even


def read_json(data: bytes, most: int) -> Any:
    """Return the value of a body that has ``most`` JSON values at most, names not counted.

    The parser holds the GIL, for a time that grows with the number of values and not with the
    length of texts. Raises ``ApiError`` for more values, for what is no JSON, and for a number
    that no finite float has.
    """
    if len(data) > most and count_values(data) > most:
        raise ApiError(
            413, f"the body has more than {most} JSON values: send less in one request, or start "
            "the server with a larger --max-body-mib", code="body_too_large",
        )  # fmt: skip
    try:
        given = pydantic_core.from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON: {error}") from None
    if _has_infinity(given):
        raise ApiError(400, "the body has a number that is too large for a float")
    return given


def count_values(data: bytes) -> int:
    """Return how many values JSON may have, names not counted: one for each ``,``, ``[`` and ``{``.

    It counts a few too many: an empty list is two. Of what is no JSON, it counts what a parser
    reads before it finds that. Other threads run meanwhile.
    """
    count, begin, within = 1, 0, False  # within: whether a text has begun and not ended
    while piece := data[begin : begin + _PIECE]:
        # A backslash and what it stands before are in one piece.
        odd = (len(piece) - len(piece.rstrip(b"\\"))) % 2
        piece = piece[:-1] if odd and len(piece) == _PIECE else piece
        begin += len(piece)
        text = np.frombuffer(piece.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
        quotes = text == ord('"')
        inside = np.logical_xor.accumulate(quotes) ^ within
        begins = (text == ord(",")) | (text == ord("[")) | (text == ord("{"))
        count += int(np.count_nonzero(begins & ~inside))
        within ^= bool(np.count_nonzero(quotes) % 2)
    return count


def _has_infinity(given: Any) -> bool:
    """Return whether a number of a body became infinite when it was read."""
    left = [given]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            left += value.values()
        elif isinstance(value, float) and isinf(value):
            return True
    return False
