"""The laws of loading, on small trees: routing, accounting, order, ties, life, purity, cost."""

from __future__ import annotations

import copy
import pickle
import random
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vllm_module import WeightLoadError, vLLMModule
from vllm_module.distributed import tensor_parallel
from vllm_module.errors import (
    DuplicateWeightError,
    MisshapenWeightError,
    MissingWeightError,
    ModelNotReadyError,
    UnexpectedWeightError,
)
from vllm_module.layers import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    SiluAndMul,
    VocabParallelEmbedding,
)


class MLP(vLLMModule):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            8, [12, 12], bias=False, shard_names=["gate_proj", "up_proj"]
        )
        self.act_fn = SiluAndMul()
        self.down_proj = RowParallelLinear(12, 8, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class Block(vLLMModule):
    skipped_weights = {"rotary": "computed"}

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(8, 2, 4, 2, bias=True)
        self.mlp = MLP()
        self.norm = RMSNorm(8)
        self.plain = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(self.norm(self.mlp(x))) + self.qkv_proj(x).mean()


class Model(vLLMModule):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(10, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = ParallelLMHead(10, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TiedModel(Model):
    def __init__(self) -> None:
        super().__init__(blocks=1)
        self.head.tie_weights(self.embed)


def checkpoint(blocks: int = 2, *, head: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (10, 8)}
    for i in range(blocks):
        b = f"blocks.{i}."
        for name, rows in (("q_proj", 8), ("k_proj", 4), ("v_proj", 4)):
            shapes |= {f"{b}{name}.weight": (rows, 8), f"{b}{name}.bias": (rows,)}
        shapes |= {
            f"{b}mlp.gate_proj.weight": (12, 8),
            f"{b}mlp.up_proj.weight": (12, 8),
            f"{b}mlp.down_proj.weight": (8, 12),
            f"{b}mlp.down_proj.bias": (8,),
            f"{b}norm.weight": (8,),
            f"{b}plain.0.weight": (8, 8),
            f"{b}plain.0.bias": (8,),
        }
        shapes |= {
            f"{b}plain.1.{name}": (8,) for name in ("weight", "bias", "running_mean", "running_var")
        }
    if head:
        shapes["head.weight"] = (10, 8)
    tensors = {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}
    for i in range(blocks):
        tensors[f"blocks.{i}.plain.1.num_batches_tracked"] = torch.tensor(7 + i)
    return tensors


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def test_every_tensor_arrives_and_the_names_filled_are_returned() -> None:
    """A whole checkpoint fills every parameter and buffer, plain modules' too."""
    model, tensors = Model(), checkpoint()
    filled = model.load_weights(tensors)
    assert filled == set(model.state_dict())
    qkv = torch.cat([tensors[f"blocks.1.{p}_proj.weight"] for p in "qkv"])
    assert torch.equal(model.blocks[1].qkv_proj.weight, qkv)
    assert model.blocks[1].plain[1].num_batches_tracked == 8
    assert model.load_report is not None
    assert model.load_report.loaded["blocks.0.qkv_proj.bias"] == [
        f"blocks.0.{p}_proj.bias" for p in "qkv"
    ]
    model.eval()(torch.arange(10))


@settings(max_examples=40)
@given(
    order=st.randoms(use_true_random=False), streamed=st.booleans(), size=st.sampled_from([1, 2])
)
def test_any_order_gives_the_same_bits(order: random.Random, streamed: bool, size: int) -> None:
    """Law 2: names in any order, whole or streamed, load the same bits on every rank."""
    items = list(checkpoint().items())
    for rank in range(size):
        with tensor_parallel(rank=rank, size=size):
            expected, model = Model(), Model()
        expected.load_weights(dict(items))
        order.shuffle(items)
        model.load_weights(iter(items) if streamed else items)
        assert_same(state(model), state(expected))


@settings(max_examples=20)
@given(order=st.randoms(use_true_random=False), calls=st.integers(2, 6))
def test_any_split_into_calls_gives_the_same_bits(order: random.Random, calls: int) -> None:
    """Law 2: a fresh model filled by several updates is ready exactly when the last one is in."""
    expected, model = Model(), Model().eval()
    expected.load_weights(checkpoint())
    items = list(checkpoint().items())
    order.shuffle(items)
    for call in range(calls):
        with pytest.raises(ModelNotReadyError):
            model(torch.arange(3))
        model.update_weights(items[call::calls])
    assert_same(state(model), state(expected))
    model(torch.arange(3))


def test_a_fused_tensor_on_disk_loads_like_its_parts() -> None:
    """Law 4: a fused tensor is cut by slot and then by rank."""
    tensors = checkpoint(1)
    fused = dict(tensors)
    for kind in ("weight", "bias"):
        fused[f"blocks.0.qkv_proj.{kind}"] = torch.cat(
            [fused.pop(f"blocks.0.{p}_proj.{kind}") for p in "qkv"]
        )
    fused["blocks.0.mlp.gate_up_proj.weight"] = torch.cat(
        [fused.pop(f"blocks.0.mlp.{p}_proj.weight") for p in ("gate", "up")]
    )
    for size in (1, 2, 4):
        for rank in range(size):
            with tensor_parallel(rank=rank, size=size):
                split, whole = Model(1), Model(1)
            split.load_weights(tensors)
            whole.load_weights(fused)
            assert_same(state(split), state(whole))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"blocks.1.q_proj.weight": None},
            MissingWeightError,
            ["blocks.1.q_proj.weight", "[8, 8]", "slot 'q_proj' of qkv_proj.weight"],
        ),
        ({"blocks.0.norm.weight": None}, MissingWeightError, ["blocks.0.norm.weight", "[8]"]),
        (
            {"blocks.0.plain.1.running_var": None},
            MissingWeightError,
            ["blocks.0.plain.1.running_var"],
        ),
        ({"head.weight": None}, MissingWeightError, ["head.weight", "[10, 8]"]),
        (
            {"blocks.0.qkqkv_proj.weight": torch.zeros(8, 8)},
            UnexpectedWeightError,
            ["blocks.0.qkqkv_proj.weight", "Block has no 'qkqkv_proj'"],
        ),
        (
            {"blocks.0.norm.bias": torch.zeros(8)},
            UnexpectedWeightError,
            ["blocks.0.norm.bias", "RMSNorm has no 'bias'; it has weight"],
        ),
        (
            {"blocks.0.mlp.up_proj.bias": torch.zeros(12)},
            UnexpectedWeightError,
            ["blocks.0.mlp.up_proj.bias", "built without 'bias'"],
        ),
        ({"blocks.9.norm.weight": torch.zeros(8)}, UnexpectedWeightError, ["blocks.9.norm.weight"]),
        ({"blocks": torch.zeros(8)}, UnexpectedWeightError, ["blocks: "]),
        ({"embed.weight.x": torch.zeros(8)}, UnexpectedWeightError, ["embed.weight.x"]),
        ({"": torch.zeros(8)}, UnexpectedWeightError, []),
        (
            {"blocks.0.k_proj.weight": torch.zeros(8, 8)},
            MisshapenWeightError,
            ["blocks.0.k_proj.weight", "expected shape [4, 8], got [8, 8]"],
        ),
        (
            {"embed.weight": torch.zeros(11, 8)},
            MisshapenWeightError,
            ["embed.weight", "expected shape [10, 8], got [11, 8]"],
        ),
        (
            {"embed.weight": torch.zeros(10, 8, dtype=torch.int8)},
            MisshapenWeightError,
            ["embed.weight", "torch.int8"],
        ),
        (
            {"embed.weight": torch.zeros(10, 8).to(torch.float8_e4m3fn)},
            MisshapenWeightError,
            ["embed.weight", "float8_e4m3fn"],
        ),
        (
            {"embed.weight": torch.zeros(10, 8, device="meta")},
            MisshapenWeightError,
            ["embed.weight", "meta"],
        ),
        ({"embed.weight": [1.0]}, MisshapenWeightError, ["embed.weight", "list"]),
        (
            {"blocks.0.qkv_proj.weight": torch.zeros(16, 8)},
            DuplicateWeightError,
            ["blocks.0.qkv_proj.weight", "already filled by 'blocks.0.q_proj.weight'"],
        ),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_each_damage_is_refused_by_name(change, error, words, streamed: bool) -> None:
    """Law 1: one message names the full path, what was expected and what came; the model stops."""
    tensors = checkpoint() | change
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    model = Model().eval()
    with pytest.raises(error) as refused:
        model.load_weights(iter(tensors.items()) if streamed else tensors)
    assert isinstance(refused.value, WeightLoadError)
    assert not refused.value.report.ok
    for word in words:
        assert word in str(refused.value)
    with pytest.raises(ModelNotReadyError):
        model(torch.arange(3))
    model.load_weights(checkpoint())
    model(torch.arange(3))


def test_a_tensor_given_twice_is_a_duplicate() -> None:
    """Law 1: a slot that two tensors of one name claim is refused."""
    items = [*checkpoint().items(), ("blocks.0.norm.weight", torch.zeros(8))]
    for weights in (items, iter(items)):
        with pytest.raises(DuplicateWeightError, match=r"blocks\.0\.norm\.weight"):
            Model().load_weights(weights)


def test_all_problems_come_in_one_report_with_layers_folded() -> None:
    """Law 1: problems of several kinds are one WeightLoadError, numbered names folded."""
    tensors = checkpoint(4)
    for i in range(4):
        del tensors[f"blocks.{i}.mlp.up_proj.weight"]
    tensors["extra"] = torch.zeros(1)
    tensors["embed.weight"] = torch.zeros(3)
    with pytest.raises(WeightLoadError) as refused:
        Model(4).load_weights(tensors)
    assert type(refused.value) is WeightLoadError
    report = refused.value.report
    assert [len(x) for x in (report.missing, report.unexpected, report.misshapen)] == [4, 1, 1]
    assert "blocks.{0..3}.mlp.up_proj.weight: expected shape [12, 8]" in str(refused.value)


def test_a_refused_collection_leaves_a_loaded_model_as_it_was() -> None:
    """Everything is checked before anything is written, so a bad reload changes nothing."""
    model = Model().eval()
    model.load_weights(checkpoint())
    before = state(model)
    bad = {name: tensor + 1 for name, tensor in checkpoint().items()} | {"extra": torch.zeros(1)}
    for call in (model.load_weights, model.update_weights):
        with pytest.raises(UnexpectedWeightError, match="Nothing was written"):
            call(bad)
    assert_same(state(model), before)
    model(torch.arange(3))


def test_a_stream_that_breaks_leaves_the_model_refusing_until_a_load_succeeds() -> None:
    """Law 9: a mixture is never run, not even after a later partial update."""
    model = Model().eval()
    model.load_weights(checkpoint())

    def broken():
        yield "embed.weight", torch.zeros(10, 8)
        raise OSError("the trainer went away")

    with pytest.raises(OSError, match="went away"):
        model.update_weights(broken())
    for module in (model, model.blocks[0], model.embed):
        with pytest.raises(ModelNotReadyError, match="went away"):
            module(torch.arange(3))
    model.update_weights({"embed.weight": torch.zeros(10, 8)})
    with pytest.raises(ModelNotReadyError, match="mixture"):
        model(torch.arange(3))
    model.load_weights(checkpoint())
    model(torch.arange(3))


def test_a_stream_that_breaks_before_the_first_tensor_changes_nothing() -> None:
    """A model nothing was written to goes on."""
    model = Model().eval()
    model.load_weights(checkpoint())

    def broken():
        raise OSError("not even one")
        yield

    with pytest.raises(OSError, match="not even one"):
        model.update_weights(broken())
    model(torch.arange(3))


def test_reload_and_update_keep_the_storage() -> None:
    """Law 9: new weights go into the memory the parameters already have."""
    model = Model()
    model.load_weights(checkpoint())
    pointers = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    new = {name: tensor + 1 for name, tensor in checkpoint().items()}
    model.load_weights(new)
    updated = model.update_weights(
        {"blocks.0.k_proj.weight": torch.zeros(4, 8), "blocks.1.plain.1.bias": torch.ones(8)}
    )
    assert updated == {"blocks.0.qkv_proj.weight", "blocks.1.plain.1.bias"}
    assert {name: t.data_ptr() for name, t in model.state_dict().items()} == pointers
    weight = model.blocks[0].qkv_proj.weight
    assert torch.equal(weight[:8], new["blocks.0.q_proj.weight"])
    assert torch.equal(weight[8:12], torch.zeros(4, 8))


@pytest.mark.parametrize("streamed", [False, True])
def test_tied_parameters_are_filled_once_under_either_name(streamed: bool) -> None:
    """A tied tensor may be stored under one name or, alike, under both."""
    tensors = checkpoint(1, head=False)
    weight = tensors.pop("embed.weight")
    for stored in (
        {"embed.weight": weight},
        {"head.weight": weight},
        {"embed.weight": weight, "head.weight": weight.clone()},
    ):
        model = TiedModel().eval()
        weights = tensors | stored
        model.load_weights(iter(weights.items()) if streamed else weights)
        assert model.head.weight is model.embed.weight
        assert torch.equal(model.embed.weight[:10], weight)
        model(torch.arange(3))
    different = tensors | {"embed.weight": weight, "head.weight": weight + 1}
    model = TiedModel().eval()
    with pytest.raises(DuplicateWeightError, match=r"head\.weight.*tie_word_embeddings"):
        model.load_weights(iter(different.items()) if streamed else different)
    with pytest.raises(ModelNotReadyError):
        model(torch.arange(3))
    with pytest.raises(MissingWeightError, match=r"embed\.weight"):
        TiedModel().load_weights(tensors)


class Renamed(vLLMModule):
    """The inner block goes by other names in its checkpoint."""

    weight_aliases = {"attention_block": "block", "gain": "norm"}

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.norm = RMSNorm(8)


def test_aliases_are_exact_and_child_scoped() -> None:
    """An alias renames one component where it is declared and nowhere else."""
    block = {
        name.removeprefix("blocks.0."): t for name, t in checkpoint(1).items() if "blocks" in name
    }
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
    """A checkpoint that calls the gate w1 loads through an alias."""

    class Aliased(MLP):
        weight_aliases = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}

    tensors = {f"w{i}.weight": torch.rand(shape) for i, shape in ((1, (12, 8)), (3, (12, 8)))}
    rest = {"w2.weight": torch.rand(8, 12), "w2.bias": torch.rand(8)}
    model = Aliased()
    model.load_weights(tensors | rest)
    assert torch.equal(model.gate_up_proj.weight[12:], tensors["w3.weight"])


