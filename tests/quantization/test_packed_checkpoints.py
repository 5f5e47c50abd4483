"""Whole checkpoints of packed weights: configuration, names, ranks and logits."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_module import ModelConfig, get_model
from vllm_module.distributed import run_ranks
from vllm_module.quantization import EightBitMethod, QuantizableLayer, UnquantizedMethod
from vllm_module.quantization.packed import PackedMethod

WITHIN = 1e-4  # of each logit, in float32, as in tests/models

_HERE = Path(__file__).parent
layouts = SimpleNamespace(**runpy.run_path(str(_HERE / "layouts.py")))
packing = SimpleNamespace(**runpy.run_path(str(_HERE / "packing.py")))
QWEN3, LLAMA = layouts.QWEN3, layouts.LLAMA | {"num_key_value_heads": 2}

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def _compressed(form: str, ignore: tuple[str, ...] = ("lm_head",), **weights: Any) -> Any:
    inputs = weights.pop("inputs", None)
    args = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32} | weights
    group = {"targets": ["Linear"], "weights": args, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": list(ignore),
        "config_groups": {"group_0": group},
    }


def _not_the_head(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda name, weight: None if name == "lm_head" else make(name, weight)


def _gptq(name: str, weight: torch.Tensor, **how: Any) -> Any:
    if how.pop("act_order", False):
        how["order"] = packing.act_order(weight.shape[1], 32, len(name.split(".")[2]))
    return packing.gptq(*weight.shape, seed=len(name), **how)


def _with_zero_bias(name: str, weight: torch.Tensor) -> Any:
    made = _gptq(name, weight)
    made.stored["bias"] = torch.zeros(len(weight))
    return made


def _awq(name: str, weight: torch.Tensor) -> Any:
    return packing.awq(*weight.shape, seed=len(name))


def _by_ct(name: str, weight: torch.Tensor, **how: Any) -> Any:
    return packing.by_compressed_tensors(weight, **how)


def _static(name: str, weight: torch.Tensor, **how: Any) -> Any:
    made = _by_ct(name, weight, **how)
    made.stored["input_scale"] = torch.tensor([0.05])
    return made


def _mixed(name: str, weight: torch.Tensor) -> Any:
    """Two bits or eight in some layers, full precision in others, and a packed head."""
    if ".0.mlp." in name:
        return None
    if "down_proj" in name:
        return _gptq(name, weight, bits=8, group=64, symmetric=True)
    return _gptq(name, weight)


_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": False}
_STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
_CHANNEL = {"strategy": "channel", "group_size": None}
_DYNAMIC = {
    "-:.*\\.0\\.mlp\\..*": {},
    "+:.*down_proj": {"bits": 8, "group_size": 64, "sym": True},
}

# The configuration, what makes a layer, and quantization_config.
CHECKPOINTS: dict[str, tuple[dict[str, Any], Callable[..., Any], dict[str, Any]]] = {
    "gptq": (LLAMA, _not_the_head(_gptq), GPTQ),
    "gptq-qwen3": (QWEN3, _not_the_head(_with_zero_bias), GPTQ),
    "gptq-v2": (QWEN3, _not_the_head(partial(_gptq, v2=True)),
                GPTQ | {"checkpoint_format": "gptq_v2"}),
    "gptq-symmetric": (QWEN3, _not_the_head(partial(_gptq, symmetric=True, group=None)),
                       GPTQ | {"sym": True, "group_size": -1, "desc_act": True}),
    "gptq-act-order": (QWEN3, _not_the_head(partial(_gptq, act_order=True)),
                       GPTQ | {"desc_act": True}),
    "gptq-3-bits": (QWEN3, _not_the_head(partial(_gptq, bits=3)), GPTQ | {"bits": 3}),
    "gptq-dynamic-and-head": (QWEN3 | {"vocab_size": 128}, _mixed,
                              GPTQ | {"dynamic": _DYNAMIC, "lm_head": True}),
    "gptq-some-modules": (
        QWEN3,
        lambda name, weight: _gptq(name, weight) if "self_attn" in name else None,
        GPTQ | {"modules_in_block_to_quantize": [
            ["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"], ["self_attn.o_proj"]
        ]},
    ),
    "awq": (LLAMA, _not_the_head(_awq), AWQ),
    "awq-skipped": (QWEN3, _not_the_head(lambda name, weight: None if ".0.mlp." in name else
                                         _awq(name, weight)),
                    AWQ | {"modules_to_not_convert": ["layers.0.mlp"], "version": "GEMM"}),
    "awq-gemv": (LLAMA, _not_the_head(lambda name, weight: packing.awq_gemv(
        *weight.shape, seed=len(name))), AWQ | {"version": "GEMV"}),
    "awq-gemv-64": (QWEN3, _not_the_head(lambda name, weight: packing.awq_gemv(
        *weight.shape, 64, seed=len(name))), AWQ | {"version": "gemv", "group_size": 64}),
    "ct-int4": (LLAMA, _not_the_head(_by_ct), _compressed("pack-quantized")),
    "ct-int4-with-zeros": (QWEN3, _not_the_head(partial(_by_ct, symmetric=False)),
                           _compressed("pack-quantized", symmetric=False)),
    "ct-int4-channel": (QWEN3, _not_the_head(partial(_by_ct, group=None)),
                        _compressed("pack-quantized", **_CHANNEL)),
    "ct-int8-packed": (QWEN3, _not_the_head(partial(_by_ct, bits=8)),
                       _compressed("pack-quantized", num_bits=8)),
    "ct-int8": (LLAMA, _not_the_head(partial(_by_ct, bits=8, group=None, packed=False)),
                _compressed("int-quantized", num_bits=8, **_CHANNEL, inputs=_TOKEN)),
    "ct-int8-tensor-static": (
        QWEN3,
        _not_the_head(partial(_static, bits=8, group=None, strategy="tensor", packed=False)),
        _compressed("int-quantized", num_bits=8, strategy="tensor", group_size=None,
                    inputs=_STATIC)),
    # W4A8: four bits in a byte each, as the library writes them, or packed.
    "ct-w4a8": (LLAMA, _not_the_head(partial(_by_ct, packed=False)),
                _compressed("int-quantized", num_bits=4, inputs=_TOKEN)),
    "ct-w4a8-channel": (QWEN3, _not_the_head(partial(_by_ct, group=None, packed=False)),
                        _compressed("int-quantized", num_bits=4, **_CHANNEL, inputs=_TOKEN)),
    "ct-w4a8-floats": (QWEN3, _not_the_head(partial(_by_ct, packed=False)),
                       _compressed("int-quantized", num_bits=4, inputs=_TOKEN | {"type": "float"})),
    "ct-w4a8-packed": (QWEN3, _not_the_head(_by_ct), _compressed("pack-quantized", inputs=_TOKEN)),
    "ct-int8-groups": (QWEN3, _not_the_head(partial(_by_ct, bits=8, packed=False)),
                       _compressed("naive-quantized", num_bits=8)),
}  # fmt: skip
# Of those with edges of another kind, all sizes; three bits need shards of 32 rows.
SIZES = dict.fromkeys(CHECKPOINTS, (4,)) | dict.fromkeys(
    ("gptq", "gptq-act-order", "awq-gemv", "ct-int4", "ct-w4a8", "ct-w4a8-packed"), (1, 2, 4)
)
SIZES |= dict.fromkeys(("gptq-3-bits", "gptq-dynamic-and-head", "awq-gemv-64"), (2,))


@pytest.fixture(scope="module")
def stored(_quiet: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return the checkpoint of a name; each is written once."""
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            config, make, quantization = CHECKPOINTS[name]
            folder = tmp_path_factory.mktemp(name)
            made[name] = packing.publish(folder, config, make, quantization)
        return made[name]

    return get


