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
from vllm_module.layers import MergedColumnParallelLinear, MergedReplicatedLinear, RMSNorm
from vllm_module.parameters import ColumnvLLMParameter, Dim, ModelWeightParameter, Slot
from vllm_module.testing import random_weights
from vllm_module.testing.checkpoints import assert_same_state, state

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


def test_an_alias_of_a_tensor_leaves_a_rule_for_one_of_its_slots() -> None:
    """``gate_proj.kernel`` is skipped by its rule; ``up_proj.kernel`` is the slot's tensor."""

    class Fused(MergedColumnParallelLinear):
        weight_aliases = {"kernel": "weight"}
        skipped_weights = {"gate_proj.kernel": "an older copy"}

    layer = Fused(8, [12, 12], bias=False, shard_names=["gate_proj", "up_proj"])
    tensors = {f"{slot}_proj.kernel": torch.rand(12, 8) for slot in ("gate", "up")}
    report = layer.plan_weights(tensors).report
    assert report.skipped == {"gate_proj.kernel": "an older copy"}
    assert report.loaded == {"weight": ["up_proj.kernel"]}
    weight = torch.rand(12, 8)
    layer.load_weights(tensors | {"gate_proj.weight": weight})
    assert torch.equal(layer.weight, torch.cat([weight, tensors["up_proj.kernel"]]))


class Part(vLLMModule):
    """Layers whose path has other names in checkpoints, or is not there."""

    weight_aliases = {
        "h": "transformer.h",
        "language_model.model": "transformer",
        "transformer.h.1.scale": "gain",
        "transformer.h.1.w1": "transformer.h.1.gate_proj",
        "head.bias": "transformer.bias",
    }
    skipped_weights = {"transformer.h.2": "not for inference", "vision.tower": "text only"}

    def __init__(self) -> None:
        super().__init__()
        self.transformer = vLLMModule()
        self.transformer.h = nn.ModuleList(tree.MLP() for _ in range(2))
        self.transformer.bias = nn.Parameter(torch.empty(3, device="meta"), requires_grad=False)
        self.gain = nn.Parameter(torch.empty(2, device="meta"), requires_grad=False)


# From a name of the tree to names that a checkpoint may have instead.
SPELLINGS = {
    "transformer.h.0.up_proj.weight": [
        "h.0.up_proj.weight",
        "language_model.model.h.0.up_proj.weight",
    ],
    "transformer.h.0.down_proj.bias": ["h.0.down_proj.bias"],
    "transformer.h.1.gate_proj.weight": ["transformer.h.1.w1.weight"],
    "transformer.bias": ["language_model.model.bias", "head.bias"],
    "gain": ["transformer.h.1.scale"],
}  # fmt: skip


@pytest.mark.parametrize("streamed", [False, True])
def test_paths_lead_to_modules_slots_and_tensors(streamed: bool) -> None:
    """Either side of an alias may be a path; the report has the names of the checkpoint."""
    tensors = random_weights(Part().expected_weights())
    expected = Part()
    expected.load_weights(tensors)
    for name, others in SPELLINGS.items():
        for other in others:
            given = {other if each == name else each: tensor for each, tensor in tensors.items()}
            model = Part()
            model.load_weights(iter(given.items()) if streamed else given)
            assert_same_state(state(model), state(expected), other)
            assert model.load_report is not None
            assert other in [n for names in model.load_report.loaded.values() for n in names]


def test_the_longest_path_counts() -> None:
    """A path into a child is the module's own where it says so, and the child's elsewhere."""
    model = Part()
    report = model.plan_weights({"transformer.h.1.scale": torch.ones(2)}).report
    assert report.loaded == {"gain": ["transformer.h.1.scale"]}
    for name in ("transformer.h.0.scale", "transformer.h.1.scale.x", "h.1.w1.weight"):
        report = model.plan_weights({name: torch.ones(2)}).report
        assert [problem.name for problem in report.unexpected] == [name]


def test_a_rule_for_a_path_skips_what_is_below_it() -> None:
    """It skips no sibling, no name that begins alike and no shorter name."""
    skipped = ["transformer.h.2", "transformer.h.2.w.x", "vision.tower.0", "vision.tower"]
    refused = ["transformer.h.20.w", "transformer.h.3", "vision", "vision.towers", "vision.x.tower"]
    report = Part().plan_weights(dict.fromkeys([*skipped, *refused], torch.ones(1))).report
    assert list(report.skipped) == skipped
    assert sorted(problem.name for problem in report.unexpected) == sorted(refused)