def test_skip_rules_are_reported_by_their_owners_words() -> None:
    """Law 1: what is left out is left out by a named rule."""
    model = Model()
    model.load_weights(checkpoint() | {"blocks.0.rotary.inv_freq": torch.zeros(4)})
    assert model.load_report.skipped == {"blocks.0.rotary.inv_freq": "computed"}
    with pytest.raises(UnexpectedWeightError):
        model.load_weights(checkpoint() | {"rotary.inv_freq": torch.zeros(4)})


def test_two_claims_on_one_component_are_the_authors_mistake() -> None:
    """Routing is unambiguous or the model is refused."""

    class Ambiguous(vLLMModule):
        def __init__(self) -> None:
            super().__init__()
            self.one = MergedColumnParallelLinear(8, [4, 4], shard_names=["a", "b"])
            self.two = MergedColumnParallelLinear(8, [4, 4], shard_names=["b", "c"])

    with pytest.raises(ValueError, match=r"Ambiguous: two .* claim .* b"):
        Ambiguous().load_weights({})


def test_an_override_may_rename_and_call_super() -> None:
    """Law 9: load_weights is plain polymorphism; a generator of renamed pairs joins the load."""

    class Old(Block):
        def load_weights(self, weights):
            return super().load_weights((n.replace("gamma", "weight"), w) for n, w in weights)

    class Tree(vLLMModule):
        def __init__(self, block: Block) -> None:
            super().__init__()
            self.block = block

    block = {
        name.removeprefix("blocks.0."): t for name, t in checkpoint(1).items() if "blocks" in name
    }
    gammas = dict(block)
    gammas["norm.gamma"] = gammas.pop("norm.weight")
    expected, nested, outermost = Block(), Tree(Old()), Old()
    expected.load_weights(block)
    nested.load_weights({f"block.{name}": tensor for name, tensor in gammas.items()})
    assert outermost.load_weights(gammas.items()) == set(expected.state_dict())
    assert_same(state(nested.block), state(expected))
    assert_same(state(outermost), state(expected))
    del gammas["norm.gamma"]
    with pytest.raises(MissingWeightError, match=r"block\.norm\.weight"):
        Tree(Old()).load_weights({f"block.{name}": tensor for name, tensor in gammas.items()})


