"""A model in GGUF files as a source: its folder is written from what the files say of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_module.errors import CheckpointFormatError, UnsupportedModelError
from vllm_module.messages import printable
from vllm_module.weights.checkpoint import Checkpoint
from vllm_module.weights.gguf_config import check_rope_factors, config_of, stored_entries
from vllm_module.weights.gguf_file import GGUFFile, open_gguf, open_gguf_files
from vllm_module.weights.gguf_names import architecture_of
from vllm_module.weights.gguf_tokenizer import tokenizer_files
from vllm_module.weights.regular_file import is_there, read_file
from vllm_module.weights.strict_json import read_json
from vllm_module.weights.written_folder import NO_TOKENIZER, TAKEN, write_folder


@dataclass(frozen=True)
class GGUFSource:
    """A model in one GGUF file, or in the parts of a split one.

    Attributes:
        path: the file, any part of a split one, or the folder with it.
        folder: has a ``config.json`` and the files of the tokenizer, written when the model was
            found. It is in the system's folder for temporary files until this process ends; ranks
            in other processes, which it starts, find it there.

    """

    path: Path
    folder: Path

    def weights(self) -> Checkpoint:
        """Open the files and check what they say of their tensors."""
        return open_gguf(self.path)


def find_gguf_source(path: Path) -> GGUFSource:
    """Open the files at ``path``, and write the folder of their source.

    A ``config.json`` and files of a tokenizer beside them go before what their metadata says. Where
    no tokenizer can be made of it, the folder has the reason in place of one.

    Raises ``CheckpointFormatError`` and ``UnsupportedModelError`` for files or settings that are
    refused.
    """
    beside = path if path.is_dir() else path.parent
    with Checkpoint(files := open_gguf_files(path), "gguf"):
        architecture_of(files[0].metadata.get("general.architecture"), printable(files[0].path))
        written = {"config.json": json.dumps(_config(files, beside)).encode()}
        taken = [name for name in TAKEN if is_there(beside / name)]
        if "tokenizer.json" not in taken or "tokenizer_config.json" not in taken:
            try:
                written |= tokenizer_files(files[0].metadata, printable(files[0].path), taken)
            except (CheckpointFormatError, UnsupportedModelError) as error:
                written[NO_TOKENIZER] = str(error).encode()  # tokens need none
        written |= {name: read_file(beside / name, beside) for name in taken}
    return GGUFSource(path, write_folder(written, printable(path)))


def _config(files: tuple[GGUFFile, ...], beside: Path) -> dict[str, Any]:
    stored = stored_entries(files)
    path = beside / "config.json"
    if not is_there(path):
        return {**config_of(files), **stored}
    entries = read_json(path, beside)
    if entries.get("quantization_config") is not None:
        raise CheckpointFormatError(
            f"{printable(path)} has a quantization_config, and the weights beside it are in GGUF "
            "files, which say themselves how they are quantized: remove the entry"
        )
    check_rope_factors(files, entries, printable(path))
    return {**entries, **stored}
