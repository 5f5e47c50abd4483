"""Hypothesis strategies: sizes, layouts, dtypes and parameters.

Every strategy shrinks towards the simplest case: one rank, one head, the fewest features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

from vllm_module.distributed import (
    expert_parallel,
    expert_parallel_group,
    tensor_parallel_group,
)
from vllm_module.parameters import (
    BasevLLMParameter,
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    ColumnvLLMParameter,
    Dim,
    Experts,
    FlattenedParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PackedColumnParameter,
    PackedModelWeightParameter,
    PackedvLLMParameter,
    PerSlotVectorParameter,
    PerTensorScaleParameter,
    PerTensorTableParameter,
    RankedColumnParameter,
    RowvLLMParameter,
    Slot,
)


def tp_sizes(most: int = 8) -> st.SearchStrategy[int]:
    """Draw a tensor-parallel size, a power of two or not."""
    return st.integers(1, most)


def dtypes() -> st.SearchStrategy[torch.dtype]:
    """Draw a dtype of weights that are not quantized."""
    return st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


def features(most: int = 3) -> st.SearchStrategy[int]:
    """Draw a number of features that many tensor-parallel sizes divide."""
    factors = st.tuples(st.integers(1, most), st.sampled_from([1, 2, 6, 8, 24]))
    return factors.map(lambda pair: pair[0] * pair[1])


def vocabularies(most: int = 150) -> st.SearchStrategy[int]:
    """Draw a vocabulary size; nearly all need padding, and a rank may hold only padding."""
    return st.integers(1, most)


class HeadLayout(NamedTuple):
    """Query heads, the key-value heads that they share, and the features of a head."""

    heads: int
    kv_heads: int
    head_size: int


@st.composite
def head_layouts(draw: st.DrawFn) -> HeadLayout:
    """Draw heads. With fewer key-value heads than ranks, the ranks replicate them."""
    heads = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12]))
    kv_heads = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    return HeadLayout(heads, kv_heads, draw(st.sampled_from([2, 4, 6])))


class SlotLayout(NamedTuple):
    """A slot for any tensor-parallel size; it can be cut into at most ``most_parts`` parts."""

    name: str
    size: int
    most_parts: int
    padded: int
    pairs: int = 0

    def at(self, tp_size: int) -> Slot:
        """Return the slot for one tensor-parallel size."""
        return Slot(self.name, self.size, min(self.most_parts, tp_size), self.padded, self.pairs)


class DimLayout(NamedTuple):
    """A dimension for any tensor-parallel size; ``groups`` is as in :class:`Dim`."""

    slots: tuple[SlotLayout, ...]
    groups: int | None = None

    def at(self, tp_size: int) -> Dim:
        """Return the dimension for one tensor-parallel size."""
        return Dim(tuple(slot.at(tp_size) for slot in self.slots), self.groups)


class ExpertLayout(NamedTuple):
    """The experts of a parameter: their number, whether packed, and whether spread over ranks.

    ``order`` is that of their places, and so many ``copies`` have places on other ranks besides.
    """

    number: int
    together: bool
    spread: bool
    order: tuple[int, ...] = ()
    copies: int = 0

    def build(self) -> Experts:
        """Return the experts of the current tensor-parallel group's rank."""
        if not self.spread:
            return Experts(self.number, 0, 1, self.together)
        with expert_parallel():
            group = expert_parallel_group()
        assert group is not None
        ranks = group.ranks
        places = self.number + min(self.copies, self.number * (ranks.size - 1))
        order = self.order or range(self.number)
        placement = tuple(order[place % self.number] for place in range(places))
        return Experts(self.number, ranks.rank, ranks.size, self.together, placement)


@st.composite
def expert_layouts(draw: st.DrawFn) -> ExpertLayout:
    """Draw experts; with fewer of them than ranks, a rank may keep none."""
    number, together, spread = draw(st.integers(1, 6)), draw(st.booleans()), draw(st.booleans())
    if not spread or draw(st.booleans()):
        return ExpertLayout(number, together, spread)
    order = draw(st.permutations(range(number)))
    return ExpertLayout(number, together, spread, tuple(order), draw(st.sampled_from([0, 1, 3])))


_SLOT_NAMES = ("q_proj", "k_proj", "v_proj")
_OTHER_SLOT_NAMES = ("even", "odd", "rest")


