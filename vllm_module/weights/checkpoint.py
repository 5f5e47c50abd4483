"""A checkpoint as a mapping of names to handles, and opening one from a folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_module.base.garbage import paused_gc
from vllm_module.base.messages import printable, printable_name, shorten
from vllm_module.errors import CheckpointFormatError
from vllm_module.weights.file_bytes import FileBytes
from vllm_module.weights.formats import FORMATS, UNSUPPORTED, Files, Unit, formats_of, imported
from vllm_module.weights.header import Entry
from vllm_module.weights.index import DAMAGED, check_against_index, read_index
from vllm_module.weights.regular_file import is_there, read_file, refusal
from vllm_module.weights.weight_file import WeightFile

if TYPE_CHECKING:
    from vllm_module.weights.handle import FileHandle


class Checkpoint(Mapping[str, "FileHandle"]):
    """The tensors of one or more files by name, as handles that are not read yet.

    A tensor that is in two files is a CheckpointFormatError. The files are closed when no handle
    is left, or earlier by ``close`` or at the end of a ``with`` block.

    Attributes:
        load_format: the files' format, as ``LoadConfig`` names it.
        config: a function that returns the entries of ``config.json``, for formats whose folders
            lack that file. It raises the errors of ``find_source``.
        stored_name: a function from a Hugging Face name to the name in the file, for formats that
            rename tensors; it returns None for a name that the format lacks.

    """

    def __init__(self, files: tuple[WeightFile, ...], load_format: str) -> None:
        self._files = files
        self.load_format = load_format
        self.config: Callable[[], dict[str, Any]] | None = None
        self.stored_name: Callable[[str], str | None] | None = None
        self._owner: dict[str, WeightFile] = {}
        for file in files:
            for name in self._owner.keys() & file.entries.keys():
                if "DCP_SHARDING_INFO" in getattr(file, "metadata", ()):
                    raise CheckpointFormatError(
                        f"{printable(file.path)}: a trainer's rank wrote its part of "
                        f"{shorten(name)} and others (HuggingFaceStorageWriter with "
                        "save_distributed=True): save with enable_consolidation=True, or put the "
                        "parts together with consolidate_safetensors_files of "
                        "torch.distributed.checkpoint._consolidate_hf_safetensors"
                    )
                raise CheckpointFormatError(
                    f"{printable(file.path)}: tensor {shorten(name)} is in "
                    f"{printable(self._owner[name].path)} too; keep one of the two files, or add "
                    "an index that names the right ones"
                )
            self._owner.update(dict.fromkeys(file.entries, file))

    @property
    def files(self) -> tuple[Path, ...]:
        """The paths of the files, sorted by name."""
        return tuple(file.path for file in self._files)

    @property
    def metadata(self) -> tuple[Mapping[str, str], ...]:
        """The free-form strings of each file, of a format that has some."""
        return tuple(getattr(file, "metadata", {}) for file in self._files)

    def headers(self) -> Iterator[tuple[str, Path, Entry]]:
        """Yield each tensor's name, its file, and its entry in the file's header."""
        for name, file in self._owner.items():
            yield name, file.path, file.entries[name]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(file.nbytes for file in self._files)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read so far."""
        return sum(file.bytes_read for file in self._files)

    @property
    def fingerprint(self) -> str:
        """A hex SHA-256 by which two hosts compare the checkpoints they opened.

        It covers each file's name, size and whole header, and 64 bytes at 16 evenly spaced places
        of its data. It does not cover the folder's path, the values between those places, the
        index or config.json. The bytes it reads are not counted in ``bytes_read``. A file that
        changed or was closed is a WeightReadError.
        """
        digest = hashlib.sha256()
        for file in self._files:
            digest.update(file.fingerprint())
        return digest.hexdigest()

    def close(self) -> None:
        """Close the files; their handles can no longer be read."""
        for file in self._files:
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> FileHandle:
        return self._owner[name][name]

    def __contains__(self, name: object) -> bool:
        return name in self._owner  # Mapping's own __contains__ makes a handle

    def __iter__(self) -> Iterator[str]:
        return iter(self._owner)

    def __len__(self) -> int:
        return len(self._owner)


class LocalFiles:
    """The :class:`FolderFiles` of a folder on this machine; for one file, of its folder."""

    def __init__(self, path: Path) -> None:
        is_folder = os.path.isdir(path)
        self.path = path if is_folder else path.parent
        self.named = None if is_folder else path.name
        self._names: list[str] | None = None

    def names(self) -> list[str]:
        """List the files in order."""
        if self._names is None:
            self._names = [path.name for path in _listed(self.path)]
        return self._names

    def has(self, name: str) -> bool:
        """Return whether a file of this name exists."""
        return is_there(self.path / name)

    def read(self, name: str) -> bytes:
        """Return the contents of a small file."""
        return read_file(self.path / name, self.path)

    def open(self, name: str) -> FileBytes:
        """Open a file of weights."""
        # The user chose this path, so a link may lead anywhere.
        return FileBytes(self.path / name, self.path if self.named is None else None)

    def close(self) -> None:
        """Do nothing: each file is closed by its own ``close``."""

    def checkpoint(self, files: Sequence[WeightFile], load_format: str) -> Checkpoint:
        """Return a checkpoint of ``files``, which were opened through this object."""
        return Checkpoint(tuple(files), load_format)


