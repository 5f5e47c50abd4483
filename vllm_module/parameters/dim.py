"""The division of one dimension of a tensor among ranks.

A layer describes each dimension once, by a :class:`Dim`, which is the same on every rank. From
that, :meth:`Dim.shards` computes the part that one rank keeps. Column-parallel, row-parallel,
fused, replicated and padded layers are all cases of this division. The dimension of
:class:`Experts` is not cut: each rank keeps some of its slots whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
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
        pairs: head size, if the checkpoint interleaves the two rotary halves of each head (x0 y0
            x1 y1 …, as llama.cpp does). The parameter holds all x, then all y. 0: the same order.
        unit: number of features that must stay on one rank, such as those of an attention head.

    Raises:
        ShardingError: ``padded`` cannot be divided into ``parts``, or a part into ``pairs`` or
            units.

    """

    name: str
    size: int
    parts: int = 1
    padded: int = -1
    pairs: int = 0
    unit: int = 1

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
        part = self.padded // self.parts
        if self.unit < 1 or part % self.unit:
            raise ShardingError(
                f"{self.label} of {self.padded} features is cut into {self.parts} parts of {part}, "
                f"which end inside a unit of {self.unit}, such as an attention head: choose a "
                f"tensor-parallel size that divides its {self.padded // max(1, self.unit)} units"
            )
        if self.pairs and (self.pairs % 2 or self.padded != self.size or part % self.pairs):
            raise ShardingError(
                f"{self.label}: its part of {part} features is no number of whole runs of "
                f"{self.pairs} features, stored as pairs"
            )

    @property
    def label(self) -> str:
        """The slot's name in messages."""
        return f"slot {self.name!r}" if self.name else "a dimension"


class Shard(NamedTuple):
    """The part of one slot that one rank keeps, in elements along one dimension.

    Attributes:
        name: the slot's name.
        start: begin of the shard in the checkpoint's tensor of the slot.
        length: number of elements taken from the checkpoint; 0 if the shard is all padding.
        offset: begin of the shard in the rank's parameter.
        padded: number of elements in the parameter: ``length`` and the padding after it.

    """

    name: str
    start: int
    length: int
    offset: int
    padded: int


