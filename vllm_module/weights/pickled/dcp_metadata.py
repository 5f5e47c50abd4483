"""Parsing the file ``.metadata`` of torch.distributed.checkpoint without running its pickle.

It is a pickle of the classes in torch/distributed/checkpoint/metadata.py and filesystem.py. Records
without behavior stand for these classes, and a pickle that asks for any other is refused.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

from vllm_module.base.messages import shorten
from vllm_module.weights.header import DAMAGED, MAX_DIMS, MAX_NAME, StoredDType
from vllm_module.weights.pickled.pickle_records import (
    NEWER,
    PLAIN,
    Name,
    PickleError,
    Record,
    RecordReader,
)
from vllm_module.weights.pickled.saved_tensors import NAMED_DTYPES

_MOST_CUT = 4  # limit on the dimensions in which a tensor is cut; a trainer's mesh has no more
# Words of keys under which trainers keep other things than weights.
_NOT_WEIGHTS = re.compile(
    "optimi[sz]er|scheduler|dataloader|train_state"
    "|(?<![a-z])(?:optim|sched|rng|ema|(?:grad)?scaler)s?(?![a-z])",  # not a part of "semantic"
    re.IGNORECASE,
)
_CLASSES = frozenset(
    {
        "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
        "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
        "torch.distributed.checkpoint.metadata.Metadata",
        "torch.distributed.checkpoint.metadata.MetadataIndex",
        "torch.distributed.checkpoint.metadata.StorageMeta",
        "torch.distributed.checkpoint.metadata.TensorProperties",
        "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
        "torch.Size",
        "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.serialization._get_layout",
        "pathlib.PosixPath",
        "pathlib.PurePosixPath",
        "pathlib._local.PosixPath",
    }
)


class StoredChunk(NamedTuple):
    """A part of a tensor: its start, its shape, and the bytes that hold it.

    The bytes are written by ``torch.save``: ``length`` bytes from ``begin`` on in ``file``.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    begin: int
    length: int


class ChunkedTensor(NamedTuple):
    """A tensor and the chunks that cover it, each element once; ``key``: its name in the files."""

    dtype: StoredDType
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]
    key: str


def read_metadata(data: bytes, refuse: Callable[[str], NoReturn]) -> dict[str, ChunkedTensor]:
    """Return the weights by name, without the optimizer's state.

    A trainer saves a dict of dicts, such as ``{"model": {...}, "optim": {...}}``. The weights are
    the tensors of one of them, under its keys. ``refuse`` is called with a description of an error.
    """
    try:
        held = _MetadataReader().read(data)
    except PickleError as error:
        refuse(str(error))
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
        key: _path(key, paths, refuse)
        for key, each in described.items()
        if isinstance(_field(each, "chunks"), list)
    }
    weights = _weights(keys, refuse)
    # A hostile file may use one list of chunks for many tensors, and each check takes long.
    listed = sum(len(_field(described[key], "chunks")) for key in weights.values())
    if listed > len(stored):
        refuse(f"its tensors have {listed} chunks, and {len(stored)} are stored. {DAMAGED}")
    return {name: _tensor(key, described[key], places, refuse) for name, key in weights.items()}


def _path(key: Any, paths: Any, refuse: Callable[[str], NoReturn]) -> tuple[Any, ...]:
    """Return the keys that lead to a tensor in the trainer's nested dicts."""
    path = paths.get(key) if isinstance(paths, dict) else None
    if not isinstance(path, tuple) or not path:
        return (key,)
    if not all(isinstance(each, str | int) for each in path):
        refuse(f"the keys that lead to {shorten(key)} are no names and numbers. {DAMAGED}")
    return path


