"""A handle of a weight whose heads are stored transposed."""

from __future__ import annotations

import torch

from vllm_module.weights.computed_handle import Compute, ComputedHandle
from vllm_module.weights.handle import FileHandle, narrowed


class TurnedHandle(ComputedHandle):
    """A weight ``[heads * features, input]`` that is stored as ``[heads, input, features]``.

    Only the heads that were kept by ``narrow`` are read.

    Args:
        stored: the handle of the stored tensor.
        compute: a function from some of its heads to their values ``[heads, input, features]``.
        shape: the shape of all these values.
        dtype: the dtype of the values.

    """

    __slots__ = ("_columns", "_features", "_rows")

    def __init__(
        self, stored: FileHandle, compute: Compute, shape: torch.Size, dtype: torch.dtype
    ) -> None:
        heads, columns, self._features = shape
        super().__init__(stored, compute, torch.Size((heads * self._features, columns)), dtype)
        self._rows = slice(0, self.shape[0])
        self._columns = slice(0, columns)

    def narrow(self, dim: int, start: int, length: int) -> TurnedHandle:
        """Keep ``length`` entries of ``dim`` from ``start`` on; other heads are not read."""
        dim, start, shape = narrowed(self, dim, start, length)
        kept = TurnedHandle.__new__(TurnedHandle)
        ComputedHandle.__init__(kept, self._stored, self._compute, shape, self.dtype)
        kept._features, kept._rows, kept._columns = self._features, self._rows, self._columns
        if dim == 1:
            first = self._columns.start + start
            kept._columns = slice(first, first + length)
            return kept
        head, first = divmod(self._rows.start + start, self._features)
        heads = -(-(first + length) // self._features)
        kept._stored = self._stored.narrow(0, head, heads)
        kept._rows = slice(first, first + length)
        return kept

    def read(self) -> torch.Tensor:
        """Compute the values in host memory."""
        values = self._compute(self._stored.read()).mT.flatten(0, 1)
        return values[self._rows, self._columns]
