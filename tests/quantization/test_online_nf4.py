"""Quantizing to NF4 while loading gives the bits of bitsandbytes, on any number of ranks."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bitsandbytes.functional import quantize_4bit

from vllm_module import ModelConfig, QuantizationConfig, get_model
from vllm_module.distributed import run_ranks
from vllm_module.errors import ShardingError, UnsupportedModelError, WeightReadError
from vllm_module.kernels.matmul.packed_words import unpack
from vllm_module.kernels.rows.quantize_nf4 import NF4, PACKING, quantize_nf4
from vllm_module.layers import ColumnParallelLinear, RowParallelLinear
from vllm_module.quantization import QuantizableLayer, rules_for
from vllm_module.quantization.online_nf4 import OnlineNF4Method
from vllm_module.testing.checkpoints import assert_same_state, state
from vllm_module.weights import open_checkpoint

bnb = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("bnb_checkpoints.py"))))


class Transposed(ColumnParallelLinear):
    """A layer whose weight is stored as ``[input, output]``."""

    transposed = True


pytestmark = pytest.mark.usefixtures("_quiet")


@pytest.fixture(scope="module")
def folder(_quiet: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("full")
    model = bnb.publishing.randomized(bnb.MODELS["qwen3"])
    model.save_pretrained(folder)
    return folder


def load(folder: Path, quantization: Any = "bitsandbytes") -> Any:
    config = ModelConfig(model=str(folder), dtype="float32", quantization=quantization)
    return get_model(model_config=config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_and_scales_are_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    """Zeros, numbers in the middle of two codes, subnormal and very large ones are included."""
    wide = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    levels = torch.tensor(NF4)
    wide[0] = 0
    wide[1, :15], wide[1, 15:64] = (levels[:-1] + levels[1:]) / 2, 1
    wide[2, :64] = 1e-40
    wide[3] *= torch.finfo(dtype).max / 8
    wide[4, :16] = levels
    wide = wide.to(dtype)
    packed, absmax = torch.empty(64, 128, dtype=torch.uint8), torch.empty(64, 4)
    quantize_nf4(wide, packed, absmax, 64)
    expected, made = quantize_4bit(wide, quant_type="nf4")
    assert torch.equal(absmax.flatten(), made.absmax)
    assert torch.equal(packed.view(-1, 1), expected)
    assert torch.equal(made.code, levels)
    assert torch.equal(unpack(packed[:1], PACKING), torch.full((1, 256), 7, dtype=torch.uint8))


def test_codes_are_those_of_any_default_dtype() -> None:
    """Torch's default dtype, which a program may have set, does not round where codes change."""
    wide = torch.randn(8, 4096, generator=torch.Generator().manual_seed(0))
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        packed, absmax = torch.empty(8, 2048, dtype=torch.uint8), torch.empty(8, 64)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            quantize_nf4(wide, packed, absmax, 64)
        finally:
            torch.set_default_dtype(before)
        found.append(packed)
    assert torch.equal(*found)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("layer", [ColumnParallelLinear, RowParallelLinear, Transposed])
def test_a_rank_holds_its_part_of_the_whole_quantized(layer: Any, size: int) -> None:
    """Bits do not depend on the cut, and the same memory takes an update in full precision."""
    wide = [torch.randn(128, 256) for _ in range(2)]
    codes = [quantize_4bit(each, quant_type="nf4") for each in wide]
    dim = 1 if layer is RowParallelLinear else 0

    def work(rank: int) -> None:
        module = layer(256, 128, bias=False)
        module.quantize(OnlineNF4Method())
        for each, (packed, made) in zip(wide, codes, strict=True):
            stored = each.T if layer is Transposed else each
            if module.weight.is_meta:
                module.load_weights({"weight": stored})
                places = module.weight.data_ptr(), module.absmax.data_ptr()
            else:
                module.update_weights({"weight": stored})
            assert places == (module.weight.data_ptr(), module.absmax.data_ptr())
            assert torch.equal(module.weight.data, packed.view(128, 128).chunk(size, dim)[rank])
            assert torch.equal(module.absmax.data, made.absmax.view(128, 4).chunk(size, dim)[rank])

    run_ranks(size, work)


