"""Looking up metadata keys of one architecture and tensors of all files of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_module.base.messages import printable
from vllm_module.errors import CheckpointFormatError
from vllm_module.weights.gguf.file import GGUFFile
from vllm_module.weights.gguf.header import GGUFTensor


class Metadata:
    """The metadata keys of one architecture, and the tensors of all files."""

    def __init__(self, files: Sequence[GGUFFile]) -> None:
        self.files = files
        self.where = printable(files[0].path)
        self.keys: Mapping[str, Any] = files[0].metadata
        self.architecture: str = self.keys["general.architecture"]
        self.tensors: dict[str, GGUFTensor] = {
            tensor.name: tensor for file in files for tensor in file.header.tensors
        }

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of an architecture's key, or ``default`` if the file lacks the key."""
        return self.keys.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        """Return the value of an architecture's key; raise if the file lacks the key."""
        if (value := self.get(key)) is None:
            raise CheckpointFormatError(
                f"{self.where}: the metadata has no {self.architecture}.{key}, and there is no "
                "config.json beside the file: put one there, or convert the model again"
            )
        return value

    def shape(self, name: str, dims: int) -> tuple[int, ...]:
        """Return a tensor's shape; raise if it is missing or has another number of dimensions."""
        if name not in self.tensors:
            raise CheckpointFormatError(
                f"{self.where}: the tensor {name} is missing; download the model again"
            )
        shape = self.tensors[name].shape
        if len(shape) != dims:
            raise CheckpointFormatError(
                f"{self.where}: the tensor {name} should have {dims} dimensions, and its shape is "
                f"{list(shape)}; download the model again"
            )
        return shape

    def factors(self, name: str) -> list[float] | None:
        """Return the values of a tensor of frequency factors, or None if there is none."""
        for file in self.files:
            if name in file.rope_tensors:
                return file.floats(file.rope_tensors[name])
        return None
