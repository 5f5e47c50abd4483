"""The tensors of a safetensors file."""

from __future__ import annotations

from vllm_module.weights.header import read_header
from vllm_module.weights.weight_file import WeightFile


class SafetensorsFile(WeightFile):
    """The tensors of one safetensors file; ``metadata`` has its free-form strings."""

    def _read_entries(self) -> None:
        header = read_header(self.path, self._bytes.size, self._bytes.read_bytes)
        self.entries, self.metadata, self._start = header

    def _described(self) -> list[tuple[int, int]]:
        return [(0, self._start)]
