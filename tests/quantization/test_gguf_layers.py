"""Layers with weights in the blocks of GGUF files, by themselves: the laws, and refused scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from vllm_module import vLLMModule
from vllm_module.errors import (
    MisshapenWeightError,
    WeightReadError,
)
from vllm_module.kernels.matmul.gguf_types import BLOCK_TYPES
from vllm_module.layers import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm_module.quantization.gguf import GGUFMethod
from vllm_module.testing import LAWS


@pytest.mark.parametrize(
    ("kind", "at", "value"),
    [
        ("Q4_0", 0, 0x7C00), ("Q8_0", 0, 0xFC00), ("Q4_K", 0, 0x7E00), ("Q4_K", 2, 0x7C01),
        ("Q5_K", 2, 0xFC00), ("Q6_K", 208, 0x7C00), ("IQ3_S", 0, 0x7C00), ("MXFP4", 0, 0x01FF),
    ],
)  # fmt: skip
def test_a_scale_that_is_not_finite_is_refused(kind: str, at: int, value: int) -> None:
    """The error names the tensor and the slot that has infinity or NaN for a scale or offset."""
    block = BLOCK_TYPES[kind]
    layer = MergedColumnParallelLinear(512, [3, 3], bias=False, shard_names=["gate", "up"])
    layer.quantize(GGUFMethod((("gate", kind), ("up", kind))))
    name = f"weight_{kind.lower()}"
    blocks = torch.zeros(3, 512 // block.values, block.nbytes, dtype=torch.uint8)
    layer.load_weights({f"gate.{name}": blocks, f"up.{name}": blocks})
    broken = blocks.clone()
    broken[2, 1, at] = value & 0xFF
    broken[2, 1, at + 1] = value >> 8
    with pytest.raises(WeightReadError, match=rf"{name} \(slot 'up'\) has (-?inf|nan), and all"):
        layer.update_weights({f"up.{name}": broken})


class Projections(vLLMModule):
    """A fused layer with three types among its slots, rows in turns, and a layer cut by input."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(32, 32, 4, 2, stored_rotary_pairs=True)
        types = (("q_proj_pairs", kind), ("k_proj_pairs", None), ("v_proj", "Q8_0"))
        self.qkv_proj.quantize(GGUFMethod(types))
        self.o_proj = RowParallelLinear(128, 32)
        self.o_proj.quantize(GGUFMethod(((None, kind),)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(x).split(self.qkv_proj.output_sizes, -1)
        heads = q.shape[-1] // k.shape[-1]  # of q for each of k and v
        kv = (k * v).unflatten(-1, (-1, 32)).repeat_interleave(heads, -2)
        return self.o_proj(q * kv.flatten(-2))


@pytest.mark.usefixtures("_few_examples", "_finite_blocks")
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_layers_in_blocks_keep_the_laws(law: Any) -> None:
    """Each slot has its own type, and all that is promised of loading holds."""
    kinds = st.sampled_from(["Q4_0", "Q8_0"])
    law(Projections, kinds, inputs=lambda model: (torch.ones(2, 32) / 32,))


def test_a_fused_tensor_is_refused_where_its_rows_may_have_two_orders() -> None:
    """Rows of q and k are in turns or not, which names of slots tell, and that of all does not."""
    layer = QKVParallelLinear(32, 32, 4, 2, bias=False, stored_rotary_pairs=True)
    slots = {name: torch.randn(each.shape) for name, each in layer.expected_weights().items()}
    assert [*slots] == ["q_proj_pairs.weight", "k_proj_pairs.weight", "v_proj.weight"]
    layer.load_weights(slots)
    before = layer.weight.clone()
    whole = {"weight": torch.cat([*slots.values()])}
    with pytest.raises(MisshapenWeightError, match=r"order .* expected q_proj_pairs, k_proj_pairs"):
        layer.update_weights(whole)
    assert torch.equal(layer.weight, before)
    other = QKVParallelLinear(32, 32, 4, 2, False, shard_names=None, stored_rotary_pairs=True)
    other.load_weights(whole)  # its checkpoint has it so
    assert torch.equal(other.weight, before)