def test_an_override_may_call_a_child_by_hand() -> None:
    """A child called by an override keeps its place in the tree and in the report."""

    class Hand(vLLMModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([MLP()])

        def load_weights(self, weights):
            return self.inner[0].load_weights(weights)

    class Tree(vLLMModule):
        def __init__(self) -> None:
            super().__init__()
            self.hand = Hand()

    mlp = {n.removeprefix("blocks.0.mlp."): t for n, t in checkpoint(1).items() if ".mlp." in n}
    tree = Tree()
    tree.load_weights({f"hand.{name}": tensor for name, tensor in mlp.items()})
    assert "hand.inner.0.down_proj.bias" in tree.load_report.loaded
    del mlp["down_proj.bias"]
    with pytest.raises(MissingWeightError, match=r"hand\.inner\.0\.down_proj\.bias"):
        Tree().load_weights({f"hand.{name}": tensor for name, tensor in mlp.items()})


def test_parameters_are_born_on_meta_and_become_real_when_loaded() -> None:
    """Law 6: memory is taken when data arrives, and types survive."""
    model = Model()
    ours = {n: p for n, p in model.named_parameters() if ".plain." not in n}
    assert all(parameter.is_meta for parameter in ours.values())
    model.load_weights(checkpoint())
    for name, parameter in model.named_parameters():
        assert not parameter.is_meta, name
        if name in ours:
            assert type(parameter) is type(ours[name])


def test_third_party_modules_on_meta_are_materialized_too() -> None:
    """Law 9: a plain module built under torch.device('meta') loads by the same path."""

    class Wrapper(vLLMModule):
        def __init__(self) -> None:
            super().__init__()
            with torch.device("meta"):
                self.plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

        def forward(self, x):
            return self.plain(x)

    model = Wrapper().eval()
    reference = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    tensors = {f"plain.{name}": tensor for name, tensor in reference.state_dict().items()}
    model.load_weights(tensors)
    x = torch.rand(2, 4)
    assert torch.equal(model(x), reference(x))


def test_a_computed_buffer_on_meta_is_refused_when_run() -> None:
    """Law 6: what no checkpoint can fill is named, not run as garbage."""

    class Computed(vLLMModule):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.empty(4, device="meta"), persistent=False)

        def forward(self, x):
            return x + self.table

    model = Computed()
    model.load_weights({})
    with pytest.raises(ModelNotReadyError, match="table"):
        model(torch.zeros(4))


