"""Four bits per group while loading: compressed-tensors' words and scales, on any ranks."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import pack_quantized
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams
from hypothesis import given
from hypothesis import strategies as st

from vllm_module import ModelConfig, QuantizationConfig, get_model
from vllm_module.distributed import run_ranks, tensor_parallel
from vllm_module.errors import ShardingError, WeightReadError
from vllm_module.layers import (
    FusedMoE,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm_module.quantization import online, online_rules
from vllm_module.quantization.packed import COMPRESSED_TENSORS, PackedMethod
from vllm_module.quantization.packed_online import OnlinePackedMethod

_HERE = Path(__file__).parent
packing = SimpleNamespace(**runpy.run_path(str(_HERE / "packing.py")))


def loaded(weight: torch.Tensor, group: int = 32) -> Any:
    layer = ReplicatedLinear(weight.shape[1], weight.shape[0], False, params_dtype=weight.dtype)
    layer.quantize(OnlinePackedMethod(group_size=group))
    layer.load_weights({"weight": weight})
    return layer


@st.composite
def weights(draw: st.DrawFn) -> torch.Tensor:
    """Draw a float32 matrix of any magnitude, with outliers, zeros and groups of zeros."""
    rows, groups = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    weight = torch.randn(rows, groups, 16, generator=generator)
    spread = draw(st.sampled_from([0.0, 1.0, 4.0]))
    weight *= torch.exp(spread * torch.randn(rows, groups, 1, generator=generator))
    weight *= 10.0 ** draw(st.integers(-20, 20))
    weight[draw(st.integers(0, rows - 1)), draw(st.integers(0, groups - 1))] *= draw(
        st.sampled_from([0.0, 1.0, -1.0])
    )
    weight[0, 0, draw(st.integers(0, 15))] = draw(st.sampled_from([0.0, 7.5, -8.0, 1e-30]))
    return weight.flatten(1)


@given(weight=weights())
def test_words_and_scales_are_compressed_tensors(weight: torch.Tensor) -> None:
    """Of float32, the words and scales are those that compressed-tensors makes, bit for bit."""
    layer, made = loaded(weight, 16), packing.by_compressed_tensors(weight, 4, 16)
    assert torch.equal(layer.weight_scale, made.stored["weight_scale"])
    assert torch.equal(layer.weight, made.stored["weight_packed"])
    stored = ReplicatedLinear(weight.shape[1], weight.shape[0], False, params_dtype=torch.float32)
    stored.quantize(PackedMethod(COMPRESSED_TENSORS, 4, 16))
    stored.load_weights(made.stored)
    x = torch.randn(2, weight.shape[1])
    assert torch.equal(layer(x), stored(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_round_once(dtype: torch.dtype) -> None:
    """Of 16 bits, the scales are compressed-tensors', and numbers are rounded in float32 by them.

    compressed-tensors rounds the quotient to 16 bits first, which shows in bfloat16.
    """
    weight = torch.randn(64, 128).to(dtype)
    weight[5, 32:64] = 0  # the scale of zeros is the dtype's epsilon
    layer = loaded(weight)
    groups = weight.view(64, 4, 32)
    args = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32)
    scale = calculate_qparams(groups.amin(-1), groups.amax(-1), args)[0]
    assert scale.dtype == dtype
    assert torch.equal(layer.weight_scale, scale.float())
    codes = (groups.float() / scale.float().unsqueeze(-1)).round().clamp(-8, 7).flatten(1)
    words = pack_quantized.pack_to_int32(codes.to(torch.int8), 4)
    assert torch.equal(layer.weight, words)
    theirs = packing.by_compressed_tensors(weight, 4, 32).stored["weight_packed"]
    assert dtype != torch.bfloat16 or not torch.equal(layer.weight, theirs)


def test_pieces_have_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that is read in pieces of a row has the same words and scales."""
    weight = torch.randn(8, 64)
    whole = loaded(weight)
    monkeypatch.setattr(online, "_PIECE", 8)
    pieces = loaded(weight)
    assert torch.equal(whole.weight, pieces.weight)
    assert torch.equal(whole.weight_scale, pieces.weight_scale)


def test_updates_write_to_the_same_memory() -> None:
    """New full-precision weights of a slot are packed into the memory of the old ones."""
    layer: Any = MergedColumnParallelLinear(64, [8, 8], False, shard_names=["a", "b"])
    layer.quantize(OnlinePackedMethod(group_size=32))
    a, b, c = (torch.randn(8, 64) for _ in range(3))
    layer.load_weights({"a.weight": a, "b.weight": b})
    memory = layer.weight.data_ptr(), layer.weight_scale.data_ptr()
    layer.update_weights({"b.weight": c})
    assert (layer.weight.data_ptr(), layer.weight_scale.data_ptr()) == memory
    assert torch.equal(layer.weight, torch.cat([loaded(a).weight, loaded(c).weight]))


