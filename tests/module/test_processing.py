"""When process_weights_after_loading is called: once a module is complete, and never before."""

from __future__ import annotations

import contextlib
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vllm_module import vLLMModule
from vllm_module.errors import ModelNotReadyError, WeightReadError
from vllm_module.layers import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ParallelLMHead,
    RMSNorm,
    VocabParallelEmbedding,
)
from vllm_module.parameters import ColumnvLLMParameter, Dim
from vllm_module.quantization import ONLINE, EightBitMethod, Scheme
from vllm_module.testing import random_weights

tree = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("tree.py"))))
pytestmark = pytest.mark.usefixtures("onto")


class Leaf(MergedColumnParallelLinear):
    """Computes the sums of its rows, and logs its name."""

    def __init__(self, log: list[str], name: str) -> None:
        super().__init__(4, [2, 2], bias=False, shard_names=["a", "b"])
        self.log, self.name = log, name
        self.register_buffer("sums", torch.zeros(4), persistent=False)

    @property
    def processes(self) -> bool:
        return True

    def process_weights_after_loading(self) -> None:
        assert not torch.is_grad_enabled()
        self.log.append(self.name)
        torch.sum(self.weight, 1, out=self.sums)


class Parent(vLLMModule):
    """Has children that process, one of them below a plain module."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.first = Leaf(self.log, "first")
        self.inner = nn.ModuleDict({"leaf": Leaf(self.log, "second")})
        self.norm = RMSNorm(4)

    def process_weights_after_loading(self) -> None:
        assert not any(parameter.is_meta for parameter in self.parameters())
        self.log.append("parent")


class Root(vLLMModule):
    def __init__(self) -> None:
        super().__init__()
        self.parent = Parent()

    def process_weights_after_loading(self) -> None:
        self.parent.log.append("root")

    @property
    def log(self) -> list[str]:
        return self.parent.log


def checkpoint() -> dict[str, torch.Tensor]:
    return {name: torch.randn(like.shape) for name, like in Root().expected_weights().items()}


def test_each_module_processes_once_and_inner_ones_first() -> None:
    """A whole load processes every module, after the modules below it."""
    root = Root()
    tensors = checkpoint()
    root.load_weights(tensors)
    assert root.log == ["first", "second", "parent", "root"]
    assert torch.equal(root.parent.first.sums, root.parent.first.weight.sum(1))


def test_a_leaf_processes_before_the_next_one_is_materialized() -> None:
    """Law 7: what processing frees is free before the next module takes memory."""
    root = Root()
    seen = []
    leaf, other = root.parent.first, root.parent.inner["leaf"]
    leaf.process_weights_after_loading = lambda: seen.append(other.weight.is_meta)
    root.load_weights(checkpoint())
    assert seen == [True]


def test_leaves_whose_names_alternate_process_one_after_the_other() -> None:
    """The order of names does not let a layer take memory while another holds what it frees."""
    seen = []

    class Logged(ColumnParallelLinear):
        def process_weights_after_loading(self) -> None:
            seen.append([layer.weight.is_meta for layer in pair.children()])

    class Pair(vLLMModule):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Logged(4, 4, bias=True), Logged(4, 4, bias=True)

    pair = Pair()
    sizes = {"weight": (4, 4), "bias": (4,)}
    pair.load_weights(
        [
            (f"{layer}.{name}", torch.randn(sizes[name]))
            for name in sizes
            for layer in ("one", "two")
        ]
    )
    assert seen == [[False, True], [False, False]]


@pytest.mark.parametrize("streamed", [False, True])
def test_nothing_processes_until_it_is_complete(streamed: bool) -> None:
    """A module is processed when its last slot is filled, and then the modules above it."""
    root, tensors = Root(), checkpoint()
    late = "parent.inner.b.weight"
    early = {name: tensor for name, tensor in tensors.items() if name != late}
    root.update_weights(iter(early.items()) if streamed else early)
    assert root.log == ["first"]
    root.update_weights({late: tensors[late]})
    assert root.log == ["first", "second", "parent", "root"]


def test_an_update_processes_what_it_touched_again() -> None:
    """New weights of one slot process its module, in place, and those above, and no other."""
    root, tensors = Root(), checkpoint()
    root.load_weights(tensors)
    root.log.clear()
    address = root.parent.first.sums.data_ptr()
    root.update_weights({"parent.a.weight": 2 * tensors["parent.a.weight"]})
    assert root.log == ["first", "parent", "root"]
    assert torch.equal(root.parent.first.sums, root.parent.first.weight.sum(1))
    assert root.parent.first.sums.data_ptr() == address


def test_a_plan_or_a_refused_checkpoint_processes_nothing() -> None:
    """No module is processed where nothing was written."""
    root, tensors = Root(), checkpoint()
    root.plan_weights(tensors)
    with pytest.raises(ValueError, match="unexpected"):
        root.load_weights(tensors | {"other": torch.zeros(1)})
    assert root.log == []


@pytest.mark.parametrize("name", ["first", "parent"])
def test_a_refusal_names_the_tensor_and_the_model_will_not_run(name: str) -> None:
    """An error of processing has the tensor's full path, and the model does not run after it."""
    root, tensors = Root(), checkpoint()

    def refuse() -> None:
        raise WeightReadError("weight: is odd")

    where = root.parent if name == "parent" else root.parent.first
    where.process_weights_after_loading = refuse
    path = "parent.weight" if name == "parent" else "parent.first.weight"
    with pytest.raises(WeightReadError, match=f"^{path}: is odd\n"):
        root.load_weights(tensors)
    with pytest.raises(ModelNotReadyError, match="is odd"):
        root.check_ready()