def test_every_module_with_an_unfilled_tensor_refuses_to_run() -> None:
    """Law 6: it says which, layers folded and slots named; modules without tensors just run."""
    model = Model()
    with pytest.raises(
        ModelNotReadyError, match=r"blocks\.\{0\.\.1\}\.qkv_proj\.weight \(slot 'k_"
    ):
        model(torch.arange(3))
    with pytest.raises(ModelNotReadyError, match=r"down_proj\.bias"):
        model.blocks[0].mlp(torch.zeros(1, 8))
    tensors = checkpoint()
    model.update_weights({n: t for n, t in tensors.items() if n != "blocks.1.v_proj.bias"})
    with pytest.raises(ModelNotReadyError) as refused:
        model.check_ready()
    assert str(refused.value).splitlines()[1:] == ["  blocks.1.qkv_proj.bias (slot 'v_proj')"]
    model.blocks[0].eval()(torch.zeros(1, 8))
    SiluAndMul()(torch.zeros(4))


def test_a_ready_module_has_no_hook_left() -> None:
    """Readiness costs a ready module nothing."""
    model = Model().eval()
    model.load_weights(checkpoint())
    model(torch.arange(3))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_parameters_and_tensors_stay_pure() -> None:
    """Law 5: plain parameters have an empty __dict__ before and after; typed ones do not change."""
    model, tensors = Model(), checkpoint()
    declared = {n: set(vars(p)) for n, p in model.named_parameters()}
    model.load_weights(iter(tensors.items()))
    model.update_weights(tensors)
    for name, parameter in model.named_parameters():
        assert set(vars(parameter)) == declared[name], name
        if type(parameter) is nn.Parameter:
            assert not vars(parameter)
    assert not any(vars(tensor) for tensor in tensors.values())


