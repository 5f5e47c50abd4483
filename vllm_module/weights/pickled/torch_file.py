"""Reading ``torch.save`` files: zip archives of a pickle and the bytes of each storage.

Layout: torch/serialization.py. The pickle is parsed without running it, and one with anything but
tensors is refused. It has each tensor's storage and offset in it; the archive has the offset of the
storage's bytes. Older files, which are one pickle without an archive, are refused.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

from vllm_module.base.messages import describe_error, printable, shorten
from vllm_module.errors import WeightReadError
from vllm_module.weights.header import DAMAGED, MAX_HEADER_BYTES, MAX_NAME
from vllm_module.weights.pickled.pickle_records import BrokenPickleError, PickleError
from vllm_module.weights.pickled.saved_tensors import SavedTensor, TensorReader
from vllm_module.weights.weight_file import WeightFile

_SIGNATURE = b"PK\x03\x04"
_MOST_LIST = 1 << 24  # limit in bytes on an archive's list of members, about 100 for each storage
_LOCAL_HEADER = 30  # bytes of a member's header before its name and extra field
_VERSIONS = range(1, 11)  # versions of torch.save's archives that torch 2.13 reads
_ENCRYPTED = 1 << 0 | 1 << 6 | 1 << 13  # flags of a member
_LONGEST_NUMBER = 20  # digits
SAVE_AGAIN = (
    "Load it with torch.load where you trust it, and save its tensors with "
    "safetensors.torch.save_file."
)


Refuse = Callable[[str], NoReturn]


class Bytes(Protocol):
    """The bytes of a file, or of a part of one."""

    @property
    def size(self) -> int:
        """Number of bytes."""

    def read_bytes(self, offset: int, length: int) -> bytes:
        """Return ``length`` bytes from ``offset`` on."""

    def read_ahead(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Announce the offsets and lengths of coming ``read_bytes`` calls."""


class TorchFile(WeightFile):
    """The tensors of one ``torch.save`` file, which holds a dict of names and tensors."""

    def _read_entries(self) -> None:
        self.entries = {}
        held, self._pickle = unpickled(self._bytes, self._refuse)
        if not isinstance(held, Mapping):
            self._refuse(f"it holds {_described(held)}: expected a dict of names and tensors")
        for name, tensor in held.items():
            if not isinstance(name, str) or len(name) > MAX_NAME:
                self._refuse(
                    f"a tensor should be named by a string of at most {MAX_NAME} characters, got "
                    f"{shorten(name)}"
                )
            if not isinstance(tensor, SavedTensor):
                self._refuse(
                    f"{shorten(name)} is {_described(tensor)}, and only tensors are read. "
                    f"{SAVE_AGAIN}"
                )
            if tensor.entry is None:
                self._refuse(f"tensor {shorten(name)}: {tensor.problem}")
            self.entries[name] = tensor.entry

    def _described(self) -> list[tuple[int, int]]:
        return [self._pickle]


def _described(value: object) -> str:
    """Return a description of a value that is no tensor, without a container's contents."""
    if value is None or isinstance(value, int | float | str):
        return printable(shorten(value))
    return "a dict" if isinstance(value, Mapping) else f"a {type(value).__name__}"


def unpickled(file_bytes: Bytes, refuse: Refuse) -> tuple[Any, tuple[int, int]]:
    """Return the object in a ``torch.save`` file, and the begin and end of its pickle.

    Tensors become :class:`SavedTensor`; each storage must be a member of the archive.
    """
    places = _members(file_bytes, refuse)
    begin, end = places["data.pkl"]
    data = file_bytes.read_bytes(begin, end - begin)
    try:
        held = TensorReader(places, file_bytes.size).read(data)
    except BrokenPickleError as error:
        refuse(str(error))
    except PickleError as error:
        refuse(f"{str(error).removesuffix('.')}. {SAVE_AGAIN}")
    return held, (begin, end)


class _Reader(io.RawIOBase):
    """A read-only file object over ``Bytes``."""

    def __init__(self, file_bytes: Bytes, most: int | None = None) -> None:
        self._bytes, self._at = file_bytes, 0
        self._most = most  # limit on bytes read at once, or None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at: int = offset + (0, self._at, self._bytes.size)[whence]
        if at < 0:
            raise ValueError("it is shorter than the end of an archive")
        self._at = at
        return at

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


def _members(file_bytes: Bytes, refuse: Refuse) -> dict[str, tuple[int, int]]:
    """Return the begin and end of each member of the archive, by its name in the one folder."""
    first = file_bytes.read_bytes(0, min(8, file_bytes.size))
    if first == b"version ":
        refuse("it is a Git LFS pointer, not the file itself; run `git lfs pull`")
    if first[:4] != _SIGNATURE:
        refuse(
            "it is no zip archive, as torch.save has written since torch 1.6. An older file is "
            f"one pickle, of which no part can be read alone. {SAVE_AGAIN}"
        )
    places: dict[str, tuple[int, int]] = {}
    folders = set()
    try:
        with zipfile.ZipFile(_Reader(file_bytes, _MOST_LIST)) as archive:
            listed = archive.infolist()
    except WeightReadError:  # of a disk or a network
        raise
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError) as error:
        refuse(f"its zip archive is broken ({describe_error(error)}). {DAMAGED}")
    headers = [(member.header_offset, _LOCAL_HEADER) for member in listed]
    file_bytes.read_ahead([each for each in headers if 0 <= sum(each) <= file_bytes.size])
    for member in listed:
        shown = shorten(member.filename)
        stored = member.compress_type == zipfile.ZIP_STORED and not member.flag_bits & _ENCRYPTED
        if not stored or member.file_size != member.compress_size:
            refuse(f"its member {shown} is compressed or encrypted")
        if not member.filename.isascii() or member.volume:
            refuse(f"its member {shown} has a name or a disk that torch does not write. {DAMAGED}")
        begin = member.header_offset + _LOCAL_HEADER
        if not _LOCAL_HEADER <= begin <= file_bytes.size:
            refuse(f"its member {shown} is not where it should be. {DAMAGED}")
        header = file_bytes.read_bytes(member.header_offset, _LOCAL_HEADER)
        begin += int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:], "little")
        end = begin + member.file_size
        if header[:4] != _SIGNATURE or end > file_bytes.size:
            refuse(f"its member {shown} is not where it should be. {DAMAGED}")
        folder, _, name = member.filename.partition("/")
        folders.add(folder)
        if name in places:
            refuse(f"it has two members {shown}. {DAMAGED}")
        places[name] = begin, end
    if "constants.pkl" in places:
        refuse("it is a TorchScript archive, which holds a program and not a dict of tensors")
    if "data.pkl" not in places or len(folders) != 1:
        refuse("its zip archive has no data.pkl, or several: torch.save did not write it")
    begin, end = places["data.pkl"]
    if end - begin > MAX_HEADER_BYTES:
        refuse(f"its pickle has {end - begin} bytes: expected at most {MAX_HEADER_BYTES}")

    def text(name: str) -> str:
        begin, end = places[name]
        return file_bytes.read_bytes(begin, min(end - begin, _LONGEST_NUMBER)).decode("latin-1")

    if "byteorder" in places and text("byteorder") != "little":
        refuse(f"its numbers are not little-endian. {SAVE_AGAIN}")
    version = text("version").strip() if "version" in places else ""
    if not version.isdecimal() or int(version) not in _VERSIONS:
        refuse(
            f"its version is {shorten(version)}: expected one of {_VERSIONS[0]} to {_VERSIONS[-1]}."
            f" {DAMAGED}"
        )
    return places
