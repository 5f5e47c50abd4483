"""Folders that are removed however this process ends.

Most are temporary ones, for small files that a checkpoint lacks in Hugging Face's layout.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from vllm_module.base.messages import printable, show_written
from vllm_module.errors import CheckpointFormatError

# Files that are copied from beside the weights, if they exist.
TAKEN = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "generation_config.json",
)  # fmt: skip

_folders: dict[Path, int] = {}  # the id of the process that made each folder

# Name of a file with the reason why the folder has no tokenizer.
NO_TOKENIZER = "no_tokenizer.txt"


def write_folder(files: Mapping[str, bytes], what: str) -> Path:
    """Write ``files`` to a new temporary folder, which is removed when this process ends.

    Other processes that this one starts, such as ranks, find it there. ``what`` names the model in
    messages, also those of this folder. Raises ``CheckpointFormatError`` if it cannot be written.
    """
    folder = new_folder(what)
    for name, data in files.items():
        write_file(folder / name, data, what)
    return folder


def new_folder(what: str, owner: object = None) -> Path:
    """Make a folder as :func:`write_folder` does; with ``owner``, it is removed with that."""
    with _refusal(what):
        folder = Path(tempfile.mkdtemp(prefix="vllm-module-"))
    _folders[folder] = os.getpid()
    if owner is None:
        atexit.register(_remove, folder)
    else:
        weakref.finalize(owner, _remove, folder)
    show_written(folder, what)
    return folder


@contextmanager
def removed(folder: Path) -> Iterator[None]:
    """Remove ``folder`` at the end of the block, or by :func:`remove_all` inside of it."""
    _folders[folder] = os.getpid()
    try:
        yield
    finally:
        _remove(folder)


def remove_all() -> None:
    """Remove every such folder; call it before this process ends without cleanup."""
    for folder in list(_folders):
        _remove(folder)


def write_file(path: Path, data: bytes, what: str) -> None:
    """Write a file into such a folder, making its parent folder. Raises as the others do."""
    with _refusal(what):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)


@contextmanager
def _refusal(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointFormatError(
            f"the configuration of {what} cannot be written to {printable(tempfile.gettempdir())}: "
            f"{error.strerror}; free space, or name another folder in TMPDIR"
        ) from error


def _remove(folder: Path) -> None:
    show_written(folder, None)
    if _folders.pop(folder, None) == os.getpid():  # forks of the process leave the folder alone
        shutil.rmtree(folder, ignore_errors=True)