@paused_gc()
def open_checkpoint(folder: str | Path, load_format: str = "auto") -> Checkpoint:
    """Open a checkpoint in Hugging Face's layout and check the headers of its files.

    ``folder`` is a folder or one file. In a folder, the files that an index names are opened
    (``model.safetensors.index.json``, ``pytorch_model.bin.index.json``); without an index, or with
    one whose files are all gone, ``model.safetensors`` or ``pytorch_model.bin``; without that every
    file of the format but those of Mistral's second layout (``consolidated*``) and of a trainer's
    state. No tensor is read. A file that is missing, damaged or does not match the index is a
    CheckpointFormatError.

    Args:
        folder: the folder or file.
        load_format: as in ``LoadConfig``. ``"auto"`` is the first format of files that the folder
            has. ``"dummy"`` has no files and is a ``ValueError``, as is an unknown format.

    """
    path = Path(os.path.expanduser(folder))
    formats = formats_of(load_format)
    name = format_of(path, load_format)
    if name is None:
        raise _nothing_to_open(path, load_format, formats)
    each = FORMATS[name]
    if isinstance(each, Unit):
        opened: Checkpoint = imported(each.opener)(LocalFiles(path))
        return opened
    if not os.path.isdir(path):
        return _open_files(name, each, [path], None)  # named by the user: a link to anywhere
    if each.index is not None and is_there(path / each.index):
        names_in = read_index(path / each.index, each.suffixes)
        if not each.is_left_over(names_in, LocalFiles(path).has):
            paths = [path / file for file in sorted(names_in)]
            return _open_files(name, each, paths, path, names_in)
    whole = each.whole is not None and is_there(path / each.whole)
    paths = [path / str(each.whole)] if whole else each.files(_listed(path))
    return _open_files(name, each, paths, path)


def format_of(path: Path, load_format: str = "auto") -> str | None:
    """Return the format that ``open_checkpoint`` would open; ``None`` if there are no files of any.

    ``path`` is a folder or one file. Raises ``ValueError`` as ``open_checkpoint`` does.
    """
    formats = formats_of(load_format)
    if not os.path.isdir(path):
        return next((name for name in formats if path.suffix in FORMATS[name].suffixes), None)
    folder = LocalFiles(path)
    for name in formats:
        each = FORMATS[name]
        makes = len(formats) == 1 and isinstance(each, Unit) and each.made_from is not None
        if makes or each.is_in(folder):
            return name
    return None


def _nothing_to_open(path: Path, load_format: str, formats: list[str]) -> CheckpointFormatError:
    """Return the error for a path that has files of none of ``formats``."""
    where = printable(path)
    if not os.path.isdir(path):
        if not is_there(path, follow_links=True):
            return CheckpointFormatError(f"{where} does not exist; check the path")
        suffixes = [suffix for name in formats for suffix in FORMATS[name].suffixes]
        if not suffixes:
            return CheckpointFormatError(
                f"{where} is a file, and {load_format} is a format of folders: pass one"
            )
        return CheckpointFormatError(
            f"{where} is not a {' or '.join(suffixes)} file, the formats that are read; convert it"
        )
    if (other := format_of(path)) is not None:
        return CheckpointFormatError(
            f"{where} has no weights of load_format {load_format!r}, but of {other!r}: ask for "
            "that, or for 'auto'"
        )
    present = _listed(path)
    unsupported = [each.name for each in present if each.suffix in UNSUPPORTED]
    advice = (
        f"{printable(unsupported[0])} is in a format that is not supported; convert it to "
        "safetensors"
        if unsupported
        else "Check the path, or download the checkpoint again"
    )
    wanted = " or ".join(pattern for name in formats for pattern in FORMATS[name].patterns)
    names = ", ".join(printable(each.name) for each in present[:20]) or "nothing"
    more = f" and {len(present) - 20} more" if len(present) > 20 else ""
    return CheckpointFormatError(
        f"{where} holds no {wanted} file; there is {names}{more}. {advice}"
    )


def _open_files(
    name: str,
    format_: Files,
    paths: list[Path],
    folder: Path | None,
    names_in: dict[str, set[str]] | None = None,
) -> Checkpoint:
    """Open files of the format ``name``, and compare them with an index if there is one."""
    files: list[WeightFile] = []
    with ExitStack() as opened:
        for path in paths:
            if names_in is not None and not is_there(path):
                raise CheckpointFormatError(
                    f"{printable(path.parent)}/{format_.index} names {printable_name(path.name)}, "
                    f"which is not there. {DAMAGED}"
                )
            files.append(imported(format_.opener)(path, folder))
            opened.callback(files[-1].close)
        if folder is not None and format_.index is not None and names_in is not None:
            for file in files:
                check_against_index(folder / format_.index, names_in, file)
        checkpoint = Checkpoint(tuple(files), name)
        opened.pop_all()
    return checkpoint


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise refusal(folder, error, "listed") from error
