from __future__ import annotations

import json
from collections import Counter

from vllm_module.errors import CheckpointFormatError


def parse_object(data: bytes, where: str, advice: str) -> dict[str, object]:
    """Parse a JSON object, refusing what Python's parser lets pass: keys twice, NaN, Infinity.

    A CheckpointFormatError starts with ``where`` and ends with ``advice``.
    """
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointFormatError(f"{where} is not valid JSON: {error}. {advice}") from error
    if not isinstance(value, dict):
        raise CheckpointFormatError(
            f"{where} should be a JSON object, and is {shorten(value)}. {advice}"
        )
    return value


def shorten(value: object) -> str:
    """Show something from a file, cut so that a hostile one does not fill the screen."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {shorten(twice)} stands there twice")
    return result


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")
