"""Weights from somewhere else: one ``.npy`` file for each tensor, under ``npy://FOLDER``.

A source has a folder with ``config.json`` and the tokenizer, and yields names with handles. A
handle knows the shape and dtype of a tensor, and is narrowed to a rank's shard before it is read.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from small_checkpoint import write_checkpoint

from vllm_module import DeviceConfig, ModelConfig, get_model, register_source
from vllm_module.distributed import run_ranks


class NpyHandle:
    """An array in a file, or a region of one; ``array`` is a view of the file's mapping."""

    bytes_read = 0

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.shape = torch.Size(array.shape)
        self.dtype = torch.float32

    def narrow(self, dim: int, start: int, length: int) -> NpyHandle:
        region = (slice(None),) * dim + (slice(start, start + length),)
        return NpyHandle(self.array[region])

    def read(self) -> torch.Tensor:
        NpyHandle.bytes_read += self.array.nbytes
        return torch.from_numpy(np.array(self.array))

    def read_into(self, destination: torch.Tensor) -> None:
        destination.copy_(self.read())


_PARSING = Lock()  # np.load parses a file's header by ast, which may fail in two threads at once


class NpySource:
    def __init__(self, url: str) -> None:
        self.folder = Path(url.removeprefix("npy://"))

    def weights(self) -> Iterator[tuple[str, NpyHandle]]:
        for path in self.folder.glob("*.npy"):
            with _PARSING:
                array = np.load(path, mmap_mode="r")
            yield path.stem, NpyHandle(array)


def main() -> None:
    register_source("npy", NpySource)
    with tempfile.TemporaryDirectory() as folder:
        weights = write_checkpoint(Path(folder))
        Path(folder, "model.safetensors").unlink()
        for name, weight in weights.items():
            np.save(Path(folder, f"{name}.npy"), weight.numpy())

        def tokens(rank: int) -> torch.Tensor:
            model = get_model(
                model_config=ModelConfig(model=f"npy://{folder}"),
                device_config=DeviceConfig(device="cpu"),
            )
            ids = torch.arange(10)
            return model.compute_logits(model(ids, ids)).argmax(-1)

        total = sum(weight.nbytes for weight in weights.values())
        (whole,) = run_ranks(1, tokens)
        print(f"one rank read {NpyHandle.bytes_read / total:.2f} of the checkpoint")
        NpyHandle.bytes_read = 0
        parts = run_ranks(2, tokens)  # two ranks in this process, a thread each
        print(f"two ranks read {NpyHandle.bytes_read / total:.2f} of it together")
    assert all(torch.equal(part, whole) for part in parts)


if __name__ == "__main__":
    main()
