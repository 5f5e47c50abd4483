"""Weights in MXFP4 as compressed-tensors stores them, in linear layers and in experts."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from torch.nn import functional as F

from vllm_module import LoadConfig, ModelConfig, get_model
from vllm_module.distributed import expert_parallel, run_ranks
from vllm_module.errors import ShardingError, UnsupportedModelError, WeightReadError
from vllm_module.layers import FusedMoE
from vllm_module.layers.linear import RowParallelLinear
from vllm_module.quantization import rules_for
from vllm_module.quantization.mxfp4 import MXFP4PackedMethod

_HERE = Path(__file__).parent
layouts = SimpleNamespace(**runpy.run_path(str(_HERE / "layouts.py")))
packing = SimpleNamespace(**runpy.run_path(str(_HERE / "packing.py")))

WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
ARGS = QuantizationArgs(**WEIGHTS, scale_dtype=torch.uint8, zp_dtype=torch.uint8)
INPUTS = {**WEIGHTS, "dynamic": True}
EXPERTS, HIDDEN, INNER = 3, 64, 128
SHAPES = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}


def config(inputs: Any = None, **weights: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": WEIGHTS | weights,
        "input_activations": inputs,
        "format": "mxfp4-pack-quantized",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def by_library(weight: torch.Tensor) -> Any:
    """Return ``weight`` rounded and stored by compressed-tensors, and what it reads from that."""
    blocks = weight.view(len(weight), -1, 32)
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), ARGS)
    scale = torch.exp2(scale.float().log2().floor())  # of powers of two
    scheme = QuantizationScheme(targets=["Linear"], weights=ARGS)
    stored = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    read = MXFP4PackedCompressor.decompress(dict(stored), scheme)["weight"]
    return packing.Layer(stored, read.float())


def drawn(rows: int, columns: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(-6, 3, (rows, columns // 32), generator=generator)
    sizes = sizes.repeat_interleave(32, -1)
    return by_library(torch.randn(rows, columns, generator=generator) * 2.0**sizes)


@pytest.fixture(scope="module")
def checkpoint(_quiet: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("mxfp4")

    def make(name: str, weight: torch.Tensor) -> Any:
        return None if name == "lm_head" else by_library(weight)

    return packing.publish(folder, layouts.QWEN3, make, config(INPUTS))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_logits_are_those_of_the_weights_multiplied_out(checkpoint: Any, size: int) -> None:
    """Any ranks compute transformers' logits, also after an update, a sleep and dummy weights."""
    stored, ids = checkpoint.tensors, checkpoint.ids

    @torch.inference_mode()
    def work(rank: int) -> list[torch.Tensor]:
        asked = ModelConfig(model=str(checkpoint.folder), dtype="float32")
        model: Any = get_model(model_config=asked)
        found = [model.compute_logits(model(ids, torch.arange(len(ids))))]
        name = "model.layers.0.mlp.up_proj.weight_scale"
        model.update_weights({name: stored[name] + 1})
        model.update_weights({name: stored[name]})
        found.append(model.compute_logits(model(ids, torch.arange(len(ids)))))
        model.sleep()
        model.load_weights(stored)
        return [*found, model.compute_logits(model(ids, torch.arange(len(ids))))]

    for each in run_ranks(size, work):
        for computed in each:
            torch.testing.assert_close(computed, checkpoint.logits, rtol=0, atol=1e-4)


def test_dummy_weights_are_what_a_checkpoint_could_have(checkpoint: Any) -> None:
    """No scale of dummy weights is the one that stands for NaN, so the model runs."""
    asked = ModelConfig(model=str(checkpoint.folder), dtype="float32")
    model: Any = get_model(model_config=asked, load_config=LoadConfig(load_format="dummy"))
    with torch.inference_mode():
        assert model(checkpoint.ids, torch.arange(len(checkpoint.ids))).isfinite().all()


