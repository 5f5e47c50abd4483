"""The first Qwen against its formulas in plain torch; transformers has no class for it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from vllm_module import ModelConfig, get_model
from vllm_module.distributed import run_ranks
from vllm_module.errors import UnsupportedModelError

WITHIN = 1e-4
STEPS = 32
HIDDEN, HEADS, LAYERS, VOCAB, INTERMEDIATE = 64, 4, 2, 130, 96
CONFIG = {
    "architectures": ["QWenLMHeadModel"],
    "model_type": "qwen",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "kv_channels": HIDDEN // HEADS,
    "intermediate_size": 2 * INTERMEDIATE,
    "layer_norm_epsilon": 1e-6,
    "rotary_emb_base": 10000,
    "rotary_pct": 1.0,
    "seq_length": 32,
    "max_position_embeddings": 128,
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
    "no_bias": True,
    "tie_word_embeddings": False,
}
Tensors = dict[str, torch.Tensor]


def drawn(seed: int) -> Tensors:
    """Return random weights under the names and in the shapes of Qwen's files."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    tensors = {
        "transformer.wte.weight": normal(0.5, VOCAB, HIDDEN),
        "transformer.ln_f.weight": normal(1, HIDDEN),
        "lm_head.weight": normal(0.5, VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        tensors |= {
            f"transformer.h.{layer}.{name}": tensor
            for name, tensor in {
                "ln_1.weight": normal(1, HIDDEN),
                "ln_2.weight": normal(1, HIDDEN),
                "attn.c_attn.weight": normal(0.15, 3 * HIDDEN, HIDDEN),
                "attn.c_attn.bias": normal(0.5, 3 * HIDDEN),
                "attn.c_proj.weight": normal(0.15, HIDDEN, HIDDEN),
                "mlp.w1.weight": normal(0.15, INTERMEDIATE, HIDDEN),
                "mlp.w2.weight": normal(0.15, INTERMEDIATE, HIDDEN),
                "mlp.c_proj.weight": normal(0.15, HIDDEN, INTERMEDIATE),
            }.items()
        }
    return tensors


def reference(weights: Tensors, ids: list[int], length: int) -> torch.Tensor:
    """Return the logits of each token, with the frequencies for sequences of ``length``."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weights[f"{name}.weight"]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def rotate(x: torch.Tensor) -> torch.Tensor:
        one, other = x.chunk(2, -1)
        return x * angles.cos() + torch.cat((-other, one), -1) * angles.sin()

    head = HIDDEN // HEADS
    seq_length: Any = CONFIG["seq_length"]
    alpha = max(2 ** math.ceil(math.log2(length / seq_length) + 1) - 1, 1)
    base = 10000 * alpha ** (head / (head - 2))
    frequencies = base ** -(torch.arange(0, head, 2) / head)
    positions = torch.arange(len(ids))
    angles = torch.outer(positions.float(), frequencies).repeat(1, 2)[:, None]
    logn = [math.log(p + 1, seq_length) if p >= seq_length else 1.0 for p in range(len(ids))]
    mask = torch.ones(len(ids), len(ids)).tril().log()
    x = weights["transformer.wte.weight"][ids]
    for layer in range(LAYERS):
        at = f"transformer.h.{layer}"
        qkv = linear(norm(x, f"{at}.ln_1"), f"{at}.attn.c_attn")
        q, k, v = (part.unflatten(-1, (HEADS, head)) for part in qkv.split(HIDDEN, -1))
        q, k = rotate(q) * torch.tensor(logn)[:, None, None], rotate(k)
        scores = torch.einsum("qhd,khd->hqk", q, k) / head**0.5 + mask
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + linear(attended, f"{at}.attn.c_proj")
        y = norm(x, f"{at}.ln_2")
        y = linear(y, f"{at}.mlp.w1") * F.silu(linear(y, f"{at}.mlp.w2"))
        x = x + linear(y, f"{at}.mlp.c_proj")
    return linear(norm(x, "transformer.ln_f"), "lm_head")


def write(folder: Path, tensors: Tensors, **entries: Any) -> Path:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | entries))
    return folder


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], torch.Tensor]:
    """A checkpoint, a prompt, and the logits of the prompt and 32 greedy tokens.

    The prompt ends before ``seq_length``, and the tokens after it.
    """
    prompt = torch.randint(VOCAB, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    for seed in range(10):
        ids, weights = list(prompt), drawn(seed)
        for _ in range(STEPS):
            logits = reference(weights, ids, 128)
            ids.append(int(logits[-1].argmax()))
        best, second = logits[len(prompt) - 1 :].topk(2).values.unbind(-1)
        if (best - second).min() > 2 * WITHIN and len(set(ids[len(prompt) :])) > 3:
            folder = tmp_path_factory.mktemp("qwen")
            return write(folder, weights), ids[:-1], logits
    raise AssertionError("no weights found that generate robustly")


@pytest.mark.parametrize("size", [1, 2, 4])
def test_qwen_computes_its_formulas(
    qwen: tuple[Path, list[int], torch.Tensor], compute: Callable[..., Any], size: int
) -> None:
    """At any size, logits and 32 greedy tokens are those of the formulas."""
    folder, ids, logits = qwen
    prompt = ids[: len(ids) - STEPS + 1]
    for computed in run_ranks(size, lambda rank: compute(folder, [ids, prompt], STEPS)):
        torch.testing.assert_close(computed["prompt_logits"][0], logits, rtol=0, atol=WITHIN)
        assert computed["tokens"][1] == logits[len(prompt) - 1 :].argmax(-1).tolist()


def test_longer_sequences_are_by_request_and_need_dynamic_scaling(
    qwen: tuple[Path, list[int], torch.Tensor], tmp_path: Path
) -> None:
    """Unless more is asked for, sequences end at ``seq_length``; without NTK they always do."""
    folder, ids, _ = qwen
    model = get_model(model_config=ModelConfig(model=str(folder)))
    assert model.config.max_model_len == 32
    short = ids[:32]
    logits = model.compute_logits(model(torch.tensor(short), torch.arange(32)))
    expected = reference(load_file(folder / "model.safetensors"), short, 32)
    torch.testing.assert_close(logits, expected, rtol=0, atol=WITHIN)
    write(tmp_path, load_file(folder / "model.safetensors"), use_dynamic_ntk=False)
    with pytest.raises(UnsupportedModelError, match="max_model_len 33 exceeds the 32 positions"):
        get_model(model_config=ModelConfig(model=str(tmp_path), max_model_len=33))
