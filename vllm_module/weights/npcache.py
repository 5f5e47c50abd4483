"""A cache of a ``torch.save`` checkpoint in which each tensor is a ``numpy.save`` file.

Layout, as vLLM and SGLang write it: a folder ``np`` inside of the checkpoint with
``weight_names.json``, a list of names, and a file of ``numpy.save`` under each of these names.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from vllm_module.base.messages import printable, shorten
from vllm_module.base.waiting import until
from vllm_module.errors import CheckpointFormatError
from vllm_module.weights.checkpoint import Checkpoint, format_of, open_checkpoint
from vllm_module.weights.folder_files import FolderFiles
from vllm_module.weights.npy_file import NpyFile, has_type, write_npy
from vllm_module.weights.regular_file import is_there, read_file, refusal
from vllm_module.weights.strict_json import parse_list

_FOLDER, _NAMES = "np", "weight_names.json"
# File with the fingerprint of the checkpoint that the cache was made from.
_MADE_FROM = ".made_from"
_MOST_BYTES = 255  # limit on the length of a file's name
_NO_FILE_NAME = (
    f"the tensor {{}} cannot be a file: expected a name of at most {_MOST_BYTES} printable bytes "
    "without /, \\ and :"
)
_AGAIN = "Remove the folder np, and load with load_format npcache again to make it anew."
_POLL = 0.05  # seconds
_UNFINISHED = ".np-"  # prefix of the folder's name while it is written
_ABANDONED = 600.0  # seconds after the last write by another host until its folder is removed
_OURS = f"{_UNFINISHED}{os.uname().nodename}"


def open_npcache(files: FolderFiles) -> Checkpoint:
    """Open the files in the folder ``np``; write them first if there are none.

    Processes that do so at the same time write them once. Raises ``CheckpointFormatError`` if they
    are damaged or were made from other files than the folder has now, if they cannot be written, or
    if numpy has no type for a tensor.
    """
    folder = files.path
    if not is_there(folder / _FOLDER / _NAMES):
        _make(folder)
    _check_origin(folder)
    cache = folder / _FOLDER
    with ExitStack() as opened:
        tensors = []
        for name in _names(cache):
            tensors.append(NpyFile(cache / name, folder))
            opened.callback(tensors[-1].close)
        checkpoint = Checkpoint(tuple(tensors), "npcache")
        opened.pop_all()
    return checkpoint


def _names(cache: Path) -> list[str]:
    """Read the tensors' names, and check that each can be a file's name."""
    path = cache / _NAMES
    where = printable(path)
    names: set[str] = set()
    for name in parse_list(read_file(path, cache.parent), where, _AGAIN):
        if not isinstance(name, str) or not _is_file_name(name):
            raise CheckpointFormatError(f"{where}: {_NO_FILE_NAME.format(shorten(name))}. {_AGAIN}")
        if name in names:
            raise CheckpointFormatError(f"{where} has the name {shorten(name)} twice. {_AGAIN}")
        names.add(name)
    if not names:
        raise CheckpointFormatError(f"{where} names no tensor. {_AGAIN}")
    return sorted(names)


def _is_file_name(name: str) -> bool:
    # \ separates folders on Windows, and : follows a drive.
    plain = name.isprintable() and not set(name) & set("/\\:")
    reserved = "", ".", "..", _NAMES, _MADE_FROM
    return plain and name not in reserved and len(os.fsencode(name)) <= _MOST_BYTES


def _check_origin(folder: Path) -> None:
    """Raise if the cache was made from other files than the folder has now.

    A cache that another program wrote has no fingerprint and is not checked.
    """
    record = folder / _FOLDER / _MADE_FROM
    if not is_there(record) or (now := _fingerprint(folder)) is None:
        return
    if read_file(record, folder).strip() != now.encode():
        raise CheckpointFormatError(
            f"{printable(folder / _FOLDER)} was made from other weights than those in "
            f"{printable(folder)} now. {_AGAIN}"
        )


def _fingerprint(folder: Path) -> str | None:
    """Return the fingerprint of the ``torch.save`` files, or ``None`` if there are none."""
    if format_of(folder, "pt") is None:
        return None
    with open_checkpoint(folder, "pt") as checkpoint:
        return checkpoint.fingerprint


def _make(folder: Path) -> None:
    """Write the cache to a temporary folder, and rename that when it is complete."""
    with open_checkpoint(folder, "pt") as checkpoint, _alone(folder) as alone:
        if is_there(folder / _FOLDER / _NAMES):  # another process made them meanwhile
            return
        if is_there(folder / _FOLDER):
            raise CheckpointFormatError(
                f"{printable(folder / _FOLDER)} has no {_NAMES}: it is unfinished. Wait for the "
                f"program that writes it, or else: {_AGAIN}"
            )
        for name, handle in checkpoint.items():
            if not _is_file_name(name):
                raise CheckpointFormatError(
                    f"{_NO_FILE_NAME.format(shorten(name))}. Take load_format pt."
                )
            if not has_type(handle.dtype):
                raise CheckpointFormatError(
                    f"numpy has no type for the {handle.dtype} of tensor {shorten(name)}, so "
                    f"npcache cannot hold it. Take load_format pt: it reads parts of "
                    f"{printable(folder)} too."
                )
        try:
            made = Path(tempfile.mkdtemp(prefix=f"{_OURS}-", dir=folder))
        except OSError as error:
            raise _unwritable(folder, error) from error
        try:
            if alone:
                _remove_leftovers(folder, made)
            _write(made, checkpoint)
            made.chmod(0o755)  # mkdtemp allows the owner only
            made.rename(folder / _FOLDER)
        except OSError as error:
            if is_there(folder / _FOLDER / _NAMES):  # a process on another host made them
                return
            raise _unwritable(folder, error) from error
        finally:
            shutil.rmtree(made, ignore_errors=True)


def _remove_leftovers(folder: Path, made: Path) -> None:
    """Remove folders that killed processes left beside ``made``, the new one.

    No process of this host is writing one, because it would hold the lock. Locks may not work
    between hosts, so other hosts' folders must be old.
    """
    now = made.stat().st_mtime  # time on the disk's clock
    for each in folder.glob(f"{_UNFINISHED}*"):
        with suppress(OSError):  # removed meanwhile, or owned by another user
            written = [path.lstat().st_mtime for path in (each, *each.iterdir())]
            ours = each.name.rpartition("-")[0] == _OURS
            if each != made and (ours or max(written) < now - _ABANDONED):
                shutil.rmtree(each)


def _write(made: Path, checkpoint: Checkpoint) -> None:
    for name, handle in checkpoint.items():
        with open(made / name, "xb") as file:  # some file systems treat w and W as one name
            write_npy(file, handle.read())
    (made / _MADE_FROM).write_text(checkpoint.fingerprint + "\n", encoding="utf-8")
    (made / _NAMES).write_text(json.dumps(list(checkpoint)), encoding="utf-8")


def _unwritable(folder: Path, error: OSError) -> CheckpointFormatError:
    words = str(refusal(folder / _FOLDER, error, "written"))
    return CheckpointFormatError(
        f"{words}. Make it where {printable(folder)} can be written, or take load_format pt."
    )


@contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Wait for the lock among processes of this host; yield whether such locks exist."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise refusal(folder, error, "opened") from error

    has_locks = True

    def locked() -> bool:
        nonlocal has_locks
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_POLL)
            return False
        except OSError:  # the first process to rename its folder wins
            has_locks = False
        return True

    try:
        until(locked)
        yield has_locks
    finally:
        os.close(descriptor)