def test_dtypes_convert_between_wide_floats_and_overflow_is_refused() -> None:
    """A checkpoint in another precision is converted; what cannot be held is not made infinite."""
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        layer = ColumnParallelLinear(4, 4, bias=False, params_dtype=dtype)
        weight = torch.rand(4, 4)
        layer.load_weights({"weight": weight})
        assert torch.equal(layer.weight, weight.to(dtype))
    layer = ColumnParallelLinear(4, 4, bias=False, params_dtype=torch.float16)
    with pytest.raises(WeightLoadError):
        layer.load_weights({"weight": torch.full((4, 4), 1e6)})
    with pytest.raises(ModelNotReadyError):
        layer(torch.rand(1, 4, dtype=torch.float16))


class UnreadableHandle:
    """A handle that must not be read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape, self.dtype = tensor, tensor.shape, tensor.dtype

    def narrow(self, dim: int, start: int, length: int) -> UnreadableHandle:
        return UnreadableHandle(self.tensor.narrow(dim, start, length))

    def read(self) -> torch.Tensor:
        raise AssertionError("read")

    def read_into(self, destination: torch.Tensor) -> None:
        raise AssertionError("read")


def test_a_plan_reads_nothing_and_names_every_part() -> None:
    """Law 8: a plan is the same recursion with handles that are never read."""
    tensors = checkpoint()
    handles = {name: UnreadableHandle(tensor) for name, tensor in tensors.items()}
    kept = 0
    for rank in range(2):
        with tensor_parallel(rank=rank, size=2):
            model = Model()
        plan = model.plan_weights(handles)
        assert plan.report.ok
        reads = list(plan.reads())
        read_here = {read.name for read in reads}
        # Ten tokens padded to a multiple of 64 all fall to rank 0.
        assert read_here == set(tensors) - ({"embed.weight", "head.weight"} if rank else set())
        kept += sum(r.source.shape.numel() for r in reads if r.name == "blocks.0.q_proj.weight")
        assert all(p.is_meta for n, p in model.named_parameters() if ".plain." not in n)
        with pytest.raises(ModelNotReadyError):
            model.check_ready()
    assert kept == 64
    del handles["embed.weight"]
    assert [p.name for p in Model().plan_weights(handles).report.missing] == ["embed.weight"]


def test_a_refused_collection_is_refused_before_a_byte_is_read() -> None:
    """Law 8: names, shapes and dtypes are compared first."""
    handles = {name: UnreadableHandle(tensor) for name, tensor in checkpoint().items()}
    del handles["blocks.1.norm.weight"]
    with pytest.raises(MissingWeightError):
        Model().load_weights(handles)
    with pytest.raises(MissingWeightError):
        Model().load_weights(iter(handles.items()))


def test_two_threads_load_two_models_alike() -> None:
    """Law 5: loads share no state."""
    models = [Model() for _ in range(4)]
    threads = [threading.Thread(target=m.load_weights, args=(checkpoint(),)) for m in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for model in models[1:]:
        assert_same(state(model), state(models[0]))


def test_a_copy_of_a_model_is_a_model_of_its_own() -> None:
    """A deep copy runs, reloads and stays apart from its original, ties included."""
    model = TiedModel().eval()
    unloaded = copy.deepcopy(model)
    model.load_weights(checkpoint(1, head=False))
    loaded = copy.deepcopy(model)
    unloaded.load_weights(checkpoint(1, head=False))
    for other in (loaded, unloaded):
        assert other.head.weight is other.embed.weight
        assert torch.equal(other(torch.arange(3)), model(torch.arange(3)))
    loaded.update_weights({"embed.weight": torch.zeros(10, 8)})
    assert torch.equal(model.embed.weight[:10], checkpoint()["embed.weight"])


def test_routing_grows_linearly_with_the_number_of_names() -> None:
    """Law 10: four times the names take four times the function calls, in any order."""

    def calls(blocks: int) -> int:
        model, items = Model(blocks), list(checkpoint(blocks).items())
        random.Random(0).shuffle(items)
        count = 0

        def count_calls(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(count_calls)
        try:
            model.plan_weights(items)
        finally:
            sys.setprofile(None)
        return count

    small, large = calls(8), calls(32)
    assert large < 4.2 * small


def test_a_duplicate_is_found_whatever_object_its_name_is() -> None:
    """Law 1: names are compared by value, a root's own tensors and slots included."""
    norm = RMSNorm(2)
    with pytest.raises(DuplicateWeightError, match="weight"):
        norm.load_weights([("weight", torch.ones(2)), ("weight", torch.zeros(2))])
    mlp = MergedColumnParallelLinear(2, [2, 2], bias=False, shard_names=["g", "u"])
    pairs = [(name, torch.ones(2, 2)) for name in ("g.weight", "u.weight", "g.weight")]
    for weights in (pairs, iter(pairs)):
        with pytest.raises(DuplicateWeightError, match=r"g\.weight"):
            mlp.load_weights(weights)