@pytest.mark.parametrize(("size", "spread"), [(1, False), (2, False), (4, False), (4, True)])
def test_experts(size: int, spread: bool) -> None:
    """Ranks with parts of experts, or with whole ones or none, have the library's numbers."""
    layers = {
        f"{expert}.{name}": drawn(*shape, 10 * expert + at)
        for expert in range(EXPERTS)
        for at, (name, shape) in enumerate(SHAPES.items())
    }
    stored = {f"{n}.{attr}": t for n, each in layers.items() for attr, t in each.stored.items()}
    x, logits = torch.randn(5, HIDDEN), torch.randn(5, EXPERTS)

    def moe_of() -> Any:
        moe: Any = FusedMoE(EXPERTS, 2, HIDDEN, INNER)
        for layer in (moe.w13, moe.w2):
            layer.quantize(MXFP4PackedMethod())
        moe.load_weights(stored)
        return moe

    def work(rank: int) -> torch.Tensor:
        if not spread:
            return moe_of()(x, logits)
        with expert_parallel():
            moe = moe_of()
        wide = moe.w2.quant_method.full_precision(moe.w2)
        for weight, expert in zip(wide, moe.w2.experts.kept, strict=True):
            assert torch.equal(weight, layers[f"{expert}.down_proj"].weight)
        return moe(x, logits)

    weights, chosen = logits.double().softmax(-1).topk(2)
    weights /= weights.sum(-1, keepdim=True)
    expected = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
            gate, up, down = (layers[f"{expert}.{name}"].weight.double() for name in SHAPES)
            expected[token] += weight * (down @ (F.silu(gate @ row) * (up @ row)))
    for computed in run_ranks(size, work):
        torch.testing.assert_close(computed.double(), expected, rtol=1e-4, atol=1e-4)


def test_every_scale_and_code() -> None:
    """A layer multiplies by the value of each code with each scale, the smallest included."""
    stored = {
        "weight_packed": torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(16, 1, 1),
        "weight_scale": (torch.arange(256) % 253).to(torch.uint8).view(16, 16),  # 6 * 2**125
    }
    stored["weight_packed"] = stored["weight_packed"].view(16, 256)
    layer: Any = RowParallelLinear(512, 16, bias=False)
    layer.quantize(MXFP4PackedMethod())
    layer.load_weights(stored)
    scheme = QuantizationScheme(targets=["Linear"], weights=ARGS)
    read = MXFP4PackedCompressor.decompress(dict(stored), scheme)["weight"].double()
    assert torch.equal(layer.quant_method.full_precision(layer).double(), read)
    assert torch.equal(layer(torch.eye(512)).T.double(), read)


def test_a_scale_that_stands_for_nan_is_refused() -> None:
    """The scale 255 is refused, with the tensor and its slot."""
    layer: Any = RowParallelLinear(64, 16, bias=False)
    layer.quantize(MXFP4PackedMethod())
    stored = drawn(16, 64, 0).stored
    stored["weight_scale"][3, 1] = 255
    with pytest.raises(WeightReadError, match="weight_scale has 255, and 255 stands for NaN"):
        layer.load_weights(stored)


def test_a_block_that_is_cut_is_refused() -> None:
    """Rows that are no number of whole blocks are refused, with the numbers."""
    layer: Any = RowParallelLinear(48, 16, bias=False)
    with pytest.raises(ShardingError, match=r"48 .* inside a block of 32"):
        layer.quantize(MXFP4PackedMethod())


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        (config(group_size=64), "weights"),
        (config(symmetric=False), "weights"),
        (config(INPUTS | {"dynamic": False}), "input_activations"),
        (config({"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}), "input_act"),
    ],
)
def test_other_settings_are_refused(entries: dict[str, Any], named: str) -> None:
    """Other groups, zeros and inputs than the format has are refused by the entry."""
    with pytest.raises(UnsupportedModelError, match=rf"config_groups\.group_0\.{named}"):
        rules_for(None, entries)
