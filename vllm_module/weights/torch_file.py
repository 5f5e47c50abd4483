"""Files that ``torch.save`` writes: a zip archive of a pickle and the bytes of each storage.

Layout: torch/serialization.py. A pickle that asks for anything but tensors is refused. Then the
restricted unpickler of torch reads it under fake tensors: they say where each storage lies, and
none is read.
Older files, which are one pickle without an archive, are refused.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm_module.errors import CheckpointFormatError, WeightReadError
from vllm_module.messages import describe_error, printable, shorten
from vllm_module.weights.header import DAMAGED, DTYPES, MAX_HEADER_BYTES, MAX_NAME, Entry
from vllm_module.weights.pickle_operations import operations
from vllm_module.weights.weight_file import WeightFile

TORCH_DTYPES = {getattr(torch, dtype.name): dtype for dtype in DTYPES.values()}
_SIGNATURE = b"PK\x03\x04"
_MOST_LIST = 1 << 24  # bytes of an archive's list of members, some 100 for each storage
_LOCAL_HEADER = 30  # bytes of a member's header before its name and extra field
# What tensors, parameters and ordered dicts are made of. torch's unpickler allows more, such as
# bytearray, which a hostile file could make as large as it likes.
_NEEDED = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor_v2|tensor_v3|parameter)"
    r"|torch\.storage \w+Storage|torch (\w*Storage|b?float\w+|u?int\d+|bool|complex\d+)"
)
SAVE_AGAIN = (
    "Load it with torch.load where you trust it, and save its tensors with "
    "safetensors.torch.save_file."
)


Refuse = Callable[[str], NoReturn]


class Bytes(Protocol):
    """The bytes of a file, or of a part of one."""

    @property
    def size(self) -> int:
        """How many there are."""

    def read_bytes(self, offset: int, length: int) -> bytes:
        """Read ``length`` bytes from ``offset`` on."""


class TorchFile(WeightFile):
    """The tensors of one file of ``torch.save``, a dict of names and tensors."""

    def _read_entries(self) -> None:
        places = members(self._bytes, self._refuse)
        self._pickle = next(place for name, place in places.items() if name.endswith("/data.pkl"))
        begin, end = self._pickle
        check_pickle(self._bytes.read_bytes(begin, end - begin), self._refuse)
        ends = dict(places.values())  # of storages, by where they begin
        self.entries = {}
        held = unpickled(self._bytes, self._refuse)
        if not isinstance(held, Mapping):
            self._refuse(
                f"it holds {printable(shorten(held))}: expected a dict of names and tensors"
            )
        for name, tensor in held.items():
            if not isinstance(name, str) or len(name) > MAX_NAME:
                self._refuse(
                    f"a tensor should be named by a string of at most {MAX_NAME} characters, got "
                    f"{shorten(name)}"
                )
            if not isinstance(tensor, torch.Tensor):
                self._refuse(
                    f"{shorten(name)} is {printable(shorten(tensor))}, and only tensors are "
                    f"read. {SAVE_AGAIN}"
                )
            size = self._bytes.size
            self.entries[name] = entry_of(name, tensor, ends, size, self._refuse)

    def _described(self) -> list[tuple[int, int]]:
        return [self._pickle]

    def _refuse(self, problem: str) -> NoReturn:
        raise CheckpointFormatError(f"{printable(self.path)}: {problem}")


def entry_of(
    name: str, tensor: torch.Tensor, ends: Mapping[int, int], size: int, refuse: Refuse
) -> Entry:
    """Return where the elements of a fake ``tensor`` lie, after checking that they do.

    ``ends`` has the ends of storages by where they begin, in a file of ``size`` bytes.
    """
    dtype = TORCH_DTYPES.get(tensor.dtype)
    plain = tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg()
    if dtype is None or not plain:
        refuse(
            f"tensor {shorten(name)} is {tensor.dtype}, {tensor.layout}: expected a dense one "
            "of a dtype that safetensors has too"
        )
    storage: Any = tensor.untyped_storage()
    first: Any = tensor.storage_offset()  # no symbol: the pickle has numbers
    strides = tuple(stride * dtype.itemsize for stride in tensor.stride())
    shape = tuple(tensor.shape)
    start: int = getattr(storage, "_checkpoint_offset", -1)
    # A tensor that reaches out of its storage has made the fake one as long as it needs.
    if start in ends and storage.nbytes() != ends[start] - start:
        refuse(
            f"the storage of tensor {shorten(name)} should have {storage.nbytes()} bytes, and its "
            f"member of the archive has {ends[start] - start}. {DAMAGED}"
        )
    if not tensor.numel():
        return Entry(dtype, shape, size, size)
    if start not in ends:
        refuse(f"tensor {shorten(name)} is in none of the archive's members. {DAMAGED}")
    reach = dtype.itemsize  # bytes that the dimensions of smaller strides cover
    for stride, count in sorted(zip(strides, shape, strict=True)):
        if count > 1 and stride < reach:
            refuse(
                f"elements of tensor {shorten(name)} share memory (shape {list(shape)}, "
                f"strides {list(tensor.stride())}): clone it and save it again"
            )
        reach += stride * (count - 1)
    begin: int = start + first * dtype.itemsize
    last = sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    assert begin + last + dtype.itemsize <= ends[start], "the fake storage was not made longer"
    nbytes = tensor.numel() * dtype.itemsize
    return Entry(dtype, shape, begin, begin + nbytes, strides)


class _Reader(io.RawIOBase):
    """A file for reading that is open already."""

    def __init__(self, file_bytes: Bytes, most: int | None = None) -> None:
        self._bytes, self._at = file_bytes, 0
        self._most = most  # bytes that are read at once, if they are bounded

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._bytes.size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        rest = max(0, self._bytes.size - self._at)
        length = rest if size is None or size < 0 else min(size, rest)
        if self._most is not None and length > self._most:
            raise ValueError(f"a list of {length} bytes, where at most {self._most} are accepted")
        data = self._bytes.read_bytes(self._at, length)
        self._at += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def members(file_bytes: Bytes, refuse: Refuse) -> dict[str, tuple[int, int]]:
    """Return from where to where the bytes of each member of the archive lie, by its name."""
    if file_bytes.read_bytes(0, min(4, file_bytes.size)) != _SIGNATURE:
        refuse(
            "it is no zip archive, as torch.save has written since torch 1.6. An older file is "
            f"one pickle, of which no part can be read alone. {SAVE_AGAIN}"
        )
    places: dict[str, tuple[int, int]] = {}
    try:
        with zipfile.ZipFile(_Reader(file_bytes, _MOST_LIST)) as archive:
            for member in archive.infolist():
                stored = member.compress_type == zipfile.ZIP_STORED and not member.flag_bits & 1
                if not stored or member.file_size != member.compress_size:
                    refuse(f"its member {shorten(member.filename)} is compressed or encrypted")
                header = file_bytes.read_bytes(member.header_offset, _LOCAL_HEADER)
                lengths = (
                    int.from_bytes(header[26:28], "little"),
                    int.from_bytes(header[28:], "little"),
                )
                begin = member.header_offset + _LOCAL_HEADER + sum(lengths)
                end = begin + member.file_size
                if header[:4] != _SIGNATURE or end > file_bytes.size:
                    refuse(
                        f"its member {shorten(member.filename)} is not where it should be. "
                        f"{DAMAGED}"
                    )
                if member.filename in places:
                    refuse(f"it has two members {shorten(member.filename)}. {DAMAGED}")
                places[member.filename] = begin, end
            order = next((name for name in places if name.endswith("/byteorder")), None)
            if order is not None and not _is_little(archive, order):
                refuse(f"its numbers are not little-endian. {SAVE_AGAIN}")
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError) as error:
        if isinstance(error, CheckpointFormatError):
            raise
        refuse(f"its zip archive is broken ({describe_error(error)}). {DAMAGED}")
    if any(name.endswith("/constants.pkl") for name in places):
        refuse("it is a TorchScript archive, which holds a program and not a dict of tensors")
    pickles = [name for name in places if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        refuse("its zip archive has no data.pkl, or several: torch.save did not write it")
    begin, end = places[pickles[0]]
    if end - begin > MAX_HEADER_BYTES:
        refuse(f"its pickle has {end - begin} bytes: expected at most {MAX_HEADER_BYTES}")
    return places


def _is_little(archive: zipfile.ZipFile, order: str) -> bool:
    expected = b"little"
    return archive.getinfo(order).file_size == len(expected) and archive.read(order) == expected


def check_pickle(data: bytes, refuse: Refuse) -> None:
    """Refuse a pickle that asks for anything but tensors, before it is read as one."""
    try:
        for operation, argument in operations(data, refuse):
            if operation == "GLOBAL" and not _NEEDED.fullmatch(str(argument)):
                asked = str(argument).replace(" ", ".")
                refuse(
                    f"its pickle asks for {shorten(asked)}, which is no tensor, and nothing of it "
                    f"was run. {SAVE_AGAIN}"
                )
            if operation == "STACK_GLOBAL":
                refuse(f"its pickle has {operation}, which torch.save does not write")
    except (CheckpointFormatError, WeightReadError, MemoryError):
        raise
    except Exception as error:  # pickletools raises several kinds for bytes that are no pickle
        refuse(f"its pickle is broken ({describe_error(error)}). {DAMAGED}")


def unpickled(file_bytes: Bytes, refuse: Refuse) -> Any:
    """Return what the file's pickle holds: fake tensors, which say where their storages lie."""
    try:
        with FakeTensorMode():
            reader: Any = _Reader(file_bytes)  # torch calls no more of a file than it has
            held = torch.load(reader, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # of the unpickler, the archive's reader, or a rebuilt tensor
        reason = describe_error(error).partition("\n")[0]
        refuse(f"torch.load refuses it, and nothing of it was run: {reason}. {SAVE_AGAIN}")
    return held
