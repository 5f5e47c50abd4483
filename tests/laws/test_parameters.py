"""The laws of loading, checked on every class of typed parameters."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from vllm_module import vLLMModule
from vllm_module.distributed import tensor_parallel
from vllm_module.errors import ShardingError
from vllm_module.parameters import (
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    ColumnvLLMParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PackedColumnParameter,
    PackedvLLMParameter,
    PerTensorScaleParameter,
)
from vllm_module.testing import (
    LAWS,
    Law,
    ParameterLayout,
    parameter_layouts,
    random_weights,
    tp_sizes,
)
from vllm_module.testing.sharding import reassemble

PARAMETERS = runpy.run_path(str(Path(__file__).with_name("subjects.py")))["PARAMETERS"]


@pytest.fixture
def fewer_cases() -> Iterator[None]:
    """Try fewer cases of each law and class than of a property; "make laws" tries more."""
    before = settings.get_current_profile_name()
    settings.register_profile("few", settings.get_profile(before), max_examples=2)
    settings.load_profile("few")
    yield
    settings.load_profile(before)


@pytest.mark.usefixtures("fewer_cases")
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_parameter_keeps_the_law(name: str, law: Law) -> None:
    """The law holds for any layout of the parameter and any number of ranks."""
    PARAMETERS[name].hold(law)


def units(layout: ParameterLayout) -> tuple[int, int]:
    """Return how many output and input features one unit of the parameter spans."""
    entries = layout.entries
    if layout.cls is PackedvLLMParameter:
        factor = entries["packed_factor"]
        return (1, factor) if entries["packed_dim"] else (factor, 1)
    if layout.cls is PackedColumnParameter:
        return entries["packed_factor"], 1
    if layout.cls is GroupQuantScaleParameter:
        return 1, entries["group_size"]
    return entries.get("block", (1, 1))


class Scaled(vLLMModule):
    """A weight, and a parameter that counts the weight's features in units."""

    def __init__(self, layout: ParameterLayout) -> None:
        super().__init__()
        layout = replace(layout, stored_beside=None)
        weight_class = ColumnvLLMParameter if layout.input is None else ModelWeightParameter
        self.weight = replace(layout, cls=weight_class, entries={}, dtype=torch.float32).build()
        self.scale = layout.build()
        self.shard_names = tuple(name for name in self.weight.slots if name)
        self.units, self.apart = units(layout), layout.entries.get("apart", False)
        self.elements = [1, 1]  # of a unit
        if layout.cls is PackedvLLMParameter:
            self.elements[layout.entries["packed_dim"]] = layout.entries["packed_elements"]

    def scaled(self) -> torch.Tensor:
        """Multiply every element of the weight with the unit that it lies in."""
        scale = self.scale.detach().double()
        first = 0 if self.weight.experts is None else 1
        if isinstance(self.scale, PerTensorScaleParameter):
            rows = torch.tensor([shard.padded for shard in self.weight.shards[first]])
            return self.weight * scale.repeat_interleave(rows, first)
        if isinstance(self.scale, ChannelQuantScaleParameter):
            return self.weight * scale.squeeze(-1)
        if self.apart:
            scale = scale.squeeze(-1).squeeze(first + 1)
        for dim, features in enumerate(self.weight.shape[first:]):
            at = torch.arange(features) * self.elements[dim] // self.units[dim]
            scale = scale.index_select(first + dim, at)
        return self.weight * scale


UNITS = (
    PackedvLLMParameter,
    PackedColumnParameter,
    PerTensorScaleParameter,
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    BlockQuantScaleParameter,
)


@pytest.mark.parametrize("cls", UNITS)
@given(data=st.data(), size=tp_sizes())
def test_units_stay_with_their_features(cls: type, data: st.DataObject, size: int) -> None:
    """On every rank, a feature has the packed element or scale that it has unsharded."""
    layout = data.draw(parameter_layouts(cls))
    whole = Scaled(layout)
    tensors = random_weights(whole.expected_weights())
    whole.load_weights(tensors)
    ranks = []
    for rank in range(size):
        with tensor_parallel(rank=rank, size=size):
            try:
                ranks.append(Scaled(layout))
            except ShardingError:
                assume(False)
    for module in ranks:
        module.load_weights(tensors)
    shards = [module.scaled() for module in ranks]
    together = reassemble([each.weight for each in ranks], shards, "the scaled weight")
    expected = reassemble([whole.weight], [whole.scaled()], "the scaled weight")
    assert together.keys() == expected.keys()
    for slot, tensor in expected.items():
        assert tensor.count_nonzero() == tensor.numel()
        assert torch.equal(together[slot], tensor), slot
