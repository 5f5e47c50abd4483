"""JSON values as answers."""

from __future__ import annotations

import json
from collections.abc import Mapping

from starlette.responses import Response

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_HEADERS = {503: {"retry-after": "1"}, 401: {"www-authenticate": "Bearer"}}


def encode(value: object, in_parts: bool = False) -> bytes:
    """Return a value as JSON; half of a surrogate pair becomes a question mark."""
    # At once, the encoder holds the GIL until all of a value is encoded.
    text = "".join(_ENCODER.iterencode(value)) if in_parts else _ENCODER.encode(value)
    return text.encode(errors="replace")


def json_response(
    value: object,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    *,
    in_parts: bool = False,
) -> Response:
    """Return a JSON value as an answer; in parts, other threads run while it is encoded."""
    headers = {**_HEADERS.get(status, {}), **(headers or {})}
    return Response(encode(value, in_parts), status, headers, "application/json")
