"""How one dimension of a tensor is divided among tensor-parallel ranks.

A layer describes each dimension once, by a :class:`Dim`, and alike on every rank. From that,
:meth:`Dim.shards` computes what one rank keeps. Column-parallel, row-parallel, fused, replicated
and padded layers are all cases of that one division.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_module.errors import ShardingError


@dataclass(frozen=True)
class Slot:
    """A named part of a fused parameter, such as ``q_proj`` of ``qkv_proj``, along one dimension.

    A dimension that is not fused has one slot without a name.

    Args:
        name: the component of checkpoint names, or ``""``.
        size: features in the checkpoint.
        parts: number of pieces the slot is cut into. With 1, every rank keeps the whole slot; with
            the tensor-parallel size, each rank keeps a piece of its own; with a number between,
            neighbouring ranks keep copies of the same piece.
        padded: features after padding with zeros; ``size`` unless given.

    Raises:
        ShardingError: ``padded`` cannot be divided into ``parts``.

    """

    name: str
    size: int
    parts: int = 1
    padded: int = -1

    def __post_init__(self) -> None:
        if self.padded == -1:
            object.__setattr__(self, "padded", self.size)
        if self.size < 1 or self.parts < 1 or self.padded < self.size:
            raise ShardingError(f"impossible slot {self!r}: sizes and parts must be positive")
        if self.padded % self.parts:
            raise ShardingError(
                f"{self.label} of {self.padded} features cannot be divided into {self.parts} "
                f"equal parts ({self.padded} % {self.parts} = {self.padded % self.parts}): "
                "choose a tensor-parallel size that divides it"
            )

    @property
    def label(self) -> str:
        """What messages call the slot."""
        return f"slot {self.name!r}" if self.name else "a dimension"


class Shard(NamedTuple):
    """What one rank keeps of one slot, in elements along one dimension.

    Attributes:
        name: of the slot.
        start: where the shard begins in the checkpoint's tensor of the slot.
        length: how many elements of the checkpoint it has; 0 where it is all padding.
        offset: where it begins in the rank's parameter.
        padded: how many elements of the parameter it takes: ``length`` and padding after it.

    """

    name: str
    start: int
    length: int
    offset: int
    padded: int


@dataclass(frozen=True)
class Dim:
    """One dimension of a tensor: its slots in order, described alike on every rank.

    Attributes:
        slots: one or more; several must have distinct names.
        size: features of all slots together, in the checkpoint.

    """

    slots: tuple[Slot, ...]
    size: int = field(init=False)

    def __post_init__(self) -> None:
        names = [slot.name for slot in self.slots]
        if not names or (len(names) > 1 and (not all(names) or len(set(names)) < len(names))):
            raise ValueError(f"the slots of a dimension need distinct names, got {names}")
        object.__setattr__(self, "size", sum(slot.size for slot in self.slots))

    @classmethod
    def whole(cls, size: int) -> Dim:
        """Return a dimension that every rank keeps whole."""
        return cls((Slot("", size),))

    @classmethod
    def cut(cls, size: int, parts: int, *, padded: int = -1) -> Dim:
        """Return a dimension of ``size`` features cut into ``parts``."""
        return cls((Slot("", size, parts, padded),))

    def shards(self, tp_rank: int, tp_size: int) -> tuple[Shard, ...]:
        """Return what rank ``tp_rank`` of ``tp_size`` keeps of each slot.

        Raises ``ShardingError`` where ``tp_size`` is not a multiple of a slot's parts.
        """
        shards = []
        offset = 0
        for slot in self.slots:
            if tp_size % slot.parts:
                raise ShardingError(
                    f"{slot.label} has {slot.parts} parts, which {tp_size} tensor-parallel "
                    "ranks cannot share evenly"
                )
            # Division, not modulo: neighbours share KV heads, because their query heads do.
            part = tp_rank * slot.parts // tp_size
            padded = slot.padded // slot.parts
            start = min(part * padded, slot.size)
            length = min(padded, slot.size - start)
            shards.append(Shard(slot.name, start, length, offset, padded))
            offset += padded
        return tuple(shards)

    def in_units(self, unit: int, what: str, *, partial: bool = False) -> Dim:
        """Return this dimension counted in units of ``unit`` features, such as scale groups.

        Every edge of a slot or shard must fall between units. With ``partial``, the last slot may
        end inside a unit if it is not cut: block scales round up there. ``what`` names the unit in
        messages.

        Raises ``ShardingError`` where an edge falls inside a unit: two shards would own it.
        """
        slots = []
        for slot in self.slots:
            last = slot is self.slots[-1] and slot.parts == 1
            part = slot.padded // slot.parts
            if part % unit and not (partial and last):
                advice = f"choose a tensor-parallel size that leaves a multiple of {unit}"
                if slot.padded % unit:
                    advice = "no tensor-parallel size can change that"
                raise ShardingError(
                    f"{slot.label}: its shard of {part} features ({slot.padded} in {slot.parts} "
                    f"parts) ends inside a {what} of {unit}: {advice}"
                )
            size, padded = -(-slot.size // unit), -(-slot.padded // unit)
            slots.append(Slot(slot.name, size, slot.parts, padded))
        return Dim(tuple(slots))
