"""Weights of a registered source as a mapping with the interface of a checkpoint."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from operator import index
from pathlib import Path
from threading import Lock
from typing import Any, SupportsIndex, TypeAlias

import torch

from vllm_module.base.messages import printable, shorten
from vllm_module.base.outside import blamed
from vllm_module.errors import NOT_THEIRS, CheckpointFormatError, WeightReadError
from vllm_module.weights.checkpoint import Checkpoint
from vllm_module.weights.handle import Handle, Weight, read_into
from vllm_module.weights.header import MAX_NAME


class PairsCheckpoint(Mapping[str, Handle]):
    """The pairs of a source, as a mapping that counts the bytes read.

    Raises ``CheckpointFormatError`` for a name that comes twice, and for an item that is not a pair
    of a name and a tensor or handle. If ``whose`` is given, the source's name in messages, all that
    its code raises is a ``WeightReadError``, here and when handles are read.

    Attributes:
        load_format: the format, as ``LoadConfig`` names it; ``None`` if the source has none.

    """

    def __init__(
        self,
        folder: Path,
        pairs: Mapping[str, Weight] | Iterable[tuple[str, Weight]],
        whose: str | None = None,
    ) -> None:
        self._opened: Any = pairs
        self._whose = whose
        self.load_format: str | None = getattr(pairs, "load_format", None)
        self._lock = Lock()
        self._handles: dict[str, Handle] = {}
        self.bytes_read = 0
        try:
            with _blamed(whose):
                self._take(f"the source of {printable(folder)}")
        except BaseException:
            self.close()
            raise

    def _take(self, source: str) -> None:
        """Check and store each pair; ``source`` is for messages."""
        pairs = self._opened
        try:
            pairs = iter(pairs.items() if isinstance(pairs, Mapping) else pairs)
        except TypeError:
            raise CheckpointFormatError(
                f"{source} has no weights: weights() should return a mapping, or an iterable of "
                f"pairs of name and tensor, got {shorten(pairs)}"
            ) from None
        for pair in pairs:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise CheckpointFormatError(
                    f"{source} should yield pairs of name and tensor, got {shorten(pair)}"
                )
            name, weight = pair
            if not isinstance(name, str) or len(name) > MAX_NAME:
                raise CheckpointFormatError(
                    f"{source} should name a tensor by a string of at most {MAX_NAME} characters, "
                    f"got {shorten(name)}"
                )
            if name in self._handles:
                raise CheckpointFormatError(f"{source} yields the tensor {shorten(name)} twice")
            if (wrong := _not_a_handle(weight)) is not None:
                raise CheckpointFormatError(f"{source}: the tensor {shorten(name)} {wrong}")
            self._handles[name] = _Counted(weight, self._count, self._whose)

    def _count(self, nbytes: int) -> None:
        with self._lock:  # several threads read at once
            self.bytes_read += nbytes

    @property
    def files(self) -> tuple[Path, ...]:
        """No paths: a source's files are unknown."""
        return ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(_nbytes(weight) for weight in self.values())

    @property
    def fingerprint(self) -> str:
        """A hex SHA-256 of the names, shapes and dtypes, and of the source's own fingerprint.

        A source without a fingerprint is compared without values.
        """
        described = sorted((n, tuple(w.shape), str(w.dtype)) for n, w in self.items())
        with _blamed(self._whose):
            own = getattr(self._opened, "fingerprint", None)
        # A user's class may have another attribute of this name.
        own = own if isinstance(own, str) else None
        return hashlib.sha256(repr((described, own)).encode()).hexdigest()

    def close(self) -> None:
        """Call the source's ``close``, if it has one."""
        with _blamed(self._whose):
            close = getattr(self._opened, "close", None)
            if close is not None:
                close()

    def __enter__(self) -> PairsCheckpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> Handle:
        return self._handles[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._handles)

    def __len__(self) -> int:
        return len(self._handles)


OpenWeights: TypeAlias = Checkpoint | PairsCheckpoint


class _Counted:
    """A handle that counts the bytes it reads; ``whose`` is that of its checkpoint."""

    __slots__ = ("_count", "_weight", "_whose", "dtype", "shape")

    def __init__(self, weight: Weight, count: Callable[[int], None], whose: str | None) -> None:
        self._weight = weight
        self._count = count
        self._whose = whose
        self.shape = torch.Size(weight.shape)
        self.dtype = weight.dtype

    def narrow(self, dim: int, start: int, length: int) -> Handle:
        with _blamed(self._whose):
            return _Counted(self._weight.narrow(dim, start, length), self._count, self._whose)

    def read_into(self, destination: torch.Tensor) -> None:
        with _blamed(self._whose):
            read_into(self._weight, destination)
        self._count(_nbytes(self))

    def read(self) -> torch.Tensor:
        weight = self._weight
        with _blamed(self._whose):
            tensor = weight if isinstance(weight, torch.Tensor) else weight.read()
        self._count(_nbytes(self))
        return tensor

    def __repr__(self) -> str:
        with suppress(Exception):  # a user's class may raise anything
            return repr(self._weight)
        return type(self._weight).__name__


def _blamed(whose: str | None) -> AbstractContextManager[None]:
    if whose is None:
        return nullcontext()
    return blamed(f"{whose} fails", WeightReadError, NOT_THEIRS)


def _not_a_handle(weight: Any) -> str | None:
    """Return why ``weight`` is neither a tensor nor a handle, or ``None`` if it is one."""
    if isinstance(weight, torch.Tensor):
        return None
    if not all(callable(getattr(weight, name, None)) for name in ("narrow", "read_into", "read")):
        return (
            "should be a torch.Tensor or a handle with shape, dtype, narrow, read_into and read, "
            f"got {shorten(weight)}"
        )
    dtype, shape = getattr(weight, "dtype", None), getattr(weight, "shape", None)
    if not isinstance(dtype, torch.dtype):
        return f"should have a torch.dtype as its dtype, got {shorten(dtype)}"
    if isinstance(shape, tuple | list) and all(map(_is_size, shape)):
        return None
    return f"should have a tuple of sizes as its shape, got {shorten(shape)}"


def _is_size(value: object) -> bool:
    return isinstance(value, SupportsIndex) and 0 <= index(value) < 1 << 63


def _nbytes(weight: Weight) -> int:
    return math.prod(weight.shape) * weight.dtype.itemsize
