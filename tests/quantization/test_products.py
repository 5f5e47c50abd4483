"""What a quantized layer does on each call, and the scales that are computed before."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_module import vLLMModule
from vllm_module.distributed import run_ranks
from vllm_module.layers import FusedMoE, QKVParallelLinear, RowParallelLinear
from vllm_module.quantization import ONLINE, EightBitMethod, QuantizableLayer, Scheme
from vllm_module.testing.checkpoints import random_weights

COMPUTED = [
    ONLINE["fp8_per_tensor"],
    Scheme("tensor", activations="static"),
    Scheme("channel", activations="static"),
]
SCHEMES = [*COMPUTED, ONLINE["int8_per_channel_weight_only"], Scheme("block", block=(16, 16))]


class Model(vLLMModule):
    def __init__(self, scheme: Scheme) -> None:
        super().__init__()
        self.qkv = QKVParallelLinear(64, 32, 2, shard_names=("q", "k", "v"))
        self.out = RowParallelLinear(64, 64)
        self.experts = FusedMoE(4, 2, 64, 64)
        for layer in self.modules():
            if isinstance(layer, QuantizableLayer):
                layer.quantize(EightBitMethod(scheme))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.out(self.qkv(x).chunk(3, -1)[0])
        return self.experts(x, x[:, :4])


class Operators(TorchDispatchMode):
    """Collect the names of operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


def weights_of(model: vLLMModule, seed: int) -> dict[str, torch.Tensor]:
    return random_weights(model.expected_weights(), seed=seed)


def loaded(scheme: Scheme, seed: int) -> Model:
    model = Model(scheme)
    model.load_weights(weights_of(model, seed))
    return model


def computed(model: vLLMModule) -> dict[str, torch.Tensor]:
    return {name: each for name, each in model.named_buffers() if name.endswith("_for_matmul")}


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_product_is_one_operator(scheme: Scheme) -> None:
    """A call computes nothing else from weights or scales: with one slot, many, or experts."""
    model, x = loaded(scheme, 0), torch.randn(3, 64)
    model(x)
    experts, offsets = model.experts, torch.tensor([0, 1, 1, 2, 3], dtype=torch.int32)
    for layer, name, arguments in (
        (model.qkv, "scaled_matmul", (x,)),
        (model.out, "scaled_matmul", (torch.randn(3, 64),)),
        (experts.w13, "grouped_matmul", (x, offsets)),
        (experts.w2, "grouped_matmul", (torch.randn(3, 64), offsets)),
    ):
        with torch.no_grad(), Operators() as operators:
            layer(*arguments)
        assert operators.names == [f"vllm_module::{name}"]


@pytest.mark.parametrize("scheme", COMPUTED, ids=str)
def test_computed_scales_keep_their_memory(scheme: Scheme) -> None:
    """An update, a reload and a state dict change them where they are; sleep releases them."""
    model, x = loaded(scheme, 0), torch.randn(3, 64)

    def places() -> dict[str, int]:
        return {name: each.data_ptr() for name, each in computed(model).items()}

    of_a_layer = (scheme.strategy == "tensor") + (scheme.activations == "static")
    assert len(places()) == 4 * of_a_layer

    def update(seed: int) -> None:
        model.update_weights(weights_of(model, seed))

    def load(seed: int) -> None:
        model.load_weights(weights_of(model, seed))

    def wake(seed: int) -> None:
        weights = weights_of(model, seed)
        model.sleep()
        model.load_weights(weights)

    def copy_state(seed: int) -> None:
        model.load_state_dict(loaded(scheme, seed).state_dict())

    for seed, change in enumerate((update, load, wake, copy_state), 1):
        before, where = copy.deepcopy(computed(model)), places()
        change(seed)
        fresh = loaded(scheme, seed)
        assert torch.equal(model(x), fresh(x)), change.__name__
        assert change is wake or places() == where
        for name, each in computed(model).items():
            assert torch.equal(each, computed(fresh)[name])
            assert not torch.equal(each, before[name]), name


def test_a_state_dict_is_copied_and_not_assigned() -> None:
    """Parameters of a state dict do not know their shard, so they cannot replace quantized ones."""
    model = loaded(Scheme("tensor", online=True), 0)
    with pytest.raises(RuntimeError, match="assign=True would replace parameters that know"):
        model.load_state_dict(model.state_dict(), assign=True)


def test_a_part_of_the_slots_is_updated() -> None:
    """After an update of one slot, only this slot's scale differs."""
    model = loaded(Scheme("tensor", online=True), 0)
    before = computed(model)["qkv.scale_for_matmul"].clone()
    model.update_weights({"k.weight": torch.full((64, 64), 448.0)})
    after = computed(model)["qkv.scale_for_matmul"]
    assert torch.equal(after[:64], before[:64])
    assert torch.equal(after[64:128], torch.ones(64, 1))
    assert torch.equal(after[128:], before[128:])


@pytest.mark.parametrize("scheme", [each for each in SCHEMES if not each.online], ids=str)
def test_ranks_compute_the_scales_of_their_shards(scheme: Scheme) -> None:
    """Two ranks together give what one rank gives."""
    x = torch.randn(3, 64)
    weights = weights_of(Model(scheme), 0)

    def run(rank: int) -> torch.Tensor:
        model = Model(scheme)
        model.load_weights(weights)
        return model(x)

    single = Model(scheme)
    single.load_weights(weights)
    for y in run_ranks(2, run):
        torch.testing.assert_close(y, single(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_leaves_computed_scales_alone(dtype: torch.dtype) -> None:
    """A cast and a copy keep float32 scales; the copy has memory of its own."""
    model = loaded(Scheme("tensor", activations="static"), 0)
    before = copy.deepcopy(computed(model))
    other = copy.deepcopy(model.to(dtype))
    for name, each in computed(other).items():
        assert each.dtype == torch.float32
        assert torch.equal(each, before[name])
        assert each.data_ptr() != computed(model)[name].data_ptr()


def test_layers_that_were_built_and_loaded_in_unusual_modes() -> None:
    """Layers built on meta, and loaded in inference mode, can be loaded again outside of it."""
    scheme, x = Scheme("tensor", activations="static"), torch.randn(3, 64)
    with torch.device("meta"):
        model = Model(scheme)
    with torch.inference_mode():
        model.load_weights(weights_of(model, 0))
    assert torch.equal(model(x), loaded(scheme, 0)(x))
    model.load_weights(weights_of(model, 1))
    assert torch.equal(model(x), loaded(scheme, 1)(x))


def test_scales_that_are_trained_are_read_from_their_parameter() -> None:
    """An optimizer writes a scale without a load; the product and its gradient follow."""
    model = loaded(Scheme("tensor", activations="none"), 0)
    layer, x = model.qkv, torch.randn(3, 64)
    layer.weight_scale.requires_grad_(True)
    y = layer(x)
    y.sum().backward()
    assert layer.weight_scale.grad is not None
    with torch.no_grad():
        layer.weight_scale.mul_(2)
        torch.testing.assert_close(layer(x) - layer.bias, (y - layer.bias) * 2)