def test_problems_are_named_as_the_checkpoint_names_them() -> None:
    """Through aliases, slots and an override, every list of the report has the given names."""

    class Passing(Part):
        def load_weights(self, weights):
            return super().load_weights([(name, 1 * weight) for name, weight in weights])

    class Above(vLLMModule):
        weight_aliases = {"model.text": "part"}

        def __init__(self) -> None:
            super().__init__()
            self.part = Passing()

    tensors = random_weights(Part().expected_weights())
    given = {f"model.text.{name}": tensor for name, tensor in tensors.items()}
    model = Above()
    model.load_weights(given)
    assert model.load_report is not None
    loaded = [name for names in model.load_report.loaded.values() for name in names]
    assert sorted(loaded) == sorted(given)
    strange = {
        "model.text.h.0.nope.weight": torch.ones(1),
        "model.text.h.0.up_proj.weight": torch.ones(1),
    }
    report = Above().plan_weights(given | strange).report
    assert [problem.name for problem in report.unexpected] == ["model.text.h.0.nope.weight"]
    assert [problem.name for problem in report.duplicated] == ["model.text.h.0.up_proj.weight"]


@pytest.mark.parametrize(
    "declared", ["skipped_weights", "weight_aliases", "shard_names", "conversions"]
)
def test_declarations_of_a_plain_module_are_refused(declared: str) -> None:
    """They would have no effect: a ValueError says so, on the class as on the object."""

    class Layers(nn.ModuleList):
        pass

    for where in (Layers, None):
        model = vLLMModule()
        model.layers = Layers([RMSNorm(2)])
        if where is not None:
            setattr(where, declared, {})
        else:
            model.layers = nn.ModuleList([RMSNorm(2)])
            setattr(model.layers, declared, {})
        with pytest.raises(ValueError, match=f"declares {declared}, which has no effect"):
            model.load_weights({"layers.0.weight": torch.ones(2)})


@pytest.mark.parametrize("declared", ["skipped_weights", "weight_aliases"])
def test_names_without_what_they_map_to_are_refused(declared: str) -> None:
    """A list where a dict belongs is a TypeError that says so."""
    layer = RMSNorm(2)
    setattr(layer, declared, ["inv_freq"])
    with pytest.raises(TypeError, match=r"RMSNorm: .*skipped_weights.* expected two dicts"):
        layer.load_weights({"weight": torch.ones(2)})


@pytest.mark.parametrize("name", ["", "a.", ".a", "a..b"])
@pytest.mark.parametrize("declared", ["alias", "target", "rule", "slot"])
def test_empty_components_are_refused(declared: str, name: str) -> None:
    """No declared name has a component without letters."""

    class Odd(vLLMModule):
        weight_aliases = {"alias": {name: "norm"}, "target": {"x": name}}.get(declared, {})
        skipped_weights = {name: "a reason"} if declared == "rule" else {}

        def __init__(self) -> None:
            super().__init__()
            self.norm = RMSNorm(2)
            if declared == "slot":
                self.norm.shard_names = [name]

    with pytest.raises(ValueError, match=r"declares .*, which is no name"):
        Odd().load_weights({"norm.weight": torch.ones(2)})