def test_a_model_is_what_a_stored_checkpoint_would_be(folder: Path, tmp_path: Path) -> None:
    """Quantized before or while loading: the same weights and logits; the vocabulary is not."""
    stored = bnb.publish(tmp_path, "qwen3", "nf4")

    def work(rank: int) -> None:
        online, before = load(folder), load(stored.folder, None)
        for path, layer in online.named_modules():
            if isinstance(layer, QuantizableLayer):
                assert layer.is_quantized == (path not in ("lm_head", "model.embed_tokens"))
                other = before.get_submodule(path)
                wide = layer.quant_method.full_precision(layer)
                assert torch.equal(wide, other.quant_method.full_precision(other))
        with torch.no_grad():
            for model in (online, before):
                logits = model.compute_logits(model(stored.ids, torch.arange(len(stored.ids))))
                torch.testing.assert_close(logits, stored.logits, rtol=0, atol=1e-4)

    run_ranks(2, work)


def test_some_layers_and_other_schemes(folder: Path) -> None:
    """What is ignored is kept, overrides mix with other schemes, and entries need an effect."""
    config = QuantizationConfig(
        scheme="bitsandbytes", ignore=("o_proj",), overrides={"mlp": "fp8_per_channel"}
    )
    model = load(folder, config)
    layer = model.model.layers[0]
    assert not layer.self_attn.o_proj.is_quantized
    assert layer.mlp.down_proj.weight.dtype == torch.float8_e4m3fn
    assert layer.self_attn.qkv_proj.weight.shape == (512, 128)
    fp8 = QuantizationConfig(scheme="fp8_per_channel", overrides={"mlp": "bitsandbytes"})
    assert load(folder, fp8).model.layers[0].mlp.down_proj.weight.dtype == torch.uint8
    with pytest.raises(UnsupportedModelError, match="'bitsandbytes' was asked for"):
        rules_for("bitsandbytes", {"quant_method": "fp8"})


def test_memory_is_that_of_the_codes_and_one_piece(folder: Path) -> None:
    """A plan knows the sizes that are held, and no layer is in full precision at a time."""
    model = load(folder)
    with open_checkpoint(folder) as weights:
        plan = model.plan_weights(weights)
    held = (*model.parameters(), *model.buffers())
    assert plan.report.ok
    assert plan.memory().model == sum(tensor.nbytes for tensor in held)
    layer = model.model.layers[0].mlp.gate_up_proj
    assert layer.weight.nbytes + layer.absmax.nbytes == layer.weight.numel() * (1 + 2 * 4 / 64)


def test_a_state_dict_is_taken_back(folder: Path) -> None:
    """Codes and scales are restored; full precision in their place is refused."""
    model, other = load(folder), load(folder)
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for parameter in other.parameters():
        parameter.data.zero_()
    other.load_state_dict(saved)
    assert_same_state(state(other), state(model), "from a state dict")


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_weight_that_is_not_finite(value: float) -> None:
    """It is refused with the tensor's name."""
    layer = ColumnParallelLinear(64, 4, bias=False)
    layer.quantize(OnlineNF4Method())
    layer.allow_nan = True  # which NF4 cannot hold
    wide = torch.randn(4, 64)
    wide[2, 3] = value
    with pytest.raises(WeightReadError, match=r"^weight has (nan|inf), and must be finite"):
        layer.load_weights({"weight": wide})


def test_a_layer_that_has_no_blocks(tmp_path: Path) -> None:
    """Rows that blocks do not divide are refused, with the layer and what to do."""
    config = bnb.MODELS["qwen3"] | {"hidden_size": 96, "intermediate_size": 64}
    bnb.publishing.randomized(config).save_pretrained(tmp_path)
    with pytest.raises(ShardingError, match=r"qkv_proj cannot be held in NF4 .*96.*Leave the"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("columns", "blocksize", "problem"),
    [(96, 64, "do not divide"), (66, 3, "do not divide"), (64, 0, "do not divide")],
)
def test_blocks_that_divide_no_row(columns: int, blocksize: int, problem: str) -> None:
    """The quantizer refuses blocks that would cross rows, or split a byte."""
    with pytest.raises(ValueError, match=problem):
        quantize_nf4(
            torch.zeros(2, columns),
            torch.empty(2, columns // 2, dtype=torch.uint8),
            torch.empty(2, 1),
            blocksize,
        )
