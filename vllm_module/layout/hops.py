"""The way of tensors from ranks to ranks: hops of boxes, and routes of hops."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from vllm_module.layout.layout import StoredTensorLayout
from vllm_module.layout.views import Box, Ints


class Hop(NamedTuple):
    """A box that goes from one rank to another; ``experts`` first and number of those it is of.

    ``box`` is its number in the route. The ranks are those of the source, of the source and the
    target, or of the target: see :class:`Route`.
    """

    source: int
    target: int
    box: int
    experts: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Route:
    """How tensors that both layouts cut alike get from one to the other.

    Attributes:
        tensors: their entries in the target's layout.
        experts: first and end of the experts whose tensors these are.
        view: shape in which boxes count; it refines those of both layouts, and has no dimension of
            size 1.
        boxes: start and size of each.
        gathered: hops among ranks of the source on one host, one of which has all parts of a box
            then. A rank that has a part already is both ends of its hop.
        parts: for each box that consists of gathered ones, their numbers.
        sent: hops from ranks of the source to ranks of the target.
        relayed: hops from ranks of the target to others on their node.
        dtype: of the elements at the source.

    """

    tensors: tuple[StoredTensorLayout, ...]
    experts: tuple[int, int]
    view: Ints
    boxes: tuple[Box, ...]
    gathered: tuple[Hop, ...]
    parts: Mapping[int, Ints]
    sent: tuple[Hop, ...]
    relayed: tuple[Hop, ...]
    dtype: str

    def stage(self, number: int) -> tuple[Hop, ...]:
        """Return the hops that are gathered (0), sent (1) or relayed (2)."""
        return (self.gathered, self.sent, self.relayed)[number]

    @property
    def itemsize(self) -> int:
        """Bytes of an element at the source."""
        return itemsize_of(self.dtype)

    def nbytes(self, hop: Hop) -> int:
        """Bytes of a hop in all tensors of the route."""
        numel = math.prod(self.boxes[hop.box][1])
        return numel * hop.experts[1] * self.itemsize * len(self.tensors)


def itemsize_of(dtype: str) -> int:
    """Return the bytes of an element, which are in the names of torch's dtypes."""
    bits = re.search(r"[0-9]+", dtype)
    return 1 if bits is None else max(1, int(bits[0]) // 8)
