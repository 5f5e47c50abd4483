"""Opening a checkpoint's file safely, and a lease that delays writers while it is read.

Only a regular file inside the checkpoint's folder is opened.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vllm_module.base.messages import printable
from vllm_module.errors import CheckpointFormatError

MAX_JSON_BYTES = 100_000_000  # limit for an index or a configuration, equal to that for headers

# O_NONBLOCK: do not wait for the writer of a FIFO. O_NOFOLLOW: refuse a link that replaced the file
# after the check.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY

# The path below the cache's blobs/ where huggingface_hub keeps a file that several models share.
_SHARED_BLOB = re.compile(r"([0-9a-f]{2})/\1[0-9a-f]{62}")

_LFS_POINTER = b"version https://git-lfs.github.com/"
_ADVICE = {
    errno.ELOOP: "it is a link to itself; download the file again",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "close other programs' files",
    errno.EACCES: "check its permissions",
    errno.EPERM: "check its permissions",
}


def open_regular(path: Path, folder: Path | None) -> int:
    """Open ``path`` for reading and return the file descriptor.

    ``folder`` is the checkpoint that the file belongs to. A link may lead only to a place inside it
    or, if it is a snapshot in the Hugging Face cache, to the cache's blobs. Without ``folder``, a
    link may lead anywhere. Raises CheckpointFormatError for links that lead elsewhere, and for
    anything but a regular file, which is never opened.
    """
    try:
        target = Path(os.path.realpath(path, strict=True))
        if folder is not None and not _belongs(target, Path(os.path.realpath(folder))):
            raise CheckpointFormatError(
                f"{printable(path)} is a link to {printable(target)}, outside of the checkpoint's "
                "folder; copy the file into the folder if you trust it, else download it again"
            )
        # Checked before opening, because opening a device can have effects, and again afterwards.
        if stat.S_ISREG(os.stat(target).st_mode):
            descriptor = os.open(target, _FLAGS)
            try:
                opened = os.fstat(descriptor)
                same = os.path.samestat(os.stat(target), opened)
                # A folder on the path may have been replaced by a link since.
                if not same or Path(os.path.realpath(target, strict=True)) != target:
                    raise CheckpointFormatError(
                        f"{printable(path)} was replaced while it was opened; load again when "
                        "nobody writes to it"
                    )
                if stat.S_ISREG(opened.st_mode):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
    except (FileNotFoundError, NotADirectoryError) as error:
        what = "a link that leads nowhere" if os.path.islink(path) else "not a file"
        raise CheckpointFormatError(
            f"{printable(path)} is {what}; check the path, or download it"
        ) from error
    except OSError as error:
        raise refusal(path, error, "opened") from error
    except ValueError as error:
        if isinstance(error, CheckpointFormatError):
            raise
        # A NUL, or a surrogate that no file system encodes.
        raise CheckpointFormatError(f"{printable(path)} is not a valid file name") from error
    raise CheckpointFormatError(
        f"{printable(path)} is not a file but a folder, device, socket or pipe; check the path, "
        "or download it"
    )


def open_again(descriptor: int) -> int:
    """Open the file of ``descriptor`` once more, for reads without the kernel's read-ahead.

    Raises OSError if that is not possible, such as on a system without /proc/self/fd, or if more
    than half of the descriptors that this process may have are in use: each mapping of a file takes
    one as well.
    """
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2 * again:
        os.close(again)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # the file system takes no advice
            os.posix_fadvise(again, 0, 0, os.POSIX_FADV_RANDOM)
    return again


def is_there(path: Path, *, follow_links: bool = False) -> bool:
    """Return whether a file, folder or link exists; with ``follow_links``, whether its target does.

    Raises CheckpointFormatError where that cannot be found out, such as in a folder without
    permission.
    """
    try:
        os.stat(path, follow_symlinks=follow_links)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            return False
        raise refusal(path, error, "looked up") from error
    except ValueError:  # a NUL, or a surrogate that no file system encodes
        return False
    return True


def refusal(path: Path, error: OSError, action: str) -> CheckpointFormatError:
    """Return the error for a path that cannot be opened, listed or looked up."""
    advice = _ADVICE.get(error.errno or 0, "check the disk that holds it")
    return CheckpointFormatError(
        f"{printable(path)} cannot be {action}: {error.strerror}; {advice}"
    )


def read_file(path: Path, folder: Path | None) -> bytes:
    """Return the contents of a small file (JSON, a template), opened as ``open_regular`` does.

    A file of more than 100 MB, one that cannot be read, or a Git LFS pointer in its place is a
    CheckpointFormatError.
    """
    with open(open_regular(path, folder), "rb") as file:
        try:
            size = os.fstat(file.fileno()).st_size
            # One byte more than is accepted, to see whether the file grew.
            data = file.read(MAX_JSON_BYTES + 1) if size <= MAX_JSON_BYTES else b""
        except OSError as error:
            raise CheckpointFormatError(
                f"{printable(path)} cannot be read: {error.strerror}; check the disk that holds it"
            ) from error
    if max(size, len(data)) > MAX_JSON_BYTES:
        raise CheckpointFormatError(
            f"{printable(path)} has {max(size, len(data))} bytes, where at most {MAX_JSON_BYTES} "
            "are accepted; download it again"
        )
    if data.startswith(_LFS_POINTER):
        raise CheckpointFormatError(
            f"{printable(path)} is a Git LFS pointer, not the file itself; run `git lfs pull`"
        )
    return data


def _belongs(target: Path, folder: Path) -> bool:
    """Return whether ``target`` is a file of the checkpoint ``folder``; neither path has links."""
    if target.is_relative_to(folder):
        return True
    if folder.parent.name != "snapshots":
        return False
    repository = folder.parent.parent
    if target.is_relative_to(repository / "blobs"):
        return True
    shared = repository.parent / "blobs"
    return (
        repository.name.startswith("models--")
        and target.is_relative_to(shared)
        and _SHARED_BLOB.fullmatch(target.relative_to(shared).as_posix()) is not None
    )


class ReadLease:
    """A lease on an open file: programs that write to it wait while a mapping of it is read.

    Without it, another program may truncate the file, and reading an OS page of the mapping that is
    gone raises SIGBUS, which ends the process. The lease is Linux's (``fcntl(2)``). It is refused
    for a file of another user, on most network file systems, and while the file is open for
    writing. When a writer begins to wait, the kernel sends SIGURG to this process.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        # Number of threads: the lease belongs to the open file and not to a thread.
        self._holders = 0
        self._closed = False
        self._leased = -1  # the lease's own descriptor while it is held, else -1

    @contextmanager
    def hold(self) -> Iterator[bool]:
        """Hold the lease for a few milliseconds; yield whether it was granted."""
        if sys.platform != "linux":
            yield False
            return
        with self._lock:
            held = self._may_be_shared() if self._holders else not self._closed and self._take()
            self._holders += held
        try:
            yield held
        finally:
            with self._lock:
                self._holders -= held
                if held and not self._holders:
                    self._release()

    def close(self) -> None:
        """Grant no lease any more; call this before the descriptor is closed."""
        with self._lock:
            self._closed = True

    def _take(self) -> bool:
        try:
            # A copy of the descriptor: the original may be closed meanwhile and its number reused.
            self._leased = os.dup(self._descriptor)
        except OSError:
            return False
        try:
            # The kernel's default signal for a waiting writer is SIGIO, which ends the process;
            # SIGURG is ignored. Releasing the lease resets the choice.
            fcntl.fcntl(self._leased, fcntl.F_SETSIG, signal.SIGURG)
            if fcntl.fcntl(self._leased, fcntl.F_GETSIG) == signal.SIGURG:
                fcntl.fcntl(self._leased, fcntl.F_SETLEASE, fcntl.F_RDLCK)
                return True
        except OSError:
            pass
        os.close(self._leased)
        return False

    def _release(self) -> None:
        with suppress(OSError):  # the kernel broke the lease, or the file was deleted on its server
            fcntl.fcntl(self._leased, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        with suppress(OSError):
            os.close(self._leased)

    def _may_be_shared(self) -> bool:
        """Return whether no writer waits; another holder would prolong its wait."""
        with suppress(OSError):  # the file was deleted on its server
            return fcntl.fcntl(self._leased, fcntl.F_GETLEASE) == fcntl.F_RDLCK
        return False
