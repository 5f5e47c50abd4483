"""Loading the tensors that a rank holds, by their paths: each has to be as it is held."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from vllm_module import vLLMModule
from vllm_module.build.held import held_tensors, load_from, load_held, plan_from
from vllm_module.errors import MissingWeightError, WeightLoadError
from vllm_module.layers import MergedColumnParallelLinear, ParallelLMHead
from vllm_module.models.llama import LlamaConfig, LlamaForCausalLM
from vllm_module.testing import random_weights


class Held(vLLMModule):
    """A fused parameter, a plain one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = MergedColumnParallelLinear(4, [6, 6], bias=False, shard_names=["gate", "up"])
        self.scale = nn.Parameter(torch.empty(3), requires_grad=False)
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int32))


def tensors() -> dict[str, torch.Tensor]:
    return {
        "gate_up.weight": torch.randn(12, 4),
        "scale": torch.randn(3),
        "counts": torch.tensor([5, 7], dtype=torch.int32),
    }


def test_what_is_held_loads_again() -> None:
    model, given = Held(), tensors()
    load_held(model, given)
    held = held_tensors(model)
    assert held.keys() == given.keys()
    assert all(torch.equal(held[path], given[path]) for path in given)


_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64]


@pytest.mark.parametrize("path", sorted(tensors()))
@pytest.mark.parametrize(
    "change",
    [
        *_DTYPES,
        lambda tensor: tensor[:-1],
        lambda tensor: torch.cat([tensor, tensor[:1]]),
        lambda tensor: tensor.unsqueeze(0),
    ],
    ids=[*map(str, _DTYPES), "one row less", "one row more", "another dimension"],
)
def test_each_tensor_has_its_shape_and_dtype(path: str, change: Any) -> None:
    """Nothing is cast: the nearest wrong shapes and every other dtype are refused by name."""
    given = tensors()
    original = given[path]
    given[path] = original.to(change) if isinstance(change, torch.dtype) else change(original)
    if (given[path].shape, given[path].dtype) == (original.shape, original.dtype):
        load_held(Held(), given)
        return
    with pytest.raises(WeightLoadError) as caught:
        load_held(Held(), given)
    assert caught.value.report is not None
    ((name, detail),) = caught.value.report.misshapen
    assert name == path
    assert f"{original.dtype} {list(original.shape)}" in detail
    assert f"{given[path].dtype} {list(given[path].shape)}" in detail


@pytest.mark.parametrize("path", sorted(tensors()))
def test_each_tensor_is_needed_and_no_other(path: str) -> None:
    given = tensors()
    given["other." + path] = given.pop(path)
    with pytest.raises(WeightLoadError) as caught:
        load_held(Held(), given)
    assert caught.value.report is not None
    assert [problem.name for problem in caught.value.report.missing] == [path]
    assert [problem.name for problem in caught.value.report.unexpected] == ["other." + path]


class Untied(LlamaForCausalLM):
    """It has forgotten that its head may be the embedding."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)


def test_a_head_that_was_not_tied_is_named() -> None:
    """The refusal for a head that no tied checkpoint has says which call the model lacks."""
    config = LlamaConfig(
        architectures=["Untied"],
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=64,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    weights = random_weights(LlamaForCausalLM(config).expected_weights())
    hint = r"Untied does not tie its head: .*give the embedding to lm_head\.tie_weights"
    with pytest.raises(MissingWeightError, match=hint):
        load_from(Untied(config), weights)
    assert "lm_head.tie_weights" in plan_from(Untied(config), weights).report.advice
    del weights["model.norm.weight"]
    with pytest.raises(MissingWeightError) as refused:
        load_from(Untied(config), weights)
    assert "tie_weights" not in str(refused.value)
