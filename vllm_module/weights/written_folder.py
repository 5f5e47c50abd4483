"""Folders that a source writes, where a checkpoint lacks the files in Hugging Face's layout."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from vllm_module.errors import CheckpointFormatError
from vllm_module.messages import printable

# What is taken from beside the weights, if it is there.
TAKEN = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json",
)  # fmt: skip


def write_folder(files: Mapping[str, bytes], what: str) -> Path:
    """Write ``files`` to a new folder for temporary files, removed when this process ends.

    Ranks in other processes, which this one starts, find it there. ``what`` names the model in
    messages. Raises ``CheckpointFormatError`` if it cannot be written.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="vllm-module-"))
        atexit.register(_remove, folder, os.getpid())
        for name, data in files.items():
            (folder / name).write_bytes(data)
    except OSError as error:
        raise CheckpointFormatError(
            f"the configuration of {what} cannot be written to {printable(tempfile.gettempdir())}: "
            f"{error.strerror}; free space, or name another folder in TMPDIR"
        ) from error
    return folder


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # and not a fork of it
        shutil.rmtree(folder, ignore_errors=True)
