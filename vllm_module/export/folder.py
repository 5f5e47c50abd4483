"""Writing a folder whole or not at all, with small files copied from another one."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from vllm_module.base.messages import printable
from vllm_module.weights import read_file
from vllm_module.weights.digests import DIGESTS
from vllm_module.weights.hub import CODE, POOLING, SMALL_FILES, TEMPLATES
from vllm_module.weights.written_folder import removed

# Files that are written anew, or would be wrong.
_OF_THE_WEIGHTS = ("config.json", "sharded_state.json", DIGESTS, "*.index.json")


class FolderExistsError(ValueError, FileExistsError):
    """The folder to write exists already, or something else is in its place."""


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder beside ``out``, which is renamed to ``out`` if the block succeeds.

    If the block fails, or a signal ends the command, the temporary folder is removed. Raises
    ``FolderExistsError`` if ``out`` exists and is no empty folder, before the block or after it, or
    is below what is no folder.
    """
    demand_free(out)
    out = Path(os.path.abspath(out))
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    with removed(temporary):  # after the rename there is nothing to remove
        yield temporary
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o777 & ~mask)  # mkdtemp allows the owner only
        try:
            temporary.rename(out)  # replaces only an empty folder
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise FolderExistsError(
                    f"{printable(out)} was written by another process meanwhile, and is no empty "
                    "folder any more: name another one, or remove it and start again"
                ) from error
            raise


def demand_free(out: Path) -> None:
    """Raise ``FolderExistsError`` if ``out`` is no empty folder, or below what is no folder.

    An empty folder that a disk is mounted at is refused, too.
    """
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise FolderExistsError(
            f"{printable(out)} exists and is no empty folder: name another one, or remove it first"
        )
    if out.exists() and os.path.ismount(out):  # nothing can be renamed to it
        raise FolderExistsError(
            f"{printable(out)} is where a disk or a volume is mounted: name a folder in it"
        )
    above = next(each for each in Path(os.path.abspath(out)).parents if os.path.lexists(each))
    if not above.is_dir():
        raise FolderExistsError(
            f"{printable(out)} cannot be made, because {printable(above)} is no folder: name "
            "another one"
        )


def copy_small_files(source: Path, target: Path) -> None:
    """Copy the files of tokenizer, generation and code, without the weights."""
    names = [path.name for path in source.iterdir() if not path.is_dir()]
    wanted = [
        name
        for name in sorted(names)
        if any(fnmatch(name, pattern) for pattern in (*SMALL_FILES, CODE))
        and not any(fnmatch(name, pattern) for pattern in _OF_THE_WEIGHTS)
    ]
    below = [path.relative_to(source).as_posix() for path in sorted(source.glob(TEMPLATES))]
    for name in [*wanted, *below, *([POOLING] if (source / POOLING).exists() else [])]:
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_bytes(read_file(source / name, source))


def write_json(path: Path, entries: Mapping[str, Any]) -> None:
    """Write a JSON object, indented for people."""
    path.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
