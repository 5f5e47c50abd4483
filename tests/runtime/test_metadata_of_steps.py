"""A user's model that keeps the metadata of a step from its layers is refused, not served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_module import LLM, SamplingParams, register_model
from vllm_module.build import registry
from vllm_module.errors import UnsupportedModelError
from vllm_module.models.deepseek_v2 import DeepseekV2ForCausalLM
from vllm_module.models.llama import LlamaForCausalLM
from vllm_module.models.mamba2 import Mamba2ForCausalLM

LLAMA: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "dtype": "float32",
}  # fmt: skip
DEEPSEEK = LLAMA | {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 2, "n_routed_experts": 2,
    "num_experts_per_tok": 1, "moe_intermediate_size": 16, "n_shared_experts": 1,
}  # fmt: skip
MAMBA = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16,
    "state_size": 8, "n_groups": 1, "expand": 2, "conv_kernel": 4, "dtype": "float32",
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
MODELS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "attention": (LlamaForCausalLM, LLAMA, "model.layers.0.self_attn.attn"),
    "latents": (DeepseekV2ForCausalLM, DEEPSEEK, "model.layers.0.self_attn.attn"),
    "states": (Mamba2ForCausalLM, MAMBA, "backbone.layers.0.mixer"),
}


class AttentionForCausalLM(LlamaForCausalLM):
    def forward(self, ids: Any, positions: Tensor, metadata: Any = None) -> Any:
        return super().forward(ids, positions)


class LatentsForCausalLM(DeepseekV2ForCausalLM):
    def forward(self, ids: Any, positions: Tensor, metadata: Any = None) -> Any:
        return super().forward(ids, positions)


class StatesForCausalLM(Mamba2ForCausalLM):
    def forward(self, ids: Any, positions: Tensor, metadata: Any = None) -> Any:
        return super().forward(ids, positions)


FORGETFUL = {
    "attention": AttentionForCausalLM,
    "latents": LatentsForCausalLM,
    "states": StatesForCausalLM,
}


def engine(folder: Path, architecture: str, config: dict[str, Any]) -> LLM:
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **config}))
    return LLM(
        str(folder), device="cpu", load_format="dummy", max_model_len=32, max_num_seqs=2,
        kv_cache_memory_bytes=1 << 20,
    )  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_layers_without_metadata_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Tokens that do not see those before them are wrong, and look like any others."""
    # Replaced: what a process registers stays, because no user needs to take it back.
    monkeypatch.setattr(registry, "registered", registry.Registrations())
    _, config, name = MODELS[kind]
    register_model("ForgetfulForCausalLM", FORGETFUL[kind])
    with engine(tmp_path, "ForgetfulForCausalLM", config) as llm:
        for _ in range(2):
            with pytest.raises(UnsupportedModelError, match=f"calls {name} without the metadata"):
                llm.generate({"prompt_token_ids": [1, 2, 3]}, GREEDY, use_tqdm=False)


def hidden_states(model: Any) -> Tensor:
    ids = torch.arange(5)
    return model(ids, ids)


@pytest.mark.parametrize("kind", MODELS)
def test_a_whole_sequence_beside_the_steps_is_no_step(tmp_path: Path, kind: str) -> None:
    """A user may call the model of an engine for one sequence, before the first step too."""
    cls, config, _ = MODELS[kind]
    with engine(tmp_path, cls.__name__, config) as llm:
        llm.apply_model(hidden_states)
        (output,) = llm.generate({"prompt_token_ids": [1, 2, 3]}, GREEDY, use_tqdm=False)
        (hidden,) = llm.apply_model(hidden_states)
        assert len(output.outputs[0].token_ids) == 4
        assert hidden.isfinite().all()
