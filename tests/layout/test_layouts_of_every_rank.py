"""Each rank makes the layout of all ranks: the same one, with what is made of weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from torch import nn

from vllm_module import vLLMModule
from vllm_module.core.layout_of import layout_of_module
from vllm_module.distributed import expert_parallel, tensor_parallel
from vllm_module.layers import (
    FusedMoE,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm_module.layout import Layout
from vllm_module.quantization import ONLINE, EightBitMethod, QuantizableLayer, QuantizeMethod
from vllm_module.quantization.online_nf4 import OnlineNF4Method
from vllm_module.quantization.packed_online import OnlinePackedMethod
from vllm_module.weights.region import Region

METHODS: dict[str, Callable[[], QuantizeMethod | None]] = {
    "full precision": lambda: None,
    "by channel": lambda: EightBitMethod(ONLINE["fp8_per_channel"]),
    "by block": lambda: EightBitMethod(ONLINE["fp8_per_block"]),
    "by tensor": lambda: EightBitMethod(ONLINE["fp8_per_tensor"]),
    "int4": lambda: OnlinePackedMethod(group_size=64),
    "nf4": lambda: OnlineNF4Method(64),
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "slots": lambda: MergedColumnParallelLinear(128, [768, 1536], shard_names=("gate", "up")),
    "heads that ranks share": lambda: QKVParallelLinear(128, 128, 12, 2),
    "rows": lambda: RowParallelLinear(768, 256),
    "an uneven vocabulary": lambda: ParallelLMHead(760, 128),
    "experts": lambda: FusedMoE(5, 2, 128, 768),
}


class OneChild(vLLMModule):
    def __init__(self, build: Callable[[], nn.Module], method: QuantizeMethod | None) -> None:
        super().__init__()
        self.layer = build()
        for each in self.modules():
            if method is not None and isinstance(each, QuantizableLayer):
                each.quantize(method)


CASES = [
    *((layer, size, False) for layer in LAYERS for size in (2, 3)),
    ("experts", 2, True),
    ("experts", 3, True),
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("layer", "size", "spread"), CASES)
def test_ranks_make_one_layout(method: str, layer: str, size: int, spread: bool) -> None:
    """By a plan of tensors, and of what the module holds; experts may be uneven, or in parts."""
    size *= 2 if layer == "heads that ranks share" else 1
    found: list[tuple[Layout, Layout]] = []
    for rank in range(size):
        experts: Any = expert_parallel() if spread else nullcontext()
        with tensor_parallel(rank=rank, size=size), experts:
            module = OneChild(LAYERS[layer], METHODS[method]())
        stored = module.expected_weights().items()
        plan = module.plan_weights({name: Region.of(name, each) for name, each in stored})
        found.append((plan.layout(), layout_of_module(module)))
    for rank, layouts in enumerate(found):
        assert layouts == found[0], rank
