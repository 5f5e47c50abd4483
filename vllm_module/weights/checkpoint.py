from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from vllm_module.errors import CheckpointFormatError
from vllm_module.weights.safetensors import SafetensorsFile, SafetensorsHandle
from vllm_module.weights.strict_json import parse_object, shorten

_INDEX = "model.safetensors.index.json"
_UNSUPPORTED = (".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".npz", ".pt", ".pth")
_DAMAGED = "The checkpoint is damaged or incomplete: download it again."


class Checkpoint(Mapping[str, SafetensorsHandle]):
    """The tensors of one or more safetensors files by name, none of them read yet.

    A tensor that is in two files is a CheckpointFormatError. It need not be closed, but can be,
    by ``close`` or as a context manager, to give back its files early.
    """

    def __init__(self, files: tuple[SafetensorsFile, ...]) -> None:
        self._files = files
        self._owner: dict[str, SafetensorsFile] = {}
        for file in files:
            for name in file:
                other = self._owner.setdefault(name, file)
                if other is not file:
                    raise CheckpointFormatError(
                        f"{file.path}: tensor {shorten(name)} is in {other.path} too; keep one of "
                        "the two files, or add an index that names the right ones"
                    )

    @property
    def files(self) -> tuple[Path, ...]:
        """The files, in the order of their names."""
        return tuple(file.path for file in self._files)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(file.nbytes for file in self._files)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read so far."""
        return sum(file.bytes_read for file in self._files)

    def close(self) -> None:
        """Close the files; handles can no longer be read."""
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

    def __getitem__(self, name: str) -> SafetensorsHandle:
        return self._owner[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._owner)

    def __len__(self) -> int:
        return len(self._owner)


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Open a checkpoint in Hugging Face's layout and check the headers of all its files.

    ``folder`` is a folder or one ``.safetensors`` file. Of a folder, the files that
    ``model.safetensors.index.json`` names are opened; without an index ``model.safetensors``;
    without that every ``*.safetensors`` but Mistral's ``consolidated*``, which holds the same
    weights by other names. No tensor is read. What is not as it should be is a
    CheckpointFormatError.
    """
    path = Path(os.path.expanduser(folder))
    weight_map: dict[str, str] | None = None
    if path.is_dir():
        if os.path.lexists(path / _INDEX):  # a broken link is no reason to do without
            weight_map = _read_index(path / _INDEX)
            paths = [path / name for name in sorted(set(weight_map.values()))]
        else:
            paths = _find_files(path)
    elif path.suffix == ".safetensors":
        paths = [path]
    elif path.exists():
        raise CheckpointFormatError(
            f"{path} is not a .safetensors file, the only format that is read; convert it"
        )
    else:
        raise CheckpointFormatError(f"{path} does not exist; check the path")

    with ExitStack() as opened:
        files = []
        for file_path in paths:
            if weight_map is not None and not file_path.is_file():
                raise CheckpointFormatError(
                    f"{path / _INDEX} names {file_path.name}, which is not there. {_DAMAGED}"
                )
            files.append(SafetensorsFile(file_path))
            opened.callback(files[-1].close)
        if weight_map is not None:
            for file in files:
                _check_against_index(path / _INDEX, weight_map, file)
        checkpoint = Checkpoint(tuple(files))
        opened.pop_all()
    return checkpoint


def _read_index(index: Path) -> dict[str, str]:
    """Parse the index: tensor name to the plain name of a file beside it."""
    try:
        data = index.read_bytes()
    except OSError as error:
        raise CheckpointFormatError(f"{index} cannot be read: {error.strerror}") from error
    weight_map = parse_object(data, str(index), _DAMAGED).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointFormatError(
            f"{index}: weight_map should map names of tensors to files, and is "
            f"{shorten(weight_map)}. {_DAMAGED}"
        )
    for name, file in weight_map.items():
        # The file may be a link (Hugging Face's cache is made of them); its name may not lead
        # out of the folder. \ separates folders on Windows, where : follows a drive.
        is_plain = isinstance(file, str) and not set(file) & set("/\\:\0")
        if not is_plain or not file.endswith(".safetensors"):
            raise CheckpointFormatError(
                f"{index}: tensor {shorten(name)} should be in a .safetensors file of the same "
                f"folder, and is in {shorten(file)}; do not load it unless you trust its author"
            )
    return weight_map


def _check_against_index(index: Path, weight_map: dict[str, str], file: SafetensorsFile) -> None:
    expected = {name for name, owner in weight_map.items() if owner == file.path.name}
    for name in sorted(file.keys() - expected):
        indexed = f"says it is in {weight_map[name]}" if name in weight_map else "does not know it"
        raise CheckpointFormatError(
            f"{file.path}: tensor {shorten(name)} is here, and {index.name} {indexed}. {_DAMAGED}"
        )
    for name in sorted(expected - file.keys()):
        raise CheckpointFormatError(
            f"{index}: tensor {shorten(name)} should be in {file.path.name}, and is not. {_DAMAGED}"
        )


def _find_files(folder: Path) -> list[Path]:
    if os.path.lexists(folder / "model.safetensors"):
        return [folder / "model.safetensors"]
    present = sorted(folder.iterdir())
    files = [
        path
        for path in present
        if path.suffix == ".safetensors" and not path.name.startswith("consolidated")
    ]
    if not files:
        unsupported = [path.name for path in present if path.suffix in _UNSUPPORTED]
        advice = (
            f"{unsupported[0]} is in a format that is not supported; convert it to safetensors"
            if unsupported
            else "check the path, or download the checkpoint again"
        )
        names = ", ".join(path.name for path in present[:20]) or "nothing"
        more = f" and {len(present) - 20} more" if len(present) > 20 else ""
        raise CheckpointFormatError(
            f"{folder} holds no *.safetensors file; there is {names}{more}. {advice}"
        )
    return files
