"""Tensors in the pickle of ``torch.save``, as records of the place of their elements.

Arguments of the functions in the pickle: torch/_utils.py and torch/serialization.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from vllm_module.base.messages import shorten
from vllm_module.weights.header import DAMAGED, DTYPES, MAX_DIMS, Entry
from vllm_module.weights.pickled.pickle_records import PLAIN, Name, PickleError, RecordReader

NAMED_DTYPES = MappingProxyType({f"torch.{dtype.name}": dtype for dtype in DTYPES.values()})
# The dtype of each storage class of torch that is supported.
_STORAGES = MappingProxyType({
    "torch.DoubleStorage": "torch.float64", "torch.FloatStorage": "torch.float32",
    "torch.HalfStorage": "torch.float16", "torch.BFloat16Storage": "torch.bfloat16",
    "torch.LongStorage": "torch.int64", "torch.IntStorage": "torch.int32",
    "torch.ShortStorage": "torch.int16", "torch.CharStorage": "torch.int8",
    "torch.ByteStorage": "torch.uint8", "torch.BoolStorage": "torch.bool",
    "torch.ComplexFloatStorage": "torch.complex64", "torch.storage.UntypedStorage": "torch.uint8",
})  # fmt: skip
_REBUILD = "torch._utils._rebuild_"
_KNOWN = re.compile(r"torch\.(\w+Storage|b?float\w+|u?int\d+|bool|complex\d+)")
_MOST = 1 << 63


class _UnreadableError(Exception):
    """A tensor that cannot be read; the message gets the tensor's name once that is known."""


@dataclass(frozen=True, eq=False)
class _Storage:
    """A member of the archive: the dtype it was saved as, and the offsets of its bytes."""

    type: str
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class SavedTensor:
    """The place of a tensor's elements, or the ``problem`` for which it is refused."""

    entry: Entry | None
    problem: str = ""


