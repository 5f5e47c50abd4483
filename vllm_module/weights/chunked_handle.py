"""A tensor that is stored in chunks, which are boxes of it in one file or several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from vllm_module.base.messages import printable, printable_name
from vllm_module.weights.handle import FileHandle, check_destination, copy_weight, narrowed
from vllm_module.weights.region import Box, Region, whole


class TensorChunk(NamedTuple):
    """A box of a tensor: its start, its shape, and a function that returns its handle."""

    offsets: Sequence[int]
    shape: Sequence[int]
    open: Callable[[], FileHandle]


class ChunkedHandle:
    """A tensor in chunks, or a region of one; reading reads the chunks that the region touches.

    Args:
        name: of the tensor.
        dtype: of its elements.
        sizes: of the whole tensor.
        chunks: they have each element once.
        folder: of the files, for messages.
        box: the region; all of the tensor by default.

    """

    def __init__(
        self,
        name: str,
        dtype: torch.dtype,
        sizes: torch.Size,
        chunks: Sequence[TensorChunk],
        folder: Path,
        box: Box | None = None,
    ) -> None:
        self.name, self.dtype = name, dtype
        self._sizes, self._chunks, self._folder = sizes, chunks, folder
        self._box = whole(sizes) if box is None else box
        self.shape = torch.Size([length for _, length in self._box])

    @property
    def region(self) -> Region:
        """The box of its tensor that this handle stands for."""
        return Region.within(self.name, self._sizes, self._box, self.dtype)

    def narrow(self, dim: int, start: int, length: int) -> ChunkedHandle:
        """Keep ``length`` entries of ``dim`` from ``start`` on, as ``torch.narrow`` does."""
        dim, start, _ = narrowed(self, dim, start, length)
        kept = self._box[dim][0] + start, length
        box = (*self._box[:dim], kept, *self._box[dim + 1 :])
        return ChunkedHandle(self.name, self.dtype, self._sizes, self._chunks, self._folder, box)

    def parts(self, destination: torch.Tensor) -> Iterator[tuple[FileHandle, torch.Tensor]]:
        """Yield what is read of each chunk, and the part of a destination that it fills."""
        check_destination(self.shape, destination, self)
        for offsets, shape, opened in self._chunks:
            target = destination
            within: list[tuple[int, int, int]] = []
            for dim, (start, length) in enumerate(self._box):
                first = max(start, offsets[dim])
                count = min(start + length, offsets[dim] + shape[dim]) - first
                if count <= 0:
                    break
                within.append((dim, first - offsets[dim], count))
                target = target.narrow(dim, first - start, count)
            else:
                part = opened()
                for each in within:
                    part = part.narrow(*each)
                yield part, target

    def read_into(self, destination: torch.Tensor) -> None:
        """Read into ``destination``: the same shape; any strides, dtype and device."""
        for part, target in self.parts(destination):
            if target.dtype == self.dtype:
                part.read_into(target)
            else:
                copy_weight(part.read(), target, self)

    def read(self) -> torch.Tensor:
        """Read into a new tensor in host memory."""
        destination = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.read_into(destination)
        return destination

    def __repr__(self) -> str:
        name, folder = printable_name(self.name), printable(self._folder)
        return f"{name} ({self.dtype}, shape {list(self.shape)}, in {folder})"