def load(checkpoint: Any, **entries: Any) -> Any:
    return get_model(
        model_config=ModelConfig(model=str(checkpoint.folder), dtype="float32", **entries)
    )


@torch.inference_mode()
def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model.compute_logits(model(ids, torch.arange(len(ids))))


@pytest.mark.parametrize(
    ("name", "size", "impl"),
    [
        *((name, size, "native") for name, sizes in SIZES.items() for size in sizes),
        *((name, 2, "transformers") for name in ("gptq-act-order", "awq", "ct-int4-with-zeros")),
    ],
)
def test_logits_are_those_of_the_weights_multiplied_out(
    stored: Callable[[str], Any], name: str, size: int, impl: str
) -> None:
    """A checkpoint of any layout gives transformers' logits of what it stands for, on any ranks.

    So does transformers' class with our layers.
    """
    checkpoint = stored(name)

    def run(rank: int) -> torch.Tensor:
        return logits(load(checkpoint, model_impl=impl), checkpoint.ids)

    for computed in run_ranks(size, run):
        torch.testing.assert_close(computed, checkpoint.logits, rtol=0, atol=WITHIN)


def methods(model: Any) -> dict[str, Any]:
    found = {p: m.quant_method for p, m in model.named_modules() if isinstance(m, QuantizableLayer)}
    return {path.removeprefix("model.layers."): method for path, method in found.items()}