def test_layers_with_slots_of_one_name_have_tensors_of_their_own() -> None:
    """Slots that are stored together only are no names: each layer's tensor has its own."""
    model = vLLMModule()
    for layer in ("a", "b"):
        model.add_module(layer, MergedColumnParallelLinear(2, [1, 1], False, shard_names=None))
    assert {name: list(like.shape) for name, like in model.expected_weights().items()} == {
        "a.weight": [2, 2],
        "b.weight": [2, 2],
    }
    tensors = random_weights(model.expected_weights())
    model.load_weights(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(model.get_parameter(name), tensor)
    for name in ("0.weight", "a.0.weight", "1.weight"):
        with pytest.raises(UnexpectedWeightError):
            model.update_weights({name: torch.ones(1, 2)})


def test_a_layer_alone_has_no_name_one_level_higher() -> None:
    """The root of a load has no module above it, in which its tensors could be stored."""
    layer = RMSNorm(2)
    layer.stored_beside = {"weight": "gain"}
    above = vLLMModule()
    above.layer = layer
    for model, name in ((layer, "weight"), (above, "gain")):
        assert list(model.expected_weights()) == [name]
        model.load_weights({name: torch.ones(2)})
        model.sleep()
        with pytest.raises(WeightLoadError, match=rf"\n  {name}: expected shape"):
            model.load_weights({})


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


class Slots(vLLMModule):
    """A layer whose slots have paths for names, beside a child and a rule that are shorter."""

    shard_names = ("0.up", "old.up")
    skipped_weights = {"old": "a rule"}

    def __init__(self) -> None:
        super().__init__()
        dims = Dim((Slot("0.up", 2), Slot("old.up", 2))), Dim.whole(2)
        self.weight = ModelWeightParameter(*dims, tp_rank=0, tp_size=1, dtype=torch.float32)
        self.add_module("0", tree.MLP())


def test_a_longer_slot_wins_over_a_child_and_a_rule_for_names_it_lacks_too() -> None:
    """A name below an own slot is that slot's, and refused if the slot has no such tensor."""
    names = ["0.up.bias", "old.up.bias"]
    report = Slots().plan_weights({name: torch.zeros(2) for name in names}).report
    assert [problem.name for problem in report.unexpected] == names
    assert all("without 'bias' with a slot" in problem.detail for problem in report.unexpected)
    assert Slots().plan_weights({"old.down": torch.zeros(2)}).report.skipped == {
        "old.down": "a rule"
    }


@pytest.mark.parametrize("streamed", [False, True])
def test_a_slot_of_a_parameter_that_an_override_adds_is_found(streamed: bool) -> None:
    """A layer may add a parameter once it sees a name of it, in a stream too."""

    class Lazy(Slots):
        def load_weights(self, weights):
            def seen():
                for name, weight in weights:
                    if name.endswith("bias"):
                        dim = Dim((Slot("0.up", 2), Slot("old.up", 2)))
                        kind = {"tp_rank": 0, "tp_size": 1, "dtype": torch.float32}
                        self.bias = getattr(self, "bias", ColumnvLLMParameter(dim, **kind))
                    yield name, weight

            return super().load_weights(seen() if streamed else list(seen()))

    model = nn.ModuleDict({"layer": Lazy()})["layer"]
    weights = {f"{slot}.weight": torch.ones(2, 2) for slot in Slots.shard_names}
    biases = {f"{slot}.bias": torch.ones(2) for slot in Slots.shard_names}
    assert model.update_weights(weights | biases) == {"weight", "bias"}


def test_a_slot_that_has_the_name_of_a_tensor_is_refused_below_a_module_too() -> None:
    """A layer without children declares names that collide: the load says so."""

    class Colliding(vLLMModule):
        shard_names = ("weight",)

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))

    class Above(vLLMModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Colliding()

    with pytest.raises(ValueError, match=r"Colliding: .* claim the checkpoint name weight$"):
        Above().load_weights({"layer.weight": torch.ones(2)})


def test_children_whose_slots_have_one_name_are_named() -> None:
    """A slot stands beside its layer, so that two layers of one module cannot both have it."""

    class Attention(vLLMModule):
        def __init__(self) -> None:
            super().__init__()
            self.first = MergedReplicatedLinear(4, [2, 2], shard_names=["a", "b"])
            self.other = MergedReplicatedLinear(4, [2, 2], shard_names=["c", "b"])
            self.third = MergedReplicatedLinear(4, [2, 2], shard_names=["d", "e"])

    with pytest.raises(ValueError, match=r"claim the checkpoint name b, which is of first, other$"):
        Attention().load_weights({})


@pytest.mark.parametrize("names", [["one"], ["other"], ["one", "other"]])
def test_a_plain_module_that_one_module_holds_twice_loads_under_either_name(
    names: list[str],
) -> None:
    """The tensors of a child that has two names are loaded, and processed, by any of them."""

    class Twice(vLLMModule):
        def __init__(self) -> None:
            super().__init__()
            self.one = self.other = nn.Sequential(nn.Linear(2, 2, bias=False))
            self.processed = 0

        def process_weights_after_loading(self) -> None:
            self.processed += 1

    model = Twice()
    model.load_weights({f"{name}.0.weight": torch.ones(2, 2) for name in names})
    model.check_ready()
    assert model.processed == 1


@pytest.mark.parametrize("streamed", [False, True])
def test_every_module_with_weights_loads_itself(
    streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``load_weights`` is called on each leaf; a stream skips the modules above, not the leaf."""
    called: list[nn.Module] = []
    right = vLLMModule.load_weights

    def counting(self: vLLMModule, weights) -> set[str]:
        called.append(self)
        return right(self, weights)

    monkeypatch.setattr(vLLMModule, "load_weights", counting)
    model, tensors = tree.Model(), tree.checkpoint()
    model.load_weights(iter(tensors.items()) if streamed else tensors)
    own = [m for m in model.modules() if isinstance(m, vLLMModule) and [*m.parameters(False)]]
    assert len(own) == 10
    assert set(own) <= set(called)
    if not streamed:  # once for all of its names
        assert len(called) == len(set(called))
