"""Blocks with packed weights, for the subjects of the laws.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from vllm_module import vLLMModule
from vllm_module.layers import (
    FusedMoE,
    MergedColumnParallelLinear,
    Router,
    RowParallelLinear,
    SiluAndMul,
)
from vllm_module.quantization import QuantizableLayer, QuantizeMethod
from vllm_module.quantization.bitsandbytes import BitsAndBytes4BitMethod, BitsAndBytes8BitMethod
from vllm_module.quantization.packed import (
    AWQ,
    COMPRESSED_TENSORS,
    GPTQ,
    GPTQ_V2,
    PackedMethod,
)
from vllm_module.quantization.packed_online import OnlinePackedMethod
from vllm_module.quantization.quant_state import QuantState

HIDDEN = 32


@dataclass(frozen=True)
class AnyNumbers(PackedMethod):
    """Takes any numbers, such as the laws draw: a group that does not exist is that of the rest."""

    def stored(self, layer: QuantizableLayer) -> Any:
        return {name: replace(each, valid=None) for name, each in super().stored(layer).items()}

    def process_weights_after_loading(self, layer: QuantizableLayer) -> None:
        pass

    def groups_of_inputs(self, layer: QuantizableLayer) -> torch.Tensor | None:
        group_of = super().groups_of_inputs(layer)
        groups = layer.get_parameter(self.format.scales).shape[-1]
        return None if group_of is None else group_of % groups


class OwnOffset(BitsAndBytes4BitMethod):
    """Draws checkpoints whose nested scales are around another number in each slot.

    Their names are those of the parameters, which the laws find by the tree.
    """

    def stored(self, layer: QuantizableLayer) -> Any:
        return {name: replace(each, aliases=()) for name, each in super().stored(layer).items()}

    def _valid_state(self, layer: QuantizableLayer, slot: str) -> torch.Tensor:
        valid = super()._valid_state(layer, slot)
        if not self.nested:
            return valid
        offset = sum(map(ord, slot)) / 1024
        state = QuantState.parse(valid, "quant_state")
        return state.model_copy(update={"nested_offset": offset}).stored()


class AnyScales(BitsAndBytes8BitMethod):
    """Draws the scales of channels."""

    def stored(self, layer: QuantizableLayer) -> Any:
        return {name: each for name, each in super().stored(layer).items() if name != "SCB"}


BITSANDBYTES = st.sampled_from(
    [
        OwnOffset("nf4", nested=True, blocksize=2),  # first, for it takes the most memory to load
        OwnOffset("nf4", nested=False, blocksize=4),
        OwnOffset("fp4", nested=True, blocksize=16),
        AnyScales(),
    ]
)
BITSANDBYTES_EXPERTS = st.sampled_from(
    [OwnOffset("nf4", nested=True, blocksize=16), OwnOffset("fp4", nested=False, blocksize=32)]
)
STORED = st.sampled_from(
    [
        AnyNumbers(AWQ, 4, 8, symmetric=False),  # first, for it has the most zeros
        AnyNumbers(GPTQ, 4, 16, symmetric=False),
        AnyNumbers(GPTQ, 3, None, symmetric=True),
        AnyNumbers(GPTQ_V2, 8, 16, symmetric=False, act_order=True),
        AnyNumbers(COMPRESSED_TENSORS, 2, 16, symmetric=False),
        AnyNumbers(COMPRESSED_TENSORS, 4, 32),
    ]
)
ONLINE = st.builds(OnlinePackedMethod, group_size=st.sampled_from([8, 16]))
INNER = st.sampled_from([32, 64, 96, 128])


class PackedMLP(vLLMModule):
    """A gated MLP of packed layers."""

    def __init__(self, method: QuantizeMethod, inner: int, bias: bool) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            HIDDEN, [inner] * 2, bias, shard_names=["gate_proj", "up_proj"]
        )
        self.act_fn = SiluAndMul()
        self.down_proj = RowParallelLinear(inner, HIDDEN, bias)
        self.gate_up_proj.quantize(method)
        self.down_proj.quantize(method)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class PackedExperts(vLLMModule):
    """A router and experts of packed layers, each cut over the ranks."""

    def __init__(self, method: QuantizeMethod, inner: int, together: bool) -> None:
        super().__init__()
        names = None if together else ("gate_proj", "up_proj", "down_proj")
        self.gate = Router(HIDDEN, 3)
        self.experts = FusedMoE(3, 2, HIDDEN, inner, shard_names=names)
        self.experts.w13.quantize(method)
        self.experts.w2.quantize(method)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, self.gate(x))


def takes(size: int, method: Any, inner: int, **others: Any) -> bool:
    """Tell whether each rank has whole words and groups of the rows and columns that are cut."""
    if inner % size:
        return False
    word = 32 if method.bits == 3 else 32 // method.bits
    online = isinstance(method, OnlinePackedMethod)
    zeros = not online and (method.format.stores_all or not method.symmetric)
    rows = word if zeros or method.format.along == 0 else 1
    one_group = not online and (method.group_size is None or method.group_size >= inner)
    columns = 1 if method.act_order or one_group else method.group_size
    if method.format.along == 1:
        columns = math.lcm(columns, word)
    return inner // size % rows == 0 and inner // size % columns == 0


def takes_blocks(size: int, method: Any, inner: int, **others: Any) -> bool:
    """Tell whether each rank has whole blocks of the columns that are cut."""
    return inner % (size * getattr(method, "blocksize", 1)) == 0


def x_of(module: vLLMModule) -> tuple[Any, ...]:
    return (torch.randn(4, HIDDEN),)