@st.composite
def dim_layouts(
    draw: st.DrawFn,
    *,
    unit: int = 1,
    cut: bool = True,
    fused: bool = True,
    partial: bool = False,
    padded: bool = True,
    names: tuple[str, ...] = _SLOT_NAMES,
) -> DimLayout:
    """Draw a dimension: one slot, padded or not, or several, some replicated or stored as pairs.

    Several slots have names, or a checkpoint stores them only as one tensor: one after the other,
    or alternating.

    Args:
        unit: number of features that cannot be separated, such as those of a packed element.
        cut: True if the dimension is cut among ranks; otherwise every rank keeps it whole.
        fused: True if it may have several slots.
        partial: True if the last unit may be incomplete, as a block may, if nothing is cut.
        padded: True if it may have padding.
        names: names of the slots.

    """
    count = draw(st.integers(1, 3)) if fused else 1
    if count > 1 and draw(st.integers(0, 3)) == 3:
        return draw(_alternating(names[:count], unit, cut, padded and cut))
    slots = []
    for name in names[:count] if count > 1 else ("",):
        most_parts = draw(st.sampled_from([32, 8, 4, 2])) if cut else 1
        size = most = unit * (
            draw(st.sampled_from([24, 30, 48])) if cut else draw(st.integers(1, 6))
        )
        pairs = draw(st.sampled_from([0, 0, 6])) if unit == 1 and size % 6 == 0 else 0
        if padded and cut and not pairs and draw(st.booleans()):
            size = draw(st.integers(1, most))
        slots.append(SlotLayout(name, size, most_parts, most, pairs))
    if partial and not cut:
        last = slots[-1]
        size = last.size - draw(st.integers(0, unit - 1))
        slots[-1] = last._replace(size=size, padded=size)
    return DimLayout(tuple(slots), draw(st.sampled_from([None, 1])) if count > 1 else None)


