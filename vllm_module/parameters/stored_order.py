"""The order of values in a checkpoint tensor, where it differs from the parameter's."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from vllm_module.weights import Weight, read_into


class StoredOrder(NamedTuple):
    """The change of order from a stored part of a tensor to the values that its parameter holds.

    Dimensions are counted as stored. Bytes are read in the file's order, which is fast, and then
    reordered on the parameter's device.

    Attributes:
        groups: the dimension whose slots are stored in groups, the entries of each slot in a group,
            and the zeros after each slot in the parameter.
        pairs: the dimension, and the size of its runs whose halves are interleaved.
        transposed: True if the last two dimensions are swapped.
        flat: for a matrix that is stored as a vector: the number of dimensions before it, the
            entries of a row, and the start and number of the entries kept of each row.
        filled: the length to which zeros extend a vector.
        repeated: the shape to which the single stored number is expanded.
        exponents: True if bytes are exponents of two plus 127; 255 is NaN.

    """

    groups: tuple[int, tuple[int, ...], tuple[int, ...]] | None = None
    pairs: tuple[int, int] | None = None
    transposed: bool = False
    flat: tuple[int, int, int, int] | None = None
    filled: int = 0
    repeated: tuple[int, ...] | None = None
    exponents: bool = False

    def restore(self, stored: torch.Tensor) -> torch.Tensor:
        """Return ``stored`` in the parameter's order; groups and pairs need a copy each."""
        if self.repeated is not None:
            return stored.view(()).expand(self.repeated)
        if self.exponents:
            stored = stored.view(torch.float8_e8m0fnu).float()
        if self.filled:
            return F.pad(stored, (0, self.filled - len(stored)))
        if self.flat is not None:
            count, entries, first, length = self.flat
            rows = stored.reshape(*stored.shape[:count], -1, entries)
            stored = rows.narrow(-1, first, length)
        if self.groups is not None:
            dim, shares, padding = self.groups
            before, after = stored.shape[:dim], stored.shape[dim + 1 :]
            grouped = stored.reshape(*before, -1, sum(shares), *after)
            groups, start = grouped.shape[dim], 0
            ordered = stored.new_empty((*before, stored.shape[dim] + sum(padding), *after))
            slots = torch.split(grouped, list(shares), dim + 1)
            for slot, share, zeros in zip(slots, shares, padding, strict=True):
                target = ordered.narrow(dim, start, groups * share)
                target.view(*before, groups, share, *after).copy_(slot)
                start += groups * share
                ordered.narrow(dim, start, zeros).zero_()
                start += zeros
            stored = ordered
        if self.pairs is not None:
            dim, size = self.pairs
            pairs = stored.reshape(*stored.shape[:dim], -1, size // 2, 2, *stored.shape[dim + 1 :])
            stored = pairs.transpose(dim + 1, dim + 2).flatten(dim, dim + 2)
        return stored.transpose(-2, -1) if self.transposed else stored


class Reordered(NamedTuple):
    """A destination that reorders the weight it receives."""

    target: torch.Tensor
    order: StoredOrder

    @property
    def device(self) -> torch.device:
        """The device of the target."""
        return self.target.device

    def receive(self, weight: Weight) -> None:
        """Read the whole of ``weight`` and copy it to the target in the target's order."""
        if not isinstance(weight, torch.Tensor):
            weight = weight.read()
        read_into(self.order.restore(weight.to(self.device)), self.target)
