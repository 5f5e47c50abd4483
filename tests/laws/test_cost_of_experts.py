"""Law 10 for experts: the calls of routing grow with the names, and not with the experts."""

from __future__ import annotations

import pytest

from vllm_module import vLLMModule
from vllm_module.layers import FusedMoE
from vllm_module.quantization import ONLINE, EightBitMethod
from vllm_module.testing import random_weights
from vllm_module.testing.checkpoints import fuse
from vllm_module.testing.cost import count_calls
from vllm_module.testing.names import Names


class Layer(vLLMModule):
    def __init__(self, experts: int, scheme: str | None) -> None:
        super().__init__()
        self.experts = FusedMoE(experts, 2, 4, 6)
        for layer in (self.experts.w13, self.experts.w2) if scheme else ():
            layer.quantize(EightBitMethod(ONLINE[scheme]))


def calls(experts: int, scheme: str | None) -> dict[str, int]:
    """Return how many functions each kind of call takes."""
    layer = Layer(experts, scheme)
    tensors = random_weights(layer.expected_weights())
    packed = fuse(tensors, Names.of(layer).fused)
    layer.plan_weights(packed)  # tables of routes are made once for layers that declare the same
    one = {"experts.1.up_proj.weight": tensors["experts.1.up_proj.weight"]}
    return {
        "plan": count_calls(lambda: layer.plan_weights(tensors)),
        "plan packed": count_calls(lambda: layer.plan_weights(packed)),
        "load": count_calls(lambda: layer.load_weights(iter(tensors.items()))),
        "refuse": count_calls(lambda: Layer(experts, scheme).plan_weights({})),
        "update one name": count_calls(lambda: layer.update_weights(one)),
    }


@pytest.mark.parametrize("scheme", [None, "fp8_per_channel"])
def test_the_cost_of_a_name_does_not_grow_with_the_experts(scheme: str | None) -> None:
    """Four times the experts take four times the calls, and an update of one name the same."""
    few, many = calls(8, scheme), calls(32, scheme)
    for what, count in many.items():
        most = 1 if what == "update one name" else 4
        assert count <= most * few[what], f"{what}: {count / few[what]:.2f} times the calls"
