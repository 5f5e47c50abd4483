"""Every architecture against transformers: the same logits and the same greedy tokens."""

from __future__ import annotations

import runpy
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from vllm_module import ModelConfig, get_model
from vllm_module.distributed import run_ranks

WITHIN = 1e-4  # as in conftest.py
DISTINCT = runpy.run_path(str(Path(__file__).with_name("configurations.py")))["DISTINCT"]

# Every rank has the whole rotary embedding, so its scalings need no second rank.
SHARDED = (
    "bamba",
    "cohere",
    "cohere2",
    "falcon-h1",
    "falcon-h1-norm-biases-tied",
    "gemma2",
    "gemma3",
    "glm4",
    "deepseek-v2-groups",
    "deepseek-v3",
    "gpt-oss",
    "gpt2",
    "granite",
    "granite-tied-biases-one-kv-head",
    "granite-4",
    "nemotron-h",
    "nemotron-h-latent-groups-biases",
    "granite-4-dense-rope-tied",
    "lfm2",
    "lfm2-moe",
    "lfm3",
    "lfm3-plain-tied",
    "llama",
    "llama-tied-biases",
    "mistral-window",
    "mistral",
    "mamba2",
    "mixtral",
    "olmo2",
    "olmo-hybrid",
    "olmo-hybrid-rope-biases-tied",
    "olmoe",
    "phi3",
    "qwen2",
    "qwen2-moe",
    "qwen2-window-one-kv-head",
    "qwen3",
    "qwen3-moe",
    "qwen3-next",
    "qwen3.5",
    "qwen3.5-moe",
    "qwen3-tied-biases-window",
    "starcoder2",
)


def test_logits_and_greedy_tokens_are_those_of_transformers(checkpoint: Any, compute: Any) -> None:
    """A single rank computes transformers' logits and its 32 greedy tokens; of some, 12."""
    reference = checkpoint.reference
    if checkpoint.folder.name not in DISTINCT:
        reference = reference.first(12)
    reference.check(compute(checkpoint.folder, *reference.job))


# Other sizes are those of the laws; "make laws" tries second configurations of an architecture.
@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=[] if name in DISTINCT else [pytest.mark.at_length])
        for name, size in zip(SHARDED, cycle([2, 4]), strict=False)
    ],
)
def test_every_rank_computes_what_transformers_does(
    tiny: Any, compute: Any, name: str, size: int
) -> None:
    """At any size, every rank computes transformers' logits and its first greedy tokens.

    They are so many that sequences go on in another page, as a single rank's 32 do.
    """
    checkpoint = tiny(name)
    reference = checkpoint.reference.first(12)
    ranks = run_ranks(size, lambda rank: compute(checkpoint.folder, *reference.job))
    reference.check(ranks[0])
    for other in ranks[1:]:
        assert torch.equal(other["step_logits"], ranks[0]["step_logits"])
        assert other["tokens"] == ranks[0]["tokens"]


@pytest.mark.parametrize(
    "name",
    [
        "cohere",
        "gemma3",
        "glm4",
        "llama-yarn-tied-biases-one-kv-head",
        "mistral",
        "mixtral",
        "olmo2-biases-one-kv-head",
        "qwen2",
        "qwen3",
        "starcoder2",
    ],
)
def test_an_error_of_one_percent_in_any_tensor_shows(tiny: Any, name: str) -> None:
    """The comparison above fails if any tensor of the checkpoint is off by one percent."""
    checkpoint = tiny(name)
    prompt = max(checkpoint.reference.prompts, key=len)
    expected = max(checkpoint.reference.prompt_logits, key=len)
    model = get_model(model_config=ModelConfig(model=str(checkpoint.folder)))

    def error() -> float:
        logits = model.compute_logits(model(torch.tensor(prompt), torch.arange(len(prompt))))
        return (logits - expected).abs().max().item()

    tensors = {}
    for file in checkpoint.folder.glob("*.safetensors"):
        tensors |= load_file(file)
    assert len(tensors) >= 20
    for tensor_name, tensor in tensors.items():
        # One factor for the whole tensor would vanish in Qwen3's normalization.
        noise = 1 + 0.01 * torch.randn_like(tensor)
        model.update_weights({tensor_name: tensor * noise})
        assert error() > 10 * WITHIN, tensor_name
        model.update_weights({tensor_name: tensor})
    assert error() < WITHIN