def test_code_that_breaks_leaves_the_model_refusing() -> None:
    """An exception of another class is raised unchanged, and the model does not run after it."""
    root = Root()
    fault = KeyError("x")

    def fail() -> None:
        raise fault

    root.parent.process_weights_after_loading = fail
    with pytest.raises(KeyError) as raised:
        root.load_weights(checkpoint())
    assert raised.value is fault
    with pytest.raises(ModelNotReadyError, match="KeyError"):
        root.check_ready()


def test_weights_below_a_submodule_are_processed_up_to_it() -> None:
    """A load of a submodule processes the modules in it, and none above."""
    root = Root()
    root.load_weights(checkpoint())
    root.log.clear()
    root.parent.inner["leaf"].load_weights(
        {"a.weight": torch.ones(2, 4), "b.weight": torch.ones(2, 4)}
    )
    assert root.log == ["second"]


class Table(ParallelLMHead):
    """Keeps the largest value of each row of a weight that it may share with an embedding."""

    def __init__(self) -> None:
        super().__init__(8, 4, padding_size=1)
        self.register_buffer("largest", torch.zeros(8), persistent=False)

    @property
    def processes(self) -> bool:
        return True

    def process_weights_after_loading(self) -> None:
        self.largest.copy_(self.weight.amax(1))


