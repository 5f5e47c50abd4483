from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from vllm_module.errors import CheckpointFormatError
from vllm_module.garbage import paused_gc
from vllm_module.messages import printable, printable_name, shorten
from vllm_module.weights.header import Entry
from vllm_module.weights.regular_file import is_there, read_file, refusal
from vllm_module.weights.safetensors import SafetensorsFile
from vllm_module.weights.strict_json import parse_object
from vllm_module.weights.weight_file import WeightFile

if TYPE_CHECKING:
    from vllm_module.weights.handle import FileHandle


@dataclass(frozen=True)
class _Format:
    """Which files of a folder hold the weights.

    Attributes:
        index: the file that names them by tensor.
        whole: the one that has all of them, where there is no index.
        suffixes: else every file with the first of these suffixes that one has.
        others: files with such a suffix that hold something else.

    """

    index: str
    whole: str
    suffixes: tuple[str, ...]
    others: re.Pattern[str]

    def files(self, present: Iterable[Path]) -> list[Path]:
        """Return the files of this format among those in a folder."""
        for suffix in self.suffixes:
            found = [path for path in present if path.suffix == suffix]
            if kept := [path for path in found if not self.others.match(path.name)]:
                return kept
        return []


# In this order; the first that a folder has is taken. Mistral's consolidated* holds the same
# weights under other names, and model-rank* what ranks hold, which is in another order than a
# checkpoint's tensors of the same shape; trainers write their own state beside the weights.
FORMATS = {
    "safetensors": _Format(
        "model.safetensors.index.json",
        "model.safetensors",
        (".safetensors",),
        re.compile(r"consolidated|model-rank-\d+-part-"),
    ),
    "pt": _Format(
        "pytorch_model.bin.index.json",
        "pytorch_model.bin",
        (".bin", ".pt"),
        re.compile("consolidated|training_args|optimizer|scheduler|scaler|rng_state"),
    ),
}
SHARDED_STATE = "sharded_state.json"  # the manifest of what each rank holds, in files of its own
_OPENS_SHARDED_STATE = "vllm_module.weights.sharded_state"
_UNSUPPORTED = (".ckpt", ".gguf", ".h5", ".msgpack", ".npz", ".pth")
_DAMAGED = "The checkpoint is damaged or incomplete: download it again."


class Checkpoint(Mapping[str, "FileHandle"]):
    """The tensors of one or more files by name, none of them read yet.

    A tensor that is in two files is a CheckpointFormatError. The files are closed when no handle
    is left, or earlier by ``close`` or at the end of a ``with`` block.
    """

    def __init__(self, files: tuple[WeightFile, ...]) -> None:
        self._files = files
        self._owner: dict[str, WeightFile] = {}
        for file in files:
            for name in self._owner.keys() & file.entries.keys():
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

    def headers(self) -> Iterator[tuple[str, Path, Entry]]:
        """Yield each tensor's name, its file, and what the file's header says of it."""
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
        """A hex SHA-256 that shows whether two hosts opened the same checkpoint.

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __getitem__(self, name: str) -> FileHandle:
        return self._owner[name][name]

    def __contains__(self, name: object) -> bool:
        return name in self._owner  # a Mapping's own makes a handle

    def __iter__(self) -> Iterator[str]:
        return iter(self._owner)

    def __len__(self) -> int:
        return len(self._owner)


@paused_gc()
def open_checkpoint(folder: str | Path, load_format: str = "auto") -> Checkpoint:
    """Open a checkpoint in Hugging Face's layout and check what its files say of their tensors.

    ``folder`` is a folder or one file. In a folder, the files that an index names are opened
    (``model.safetensors.index.json``, ``pytorch_model.bin.index.json``); without an index
    ``model.safetensors`` or ``pytorch_model.bin``; without that every file of the format but those
    of Mistral's second layout (``consolidated*``) and of a trainer's state. No tensor is read. A
    file that is missing, damaged or does not match the index is a CheckpointFormatError.

    Args:
        folder: the folder or file.
        load_format: ``"sharded_state"`` for what ``vllm-module shard`` wrote, ``"safetensors"``,
            ``"pt"`` for files of ``torch.save``, or ``"auto"``: the first of these that the folder
            has.

    """
    names = ("sharded_state", *FORMATS)
    if load_format not in ("auto", *names):
        raise ValueError(
            f"load_format {shorten(load_format)} is unknown: expected auto, {', '.join(names)}"
        )
    path = Path(os.path.expanduser(folder))
    if load_format == "sharded_state" or (load_format == "auto" and _is_sharded_state(path)):
        # By name, because that file imports this one.
        state: Checkpoint = import_module(_OPENS_SHARDED_STATE).open_sharded_state(path)
        return state
    where = printable(path)
    names_in: dict[str, set[str]] | None = None  # the index: names of tensors by file
    inside: Path | None = path
    index = path
    if os.path.isdir(path):
        name, paths = _find_files(path, list(FORMATS) if load_format == "auto" else [load_format])
        index = path / FORMATS[name].index
        if not paths:
            names_in = _read_index(index, FORMATS[name].suffixes)
            paths = [path / file for file in sorted(names_in)]
    elif (of_suffix := _format_of(path)) is not None and load_format in ("auto", of_suffix):
        name, paths, inside = of_suffix, [path], None  # named by the user: a link to anywhere
    elif is_there(path, follow_links=True):
        wanted = FORMATS if load_format == "auto" else [load_format]
        suffixes = [suffix for each in wanted for suffix in FORMATS[each].suffixes]
        raise CheckpointFormatError(
            f"{where} is not a {' or '.join(suffixes)} file, the formats that are read; convert it"
        )
    else:
        raise CheckpointFormatError(f"{where} does not exist; check the path")

    with ExitStack() as opened:
        files: list[WeightFile] = []
        for file_path in paths:
            if names_in is not None and not is_there(file_path):
                raise CheckpointFormatError(
                    f"{printable(index)} names {printable_name(file_path.name)}, which is not "
                    f"there. {_DAMAGED}"
                )
            files.append(_open_file(name, file_path, inside))
            opened.callback(files[-1].close)
        if names_in is not None:
            for file in files:
                _check_against_index(index, names_in, file)
        checkpoint = Checkpoint(tuple(files))
        opened.pop_all()
    return checkpoint


def _is_sharded_state(folder: Path) -> bool:
    return os.path.isdir(folder) and is_there(folder / SHARDED_STATE)


def _open_file(load_format: str, path: Path, folder: Path | None) -> WeightFile:
    if load_format == "safetensors":
        return SafetensorsFile(path, folder)
    # Imported here because headers of safetensors files are read without torch.
    from vllm_module.weights.torch_file import TorchFile

    return TorchFile(path, folder)


def _format_of(path: Path) -> str | None:
    """Return the format that a file's suffix stands for."""
    return next((name for name, each in FORMATS.items() if path.suffix in each.suffixes), None)