@st.composite
def _alternating(
    draw: st.DrawFn, names: tuple[str, ...], unit: int, cut: bool, padded: bool
) -> DimLayout:
    """Draw slots that a checkpoint stores in groups, of one feature of each slot or one head.

    They may be padded, all by the same number of groups.
    """
    groups = draw(st.sampled_from([2, 4, 24]))
    more = draw(st.sampled_from([0, 0, groups // 2])) if padded else 0
    slots = []
    for index, name in enumerate(names):
        size = unit * groups * draw(st.sampled_from([1, 2, 4]))
        # As with key-value heads, if there are more ranks than groups, ranks may share a slot's
        # part.
        most_parts = draw(st.sampled_from([32, groups])) if index else 32
        most = size + size // groups * more
        slots.append(SlotLayout(name, size, most_parts if cut else 1, most))
    return DimLayout(tuple(slots), groups)


@dataclass(frozen=True)
class ParameterLayout:
    """A typed parameter for any tensor-parallel size; ``build`` makes it for one size.

    Attributes:
        cls: class of the parameter.
        output, input: dimensions over the layer's features; ``None`` if the parameter lacks one.
        entries: further arguments of the constructor.
        dtype: dtype of the parameter.
        experts: the experts whose weights it holds, if any.
        stored_beside: its name one level higher; as one tensor, if slots are also stored apart.

    """

    cls: type[BasevLLMParameter]
    output: DimLayout | None
    input: DimLayout | None
    entries: Mapping[str, Any]
    dtype: torch.dtype
    experts: ExpertLayout | None = None
    stored_beside: str | None = None

    def build(self) -> BasevLLMParameter:
        """Return the parameter of the current tensor-parallel group's rank."""
        group = tensor_parallel_group()
        spread = self.experts is not None and self.experts.spread  # each expert is kept whole
        dims = [
            dim.at(1 if spread else group.size)
            for dim in (self.output, self.input)
            if dim is not None
        ]
        return self.cls(
            *dims,
            **self.entries,
            tp_rank=group.rank,
            tp_size=group.size,
            dtype=self.dtype,
            experts=None if self.experts is None else self.experts.build(),
        )


_SOME_EXPERTS = st.none() | expert_layouts()
_STORED_BESIDE = st.sampled_from([None, "packed"])


@st.composite
def _weights(
    draw: st.DrawFn,
    /,
    cls: type[BasevLLMParameter],
    dtypes: st.SearchStrategy[torch.dtype],
    units: tuple[int, int] = (1, 1),
    partial: bool = False,
    **entries: Any,
) -> ParameterLayout:
    """Draw ``[output, input]``; at most one of the two is cut among ranks."""
    column = draw(st.booleans())
    output = draw(dim_layouts(unit=units[0], cut=column, partial=partial))
    fused = units == (1, 1) and output.groups in (None, 1) and draw(st.booleans())
    inputs = draw(
        dim_layouts(
            unit=units[1], cut=not column, fused=fused, partial=partial, names=_OTHER_SLOT_NAMES
        )
    )
    if any(slot.pairs for slot in output.slots):  # only one dimension may be stored as pairs
        inputs = inputs._replace(slots=tuple(slot._replace(pairs=0) for slot in inputs.slots))
    entries["transposed"] = draw(st.booleans())
    return ParameterLayout(
        cls, output, inputs, entries, draw(dtypes), draw(_SOME_EXPERTS), draw(_STORED_BESIDE)
    )


def _outputs(
    cls: type[BasevLLMParameter],
    dtypes: st.SearchStrategy[torch.dtype],
    unit: int = 1,
    **entries: Any,
) -> st.SearchStrategy[ParameterLayout]:
    output = st.booleans().flatmap(lambda cut: dim_layouts(unit=unit, cut=cut))
    return st.builds(
        ParameterLayout,
        st.just(cls), output, st.none(), st.just(entries), dtypes, _SOME_EXPERTS, _STORED_BESIDE,
    )  # fmt: skip


_PACKED = st.sampled_from([torch.int32, torch.uint8])
_SCALES = st.sampled_from([torch.float32, torch.bfloat16])
_TABLES = st.sampled_from([torch.float32, torch.uint8])
_FACTORS = st.sampled_from([2, 8])
_WEIGHTS = st.one_of(
    dtypes(), st.sampled_from([torch.float8_e4m3fn, torch.int8, torch.uint8, torch.bool])
)

_LAYOUTS: Mapping[type[BasevLLMParameter], st.SearchStrategy[ParameterLayout]] = {
    BasevLLMParameter: _weights(BasevLLMParameter, _WEIGHTS),
    ModelWeightParameter: _weights(ModelWeightParameter, _WEIGHTS),
    ColumnvLLMParameter: _outputs(ColumnvLLMParameter, dtypes()),
    RowvLLMParameter: st.builds(
        ParameterLayout,
        st.just(RowvLLMParameter),
        st.none(),
        st.booleans().flatmap(lambda cut: dim_layouts(cut=cut, fused=False)),
        st.just({}),
        st.sampled_from([torch.int32, torch.float32]),
        _SOME_EXPERTS,
        _STORED_BESIDE,
    ),
    PackedvLLMParameter: st.tuples(st.integers(0, 1), _FACTORS, st.sampled_from([1, 3])).flatmap(
        lambda drawn: _weights(
            PackedvLLMParameter,
            _PACKED,
            units=(1, drawn[1]) if drawn[0] else (drawn[1], 1),
            packed_dim=drawn[0],
            packed_factor=drawn[1],
            packed_elements=drawn[2],
        )
    ),
    # With one value per element, it needs no conversion.
    PackedModelWeightParameter: _weights(PackedModelWeightParameter, _WEIGHTS, packed_factor=1),
    PackedColumnParameter: _FACTORS.flatmap(
        lambda factor: _outputs(PackedColumnParameter, _PACKED, factor, packed_factor=factor)
    ),
    PerTensorScaleParameter: _outputs(PerTensorScaleParameter, _SCALES),
    PerTensorTableParameter: st.tuples(st.sampled_from([1, 3]), st.booleans()).flatmap(
        lambda drawn: _outputs(PerTensorTableParameter, _TABLES, length=drawn[0], shorter=drawn[1])
    ),
    FlattenedParameter: st.booleans().flatmap(
        lambda column: _weights(FlattenedParameter, _TABLES, (1, 2)).map(
            lambda layout: replace(layout, entries={"column": column})  # never transposed
        )
    ),
    PerSlotVectorParameter: _weights(PerSlotVectorParameter, _TABLES, (1, 2)).map(
        lambda layout: replace(layout, entries={})  # never transposed
    ),
    RankedColumnParameter: st.integers(1, 4).flatmap(
        lambda rank: _outputs(RankedColumnParameter, dtypes(), ranks=(rank,))
    ),
    ChannelQuantScaleParameter: _outputs(ChannelQuantScaleParameter, _SCALES),
    GroupQuantScaleParameter: st.sampled_from([2, 32]).flatmap(
        lambda size: _weights(
            GroupQuantScaleParameter, _SCALES, (1, size), partial=True, group_size=size
        )
    ),
    BlockQuantScaleParameter: st.tuples(*[st.sampled_from([1, 4, 16])] * 2, st.booleans()).flatmap(
        lambda drawn: _weights(
            BlockQuantScaleParameter,
            _SCALES,
            drawn[:2],
            partial=True,
            block=drawn[:2],
            apart=drawn[2],
        )
    ),
}


def parameter_classes() -> tuple[type[BasevLLMParameter], ...]:
    """Return the parameter classes that :func:`parameter_layouts` can draw."""
    return tuple(_LAYOUTS)


def parameter_layouts(cls: type[BasevLLMParameter]) -> st.SearchStrategy[ParameterLayout]:
    """Draw a layout of parameters of class ``cls``."""
    return _LAYOUTS[cls]
