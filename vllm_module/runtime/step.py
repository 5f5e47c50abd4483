"""A step: the tokens that the model computes in one call, and the copies before it."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_module.runtime.sequence import Sequence


@dataclass
class Moves:
    """Copies before a step, as (from, to) pairs, in this order.

    Attributes:
        swapped_out, copied, swapped_in: copies from the device to the host, on the device, and
            from the host to the device.

    """

    swapped_out: list[tuple[int, int]] = field(default_factory=list)
    copied: list[tuple[int, int]] = field(default_factory=list)
    swapped_in: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.swapped_out or self.copied or self.swapped_in)


@dataclass
class Step:
    """The tokens that the model computes in one call, and the pages and states copied before it.

    Attributes:
        scheduled: sequences, each with the number of its next tokens to compute.
        swapped_out, copied, swapped_in: (from, to) pairs of pages, copied in this order: from the
            device to the host, on the device, from the host to the device.
        states: (from, to) pairs of states; on the device, these are rows.
        saved: (from, to) pairs of a row and a saved state's slot, in either direction. All copies
            on the device read before any of them writes.

    """

    scheduled: list[tuple[Sequence, int]] = field(default_factory=list)
    swapped_out: list[tuple[int, int]] = field(default_factory=list)
    copied: list[tuple[int, int]] = field(default_factory=list)
    swapped_in: list[tuple[int, int]] = field(default_factory=list)
    states: Moves = field(default_factory=Moves)
    saved: list[tuple[int, int]] = field(default_factory=list)

    @property
    def moves(self) -> bool:
        """True if the step makes copies that cannot be repeated.

        Copies of saved states do not count: if the step fails, saved states are evicted, and
        sequences
        that used them start over.
        """
        return bool(self.swapped_out or self.copied or self.swapped_in or self.states)