class PlusOne(RMSNorm):
    """A norm that a checkpoint stores less one."""

    def load_weights(self, weights):
        return super().load_weights((name, weight + 1) for name, weight in weights)


def test_an_override_holds_for_loads_updates_and_plans() -> None:
    """Law 9: whatever the call, root or child, weights go through the overridden load_weights."""

    class Tree(vLLMModule):
        def __init__(self) -> None:
            super().__init__()
            self.norm = PlusOne(2)

    for model, name in ((PlusOne(2), "weight"), (Tree(), "norm.weight")):
        (weight,) = model.parameters()
        for value, call in enumerate((model.load_weights, model.update_weights)):
            for weights in ({name: torch.full((2,), value)}, [(name, torch.full((2,), value))]):
                assert call({n: w.float() for n, w in dict(weights).items()}) == {name}
                (weight,) = model.parameters()
                assert weight.tolist() == [value + 1] * 2
        assert model.plan_weights({name: torch.zeros(2)}).report.ok


def test_a_root_override_that_loads_children_by_hand_is_accounted_for() -> None:
    """Law 1: an override that forgets a child does not make the load whole."""

    class Hand(vLLMModule):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = RMSNorm(2), RMSNorm(2)

        def load_weights(self, weights):
            for name, weight in weights:
                child, _, rest = name.partition(".")
                getattr(self, child).load_weights([(rest, weight)])

    model = Hand()
    both = {"a.weight": torch.ones(2), "b.weight": torch.ones(2)}
    assert model.load_weights(both) == set(both)
    with pytest.raises(MissingWeightError, match=r"b\.weight"):
        model.load_weights({"a.weight": torch.ones(2)})