def _weights(
    keys: Mapping[Any, tuple[Any, ...]], refuse: Callable[[str], NoReturn]
) -> dict[str, Any]:
    """Return a dict from the weights' names in the dict that holds them to their full keys."""
    groups: dict[tuple[Any, ...], dict[Any, Any]] = {}
    for key, path in keys.items():
        *above, name = path
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
    (weights,) = chosen.values()
    for name in weights:
        if not isinstance(name, str) or len(name) > MAX_NAME:
            refuse(
                f"a tensor should be named by a string of at most {MAX_NAME} characters, got "
                f"{shorten(name)}"
            )
    return weights


def _tensor(
    key: Any, described: Any, places: Mapping[Any, Any], refuse: Callable[[str], NoReturn]
) -> ChunkedTensor:
    what = f"tensor {shorten(key)}"
    dtype = _dtype(_field(described, "properties"))
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
        count = math.prod(sizes)
        elements += count
        if count == 0:
            continue
        place = places.get((key, offsets), places.get((key, None)))
        file, begin, length = (_field(place, n) for n in ("relative_path", "offset", "length"))
        if not isinstance(file, str) or not _is_size(begin) or not _is_size(length):
            refuse(f"the chunk of {what} at {list(offsets)} is in no file. {DAMAGED}")
        if _field(place, "transform_descriptors"):
            refuse(f"{what} is compressed or encrypted: save it without extensions")
        chunks.append(StoredChunk(offsets, sizes, file, begin, length))
    chunks.sort()
    if elements != math.prod(shape) or (elements and not _cover(chunks, shape)):
        refuse(
            f"the chunks of {what} hold {elements} elements and should cover each of "
            f"{math.prod(shape)} once. {DAMAGED}"
        )
    return ChunkedTensor(dtype, shape, tuple(chunks), str(key))


def _cover(chunks: list[StoredChunk], shape: tuple[int, ...]) -> bool:
    """Return whether chunks, all inside ``shape``, cover each element exactly once.

    Each corner of a chunk has a sign: that of the number of dimensions in which it is an end. The
    sum of the signs of the corners before an element is how often the element is covered. So the
    chunks cover each element once if their corners, after cancelling, are those of the whole
    tensor.
    """
    cut = [
        dim for dim, size in enumerate(shape) if any(chunk.shape[dim] != size for chunk in chunks)
    ]
    if len(cut) > _MOST_CUT:
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    whole = (0,) * len(shape), shape
    for (offsets, sizes), sign in [(whole, -1), *((chunk[:2], 1) for chunk in chunks)]:
        points: list[tuple[tuple[int, ...], int]] = [((), sign)]
        for dim in cut:
            begin, end = offsets[dim], offsets[dim] + sizes[dim]
            points = [
                ((*point, edge), sign * each)
                for point, each in points
                for edge, sign in ((begin, 1), (end, -1))
            ]
        for point, each in points:
            corners[point] += each
    return not any(corners.values())


def _sizes(value: Any) -> tuple[int, ...] | None:
    """Return the sizes if ``value`` is a ``torch.Size``, else None."""
    if isinstance(value, Record) and value.name == "torch.Size" and len(value.arguments) == 1:
        (value,) = value.arguments
    few = isinstance(value, tuple) and len(value) <= MAX_DIMS
    return value if few and all(map(_is_size, value)) else None


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _dtype(properties: Any) -> StoredDType | None:
    """Return the dtype in a chunk's properties, which is the first entry of the state tuple."""
    state = properties.state if isinstance(properties, Record) else None
    named = state[0] if isinstance(state, tuple) and state else _field(properties, "dtype")
    return NAMED_DTYPES.get(named.path) if isinstance(named, Name) else None


class _MetadataReader(RecordReader):
    operations = PLAIN | NEWER
    most_operations = 45_000_000  # about 112 for each chunk of a trainer's rank

    def knows(self, path: str) -> bool:
        return path in _CLASSES or path in NAMED_DTYPES


def _field(record: Any, name: str) -> Any:
    """Return an attribute of a record, or ``None`` if it has none."""
    state = record.state if isinstance(record, Record) else None
    return state.get(name) if isinstance(state, dict) else None
