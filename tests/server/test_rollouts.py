"""The code of docs/rollouts.md, run against a server; transformers judges each sample."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import vllm_module.weights
from vllm_module import LLM, AsyncLLM
from vllm_module.server.app import ROUTES

PAGE = Path(__file__).parents[2] / "docs/rollouts.md"
PROMPTS = [[*range(40, 80)], [7, 8, 9]]  # the first one has whole pages of the cache
Sample = tuple[list[int], list[int], list[float]]


def code(server: Any, mailbox: Path) -> str:
    """Return the program of the page, for a server and a folder of this test."""
    text = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    for written, real in (
        ('key="KEY"', 'key="sk-two"'), ('key="ADMIN"', 'key="sk-admin"'),
        ("http://127.0.0.1:8000", server.url), ("/mailbox/", f"{mailbox}/"),
    ):  # fmt: skip
        assert written in text
        text = text.replace(written, real)
    return text


def expected(model: Any, weights: dict[str, torch.Tensor], sample: Sample) -> torch.Tensor:
    """Return the log probabilities of a sample's tokens that transformers computes."""
    model.load_state_dict(weights)
    prompt, ids, _ = sample
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def test_the_program_of_the_page(server: Any, folder: Path, tmp_path: Path) -> None:
    """Each step's samples have the log probabilities of that step's weights, and of no others."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    first = load_file(folder / "model.safetensors")
    other = {name: tensor.flip(0) for name, tensor in first.items()}
    generator = torch.Generator().manual_seed(3)
    batches = []

    def judge(weights: dict[str, torch.Tensor], batch: list[Sample]) -> None:
        assert [prompt for prompt, _, _ in batch] == [each for each in PROMPTS for _ in range(4)]
        for sample in batch:
            assert len(sample[1]) == 32
            found = torch.tensor(sample[2])
            torch.testing.assert_close(found, expected(model, weights, sample), atol=1e-3, rtol=0)
            assert (found - expected(model, other, sample)).abs().max() > 0.1
        batches.append(batch)

    def train(weights: dict[str, torch.Tensor], batch: list[Sample]) -> dict[str, torch.Tensor]:
        nonlocal other
        judge(weights, batch)
        other, new = weights, dict(weights)
        for name in ("lm_head.weight", "model.layers.0.self_attn.k_proj.weight"):
            some = torch.rand(new[name].shape, generator=generator) < 0.2
            new[name] = torch.where(some, -new[name], new[name])
        return new

    names: dict[str, Any] = {"prompts": PROMPTS, "weights": first, "train": train}
    exec(code(server, tmp_path), names)
    assert names["ask"]("/weight_version") == {"weight_version": "step-2"}
    judge(names["weights"], names["rollout"](PROMPTS, 4))
    assert len(batches) == 3
    assert not server.llm.is_paused
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "step-1.safetensors", "step-2.safetensors",
    ]  # fmt: skip


def test_what_the_table_names_is_here() -> None:
    """Each path of its last column is a route, and each method one of an engine."""
    rows = re.findall(r"^\|[^|]*\|[^|]*\|([^|]*)\|$", PAGE.read_text(), re.MULTILINE)
    cells = " ".join(rows)
    paths = set(re.findall(r"`(/[a-z0-9_/]+)`", cells))
    assert paths <= {path for _, path, _, _ in ROUTES}
    assert {"/pause", "/update_weights", "/v1/completions"} <= paths
    methods = set(re.findall(r"`llm\.([a-z_]+)", cells))
    assert methods <= {*dir(LLM), *dir(AsyncLLM)}
    assert {"update_weights", "pause", "digest"} <= methods
    for name in re.findall(r"`(init_weight_transfer|send_weights|receive_weights)\b", cells):
        assert hasattr(vllm_module.weights, name)
