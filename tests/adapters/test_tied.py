"""Adapters of an embedding and a head that share one tensor, on one stage and on two."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import LLM, LoRARequest, SamplingParams

SUPPORT = runpy.run_path(str(Path(__file__).with_name("support.py")))
PROMPT = [5, 9, 2, 41, 7]


@pytest.fixture(scope="module", params=["embed_tokens", "lm_head"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Write a model and an adapter of it; return their folders, and the tokens that PEFT gives."""
    folder = tmp_path_factory.mktemp("tied")
    torch.manual_seed(0)
    entries = {**SUPPORT["_SIZES"], "tie_word_embeddings": True, "initializer_range": 0.3}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **entries)).eval()
    model.save_pretrained(folder / "base")
    tuned = SUPPORT["adapt"](model, folder / "adapter", target_modules=[request.param, "q_proj"])
    ids = [*PROMPT]
    for _ in range(6):
        with torch.no_grad():
            ids.append(int(tuned(torch.tensor([ids])).logits[0, -1].argmax()))
    return folder, ids[len(PROMPT) :]


@pytest.mark.parametrize("stages", [1, 2])
def test_tokens_are_those_of_peft(made: Any, stages: int) -> None:
    """Of the two, a stage calls one, and holds the other for its tensor."""
    folder, wanted = made
    given = {"skip_tokenizer_init": True, "enable_lora": True, "dtype": "float32"}
    given |= {"kv_cache_memory_bytes": 1 << 20, "pipeline_parallel_size": stages}
    with LLM(folder / "base", **given) as llm:
        asked = LoRARequest("a", 1, str(folder / "adapter"))
        prompt: Any = {"prompt_token_ids": PROMPT}
        greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        (output,) = llm.generate([prompt], greedy, use_tqdm=False, lora_request=asked)
        assert (output.error, list(output.outputs[0].token_ids)) == (None, wanted)
