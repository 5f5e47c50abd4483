"""Opening a file of a checkpoint: nothing but a regular one, and nothing outside of the folder."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from vllm_module.errors import CheckpointFormatError
from vllm_module.messages import printable

MAX_JSON_BYTES = 100_000_000  # of an index or a configuration; the same bound as for headers

# Neither waits for a FIFO's writer, nor follows a link that was put there since the check.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY

# Where the cache of huggingface_hub keeps what several models share, from the cache's blobs/ on.
_SHARED_BLOB = re.compile(r"([0-9a-f]{2})/\1[0-9a-f]{62}")

_ADVICE = {
    errno.ELOOP: "it is a link to itself; download the file again",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "close other programs' files",
    errno.EACCES: "check its permissions",
    errno.EPERM: "check its permissions",
}


def open_regular(path: Path, folder: Path | None) -> int:
    """Open ``path`` for reading and return the file descriptor.

    With ``folder``, the checkpoint it belongs to, it may be a link only to a place inside of that
    folder, or to the blobs of the Hugging Face cache whose snapshot the folder is. Anything else,
    and anything that is not a regular file, is a CheckpointFormatError and is never opened.
    """
    try:
        target = Path(os.path.realpath(path, strict=True))
        if folder is not None and not _belongs(target, Path(os.path.realpath(folder))):
            raise CheckpointFormatError(
                f"{printable(path)} is a link to {printable(target)}, outside of the checkpoint's "
                "folder; copy the file into the folder if you trust it, else download it again"
            )
        # Before it is opened, because opening a device can do something, and again afterwards.
        if stat.S_ISREG(os.stat(target).st_mode):
            descriptor = os.open(target, _FLAGS)
            try:
                opened = os.fstat(descriptor)
                same = os.path.samestat(os.stat(target), opened)
                # A folder on the way may have become a link meanwhile.
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
        advice = _ADVICE.get(error.errno or 0, "check the disk that holds it")
        raise CheckpointFormatError(
            f"{printable(path)} cannot be opened: {error.strerror}; {advice}"
        ) from error
    except ValueError as error:
        if isinstance(error, CheckpointFormatError):
            raise
        # A NUL, or a surrogate that no file system encodes.
        raise CheckpointFormatError(f"{printable(path)} is no name of a file") from error
    raise CheckpointFormatError(
        f"{printable(path)} is not a file but a folder, device, socket or pipe; check the path, "
        "or download it"
    )


def read_file(path: Path, folder: Path | None) -> bytes:
    """Read a whole small file (JSON) of the checkpoint ``folder``, opened by the same rules.

    One of more than 100 MB, or one that cannot be read, is a CheckpointFormatError.
    """
    with open(open_regular(path, folder), "rb") as file:
        try:
            size = os.fstat(file.fileno()).st_size
            # One byte more than there should be, in case that it grows.
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
    return data


def _belongs(target: Path, folder: Path) -> bool:
    """Whether ``target`` is a file of the checkpoint in ``folder``; neither has links in it."""
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