class TensorReader(RecordReader):
    """A reader of an archive's pickle; ``places`` has the begin and end of each member.

    ``size`` is the file's size, which is the offset of tensors without elements. Tensors become
    :class:`SavedTensor`.
    """

    operations = PLAIN | {"BINPERSID", "SHORT_BINSTRING"}

    def __init__(self, places: Mapping[str, tuple[int, int]], size: int) -> None:
        self._places, self._size = places, size
        # Dtype and number of elements of each storage.
        self._storages: dict[str, tuple[str, int]] = {}

    def knows(self, path: str) -> bool:
        """Return whether it names a storage, a dtype, or a function that builds a dense tensor."""
        return (
            path in _STORAGES
            or path.removeprefix(_REBUILD) in ("tensor", "tensor_v2", "tensor_v3", "parameter")
            or _KNOWN.fullmatch(path) is not None
        )

    def find(self, identity: Any) -> _Storage | SavedTensor:
        """Return the storage of a persistent id, or the problem of every tensor in it."""
        try:
            return self._storage(identity)
        except _UnreadableError as error:
            return SavedTensor(None, str(error))

    def make(self, path: str, arguments: tuple[Any, ...]) -> SavedTensor:
        """Return the tensor that a torch function would rebuild."""
        if arguments and isinstance(arguments[0], SavedTensor) and arguments[0].problem:
            return arguments[0]
        try:
            return SavedTensor(self._entry(path.removeprefix(_REBUILD), arguments))
        except _UnreadableError as error:
            return SavedTensor(None, str(error))

    def _storage(self, identity: Any) -> _Storage:
        match identity:
            case ("storage", Name() as kind, str(key), str(), int(count)) if count >= 0:
                pass
            case _:
                raise PickleError(
                    f"its pickle has a storage without type, name and size. {DAMAGED}"
                )
        if not kind.path.endswith("Storage"):
            raise PickleError(f"its pickle has a storage of {shorten(kind.path)}. {DAMAGED}")
        place = self._places.get(f"data/{key}")
        if place is None:
            raise _UnreadableError(
                f"its storage {shorten(key)} is in none of the archive's members. {DAMAGED}"
            )
        known = self._storages.setdefault(key, (kind.path, count))
        if known != (kind.path, count):
            raise PickleError(
                f"its storage {shorten(key)} has {known[1]} elements of {known[0]}, and {count} of "
                f"{kind.path}. {DAMAGED}"
            )
        begin, end = place
        dtype = NAMED_DTYPES.get(_STORAGES.get(kind.path, ""))
        if dtype is not None and count * dtype.itemsize != end - begin:
            raise _UnreadableError(
                f"its storage {shorten(key)} should have {count * dtype.itemsize} bytes, and its "
                f"member of the archive has {end - begin}. {DAMAGED}"
            )
        return _Storage(kind.path, begin, end)

    def _entry(self, function: str, arguments: tuple[Any, ...]) -> Entry:
        """Return the place of a tensor's elements, from a rebuild function's name and arguments."""
        match function, arguments:
            case "tensor", (storage, offset, shape, strides):
                return self._of_storage(storage, offset, shape, strides)
            case "tensor_v2", (storage, offset, shape, strides, grad, hooks, *metadata):
                entry = self._of_storage(storage, offset, shape, strides)
            case "tensor_v3", (
                storage, offset, shape, strides, grad, hooks, Name() as dtype, *metadata
            ):  # fmt: skip
                entry = self._of_storage(storage, offset, shape, strides, dtype.path)
            case "parameter", (SavedTensor(entry=Entry() as entry), grad, hooks):
                metadata = []
            case _:
                raise PickleError(
                    f"its pickle calls {_REBUILD}{function} with other arguments than torch does"
                )
        if metadata not in ([], [None], [{}]):
            raise _UnreadableError(
                "its values are to be conjugated or negated when they are read: expected a dense "
                "one"
            )
        trains = entry.dtype.name.startswith(("float", "bfloat", "complex"))
        if type(grad) is not bool or (grad and not trains) or hooks != {}:
            raise _UnreadableError(f"it has properties that torch does not save. {DAMAGED}")
        return entry

    def _of_storage(
        self, storage: Any, offset: Any, shape: Any, strides: Any, path: str | None = None
    ) -> Entry:
        """Return the entry of a tensor; ``offset`` and ``strides`` count elements."""
        if not isinstance(storage, _Storage):
            raise PickleError(f"its pickle has a tensor without a storage. {DAMAGED}")
        path = _STORAGES.get(storage.type, storage.type) if path is None else path
        dtype = NAMED_DTYPES.get(path)
        if dtype is None:
            raise _UnreadableError(
                f"it is of {path}: expected a dense one of a dtype that safetensors has too"
            )
        sizes = [offset]
        for each in (shape, strides):
            if not isinstance(each, tuple) or len(each) > MAX_DIMS:
                raise _UnreadableError(f"it has no shape and strides. {DAMAGED}")
            sizes += each
        if len(shape) != len(strides) or not all(
            type(size) is int and 0 <= size < _MOST for size in sizes
        ):
            raise _UnreadableError(f"its shape, strides and offset are no sizes. {DAMAGED}")
        itemsize = dtype.itemsize
        if math.prod(filter(None, shape)) * itemsize >= _MOST:
            raise _UnreadableError(f"its shape {list(shape)} has too many elements. {DAMAGED}")
        if 0 in shape:
            return Entry(dtype, shape, self._size, self._size)
        steps = tuple(stride * itemsize for stride in strides)
        last = sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
        begin = storage.begin + offset * itemsize
        if begin + last + itemsize > storage.end:
            raise _UnreadableError(
                f"its storage should have {begin + last + itemsize - storage.begin} bytes, and its "
                f"member of the archive has {storage.end - storage.begin}. {DAMAGED}"
            )
        reach = itemsize  # bytes covered by the dimensions of smaller strides
        for step, size in sorted(zip(steps, shape, strict=True)):
            if size > 1 and step < reach:
                raise _UnreadableError(
                    f"its elements share memory (shape {list(shape)}, strides {list(strides)}): "
                    "clone it and save it again"
                )
            reach += step * (size - 1)
        return Entry(dtype, shape, begin, begin + math.prod(shape) * itemsize, steps)
