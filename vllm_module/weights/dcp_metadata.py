"""What the file ``.metadata`` of torch.distributed.checkpoint says, read without running it.

It is a pickle of the classes in torch/distributed/checkpoint/metadata.py and filesystem.py. Records
without behavior stand for these classes, and a pickle that asks for any other is refused.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, NoReturn

from vllm_module.messages import describe_error, shorten
from vllm_module.weights.header import DAMAGED, DTYPES, MAX_NAME, DType

_MAX_DIMS = 64
# Where trainers keep what is no weight: the last key above it contains one of these words.
_NOT_WEIGHTS = re.compile("optim|sched|scaler|rng|dataloader|train_state|ema", re.IGNORECASE)
_DTYPES = MappingProxyType({dtype.name: dtype for dtype in DTYPES.values()})
_CLASSES = frozenset(
    {
        "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
        "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
        "torch.distributed.checkpoint.metadata.Metadata",
        "torch.distributed.checkpoint.metadata.MetadataIndex",
        "torch.distributed.checkpoint.metadata.StorageMeta",
        "torch.distributed.checkpoint.metadata.TensorProperties",
        "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
        "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.serialization._get_layout",
        "pathlib.PosixPath",
        "pathlib.PurePosixPath",
        "pathlib._local.PosixPath",
    }
)


class Chunk(NamedTuple):
    """A part of a tensor: where it begins, its shape, and the bytes that hold it.

    The bytes are what ``torch.save`` wrote of it, ``length`` of them from ``begin`` on in ``file``.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    begin: int
    length: int


class Tensor(NamedTuple):
    """A tensor whose chunks cover it, each element once."""

    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def read_metadata(data: bytes, refuse: Callable[[str], NoReturn]) -> dict[str, Tensor]:
    """Return the weights by name; the state of an optimizer is left out.

    A trainer saves a dict of dicts, such as ``{"model": {...}, "optim": {...}}``. The weights are
    the tensors of one of them, named as there. ``refuse`` is called with what is wrong.
    """
    try:
        held = _Records(io.BytesIO(data)).load()
    except _ForeignError as error:
        refuse(f"its pickle asks for {shorten(str(error))}, and nothing of it was run")
    except MemoryError:
        raise
    except Exception as error:  # a broken pickle raises errors of many kinds
        refuse(f"its pickle is broken ({describe_error(error)}). {DAMAGED}")
    described, stored = _field(held, "state_dict_metadata"), _field(held, "storage_data")
    paths = _field(held, "planner_data")
    if not isinstance(described, dict) or not isinstance(stored, dict):
        refuse(f"it has no state_dict_metadata and storage_data. {DAMAGED}")
    places: dict[tuple[Any, Any], Any] = {}
    for index, place in stored.items():
        name, offset = _field(index, "fqn"), _field(index, "offset")
        if isinstance(name, str):
            places[name, offset if offset is None else _sizes(offset)] = place
    keys = {
        key: _path(key, paths)
        for key, each in described.items()
        if isinstance(_field(each, "chunks"), list)
    }
    weights = _weights(keys, refuse)
    return {name: _tensor(key, described[key], places, refuse) for name, key in weights.items()}


def _path(key: Any, paths: Any) -> tuple[Any, ...]:
    """Return the keys that lead to a tensor in what the trainer saved."""
    path = paths.get(key) if isinstance(paths, dict) else None
    return path if isinstance(path, tuple) and path else (key,)


def _weights(
    keys: Mapping[Any, tuple[Any, ...]], refuse: Callable[[str], NoReturn]
) -> dict[str, Any]:
    """Return the keys of the weights by their names in the dict that holds them."""
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for key, path in keys.items():
        *above, name = path
        if not isinstance(name, str) or len(name) > MAX_NAME:
            refuse(
                f"a tensor should be named by a string of at most {MAX_NAME} characters, got "
                f"{shorten(name)}"
            )
        if not any(_NOT_WEIGHTS.search(str(each)) for each in above):
            groups.setdefault(tuple(above), {})[name] = key
    models = {above: group for above, group in groups.items() if "model" in above[-1:]}
    chosen = models or groups
    if len(chosen) != 1:
        listed = ", ".join(shorten(".".join(map(str, above)) or "(top)") for above in groups)
        refuse(
            "expected the weights in one dict, such as 'model', found tensors in "
            f"{listed or 'none'}: save the model's state dict alone"
        )
    return next(iter(chosen.values()))


