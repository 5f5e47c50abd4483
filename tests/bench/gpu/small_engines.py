"""Engines of tiny models with random weights that transformers saves, and what they give."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gpu.device import Gpu
from vllm_module import LLM, SamplingParams

T = TypeVar("T")
TINY = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 256, "tie_word_embeddings": False, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {  # what a kind of model has beside
    "qwen3": {},
    "llama": {},
    "qwen3_next": {
        "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64, "pad_token_id": None,
    },
    "bamba": {
        "num_hidden_layers": 4, "attn_layer_indices": [1, 3], "head_dim": 32, "mamba_n_heads": 8,
        "mamba_d_head": 64, "mamba_n_groups": 2, "mamba_d_state": 64, "mamba_d_conv": 4,
        "mamba_expand": 2, "mamba_chunk_size": 16, "pad_token_id": None,
    },
}  # fmt: skip
LENGTHS = (16, 1, 40, 5, 17)  # of prompts: 16 fill a page, 17 start another
NEW = 24
Scored = list[tuple[list[int], torch.Tensor]]  # sequences, and the logprobs of all tokens but one


def few(values: Iterable[T], device: Gpu, count: int = 1) -> list[T]:
    """Return the values, and of these only the first on the stand-in for a device."""
    return list(values)[: count if device.dry else None]


def saved(folder: Path, kind: str) -> Path:
    """Save a model whose weights are large enough for its logits to differ."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TINY | KINDS[kind]))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "dt_bias", ".D")):
            continue  # how fast states decay
        norm, wide = "norm" in name, any(x in name for x in ("embed", "lm_head", "conv1d"))
        scale = 0.2 if norm else 0.5 if wide else 0.08
        parameter.data.normal_(float(norm), scale, generator=generator)
    model.save_pretrained(folder / kind)
    return folder / kind


@contextmanager
def engine(folder: Path, device: str, **options: Any) -> Iterator[LLM]:
    """Start an engine whose prompts are computed in chunks, beside tokens that are decoded."""
    with LLM(
        str(folder), device=device, skip_tokenizer_init=True, max_model_len=128, max_num_seqs=8,
        max_num_batched_tokens=32, kv_cache_memory_bytes=1 << 23, **options,
    ) as llm:  # fmt: skip
        yield llm


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    size = TINY["vocab_size"]
    return [torch.randint(int(size or 0), (n,), generator=generator).tolist() for n in LENGTHS]


def generated(llm: LLM, adapters: Sequence[str | None] = ()) -> Scored:
    """Generate greedily: a prompt's logprobs come from prefill, and new tokens' from decoding.

    ``adapters`` has one for each prompt, if any.
    """
    params = SamplingParams(
        temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=0, prompt_logprobs=0
    )
    outputs = llm.generate(_given(prompts(), adapters), params, use_tqdm=False)
    found = []
    for output in outputs:
        if output.error is not None:
            raise RuntimeError(output.error)
        sequence = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        entries = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
        values = [entry[token].logprob for entry, token in zip(entries, sequence[1:], strict=True)]
        found.append((sequence, torch.tensor(values)))
    return found


def _given(prompts: Sequence[list[int]], adapters: Sequence[str | None]) -> list[dict[str, Any]]:
    named = [
        {} if each is None else {"adapter": each} for each in adapters or [None] * len(prompts)
    ]
    return [
        {"prompt_token_ids": prompt, **name} for prompt, name in zip(prompts, named, strict=True)
    ]


def scored(
    llm: LLM, sequences: Sequence[list[int]], adapters: Sequence[str | None] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logprobs of the sequences' tokens, as one engine computes them as prompts.

    Also return how far each is below the greatest one.
    """
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    outputs = llm.generate(_given(sequences, adapters), params, use_tqdm=False)
    found, below = [], []
    for output in outputs:
        if output.error is not None:
            raise RuntimeError(output.error)
        entries = (output.prompt_logprobs or [])[1:]
        for entry, token in zip(entries, (output.prompt_token_ids or [])[1:], strict=True):
            found.append(entry[token].logprob)
            below.append(max(each.logprob for each in entry.values()) - found[-1])
    return torch.tensor(found), torch.tensor(below)


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the norm of the difference over that of the truth; not a number is infinite."""
    value = float((found.double() - truth.double()).norm() / truth.double().norm())
    return math.inf if math.isnan(value) else value


def demand(found: float, allowed: float, what: str) -> dict[str, float]:
    if not found <= allowed:
        raise AssertionError(f"{what}: {found:.3g}, and {allowed:.3g} is allowed")
    return {"error": found, "allowed": allowed}
