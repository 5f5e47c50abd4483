"""Ranges of files of stores that are kept on disk, for later loads and other processes.

A folder for each URL has one sparse file for the version that was last opened: the chunks at their
places, and behind them a digest of each chunk that is there. There are no locks. A chunk whose
digest does not match, because its writer was killed or it was damaged, is one that is not there.
Processes that write a chunk at the same time write the same bytes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_module.base.messages import printable

if TYPE_CHECKING:
    from vllm_module.weights.stores.client import Version

_log = logging.getLogger(__name__)

# Fetched and checked as a whole. At most two chunks more than asked for are fetched for a range,
# which are few beside spans.REQUEST_BYTES.
CHUNK_BYTES = 64 << 10
_DIGEST_BYTES = 16
_NONE = bytes(_DIGEST_BYTES)  # a chunk that is not there: what a sparse file has
_FOLDER = "vllm-module-ranges"

Fetch = Callable[[int, memoryview], None]


class StoreCache:
    """The folder of what is kept; each file of a store has a folder in it.

    It lets in nobody but its user, because whoever can write to it can change weights. Nothing is
    kept where it cannot be made or belongs to another user, and the log says so.

    Args:
        folder: where it is made.
        origin: what tells stores apart whose URLs are the same, such as an endpoint.

    """

    def __init__(self, folder: Path, origin: str = "") -> None:
        self._folder, self._origin = folder.expanduser() / _FOLDER, origin
        self._warned = False

    def knows(self, url: str) -> bool:
        """Whether something of the file at ``url`` may be kept."""
        return os.path.isdir(self._of(url))

    def open(self, url: str, version: Version) -> CachedFile | None:
        """Return what is kept of this version; ``None`` where nothing can be.

        Other versions are removed. Only a strong ETag proves that a file is the same: two versions
        may have one time of change, or one weak ETag.
        """
        if not version.is_proof:
            return None
        folder = self._of(url)
        name = _hashed(repr((version.size, version.tag)))
        try:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            for each in (self._folder, folder):
                with suppress(FileExistsError):
                    each.mkdir(mode=0o700)
                _check_private(each)
            for other in folder.iterdir():
                if other.name != name:
                    other.unlink(missing_ok=True)
            return CachedFile(folder / name, version.size, self._warn)
        except OSError as error:
            self._warn(error)
            return None

    def _of(self, url: str) -> Path:
        return self._folder / _hashed(repr((self._origin, url)))

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "%s: what is fetched is not kept there: %s",
                printable(self._folder),
                error.strerror or error,
            )


class CachedFile:
    """What is kept of one version of a file, which many threads and processes may use at once."""

    def __init__(self, path: Path, size: int, warn: Callable[[OSError], None]) -> None:
        self._size, self._warn = size, warn
        self._keeps = True
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600)
        # With the last thread that reads: its number may become another file's.
        weakref.finalize(self, os.close, self._file)
        self._digests = -(-size // CHUNK_BYTES) * CHUNK_BYTES
        nbytes = self._digests + self._digests // CHUNK_BYTES * _DIGEST_BYTES
        if os.fstat(self._file).st_size != nbytes:
            os.ftruncate(self._file, nbytes)

    def read(self, begin: int, view: memoryview, fetch: Fetch) -> None:
        """Fill ``view`` with the file's bytes from ``begin`` on.

        ``fetch`` is called with a place and memory for each run of chunks that is not there.
        """
        end = begin + len(view)
        low = begin // CHUNK_BYTES * CHUNK_BYTES
        high = min(-(-end // CHUNK_BYTES) * CHUNK_BYTES, self._size)
        whole = view if (low, high) == (begin, end) else memoryview(bytearray(high - low))
        absent = low  # where a run of chunks that are not there begins
        for at in range(low, high, CHUNK_BYTES):
            stop = min(at + CHUNK_BYTES, high)
            if self._load(at, whole[at - low : stop - low]):
                self._fetch(absent, whole[absent - low : at - low], fetch)
                absent = stop
        self._fetch(absent, whole[absent - low :], fetch)
        if whole is not view:
            view[:] = whole[begin - low : end - low]

    def keep(self, begin: int, data: memoryview | bytes) -> None:
        """Keep the whole chunks of ``data``, the file's bytes from the chunk's ``begin`` on."""
        for at in range(begin, begin + len(data), CHUNK_BYTES):
            stop = min(at + CHUNK_BYTES, self._size)
            chunk = data[at - begin : stop - begin]
            if len(chunk) < stop - at or not self._keeps:
                return
            try:
                # The digest last: no other process is to find it while the chunk is not there.
                _write(self._file, chunk, at)
                _write(self._file, _digest(at, chunk), self._place(at))
            except OSError as error:  # such as a full disk: what follows is fetched and not kept
                self._keeps = False
                self._warn(error)

    def _fetch(self, begin: int, view: memoryview, fetch: Fetch) -> None:
        if view:
            fetch(begin, view)
            self.keep(begin, view)

    def _load(self, at: int, chunk: memoryview) -> bool:
        """Read the chunk at ``at``; return whether it is there, and what was written."""
        try:
            digest = os.pread(self._file, _DIGEST_BYTES, self._place(at))
            if digest == _NONE or os.preadv(self._file, [chunk], at) != len(chunk):
                return False
        except OSError:  # of a disk, which is then not asked for more than this chunk
            return False
        return digest == _digest(at, chunk)

    def _place(self, at: int) -> int:
        return self._digests + at // CHUNK_BYTES * _DIGEST_BYTES


def _check_private(folder: Path) -> None:
    """Raise an OSError unless nobody but this user can enter ``folder``."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{printable(folder.name)} is not a folder")
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError("it belongs to another user, or others may enter it (expected 0700)")


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _digest(at: int, chunk: memoryview | bytes) -> bytes:
    key = at.to_bytes(8, "little")  # a chunk at another chunk's place is not that chunk
    return hashlib.blake2b(chunk, digest_size=_DIGEST_BYTES, key=key).digest()


def _write(file: int, data: memoryview | bytes, at: int) -> None:
    rest = memoryview(data)
    while rest:
        count = os.pwrite(file, rest, at)
        rest, at = rest[count:], at + count
