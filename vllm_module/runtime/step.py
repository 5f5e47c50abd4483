"""A step: what the model computes at once, and what is copied before that."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_module.runtime.sequence import Sequence


@dataclass
class Moves:
    """What is copied before a step, as (from, to) pairs, in this order.

    Attributes:
        swapped_out, copied, swapped_in: from the device to the host, on the device, from the host
            to the device.

    """

    swapped_out: list[tuple[int, int]] = field(default_factory=list)
    copied: list[tuple[int, int]] = field(default_factory=list)
    swapped_in: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.swapped_out or self.copied or self.swapped_in)


@dataclass
class Step:
    """What the model computes at once, and which pages and states are copied before that.

    Attributes:
        scheduled: sequences, each with the number of its next tokens to compute.
        swapped_out, copied, swapped_in: (from, to) pairs of pages, copied in this order: from the
            device to the host, on the device, from the host to the device.
        states: (from, to) pairs of states; on the device, these are rows.
        saved: (from, to) pairs of a row and the slot of a saved state, in either direction. All
            that is copied on the device is read before any of it is written.

    """

    scheduled: list[tuple[Sequence, int]] = field(default_factory=list)
    swapped_out: list[tuple[int, int]] = field(default_factory=list)
    copied: list[tuple[int, int]] = field(default_factory=list)
    swapped_in: list[tuple[int, int]] = field(default_factory=list)
    states: Moves = field(default_factory=Moves)
    saved: list[tuple[int, int]] = field(default_factory=list)

    @property
    def moves(self) -> bool:
        """Whether anything is copied before the step that cannot be copied again.

        Saved states are given up if it fails, and sequences that used them start over.
        """
        return bool(self.swapped_out or self.copied or self.swapped_in or self.states)
