"""A sleeping model has no weights in memory, refuses to run, and wakes up by loading."""

from __future__ import annotations

import gc
import runpy
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_module import vLLMModule
from vllm_module.errors import ModelNotReadyError, WeightReadError
from vllm_module.layers import MLAUpProjection, RotaryEmbedding
from vllm_module.quantization import ONLINE, EightBitMethod, QuantizeMethod, Scheme
from vllm_module.quantization.bitsandbytes import BitsAndBytes4BitMethod, BitsAndBytes8BitMethod
from vllm_module.quantization.method import UnquantizedMethod
from vllm_module.quantization.mxfp4 import MXFP4PackedMethod
from vllm_module.quantization.nvfp4 import MODELOPT, NVFP4Method
from vllm_module.quantization.online_nf4 import OnlineNF4Method
from vllm_module.quantization.packed import AWQ, GPTQ, PackedMethod
from vllm_module.quantization.packed_gemv import AWQ_GEMV, GEMVMethod
from vllm_module.testing.checkpoints import (
    assert_same_state,
    made_up_weights,
    random_weights,
    state,
)

tree = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("tree.py"))))


def quantized() -> torch.nn.Module:
    model = tree.Model()
    for block in model.blocks:
        for layer in (block.qkv_proj, block.mlp.gate_up_proj, block.mlp.down_proj):
            layer.quantize(EightBitMethod(ONLINE["fp8_per_channel"]))
    return model


MODELS = {
    "plain": tree.Model,
    "tied": lambda: tree.Model(tied=True),
    "quantized": quantized,
}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_a_sleeping_model_has_no_memory_and_refuses_to_run(build) -> None:
    """Every stored tensor is on meta and its memory released; every call is refused."""
    model = build().eval()
    model.load_weights(random_weights(model.expected_weights()))
    model(torch.arange(3))
    held = [weakref.ref(tensor) for tensor in model.parameters()]
    model.sleep()
    gc.collect()
    assert not any(reference() is not None for reference in held)
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    for call in (model.check_ready, lambda: model(torch.arange(3))):
        with pytest.raises(ModelNotReadyError, match="call load_weights"):
            call()
    with pytest.raises(ModelNotReadyError):
        model.blocks[1].mlp(torch.zeros(1, 8))


@pytest.mark.parametrize("in_buckets", [False, True])
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_a_model_wakes_up_by_loading(build, in_buckets: bool) -> None:
    """A load, or updates that fill everything, give the bits of a first load; ties stay ties."""
    model = build().eval()
    tensors = random_weights(model.expected_weights())
    model.load_weights(tensors)
    before = state(model)
    out = model(torch.arange(3))
    model.sleep()
    if in_buckets:
        names = sorted(tensors)
        for first in range(0, len(names), 3):
            with pytest.raises(ModelNotReadyError):
                model(torch.arange(3))
            model.update_weights({name: tensors[name] for name in names[first : first + 3]})
    else:
        model.load_weights(tensors)
    assert_same_state(state(model), before, "after sleep")
    assert torch.equal(model(torch.arange(3)), out)
    tied = {id(model.embed.weight), id(model.head.weight)}
    assert len(tied) == (1 if build is MODELS["tied"] else 2)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_sleeping_twice_or_before_loading_changes_nothing() -> None:
    """A second sleep does nothing, and a sleeping model loads as a new one does."""
    model = tree.Model()
    model.sleep()
    model.sleep()
    model.load_weights(tree.checkpoint())
    model.check_ready()


def test_a_part_of_a_model_can_sleep() -> None:
    """The rest keeps its weights; the model refuses to run until the part is loaded."""
    model = tree.Model().eval()
    model.load_weights(tree.checkpoint())
    part = model.blocks[0].mlp
    tensors = random_weights(part.expected_weights())
    part.sleep()
    assert not model.blocks[1].mlp.down_proj.weight.is_meta
    with pytest.raises(ModelNotReadyError, match="down_proj"):
        model(torch.arange(3))
    part.load_weights(tensors)
    model(torch.arange(3))


def test_sleep_is_refused_during_a_load() -> None:
    """The load is writing to the memory."""
    model = tree.Model()

    def stream():
        for name, tensor in tree.checkpoint().items():
            with pytest.raises(RuntimeError, match="being loaded"):
                model.sleep()
            yield name, tensor

    model.load_weights(stream())


