"""Which modules an adapter is for, and with which rank and scale: by the functions of PEFT."""

from __future__ import annotations

import itertools
from typing import Any

import peft
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from torch import nn

from vllm_module import vLLMModule
from vllm_module.adapters import Adapter, adapter_config
from vllm_module.adapters.spellings import spellings
from vllm_module.core.tree import Node
from vllm_module.layers import MergedColumnParallelLinear

MODULES = [
    "lm_head",
    "q_proj",
    "model.layers.1.self_attn.q_proj",
    "model.layers.1.self_attn.k_proj",
    "model.layers.11.self_attn.q_proj",
    "model.layers.1.mlp.up_proj",
    "model.layers.2.mlp.experts.1.up_proj",
    "model.my_q_proj",
    "model.q_proj.k_proj",
    "model.h.1.c_attn",
    "encoder.1.layers.3.q_proj",
]
PATTERNS = [
    "q_proj",
    "q_proj|k_proj",
    "k_proj|up",
    "self_attn.q_proj",
    r"layers\.1\..*",
    r"layers\.1\.mlp\.up_proj",
    r".*up_proj",
    "proj",
    "model",
    r"[^.]*\.q_proj",
    r"(self_attn\.)?k_proj",
    "^lm_head",
]


@pytest.mark.parametrize("first", PATTERNS)
@pytest.mark.parametrize("second", PATTERNS)
def test_ranks_and_scales(first: str, second: str) -> None:
    """The first pattern that fits decides; it fits whole components up to the end of a name."""
    patterns = dict.fromkeys((first, second))
    ranks, alphas = ({p: n + at for at, p in enumerate(patterns)} for n in (2, 7))
    ours = adapter_config(
        {"r": 5, "lora_alpha": 11, "rank_pattern": ranks, "alpha_pattern": alphas}, "a"
    )
    for module in MODULES:
        rank = ranks.get(get_pattern_key(ranks.keys(), module), 5)
        alpha = alphas.get(get_pattern_key(alphas.keys(), module), 11)
        assert (ours.rank(module), ours.scale(module)) == (rank, alpha / rank), module


TARGETS: list[Any] = [
    ["q_proj"],
    ["q_proj", "lm_head"],
    ["self_attn.q_proj", "model.h.1.c_attn"],
    ["roj"],
    r".*\.(q|k)_proj",
    r"model\.layers\.1\..*",
    "q_proj|lm_head",
    [],
    "",
]
EXCLUDED: list[Any] = [None, ["lm_head"], ["self_attn.q_proj"], r".*layers\.1\..*", "q_proj"]
LAYERS: list[dict[str, Any]] = [
    {},
    {"layers_to_transform": 1},
    {"layers_to_transform": 0},  # a layer, and not "all of them"
    {"layers_to_transform": [1, 2]},
    {"layers_to_transform": []},
    {"layers_to_transform": [1, 3], "layers_pattern": "layers"},
    {"layers_to_transform": [1], "layers_pattern": ["h", "layers"]},
    {"layers_to_transform": [1], "layers_pattern": ""},
    {"layers_to_transform": [1], "layers_pattern": "experts"},
]


@pytest.mark.parametrize("layers", LAYERS, ids=str)
@pytest.mark.parametrize("excluded", EXCLUDED, ids=str)
@pytest.mark.parametrize("targets", TARGETS, ids=str)
def test_targets(targets: Any, excluded: Any, layers: dict[str, Any]) -> None:
    """A name, an expression or layers' numbers choose a module, or leave it out."""
    asked = {"target_modules": targets, "exclude_modules": excluded}
    asked |= {} if isinstance(targets, str) else layers  # PEFT refuses both
    theirs = peft.LoraConfig(**asked)
    ours = adapter_config({"r": 8, "lora_alpha": 8, **asked}, "a")
    for module in MODULES:
        chosen = bool(check_target_module_exists(theirs, module))
        assert ours.targets(module) == chosen, module


class Fused(vLLMModule):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.fused = MergedColumnParallelLinear(4, [3, 5], bias=False, shard_names=[*names])


@torch.no_grad()
def test_slots_have_their_own_scales_whatever_their_names_have_in_common() -> None:
    """One name is the end of the other, its beginning or a part; the adapter has either or both."""
    x = torch.rand(2, 4)
    for names in itertools.permutations(["proj", "up_proj", "proj_up", "up", "1", "11"], 2):
        base, alphas = Fused(*names), dict(zip(names, (3, 7), strict=True))
        for present in (names, names[:1], names[1:]):
            expected, weights = torch.zeros(2, 8), {}
            for name, part in zip(names, expected.split([3, 5], 1), strict=True):
                if name in present:
                    a, b = torch.rand(2, 4), torch.rand(part.shape[1], 2)
                    weights |= {f"{name}.lora_A": a, f"{name}.lora_B": b}
                    part.copy_(x @ a.T @ b.T * alphas[name] / 2)
            entries = {"target_modules": [*present], "alpha_pattern": alphas}
            adapter = Adapter(base, adapter_config({"r": 2, "lora_alpha": 1} | entries, "a"))
            adapter.load(weights)
            (layer,) = adapter.layers()
            found, low = torch.zeros(2, 8), layer.low_rank()
            low.add(x, found)
            torch.testing.assert_close(found, expected)
            assert len(low.parts) == len(present)


PATH = ("model", "block", "experts", "up")


@given(st.lists(st.sets(st.sampled_from("abc")), min_size=4, max_size=4))
def test_a_module_has_the_names_by_all_aliases_above_it(aliases: list[set[str]]) -> None:
    """Each component is the module's own name or an alias, whatever the others are."""
    node, nodes = Node(nn.Module()), []
    for component, others in zip(PATH, aliases, strict=True):
        module: Any = node.module
        module.weight_aliases = {"other": "elsewhere"} | dict.fromkeys(others, component)
        node = Node(nn.Module(), node, component)
        nodes.append(node)
    each_level = [(component, *others) for component, others in zip(PATH, aliases, strict=True)]
    for depth, below in enumerate(nodes, 1):
        names = {".".join(each) for each in itertools.product(*each_level[:depth])}
        assert sorted(spellings(below, below.path.removesuffix("."))) == sorted(names)
        found = spellings(below, f"{below.path}x")
        assert sorted(found) == sorted(f"{name}.x" for name in names)