def test_an_override_that_swallows_a_failed_read_does_not_succeed() -> None:
    """Law 9: a value that was not written is not reported as loaded."""

    class Careless(RMSNorm):
        def load_weights(self, weights):
            try:
                return super().load_weights((name, weight) for name, weight in weights)
            except WeightLoadError:
                return set()

    class Tree(vLLMModule):
        def __init__(self) -> None:
            super().__init__()
            self.norm = Careless(2, params_dtype=torch.float16)
            self.last = RMSNorm(2)

    model = Tree()
    good = {"norm.weight": torch.ones(2), "last.weight": torch.ones(2)}
    model.load_weights(good)
    with pytest.raises(WeightLoadError, match=r"norm\.weight"):
        model.load_weights(good | {"norm.weight": torch.full((2,), 1e6)})
    with pytest.raises(ModelNotReadyError):
        model.check_ready()


def test_an_override_with_yield_is_refused() -> None:
    """A generator would route nothing and say nothing."""

    class Yielding(RMSNorm):
        def load_weights(self, weights):
            yield from super().load_weights(weights)

    with pytest.raises(TypeError, match=r"Yielding\.load_weights must not be"):
        Yielding(2).load_weights({"weight": torch.ones(2)})


def test_a_refused_stream_that_wrote_nothing_leaves_the_model_running() -> None:
    """Unexpected names alone do not stop a model that was whole."""
    norm = RMSNorm(2)
    norm.load_weights({"weight": torch.ones(2)})
    with pytest.raises(UnexpectedWeightError, match="Nothing was written"):
        norm.update_weights(iter([("bogus", torch.ones(2))]))
    norm(torch.ones(2))


