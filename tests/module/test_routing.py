"""Where names lead: children, slots, aliases, or nowhere."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vllm_module import WeightLoadError, vLLMModule
from vllm_module.errors import DuplicateWeightError, UnexpectedWeightError
from vllm_module.layers import MergedColumnParallelLinear, RMSNorm

tree = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("tree.py"))))


def test_every_tensor_arrives_and_the_names_filled_are_returned() -> None:
    """A whole checkpoint fills every parameter and buffer, those of plain modules included."""
    model, tensors = tree.Model(), tree.checkpoint()
    assert model.load_weights(tensors) == set(model.state_dict())
    qkv = torch.cat([tensors[f"blocks.1.{p}_proj.weight"] for p in "qkv"])
    assert torch.equal(model.blocks[1].qkv_proj.weight, qkv)
    assert model.blocks[1].plain[1].num_batches_tracked == 8
    assert model.load_report is not None
    assert model.load_report.loaded["blocks.0.qkv_proj.bias"] == [
        f"blocks.0.{p}_proj.bias" for p in "qkv"
    ]
    model.eval()(torch.arange(10))
    names = ["blocks.0.k_proj.weight", "blocks.1.plain.1.bias"]
    updated = model.update_weights({name: tensors[name] for name in names})
    assert updated == {"blocks.0.qkv_proj.weight", "blocks.1.plain.1.bias"}


class Renamed(vLLMModule):
    """A checkpoint has other names for the children."""

    weight_aliases = {"attention_block": "block", "gain": "norm"}

    def __init__(self) -> None:
        super().__init__()
        self.block = tree.Block()
        self.norm = RMSNorm(8)


def test_aliases_are_exact_and_child_scoped() -> None:
    """An alias renames one component where it is declared and nowhere else."""
    block = tree.block_checkpoint()
    aliased = {f"attention_block.{name}": tensor for name, tensor in block.items()}
    model = Renamed()
    model.load_weights(aliased | {"gain.weight": torch.ones(8)})
    canonical = {f"block.{name}": tensor for name, tensor in block.items()}
    model.load_weights(canonical | {"norm.weight": torch.ones(8)})
    with pytest.raises(UnexpectedWeightError, match=r"attention_block\.gain\.weight"):
        model.update_weights({"attention_block.gain.weight": torch.ones(8)})
    with pytest.raises(DuplicateWeightError, match=r"gain\.weight"):
        model.update_weights({"norm.weight": torch.ones(8), "gain.weight": torch.ones(8)})


def test_an_alias_may_name_a_slot() -> None:
    """A checkpoint that calls a slot ``w1`` loads through an alias."""

    class Aliased(tree.MLP):
        weight_aliases = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}

    tensors = {f"w{i}.weight": torch.rand(12, 8) for i in (1, 3)}
    model = Aliased()
    model.load_weights(tensors | {"w2.weight": torch.rand(8, 12), "w2.bias": torch.rand(8)})
    assert torch.equal(model.gate_up_proj.weight, torch.cat(list(tensors.values())))


def test_two_claims_on_one_component_are_the_authors_mistake() -> None:
    """A model whose routing is ambiguous is refused."""

    class Ambiguous(vLLMModule):
        def __init__(self) -> None:
            super().__init__()
            self.one = MergedColumnParallelLinear(8, [4, 4], shard_names=["a", "b"])
            self.two = MergedColumnParallelLinear(8, [4, 4], shard_names=["b", "c"])

    with pytest.raises(ValueError, match=r"Ambiguous: two .* claim .* b"):
        Ambiguous().load_weights({})


def test_names_that_do_not_end_where_they_should_are_unexpected() -> None:
    """Law 4: before a leading or after a trailing dot is an empty component, which has no route."""
    for name in ("weight.", ".weight", "weight.weight", "."):
        with pytest.raises(WeightLoadError) as refused:
            RMSNorm(2).load_weights({"weight": torch.ones(2), name: torch.ones(2)})
        assert [problem.name for problem in refused.value.report.unexpected] == [name]


def test_a_plain_module_that_two_parents_share_is_ready_in_both() -> None:
    """A tensor that is filled by one name is filled in every module that holds it."""

    class Parent(vLLMModule):
        def __init__(self, linear: nn.Module) -> None:
            super().__init__()
            self.linear = linear

    class Tree(vLLMModule):
        def __init__(self) -> None:
            super().__init__()
            shared = nn.Linear(2, 2, bias=False)
            self.a, self.b = Parent(shared), Parent(shared)

    weight = torch.rand(2, 2)
    for names in (["a"], ["b"], ["a", "b"]):
        model = Tree()
        model.load_weights({f"{name}.linear.weight": weight for name in names})
        model.check_ready()
        model.a.check_ready()
        model.b.check_ready()


def test_a_path_is_not_weights() -> None:
    """If a folder is passed, the error says what to call."""
    with pytest.raises(TypeError, match="open_checkpoint"):
        RMSNorm(2).load_weights("some/folder")
