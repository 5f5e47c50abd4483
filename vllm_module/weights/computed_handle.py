"""A handle whose values are computed while they are read, such as dequantized weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from vllm_module.weights.cut_rows import ByteRun
from vllm_module.weights.handle import FileHandle, check_destination, copy_weight, narrowed

Compute = Callable[[torch.Tensor], torch.Tensor]


class ComputedHandle(FileHandle):
    """A tensor whose values are computed from stored bytes while they are read.

    All dimensions but the last are those of ``stored``. ``byte_range`` and ``runs`` describe the
    stored bytes that the values are computed from, which are whole rows.

    Args:
        stored: the handle of the stored tensor.
        compute: a function from some of its rows to their values.
        shape: the shape of the values.
        dtype: the dtype of the values.
        first: the first entry that is kept of the last dimension.

    """

    __slots__ = ("_compute", "_first", "_stored")

    def __init__(
        self,
        stored: FileHandle,
        compute: Compute,
        shape: torch.Size,
        dtype: torch.dtype,
        first: int = 0,
    ) -> None:
        self.file_bytes, self.name, self.dtype, self.shape = (
            stored.file_bytes, stored.name, dtype, shape
        )  # fmt: skip
        self.whole = None  # an override that narrows values does not know where they lie
        self._stored, self._compute, self._first = stored, compute, first

    @property
    def byte_range(self) -> tuple[int, int]:
        """Offsets in the file of the first stored byte and of the byte after the last one."""
        return self._stored.byte_range

    @property
    def contiguous(self) -> bool:
        """True if the stored bytes follow each other without gaps."""
        return self._stored.contiguous

    def runs(self) -> Iterator[ByteRun]:
        """Yield the stored bytes as runs."""
        return self._stored.runs()

    def narrow(self, dim: int, start: int, length: int) -> ComputedHandle:
        """Keep ``length`` entries of ``dim`` from ``start`` on; rows besides them are not read."""
        dim, start, shape = narrowed(self, dim, start, length)
        stored, first = self._stored, self._first
        if dim < len(shape) - 1:
            stored = stored.narrow(dim, start, length)
        else:
            first += start
        return ComputedHandle(stored, self._compute, shape, self.dtype, first)

    def is_read_directly(self, destination: torch.Tensor) -> bool:
        """Return ``False``: the stored bytes are never the values themselves."""
        return False

    def read_into(self, destination: torch.Tensor) -> None:
        """Compute the values into ``destination`` (same shape; any strides, dtype, device)."""
        check_destination(self.shape, destination, self)
        copy_weight(self.read(), destination, self)

    def read(self) -> torch.Tensor:
        """Compute the values in host memory."""
        values = self._compute(self._stored.read())
        return values.narrow(-1, self._first, self.shape[-1])