def _tensor(
    key: Any, described: Any, places: Mapping[Any, Any], refuse: Callable[[str], NoReturn]
) -> Tensor:
    what = f"tensor {shorten(key)}"
    dtype = _DTYPES.get(str(_dtype(_field(described, "properties"))))
    shape = _sizes(_field(described, "size"))
    if dtype is None or shape is None:
        refuse(f"{what} has no dtype and size that are known. {DAMAGED}")
    chunks, elements = [], 0
    for each in _field(described, "chunks"):
        offsets, sizes = _sizes(_field(each, "offsets")), _sizes(_field(each, "sizes"))
        if offsets is None or sizes is None or not len(offsets) == len(sizes) == len(shape):
            refuse(f"a chunk of {what} has no offsets and sizes. {DAMAGED}")
        ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
        if any(end > size for end, size in zip(ends, shape, strict=True)):
            refuse(
                f"a chunk of {what} at {list(offsets)} of shape {list(sizes)} is outside of its "
                f"shape {list(shape)}. {DAMAGED}"
            )
        count = _product(sizes)
        elements += count
        if count == 0:
            continue
        place = places.get((key, offsets), places.get((key, None)))
        file, begin, length = (_field(place, n) for n in ("relative_path", "offset", "length"))
        if not isinstance(file, str) or not _is_size(begin) or not _is_size(length):
            refuse(f"the chunk of {what} at {list(offsets)} is in no file. {DAMAGED}")
        if _field(place, "transform_descriptors"):
            refuse(f"{what} is compressed or encrypted: save it without extensions")
        chunks.append(Chunk(offsets, sizes, file, begin, length))
    chunks.sort()
    if elements != _product(shape) or _overlap(chunks):
        refuse(
            f"the chunks of {what} hold {elements} elements and should cover each of "
            f"{_product(shape)} once. {DAMAGED}"
        )
    return Tensor(dtype, shape, tuple(chunks))


def _overlap(chunks: list[Chunk]) -> bool:
    """Tell whether two chunks, sorted by where they begin, share an element."""
    for at, one in enumerate(chunks):
        for other in chunks[at + 1 :]:
            if other.offsets and other.offsets[0] >= one.offsets[0] + one.shape[0]:
                break  # so do all that follow
            if all(
                max(a, b) < min(a + n, b + m)
                for a, n, b, m in zip(
                    one.offsets, one.shape, other.offsets, other.shape, strict=True
                )
            ):
                return True
    return False


def _product(sizes: tuple[int, ...]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


def _sizes(value: Any) -> tuple[int, ...] | None:
    """Return sizes if ``value`` is a tuple of them."""
    return value if isinstance(value, tuple) and all(map(_is_size, value)) else None


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _dtype(properties: Any) -> Any:
    """Return the name of the dtype, which is the first entry of a state that is a tuple."""
    state = properties.state if isinstance(properties, _Record) else None
    named = state[0] if isinstance(state, tuple) and state else _field(properties, "dtype")
    return getattr(named, "name", named)


class _Record:
    """What the pickle says of an object: its state. Arguments of its class are not kept."""

    state: Any = None  # of an object without one

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Name(NamedTuple):
    name: str


def _size(values: Any) -> tuple[int, ...]:
    """Return what torch.Size makes of a tuple of sizes."""
    if not isinstance(values, tuple | list) or len(values) > _MAX_DIMS:
        raise _ForeignError("a torch.Size of something else than a few sizes")
    return tuple(value if _is_size(value) else -1 for value in values)


# Operations of pickles: sets, buffers, extensions, persistent objects, older kinds of objects.
_NEVER_WRITTEN = {
    pickle.ADDITEMS, pickle.BINPERSID, pickle.BYTEARRAY8, pickle.EMPTY_SET, pickle.EXT1,
    pickle.EXT2, pickle.EXT4, pickle.FROZENSET, pickle.INST, pickle.NEWOBJ_EX, pickle.NEXT_BUFFER,
    pickle.OBJ, pickle.PERSID, pickle.READONLY_BUFFER,
}  # fmt: skip


class _ForeignError(Exception):
    """A name that the pickle may not ask for."""


class _Records(pickle._Unpickler):
    """An unpickler that makes records, tuples and dicts, and calls nothing else.

    It is the one in Python: the one in C allocates what a hostile file says.
    """

    stack: list[Any]
    # Without sets, buffers, extensions and older kinds of objects.
    dispatch: ClassVar[dict[int, Any]] = {
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if bytes([code]) not in _NEVER_WRITTEN
    }

    def _check_keys(self, keys: Any) -> None:
        """Refuse other keys than names and records: to hash nested tuples may take forever."""
        if not all(isinstance(key, str | _Record) for key in keys):
            raise _ForeignError("a dict whose keys are no names")

    def load_setitem(self) -> None:
        self._check_keys(self.stack[-2:-1])
        pickle._Unpickler.load_setitem(self)  # type: ignore[attr-defined]

    def load_setitems(self) -> None:
        self._check_keys(self.stack[::2])
        pickle._Unpickler.load_setitems(self)  # type: ignore[attr-defined]

    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" in _CLASSES:
            return _Record
        if (module, name) == ("torch", "Size"):
            return _size
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _DTYPES:
            return _Name(name)
        raise _ForeignError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise _ForeignError(f"the persistent object {pid}")


def _field(record: Any, name: str) -> Any:
    """Return an attribute of what a record stands for, ``None`` if it has none."""
    state = record.state if isinstance(record, _Record) else None
    return state.get(name) if isinstance(state, dict) else None
