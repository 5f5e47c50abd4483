"""A model of transformers whose global layers have heads of 512 features, as Gemma 4's have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import LLM, ModelConfig, SamplingParams
from vllm_module.build.model_source import ModelSource
from vllm_module.errors import UnsupportedModelError

NEW = 8


def config_with(heads: int) -> Any:
    return AutoConfig.for_model(
        "gemma4_text", vocab_size=130, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"], num_attention_heads=heads,
        num_key_value_heads=2, head_dim=16, global_head_dim=512, num_global_key_value_heads=1,
        sliding_window=8, vocab_size_per_layer_input=130, hidden_size_per_layer_input=8,
        max_position_embeddings=256, num_kv_shared_layers=0, pad_token_id=0, eos_token_id=1,
        bos_token_id=2, attention_k_eq_v=True,
    )  # fmt: skip


def test_heads_of_512_features_give_the_tokens_of_transformers(tmp_path: Path) -> None:
    """Chunks of prompts and decoding attend with heads of two sizes in one model."""
    config = config_with(4)
    model = AutoModelForCausalLM.from_config(config).eval().float()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if "embed" in name else 0.1
            parameter.normal_(float("norm" in name), scale, generator=generator)
    assert model.model.layers[1].self_attn.head_dim == 512
    model.save_pretrained(tmp_path)
    prompts = [torch.randint(3, 130, (n,), generator=generator).tolist() for n in (5, 20, 1)]
    with LLM(
        str(tmp_path), device="cpu", dtype="float32", skip_tokenizer_init=True, max_model_len=64,
        max_num_seqs=4, max_num_batched_tokens=7, model_impl="transformers",
    ) as llm:  # fmt: skip
        asked = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
        got = llm.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
    for prompt, output in zip(prompts, got, strict=True):
        assert output.error is None
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(NEW):
                logits = model(torch.tensor([ids]), use_cache=False).logits
                ids.append(int(logits[0, -1].argmax()))
        assert list(output.outputs[0].token_ids) == ids[len(prompt) :]


def test_more_query_heads_than_fit_into_registers_are_refused(tmp_path: Path) -> None:
    """A number of query heads that no kernel computes is refused before there are weights."""
    config = config_with(34)
    config.architectures = ["Gemma4ForCausalLM"]
    config.save_pretrained(tmp_path)
    asked = ModelConfig(model=str(tmp_path), model_impl="transformers")
    source = ModelSource.find(asked, "dummy")
    with pytest.raises(
        UnsupportedModelError, match=r"34 query heads of 512 features .* at most 16"
    ):
        source.build(torch.device("cpu"))