class Tied(vLLMModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(8, 4, padding_size=1)
        self.head = Table()
        self.head.tie_weights(self.embed)


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_a_tied_tensor_is_processed_by_all_modules_that_hold_it(name: str) -> None:
    """By either name, in a load, a reload and an update."""
    model = Tied()
    for call in (model.load_weights, model.load_weights, model.update_weights):
        weight = torch.randn(8, 4)
        call({name: weight})
        assert torch.equal(model.head.largest, weight.amax(1))
    other = Tied()
    other.update_weights({name: weight})
    assert torch.equal(other.head.largest, weight.amax(1))


class ByHand(Root):
    """Calls its child itself, as an override may."""

    def load_weights(self, weights):
        inside = [(name.removeprefix("parent."), tensor) for name, tensor in weights]
        self.parent.load_weights(inside)


def test_an_override_that_calls_children_by_hand_is_processed_too() -> None:
    """Processing depends on the tensors that were filled, not on how they were routed."""
    root = ByHand()
    root.load_weights(checkpoint())
    assert root.log == ["first", "second", "parent", "root"]


class Two(Leaf):
    """Logs one value of each of its two slots."""

    def __init__(self) -> None:
        super().__init__([], "two")
        self.seen: list[tuple[float, float]] = []

    def process_weights_after_loading(self) -> None:
        self.seen.append((self.weight[0, 0].item(), self.weight[2, 0].item()))


def both(value: float) -> dict[str, torch.Tensor]:
    return {f"{slot}.weight": torch.full((2, 4), float(value)) for slot in "ab"}


def test_a_streamed_reload_is_processed_once_and_never_half_way() -> None:
    """A reload or update processes when all of its tensors are read, never a mixture."""
    layer = Two()
    calls = (layer.load_weights, layer.load_weights, layer.update_weights)
    for value, call in enumerate(calls):
        call(iter(both(value).items()))
        assert layer.seen.pop() == (value, value)
        assert layer.seen == []


class Finite(Two):
    def process_weights_after_loading(self) -> None:
        if not self.weight.isfinite().all():
            raise WeightReadError("weight: is not finite")


@pytest.mark.parametrize("name", ["a.weight", "b.weight"])
def test_a_whole_load_repairs_a_model_after_a_refusal(name: str) -> None:
    """After a value was refused, a stream or a collection of good values makes the model ready."""
    for given in (dict, lambda pairs: iter(pairs.items())):
        layer = Finite()
        with pytest.raises(WeightReadError):
            layer.load_weights(both(1) | {name: torch.full((2, 4), torch.nan)})
        layer.load_weights(given(both(1)))
        layer.check_ready()


class OddError(WeightReadError):
    def __init__(self, path: str, value: int) -> None:
        super().__init__(f"{path}: {value}")
        self.value = value


def test_an_error_of_a_subclass_stays_that_error() -> None:
    """It keeps its attributes, and its message gets the path."""
    root = Root()
    fault = OddError("weight", 7)

    def refuse() -> None:
        raise fault

    root.parent.first.process_weights_after_loading = refuse
    with pytest.raises(OddError, match=r"^parent\.first\.weight: 7\n") as raised:
        root.load_weights(checkpoint())
    assert raised.value is fault
    assert fault.value == 7


class Doubled:
    """A conversion of a checkpoint's vector into its double."""

    makes = ()
    dtype = torch.float32

    def jobs(self, module, weight, slot):
        yield 2 * weight, module.gain.data

    def restored(self, module):
        return module.gain / 2

    def error_bound(self, stored):
        return torch.zeros_like(stored)


class Own(ColumnParallelLinear):
    """A linear layer with a hook, a conversion and an alias of its own."""

    weight_aliases = {"scale": "gain"}

    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)
        self.gain = nn.Parameter(torch.empty(4, device="meta"), requires_grad=False)
        self.conversions = {"gain": Doubled()}
        self.calls: list[str] = []

    def process_weights_after_loading(self) -> None:
        assert self.weight.isfinite().all() if not self.is_quantized else True
        self.calls.append("the layer's")


class Noted(EightBitMethod):
    def process_weights_after_loading(self, layer) -> None:
        layer.calls.append("the method's")
        super().process_weights_after_loading(layer)


SCHEMES = {"online": ONLINE["fp8_per_channel"], "stored": Scheme("channel")}


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_a_layer_of_ones_own_keeps_what_it_declares(scheme: str | None) -> None:
    """Quantized or not, the method's check and then the layer's hook run, once for each load."""
    layer = Own()
    if scheme is not None:
        layer.quantize(Noted(SCHEMES[scheme]))
    tensors = random_weights(layer.expected_weights())
    gain = tensors.pop("gain")
    expected = ["the layer's"] if scheme is None else ["the method's", "the layer's"]
    for call in (layer.load_weights, layer.load_weights, layer.update_weights):
        call({**tensors, "scale": gain})  # by its alias
        assert layer.calls == expected
        layer.calls.clear()
        assert torch.equal(layer.gain, 2 * gain)
    if scheme == "stored":
        stored = {n.replace("weight_scale", "weight_scale_inv"): t for n, t in tensors.items()}
        layer.load_weights({**stored, "gain": gain})  # the method's alias


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_of_ones_own_keeps_the_methods_check(scheme: str) -> None:
    """The method refuses what cannot be multiplied by, before the layer's hook is called."""
    layer = Own()
    layer.quantize(Noted(SCHEMES[scheme]))
    tensors = random_weights(layer.expected_weights())
    name = "weight" if scheme == "online" else "weight_scale"
    tensors[name][0, 0] = torch.inf
    with pytest.raises(WeightReadError, match=f"^{name} has (nan|inf)"):
        layer.load_weights(tensors)
    assert layer.calls == ["the method's"]


