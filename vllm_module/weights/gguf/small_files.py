"""Writing ``config.json`` and tokenizer files of Hugging Face's layout from GGUF files."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from vllm_module.base.messages import printable
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError
from vllm_module.weights.checkpoint import Checkpoint
from vllm_module.weights.folder_files import FolderFiles
from vllm_module.weights.gguf.config import config_of, stored_entries
from vllm_module.weights.gguf.file import GGUFFile, open_gguf_files
from vllm_module.weights.gguf.names import ARCHITECTURES, architecture_of, stored_name
from vllm_module.weights.gguf.rope import check_rope_factors
from vllm_module.weights.gguf.tokenizer import tokenizer_files
from vllm_module.weights.strict_json import parse_config
from vllm_module.weights.written_folder import NO_TOKENIZER, TAKEN


def open_gguf(folder: FolderFiles) -> Checkpoint:
    """Open the weights in GGUF files, as :func:`open_gguf_files` does."""
    return _opened(folder, open_gguf_files(folder))


def _opened(folder: FolderFiles, files: tuple[GGUFFile, ...]) -> Checkpoint:
    checkpoint: Checkpoint = folder.checkpoint(files, "gguf")
    checkpoint.config = partial(_config, files, folder)
    architecture = ARCHITECTURES.get(str(files[0].metadata.get("general.architecture")))
    if architecture is not None:
        checkpoint.stored_name = partial(stored_name, architecture=architecture)
    return checkpoint


def gguf_small_files(folder: FolderFiles) -> dict[str, bytes]:
    """Return ``config.json`` and the files of the tokenizer, by name.

    Files beside the weights are preferred to those made from the metadata. If no tokenizer can be
    made, the reason is stored in its place.

    Raises ``CheckpointFormatError`` and ``UnsupportedModelError`` for files or settings that are
    refused.
    """
    with _opened(folder, files := open_gguf_files(folder)):
        where = printable(files[0].path)
        written = {"config.json": json.dumps(_config(files, folder)).encode()}
        taken = [name for name in TAKEN if folder.has(name)]
        if "tokenizer.json" not in taken or "tokenizer_config.json" not in taken:
            try:
                written |= tokenizer_files(files[0].metadata, where, taken)
            except (CheckpointFormatError, UnsupportedModelError) as error:
                # Generating from token ids needs no tokenizer.
                written[NO_TOKENIZER] = str(error).encode()
        return written | {name: folder.read(name) for name in taken}


def _config(files: tuple[GGUFFile, ...], folder: FolderFiles) -> dict[str, Any]:
    named = files[0].metadata.get("general.architecture")
    architecture_of(named, printable(files[0].path))
    stored = stored_entries(files)
    if not folder.has("config.json"):
        return {**config_of(files), **stored}
    path = folder.path / "config.json"
    entries = parse_config(folder.read("config.json"), path)
    if entries.get("quantization_config") is not None:
        raise CheckpointFormatError(
            f"{printable(path)} has a quantization_config, and the weights beside it are in GGUF "
            "files, which say themselves how they are quantized: remove the entry"
        )
    check_rope_factors(files, entries, printable(path))
    return {**entries, **stored}