@dataclass(frozen=True)
class Dim:
    """One dimension of a tensor: its slots in order, the same on every rank.

    Attributes:
        slots: one or more; several must have distinct names if a checkpoint may store each of them
            as a tensor of its own.
        groups: the layout of a checkpoint that never stores the slots apart. 1: one slot after the
            other. More: this number of equal groups one after the other, each with an equal part of
            every slot, in order. gpt-oss alternates gate and up (a group has one feature of each);
            Falcon and Qwen3-Next store a group for each key-value head.
        size: features of all slots together, in the checkpoint.
        starts: begin of each slot if they are stored one after the other.

    """

    slots: tuple[Slot, ...]
    groups: int | None = None
    size: int = field(init=False)
    starts: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "slots", tuple(self.slots))  # a list has no hash
        names = [slot.name for slot in self.slots]
        distinct = all(names) and len(set(names)) == len(names)
        if not names or (len(names) > 1 and not distinct and self.groups is None):
            raise ValueError(f"the slots of a dimension need distinct names, got {names}")
        for slot in self.slots if self.groups is not None else ():
            assert self.groups is not None
            if self.groups < 1 or slot.size % self.groups:
                raise ShardingError(
                    f"{slot.label} of {slot.size} features cannot be stored in {self.groups} equal "
                    "groups"
                )
            part, share = slot.padded // slot.parts, slot.size // self.groups
            if self.alternates and slot.padded != slot.size and part % share:
                raise ShardingError(
                    f"{slot.label} is padded, and its part of {part} features ends inside a group, "
                    f"which has {share} of them: choose a tensor-parallel size that leaves whole "
                    "groups"
                )
        if any(slot.pairs for slot in self.slots) and self.alternates:
            raise ValueError("slots that are stored in groups cannot be stored as pairs as well")
        *starts, size = accumulate((slot.size for slot in self.slots), initial=0)
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "starts", tuple(starts))

    @classmethod
    def whole(cls, size: int) -> Dim:
        """Return a dimension that every rank keeps whole."""
        return cls((Slot("", size),))

    @classmethod
    def cut(cls, size: int, parts: int, *, padded: int = -1) -> Dim:
        """Return a dimension of ``size`` features cut into ``parts``."""
        return cls((Slot("", size, parts, padded),))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the slots that a checkpoint may store apart; empty if there are none."""
        apart = self.groups is None and self.slots[0].name
        return tuple(slot.name for slot in self.slots) if apart else ()

    @property
    def alternates(self) -> bool:
        """True if a checkpoint stores the slots in several groups."""
        return self.groups is not None and self.groups > 1 and len(self.slots) > 1

    def shards(self, tp_rank: int, tp_size: int) -> tuple[Shard, ...]:
        """Return the part of each slot that rank ``tp_rank`` of ``tp_size`` keeps.

        Raises ``ShardingError`` if ``tp_size`` is not a multiple of a slot's parts, or if a shard
        of slots that are stored in groups ends inside a group.
        """
        shards = []
        offset = 0
        for slot in self.slots:
            if tp_size % slot.parts:
                raise ShardingError(
                    f"{slot.label} has {slot.parts} parts, which {tp_size} tensor-parallel "
                    "ranks cannot share evenly"
                )
            # Division, not modulo: neighbouring ranks share KV heads, because their query heads do.
            part = tp_rank * slot.parts // tp_size
            padded = slot.padded // slot.parts
            start = min(part * padded, slot.size)
            length = min(padded, slot.size - start)
            shards.append(Shard(slot.name, start, length, offset, padded))
            offset += padded
        if self.alternates:
            self.groups_of(shards)
        return tuple(shards)

    def groups_of(self, shards: Sequence[Shard]) -> tuple[int, int, tuple[int, ...]] | None:
        """Return (first group, number of groups, features of each slot in a group) of ``shards``.

        Returns ``None`` if each shard is inside one group. Raises ``ShardingError`` otherwise.
        """
        assert self.groups is not None
        shares = tuple(slot.size // self.groups for slot in self.slots)
        inside, ranges = True, set()
        for share, shard in zip(shares, shards, strict=True):
            first, within = divmod(shard.start, share)
            inside &= within + shard.length <= share
            whole = within == 0 and shard.length % share == 0
            ranges.add((first, shard.length // share) if whole else (0, 0))
        if len(ranges) == 1 and (0, 0) not in ranges:
            return *ranges.pop(), shares
        if inside:
            return None
        raise ShardingError(
            f"slots that a checkpoint stores in {self.groups} groups are cut inside a group: "
            "choose a tensor-parallel size that divides the groups, or that they divide"
        )

    def stored_start(self, at: int, start: int) -> int:
        """Return the index of feature ``start`` of slot ``at`` in a tensor of all slots."""
        if not self.alternates or not self.groups:
            return self.starts[at] + start
        group, within = divmod(start, self.slots[at].size // self.groups)
        return (group * self.size + self.starts[at]) // self.groups + within

    def in_units(self, unit: int, what: str, *, partial: bool = False, elements: int = 1) -> Dim:
        """Return this dimension in units of ``unit`` features, such as scale groups.

        Every edge of a slot or shard must fall between units. With ``partial``, the last slot may
        end inside a unit if it is not cut, because block scales round up. ``what`` names the unit
        in messages. A unit has ``elements`` elements of the tensor: 32 values of 3 bits take 3
        words.

        Raises ``ShardingError`` if an edge falls inside a unit, which two shards would own, or if a
        unit would mix features that the checkpoint stores in another order.
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
            share = slot.size // self.groups if self.alternates and self.groups else unit
            if unit > 1 and (slot.pairs or share % unit):
                raise ShardingError(
                    f"{slot.label}: the checkpoint stores its features in another order, in which "
                    f"a {what} of {unit} would mix them"
                )
            size, padded = -(-slot.size // unit) * elements, -(-slot.padded // unit) * elements
            slots.append(Slot(slot.name, size, slot.parts, padded, slot.pairs))
        return Dim(tuple(slots), self.groups)


@dataclass(frozen=True)
class Experts:
    """The experts that a parameter holds in its first dimension, spread over ranks.

    A rank keeps whole experts, as many as the others or one more. It may keep none.

    Args:
        count: number of all experts.
        rank, size: this rank's place in the expert-parallel group; with size 1, all are kept.
        together: True if a checkpoint stores the experts only as one tensor.
        placement: the number of the expert at each place, on all ranks in their order. An expert
            may have several places, each on another rank. By default each has one, in order.

    Raises:
        ShardingError: an expert has no place, or two on one rank.

    """

    count: int
    rank: int
    size: int
    together: bool = False
    placement: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.rank < self.size:
            raise ShardingError(
                f"expert-parallel rank {self.rank} is outside of range({self.size}), or "
                f"{self.count} experts are too few"
            )
        if self.placement is not None:
            placement = tuple(self.placement)
            _check_placement(self.count, self.size, placement)
            in_order = placement == tuple(range(self.count))
            object.__setattr__(self, "placement", None if in_order else placement)

    @property
    def places(self) -> int:
        """Number of places on all ranks."""
        return self.count if self.placement is None else len(self.placement)

    @property
    def kept(self) -> Sequence[int]:
        """Numbers of this rank's experts, in the order of its places."""
        own = places_of(self.rank, self.size, self.places)
        return own if self.placement is None else self.placement[own.start : own.stop]

    @property
    def dim(self) -> Dim:
        """The dimension of the experts, with a slot of one entry for each."""
        return _experts_dim(self.count, 1 if self.together else None)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The part of each slot that this rank keeps: all or nothing."""
        return _experts_shards(self.count, self.kept)


def places_of(rank: int, size: int, places: int) -> range:
    """Return the places of experts on a rank; if they are uneven, the first ranks have one more."""
    each, more = divmod(places, size)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


@lru_cache(maxsize=256)  # all parameters of a layer share the result, on each of its ranks
def _check_placement(count: int, size: int, placement: tuple[int, ...]) -> None:
    placed = set(placement)
    if strange := [each for each in placed if not 0 <= each < count]:
        raise ShardingError(f"a placement has expert {strange[0]}, and there are {count} experts")
    if lacking := [each for each in range(count) if each not in placed]:
        raise ShardingError(
            f"a placement of {len(placement)} places lacks expert {lacking[0]}: each of the "
            f"{count} experts needs a place"
        )
    for rank in range(size):
        own = places_of(rank, size, len(placement))
        kept = placement[own.start : own.stop]
        if len(set(kept)) < len(kept):
            twice = next(each for at, each in enumerate(kept) if each in kept[:at])
            raise ShardingError(
                f"a placement has expert {twice} twice on rank {rank} of {size}: its places have "
                "to be on different ranks"
            )


@lru_cache(maxsize=256)  # all layers of a model and all parameters of a layer share the result
def _experts_shards(count: int, kept: Sequence[int]) -> tuple[Shard, ...]:
    places = {expert: at for at, expert in enumerate(kept)}
    return tuple(
        Shard(str(expert), 0, int(expert in places), places.get(expert, 0), int(expert in places))
        for expert in range(count)
    )


@lru_cache(maxsize=64)  # all layers of a model share the result
def _experts_dim(count: int, groups: int | None) -> Dim:
    return Dim(tuple(Slot(str(expert), 1) for expert in range(count)), groups)
