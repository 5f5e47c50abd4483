"""Digests of a checkpoint's tensors, which are read a piece at a time, and the file with them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

import torch

from vllm_module.base.messages import printable, shorten
from vllm_module.errors import CheckpointFormatError
from vllm_module.kernels.digest.digest import Digest, digest_box
from vllm_module.weights.handle import Weight
from vllm_module.weights.regular_file import is_there, read_file
from vllm_module.weights.strict_json import parse_object

# A box of a tensor: where it starts, its size, and the shape that both count in, if it is not the
# tensor's.
Place: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]
Digests: TypeAlias = dict[str, dict[Place, Digest]]  # of boxes, by the name of their tensor

_PIECE = 2**26  # bytes that are read at once


def digest_weight(weight: Weight, dtype: torch.dtype | None = None) -> Digest:
    """Return the digest of a whole tensor, and hold one piece of 64 MiB of it at a time.

    With a ``dtype``, it is of the values cast to that.
    """
    shape = tuple(weight.shape)
    total = Digest(dtype or weight.dtype, shape)
    for piece, starts in _pieces(weight, (0,) * len(shape)):
        values = piece if isinstance(piece, torch.Tensor) else piece.read()
        total += digest_box(values if dtype is None else values.to(dtype), starts, shape)
    return total


def _pieces(weight: Weight, starts: tuple[int, ...]) -> Iterator[tuple[Weight, tuple[int, ...]]]:
    """Cut along the first dimension that has more than one entry until a piece is small enough."""
    shape = weight.shape
    nbytes = shape.numel() * weight.dtype.itemsize
    dim = next((dim for dim, size in enumerate(shape) if size > 1), None)
    if nbytes <= _PIECE or dim is None:
        yield weight, starts
        return
    step = max(1, _PIECE * shape[dim] // nbytes)
    for first in range(0, shape[dim], step):
        part: Weight = weight.narrow(dim, first, min(step, shape[dim] - first))
        yield from _pieces(part, (*starts[:dim], first, *starts[dim + 1 :]))


def digest_of_all(digests: Iterable[tuple[str, Digest | str]]) -> str:
    """Return 32 hexadecimal digits for named tensors, whatever their order: a sum over tensors.

    Digests may be given by their digits, as ``digests.json`` has them.
    """
    total = 0
    for name, digest in digests:
        digits = digest if isinstance(digest, str) else digest.hex
        named = f"{digits} {name}".encode("utf-8", "surrogatepass")
        total += int.from_bytes(hashlib.blake2b(named, digest_size=16).digest(), "little")
    return f"{total % 2**128:032x}"


DIGESTS = "digests.json"  # beside the files of weights
_FORMAT, _VERSION = "vllm-module digests", 1
_AGAIN = "Write it again with vllm-module digest CKPT --out digests.json."


def digests_file(parts: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Return the entries of ``digests.json``, by name of a tensor: one part for a checkpoint.

    Of a sharded state there is one for each rank, with the digests of what that rank holds.
    """
    return {"format": _FORMAT, "version": _VERSION, "parts": [dict(part) for part in parts]}


def stored_digests(folder: Path) -> list[dict[str, str]] | None:
    """Return the parts of the ``digests.json`` of a folder; ``None`` if it has none.

    Raises ``CheckpointFormatError`` for a file that is damaged or of another version.
    """
    path = folder / DIGESTS
    if not is_there(path):
        return None
    where = printable(path)
    entries = parse_object(read_file(path, folder), where, _AGAIN)
    found = entries.get("format"), entries.get("version")
    if found != (_FORMAT, _VERSION):
        raise CheckpointFormatError(
            f"{where}: expected format {_FORMAT!r} in version {_VERSION}, got "
            f"{shorten(found[0])} in version {shorten(found[1])}. {_AGAIN}"
        )
    parts = entries.get("parts")
    if isinstance(parts, list) and parts and all(map(is_part, parts)):
        return parts
    raise CheckpointFormatError(
        f"{where} is damaged: parts should be a list of objects that have 32 hexadecimal digits "
        f"for each tensor. {_AGAIN}"
    )


def is_part(part: object) -> TypeGuard[dict[str, str]]:
    """Tell whether a value of a JSON object has digests by name."""
    return isinstance(part, dict) and all(
        isinstance(each, str) and re.fullmatch("[0-9a-f]{32}", each) for each in part.values()
    )