def test_a_transposed_and_a_packed_weight() -> None:
    """Experts that are stored as one tensor, ``[input, output]``, have the bits of those apart."""
    experts = [torch.randn(2, 3, 32, 64), torch.randn(3, 64, 32)]

    def moe(transposed: bool, stored: dict[str, torch.Tensor]) -> Any:
        layer = FusedMoE(3, 2, 32, 64, transposed=transposed)
        for each in (layer.w13, layer.w2):
            each.quantize(OnlinePackedMethod(group_size=32))
        layer.load_weights(stored)
        return layer

    (gate, up), down = experts[0].transpose(-1, -2), experts[1].transpose(-1, -2)
    apart = {
        f"{e}.{name}_proj.weight": weight[e]
        for e in range(3)
        for name, weight in (("gate", gate), ("up", up), ("down", down))
    }
    fused = {"gate_up_proj": torch.cat(tuple(experts[0]), -1), "down_proj": experts[1]}
    one, other = moe(False, apart), moe(True, fused)
    x, logits = torch.randn(4, 32), torch.randn(4, 3)
    assert torch.equal(one(x, logits), other(x, logits))
    for layer in ("w13", "w2"):
        assert torch.equal(getattr(one, layer).weight, getattr(other, layer).weight)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_model_has_the_same_bits_on_any_ranks(full_precision: Any, size: int) -> None:
    """A group is one rank's, so each rank holds its cut of the words; logits are near the model's.

    The head is left out unless it is asked for.
    """
    asked = QuantizationConfig(scheme="int4_per_group", group_size=32)
    config = ModelConfig(model=str(full_precision.folder), dtype="float32", quantization=asked)
    tensors = full_precision.tensors

    def work(rank: int) -> torch.Tensor:
        model: Any = get_model(model_config=config)
        down = model.get_submodule("model.layers.1.mlp.down_proj")
        whole = loaded(tensors["model.layers.1.mlp.down_proj.weight"])
        assert torch.equal(down.weight, whole.weight.chunk(size, 1)[rank])
        assert not model.lm_head.is_quantized
        ids = full_precision.ids
        with torch.inference_mode():
            return model.compute_logits(model(ids, torch.arange(len(ids))))

    computed = run_ranks(size, work)
    error = (computed[0] - full_precision.logits).norm() / full_precision.logits.norm()
    assert 0.01 < error < 0.5
    single = get_model(model_config=config)
    with torch.inference_mode():
        ids = full_precision.ids
        alone = single.compute_logits(single(ids, torch.arange(len(ids))))
    torch.testing.assert_close(computed[0], alone, rtol=0, atol=1e-4)


def test_a_plan_of_another_rank() -> None:
    """A plan of rank 1 of 2 has its part of the words, and reads full precision."""
    layers, weight = [], torch.randn(8, 64)
    for rank in (0, 1):
        with tensor_parallel(rank=rank, size=2):
            layers.append(RowParallelLinear(64, 8, False, params_dtype=torch.float32))
        layers[rank].quantize(OnlinePackedMethod(group_size=16))
    one, other = (each.plan_weights({"weight": weight}) for each in layers)
    of_other = one.of_rank(1)
    assert of_other.memory() == other.memory()
    assert other.memory().model == 8 * 32 // 2 + 8 * 2 * 4
    (read,), (expected,) = of_other.reads(), other.reads()
    assert torch.equal(read.source, expected.source)
    assert torch.equal(read.source, weight[:, 32:])


# Refusals


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite(number: float) -> None:
    """A weight with a number that is not finite is refused by the name of its slot."""
    layer = MergedColumnParallelLinear(32, [4, 4], False, shard_names=["a", "b"])
    layer.quantize(OnlinePackedMethod(group_size=32))
    broken = torch.randn(4, 32)
    broken[1, 7] = number
    given = {"a.weight": torch.randn(4, 32), "b.weight": broken}
    reason = (
        r"b\.weight has a NaN" if number != number else r"weight \(slot 'b'\) .* must be finite"
    )
    with pytest.raises(WeightReadError, match=reason):
        layer.load_weights(given)
    layer.allow_nan = True  # which no scheme can hold
    with pytest.raises(WeightReadError, match=r"weight \(slot 'b'\) .* must be finite"):
        layer.load_weights(given)


@pytest.mark.parametrize(
    ("group", "size", "named"),
    [
        (
            48,
            1,
            [
                "self_attn.qkv_proj",
                "64 inputs",
                "48",
                "another group_size",
                "--group-size and --ignore",
            ],
        ),
        (128, 1, ["self_attn.qkv_proj", "64 inputs", "128", "ignore"]),
        (64, 4, ["self_attn.o_proj", "32 features", "128 in 4 parts", "scale group of 64"]),
    ],
)
def test_a_group_that_does_not_divide(
    full_precision: Any, group: int, size: int, named: list[str]
) -> None:
    """A group that crosses the edge of a layer or shard is refused, with layer and numbers."""
    asked = QuantizationConfig(scheme="int4_per_group", group_size=group)
    config = ModelConfig(model=str(full_precision.folder), quantization=asked)
    with pytest.raises(ShardingError) as refused:
        run_ranks(size, lambda rank: get_model(model_config=config))
    assert all(text in str(refused.value) for text in named), str(refused.value)


@pytest.mark.parametrize("group", [0, -1, 12, 7.5, True])
def test_group_sizes_that_no_configuration_takes(group: Any) -> None:
    """A group has a positive multiple of eight inputs, which fill whole words."""
    with pytest.raises(ValueError, match="group_size should be"):
        QuantizationConfig(scheme="int4_per_group", group_size=group)


def test_a_layer_may_have_another_scheme() -> None:
    """Overrides mix four bits with other schemes."""
    asked = QuantizationConfig(
        scheme="int4_per_group", overrides={"mlp.down_proj": "fp8_per_channel"}, group_size=64
    )
    rules = online_rules(asked)
    assert rules.rule_of("model.layers.0.mlp.up_proj")[1] == OnlinePackedMethod(group_size=64)
    assert "float8" in str(rules.rule_of("model.layers.0.mlp.down_proj")[1])