def test_a_tensor_that_becomes_meta_again_is_unfilled() -> None:
    """Law 6: what was filled once does not vouch for memory that is gone."""
    mlp = MergedColumnParallelLinear(2, [2, 2], bias=False, shard_names=["g", "u"])
    mlp.load_weights({"g.weight": torch.ones(2, 2), "u.weight": torch.ones(2, 2)})
    fresh = MergedColumnParallelLinear(2, [2, 2], bias=False, shard_names=["g", "u"])
    mlp.weight = fresh.weight
    with pytest.raises(ModelNotReadyError):
        mlp.check_ready()
    mlp.update_weights({"g.weight": torch.ones(2, 2)})
    with pytest.raises(ModelNotReadyError, match="slot 'u'"):
        mlp.check_ready()


def test_a_plain_module_that_two_parents_share_is_ready_in_both() -> None:
    """A shared tensor is filled wherever it is held."""

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


def test_a_parameter_made_while_loading_is_loaded() -> None:
    """An override may create what its checkpoint turns out to have."""

    class Lazy(vLLMModule):
        def load_weights(self, weights):
            pairs = list(weights)
            for name, weight in pairs:
                self.register_parameter(
                    name, nn.Parameter(torch.empty(weight.shape, device="meta"))
                )
            return super().load_weights(iter(pairs))

    for weights in ({"w": torch.ones(2)}, iter([("w", torch.ones(2))])):
        model = Lazy()
        assert model.load_weights(weights) == {"w"}
        assert model.w.tolist() == [1, 1]


def test_one_model_is_loaded_by_one_call_at_a_time() -> None:
    """A second load of a model under way is an error, and the first goes on."""
    model = RMSNorm(2)

    def weights():
        done = threading.Thread(target=second)
        done.start()
        done.join()
        yield "weight", torch.ones(2)

    errors = []

    def second() -> None:
        try:
            model.load_weights({"weight": torch.zeros(2)})
        except RuntimeError as error:
            errors.append(str(error))

    model.load_weights(weights())
    assert errors == ["this RMSNorm is already being loaded"]
    assert model.weight.tolist() == [1, 1]


def test_a_pickled_model_loads_and_runs_like_its_original() -> None:
    """Typed parameters keep their type and what they declare."""
    model = Model(1).eval()
    unloaded = pickle.loads(pickle.dumps(model))
    model.load_weights(checkpoint(1))
    loaded = pickle.loads(pickle.dumps(model))
    unloaded.load_weights(checkpoint(1))
    loaded.update_weights({"blocks.0.q_proj.weight": checkpoint(1)["blocks.0.q_proj.weight"]})
    for other in (unloaded, loaded):
        assert_same(state(other), state(model))
        assert torch.equal(other(torch.arange(3)), model(torch.arange(3)))


def test_names_that_do_not_end_where_they_should_are_unexpected() -> None:
    """Law 4: a trailing or leading dot is a component that nothing is called."""
    for name in ("weight.", ".weight", "weight.weight", "."):
        with pytest.raises(WeightLoadError) as refused:
            RMSNorm(2).load_weights({"weight": torch.ones(2), name: torch.ones(2)})
        assert [problem.name for problem in refused.value.report.unexpected] == [name]


def test_a_path_is_not_weights() -> None:
    """The mistake of passing a folder says what to call."""
    with pytest.raises(TypeError, match="open_checkpoint"):
        RMSNorm(2).load_weights("some/folder")


def test_an_overflowing_tensor_is_named() -> None:
    """A tensor in memory does not know its name; the message does."""
    model = Model(1)
    model.head = ParallelLMHead(10, 8, params_dtype=torch.float16)
    with pytest.raises(WeightLoadError, match=r"head\.weight"):
        model.load_weights(checkpoint(1) | {"head.weight": torch.full((10, 8), 1e6)})
