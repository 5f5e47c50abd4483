"""Digests of weights that are quantized and packed while loading, in any stored order of rows."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bitsandbytes.functional import quantize_4bit

from vllm_module import vLLMModule
from vllm_module.core.digests import ModelDigest
from vllm_module.distributed import run_ranks
from vllm_module.kernels.digest.digest import digest_box
from vllm_module.layers import FusedMoE, GatedDeltaNet, QKVParallelLinear, RowParallelLinear
from vllm_module.quantization import QuantizableLayer, QuantizeMethod
from vllm_module.quantization.online_nf4 import OnlineNF4Method
from vllm_module.quantization.packed_online import OnlinePackedMethod
from vllm_module.testing import random_weights

_PACKING = Path(__file__).parents[1] / "quantization/packing.py"
packing = SimpleNamespace(**runpy.run_path(str(_PACKING)))


class StoredTransposed(QKVParallelLinear):
    transposed = True


def experts(**how: Any) -> FusedMoE:
    return FusedMoE(4, 2, 128, 256, shard_names=None, **how)


# A layer, the numbers of ranks that can share it, and whether weights are [input, output].
LAYERS: dict[str, tuple[Callable[[], vLLMModule], tuple[int, ...], bool]] = {
    "inputs cut": (lambda: RowParallelLinear(256, 8, False), (2, 4), False),
    "groups": (lambda: QKVParallelLinear(128, 8, 8, 4, False, groups=2), (2, 4), False),
    "a group each": (lambda: QKVParallelLinear(128, 8, 8, 4, False, groups=4), (2, 4, 8), False),
    "transposed groups": (lambda: StoredTransposed(128, 8, 8, 4, False, groups=2), (2, 4), True),
    "pairs": (lambda: QKVParallelLinear(128, 8, 8, 2, stored_rotary_pairs=True), (2, 4), False),
    "fused pairs": (
        lambda: QKVParallelLinear(128, 8, 8, 2, shard_names=None, stored_rotary_pairs=True),
        (2, 4), False,
    ),
    "transposed pairs": (
        lambda: StoredTransposed(128, 8, 8, 2, False, stored_rotary_pairs=True), (2, 4), True,
    ),
    "gated delta net": (lambda: GatedDeltaNet(128, 2, 4, 64, 64), (2, 4), False),
    "experts": (experts, (2, 4), False),
    "gpt-oss": (
        lambda: experts(interleaved=True, transposed=True, block=64, bias=True), (2, 4), True,
    ),
}  # fmt: skip


def by_compressed_tensors(weight: torch.Tensor) -> torch.Tensor:
    stored: torch.Tensor = packing.by_compressed_tensors(weight, 4, 64).stored["weight_packed"]
    return stored


def by_bitsandbytes(weight: torch.Tensor) -> torch.Tensor:
    codes: torch.Tensor = quantize_4bit(weight, quant_type="nf4")[0]
    return codes.view(len(weight), -1)


METHODS: dict[str, tuple[QuantizeMethod, Callable[[torch.Tensor], torch.Tensor]]] = {
    "int4": (OnlinePackedMethod(group_size=64), by_compressed_tensors),
    "nf4": (OnlineNF4Method(), by_bitsandbytes),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stored", LAYERS)
def test_the_digest_is_that_of_the_words_in_the_stored_order(stored: str, method: str) -> None:
    """On any ranks it is that of the words that another library makes of the whole tensor."""
    create, sizes, transposed = LAYERS[stored]
    way, by_other = METHODS[method]

    def built() -> vLLMModule:
        model = create()
        for layer in model.modules():
            if isinstance(layer, QuantizableLayer):
                layer.quantize(way)
        return model

    weights = random_weights(built().expected_weights(), seed=0)
    plain = ("bias", "conv1d.weight", "norm.weight", "A_log")
    quantized = [n for n in weights if weights[n].dim() > 1 and not n.endswith(plain)]
    assert quantized

    def digest(rank: int) -> ModelDigest:
        model = built()
        model.load_weights(weights)
        return model.digest()

    expected = {}
    for name in quantized:
        weight = weights[name].mT if transposed else weights[name]
        words = by_other(weight.reshape(-1, weight.shape[-1]))
        words = words.view(*weight.shape[:-1], -1)
        expected[name] = digest_box((words.mT if transposed else words).contiguous()).hex
    for size in (1, *sizes):
        found = sum(run_ranks(size, digest), start=ModelDigest()).tensors
        assert {name: found[name] for name in expected} == expected, size