def test_layers_have_the_settings_that_the_configuration_has_for_them(
    stored: Callable[[str], Any],
) -> None:
    """``dynamic`` skips layers and changes bits; the head is packed where it is said to be."""
    found = methods(load(stored("gptq-dynamic-and-head")))
    assert type(found["0.mlp.down_proj"]) is UnquantizedMethod
    assert (found["1.mlp.down_proj"].bits, found["1.mlp.down_proj"].symmetric) == (8, True)
    assert found["1.mlp.gate_up_proj"].bits == found["lm_head"].bits == 4
    some = methods(load(stored("gptq-some-modules")))
    packed = {path for path, method in some.items() if isinstance(method, PackedMethod)}
    assert packed == {path for path in some if "self_attn" in path}
    assert type(methods(load(stored("gptq")))["lm_head"]) is UnquantizedMethod
    eight = methods(load(stored("ct-int8-groups")))["0.mlp.down_proj"]
    assert isinstance(eight, EightBitMethod)
    assert (eight.scheme.strategy, eight.scheme.block) == ("block", (1, 32))


@pytest.mark.parametrize(("name", "asked"), [("gptq", "gptq"), ("awq", "awq")])
def test_the_stored_method_can_be_requested(
    stored: Callable[[str], Any], name: str, asked: str
) -> None:
    """``quantization`` with the checkpoint's own method changes nothing."""
    assert methods(load(stored(name), quantization=asked)) == methods(load(stored(name)))


def test_a_state_dict_and_a_cast_keep_what_is_packed(stored: Callable[[str], Any]) -> None:
    """A state dict restores words and zeros, refuses full precision, and a cast leaves both."""
    checkpoint = stored("gptq")
    model, other = load(checkpoint), load(stored("gptq"))
    for parameter in other.parameters():
        parameter.data.zero_()
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other, checkpoint.ids), logits(model, checkpoint.ids))
    name = "model.layers.0.mlp.down_proj.qweight"
    with pytest.raises(RuntimeError, match=r"qweight is held in torch\.int32"):
        other.load_state_dict(model.state_dict() | {name: model.state_dict()[name].float()})
    half = load(checkpoint).half()
    layer = half.get_submodule("model.layers.0.mlp.down_proj")
    assert (layer.qweight.dtype, layer.scales.dtype) == (torch.int32, torch.float32)
    assert layer.zeros_for_matmul.dtype == torch.uint8