def _read_index(index: Path, suffixes: tuple[str, ...]) -> dict[str, set[str]]:
    """Parse the index; return the names of tensors by the name of their file."""
    data, where = read_file(index, index.parent), printable(index)
    weight_map = parse_object(data, where, _DAMAGED).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointFormatError(
            f"{where}: weight_map should map names of tensors to files, and is "
            f"{shorten(weight_map)}. {_DAMAGED}"
        )
    names_in: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if isinstance(file, str) and file in names_in:
            names_in[file].add(name)
            continue
        # The file may be a link, as in Hugging Face's cache, but its name may not lead out of the
        # folder. \ separates folders on Windows, and : follows a drive.
        is_plain = isinstance(file, str) and not set(file) & set("/\\:\0")
        if not is_plain or not file.endswith(suffixes):
            raise CheckpointFormatError(
                f"{where}: tensor {shorten(name)} should be in a {suffixes[0]} file of the same "
                f"folder, and is in {shorten(file)}; do not load it unless you trust its author"
            )
        names_in[file] = {name}
    return names_in


def _check_against_index(index: Path, names_in: dict[str, set[str]], file: WeightFile) -> None:
    expected, where = names_in[file.path.name], printable(file.path)
    names = file.entries.keys()  # a Mapping's own are slow to compare
    for name in sorted(names - expected):
        owner = next((other for other, names in names_in.items() if name in names), None)
        indexed = "does not know it" if owner is None else f"says it is in {printable_name(owner)}"
        raise CheckpointFormatError(
            f"{where}: tensor {shorten(name)} is here, and {index.name} {indexed}. {_DAMAGED}"
        )
    for name in sorted(expected - names):
        raise CheckpointFormatError(
            f"{printable(index)}: tensor {shorten(name)} should be in "
            f"{printable_name(file.path.name)}, and is not. {_DAMAGED}"
        )


def _find_files(folder: Path, formats: list[str]) -> tuple[str, list[Path]]:
    """Return the first of ``formats`` that ``folder`` has, and its files; none if an index does."""
    present: list[Path] = []
    for name in formats:
        index, whole = folder / FORMATS[name].index, folder / FORMATS[name].whole
        if is_there(index):  # a broken link is refused, not ignored
            return name, []
        if is_there(whole):
            return name, [whole]
        present = present or _listed(folder)
        if files := FORMATS[name].files(present):
            return name, files
    unsupported = [path.name for path in present if path.suffix in _UNSUPPORTED]
    advice = (
        f"{printable(unsupported[0])} is in a format that is not supported; convert it to "
        "safetensors"
        if unsupported
        else "check the path, or download the checkpoint again"
    )
    wanted = " or ".join(f"*{suffix}" for name in formats for suffix in FORMATS[name].suffixes)
    names = ", ".join(printable(path.name) for path in present[:20]) or "nothing"
    more = f" and {len(present) - 20} more" if len(present) > 20 else ""
    raise CheckpointFormatError(
        f"{printable(folder)} holds no {wanted} file; there is {names}{more}. {advice}"
    )


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise refusal(folder, error, "listed") from error
