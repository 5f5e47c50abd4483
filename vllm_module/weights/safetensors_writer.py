"""Writing a safetensors file tensor by tensor, in any order, with one of them in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from vllm_module.base.messages import printable_name
from vllm_module.errors import UnsupportedModelError
from vllm_module.weights.digests import digest_weight
from vllm_module.weights.header import DTYPES

_CODES = {getattr(torch, dtype.name): code for code, dtype in DTYPES.items()}
_ALIGNMENT = 8  # alignment of the first tensor, in bytes


class Stored(NamedTuple):
    """Dtype and shape of a tensor to write."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class SafetensorsWriter:
    """A new file with ``tensors``, whose values :meth:`write` takes in any order.

    Tensors are laid out in the order of ``tensors``. With ``aligned``, those of wide dtypes come
    before those of narrow ones, as in safetensors' own writer, so that each can be mapped.
    Use it as a context manager: the end of the block closes the file, and all tensors must be
    written by then. ``digests`` gets the digest of each tensor, by name. ``metadata`` is beside
    ``{"format": "pt"}``, which transformers requires.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, Stored],
        *,
        aligned: bool,
        digests: dict[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._tensors = dict(tensors)
        self._digests = digests
        names = list(tensors)
        if aligned:
            names.sort(key=lambda name: -tensors[name].dtype.itemsize)
        header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        self._places: dict[str, int] = {}
        end = 0
        for name in names:
            stored = tensors[name]
            code = _CODES.get(stored.dtype)
            if code is None:
                raise UnsupportedModelError(
                    f"{printable_name(name)} is of {stored.dtype}, which safetensors files do not "
                    f"have: expected one of {', '.join(map(str, _CODES))}"
                )
            self._places[name], begin, end = end, end, end + stored.nbytes
            shape = list(stored.shape)
            header[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._file = path.open("xb", buffering=0)
        self._start = 8 + len(text)
        _write_all(self._file.fileno(), len(text).to_bytes(8, "little") + text, 0)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write the values of one tensor, once."""
        stored = Stored(tensor.dtype, tuple(tensor.shape))
        assert stored == self._tensors[name], (name, stored, self._tensors[name])
        place = self._places.pop(name)
        if self._digests is not None:
            self._digests[name] = digest_weight(tensor).hex
        if stored.nbytes:
            # A single element may have any stride, of which torch makes no bytes: hence unsqueeze.
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            values = flat.unsqueeze(-1).view(torch.uint8)
            _write_all(self._file.fileno(), values.numpy(), self._start + place)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            if kind is None:
                assert not self._places, f"not written: {', '.join(self._places)}"
                # The data must be on disk before the folder is renamed.
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


def _write_all(descriptor: int, data: object, offset: int) -> None:
    left = memoryview(data).cast("B")  # type: ignore[arg-type]  # a buffer
    while left:
        count = os.pwrite(descriptor, left, offset)
        left, offset = left[count:], offset + count