def test_buffers_that_no_load_restores_stay() -> None:
    """Sleep keeps tensors that do not follow from weights, because no load could restore them."""
    model = tree.Model()
    model.register_buffer("table", torch.ones(3), persistent=False)
    model.load_weights(tree.checkpoint())
    model.sleep()
    assert torch.equal(model.table, torch.ones(3))


def test_updates_wake_what_was_refused_before_it_slept() -> None:
    """Sleep releases the mixture that a broken load left, so updates may fill the model."""
    model = tree.Model()
    tensors = tree.checkpoint()

    def broken():
        yield next(iter(tensors.items()))
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        model.load_weights(broken())
    model.sleep()
    model.update_weights(tensors)
    model.check_ready()


class Attention(vLLMModule):
    """A latent projection, which computes what products need, beside a table that stays."""

    def __init__(self, method: QuantizeMethod) -> None:
        super().__init__()
        self.rotary = RotaryEmbedding(16, 64)
        self.kv_b_proj = MLAUpProjection(256, 4, 16, 48)
        self.kv_b_proj.quantize(method)


# By what each of them computes from its weights.
METHODS: dict[str, tuple[QuantizeMethod, set[str]]] = {
    "none": (UnquantizedMethod(), set()),
    "fp8": (
        EightBitMethod(Scheme("tensor", activations="static")),
        {"scale_for_matmul", "input_scale_for_matmul"},
    ),
    "gptq": (PackedMethod(GPTQ, 4, 32, False), {"zeros_for_matmul"}),
    "awq": (PackedMethod(AWQ, 4, 32, False), {"zeros_for_matmul"}),
    "gemv": (GEMVMethod(AWQ_GEMV, 4, 32, False), {"scales_for_matmul", "zeros_for_matmul"}),
    "nvfp4": (NVFP4Method(MODELOPT, False), {"codebook", "scales_for_matmul"}),
    "mxfp4": (MXFP4PackedMethod(), {"codebook", "scales_for_matmul"}),
    "nf4": (OnlineNF4Method(), {"codebook"}),
    "bitsandbytes": (BitsAndBytes4BitMethod("nf4", nested=True), {"codebook", "scales"}),
    "bitsandbytes int8": (BitsAndBytes8BitMethod(), {"scale_for_matmul"}),
}


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_what_is_computed_from_weights_sleeps_with_them(name: str, in_parts: bool) -> None:
    """Its memory is released, and a load, or updates that fill everything, compute it again."""
    method, computed = METHODS[name]
    model = Attention(method)
    layer = model.kv_b_proj
    assert set(dict(layer.named_buffers())) == {"w_uk", "w_uv", *computed}
    tensors = made_up_weights(model)
    model.load_weights(tensors)
    before = {path: buffer.clone() for path, buffer in model.named_buffers()}
    held = [weakref.ref(each) for each in (*layer.parameters(), *layer.buffers())]
    model.sleep()
    gc.collect()
    assert not any(reference() is not None for reference in held)
    assert all(each.is_meta for each in (*layer.parameters(), *layer.buffers()))
    assert torch.equal(model.rotary.inv_freq, before["rotary.inv_freq"])
    if in_parts:
        for each in sorted(tensors):
            with pytest.raises(ModelNotReadyError):
                model.check_ready()
            model.update_weights({each: tensors[each]})
    else:
        model.load_weights(tensors)
    model.check_ready()
    after = dict(model.named_buffers())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[path], before[path]) for path in before)
    weight = layer.quant_method.full_precision(layer)
    if name == "none":
        weight = tensors["kv_b_proj.weight"]
    key, value = weight.view(4, 64, 256).split([16, 48], 1)
    assert torch.equal(layer.w_uk, key)
    assert torch.equal(layer.w_uv, value.mT)


def test_a_wake_up_that_breaks_leaves_what_is_computed_to_the_next_load() -> None:
    """A refused load lets nothing run, and the next one computes all of it."""
    model = Attention(MXFP4PackedMethod())
    tensors = made_up_weights(model)
    model.load_weights(tensors)
    before = model.kv_b_proj.w_uk.clone()
    model.sleep()
    name = "kv_b_proj.weight_scale"
    with pytest.raises(WeightReadError):
        model.load_weights(tensors | {name: torch.full_like(tensors[name], 255)})  # NaN
    with pytest.raises(ModelNotReadyError):
        model.check_ready()
    model.load_weights(tensors)
    assert torch.equal(model.kv_b_proj.w_uk, before)
