from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from vllm_module.weights.cut_rows import Run
from vllm_module.weights.handle import FileHandle, check_destination, copy_weight

Compute = Callable[[torch.Tensor], torch.Tensor]


class ComputedHandle(FileHandle):
    """A tensor whose values are computed from what a file stores, while they are read.

    All dimensions but the last are those of ``stored``. ``byte_range`` and ``runs`` are those of
    the bytes that it is computed from, which are whole rows.

    Args:
        stored: what the file stores.
        compute: returns the values of some of its rows.
        shape: of the values.
        dtype: of the values.
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
        self._stored, self._compute, self._first = stored, compute, first

    @property
    def byte_range(self) -> tuple[int, int]:
        """Where the first and the one after the last byte are that the values are computed from."""
        return self._stored.byte_range

    @property
    def contiguous(self) -> bool:
        """Whether these bytes follow each other without gaps."""
        return self._stored.contiguous

    def runs(self) -> Iterator[Run]:
        """Yield these bytes as runs."""
        return self._stored.runs()

    def narrow(self, dim: int, start: int, length: int) -> ComputedHandle:
        """Keep ``length`` entries of ``dim`` from ``start`` on; rows besides them are not read."""
        # A tensor without memory checks the arguments as torch does.
        shape = torch.empty(self.shape, device="meta").narrow(dim, start, length).shape
        dim %= len(shape)
        start %= self.shape[dim] or 1
        stored, first = self._stored, self._first
        if dim < len(shape) - 1:
            stored = stored.narrow(dim, start, length)
        else:
            first += start
        return ComputedHandle(stored, self._compute, shape, self.dtype, first)

    def is_read_directly(self, destination: torch.Tensor) -> bool:
        """Return ``False``: no bytes of the file are values."""
        return False

    def read_into(self, destination: torch.Tensor) -> None:
        """Compute into ``destination``: the same shape; any strides, dtype and device."""
        check_destination(self.shape, destination, self)
        copy_weight(self.read(), destination, self)

    def read(self) -> torch.Tensor:
        """Compute the values in host memory."""
        values = self._compute(self._stored.read())
        return values.narrow(-1, self._first, self.shape[-1])