def test_an_error_inside_of_a_property_is_seen() -> None:
    """An AttributeError names the attribute that is missing, not the property that needs it."""

    class Broken(vLLMModule):
        def __init__(self) -> None:
            super().__init__()
            self.norm = RMSNorm(2)

        @property
        def conversions(self):
            return {"weight": self.missing}

    model = vLLMModule()
    model.broken = Broken()
    for work in (lambda: model.load_weights({}), model.expected_weights):
        with pytest.raises(AttributeError, match="'missing'"):
            work()


def test_siblings_are_processed_one_after_the_other_whatever_the_order_of_names() -> None:
    """Law 7: a checkpoint that interleaves layers materializes one at a time nevertheless."""

    class Layer(vLLMModule):
        def __init__(self, unprocessed: set[vLLMModule]) -> None:
            super().__init__()
            self.unprocessed = unprocessed
            self.weight = nn.Parameter(torch.empty(2, device="meta"), requires_grad=False)
            self.bias = nn.Parameter(torch.empty(2, device="meta"), requires_grad=False)

        def process_weights_after_loading(self) -> None:
            self.unprocessed.discard(self)
            assert all(layer.weight.is_meta and layer.bias.is_meta for layer in self.unprocessed)

    class Layers(vLLMModule):
        def __init__(self) -> None:
            super().__init__()
            unprocessed: set[vLLMModule] = set()
            for name in "abc":
                self.add_module(name, Layer(unprocessed))
            unprocessed.update(self.children())

    names = [f"{layer}.{tensor}" for tensor in ("bias", "weight") for layer in "abc"]
    Layers().load_weights({name: torch.ones(2) for name in names})


def test_an_update_processes_all_modules_above_that_it_names() -> None:
    """Two modules that hold one layer both compute again from what is updated under both names."""

    class Above(vLLMModule):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer, self.processed = layer, 0

        def process_weights_after_loading(self) -> None:
            self.processed += 1

    class Root(vLLMModule):
        def __init__(self) -> None:
            super().__init__()
            layer = RMSNorm(2)
            self.a, self.b = Above(layer), Above(layer)

    model = Root()
    weights = {f"{name}.layer.weight": torch.ones(2) for name in "ab"}
    model.load_weights(weights)
    model.update_weights(weights)
    assert (model.a.processed, model.b.processed) == (2, 2)


class Doubling(vLLMModule):
    """Doubles its weight each time it is processed."""

    def __init__(self) -> None:
        super().__init__()
        self.w = ColumnvLLMParameter(Dim.whole(2), tp_rank=0, tp_size=1, dtype=torch.float32)

    def process_weights_after_loading(self) -> None:
        self.w.mul_(2)


@pytest.mark.parametrize("order", [("a", "b", "other"), ("a", "other", "b"), ("other", "b", "a")])
def test_a_module_under_two_names_is_processed_once(order: tuple[str, ...]) -> None:
    """Whatever the order of its names in a collection."""

    class Root(vLLMModule):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.other = Doubling(), Doubling()
            self.b = self.a

    model = Root()
    model.load_weights({f"{name}.w": torch.ones(2) for name in order})
    assert model.a.w.tolist() == model.other.w.tolist() == [2, 2]


def test_an_error_of_processing_that_an_override_catches_is_the_error_of_the_load() -> None:
    """What the stream brought before it is not called missing."""

    class Broken(Doubling):
        def process_weights_after_loading(self) -> None:
            raise ValueError("boom")

    class Root(vLLMModule):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Broken(), Doubling()

        def load_weights(self, weights):
            for pair in weights:
                with contextlib.suppress(ValueError):
                    super().load_weights(iter([pair]))

    with pytest.raises(ValueError, match="boom"):
        Root().load_weights(iter([("a.w", torch.ones(2)), ("b.w", torch.ones(2))]))
