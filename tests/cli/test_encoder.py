"""The commands on an encoder, which has no cache and generates nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, BertModel

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory, with_text: Path) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = BertConfig(vocab_size=130, num_hidden_layers=1, max_position_embeddings=16, **sizes)
    BertModel(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((with_text / "tokenizer.json").read_bytes())
    return folder


def test_a_plan_has_no_cache(run: Run, encoder: Path) -> None:
    """Memory is that of the weights, and nothing is said of tokens of a KV cache."""
    result = run("plan", encoder, "--tp", 2, "--memory", "1GiB")
    assert (result.code, result.err) == (0, "")
    assert "weights and buffers" in result.out
    assert "KV cache" not in result.out
    (rank,) = run("plan", encoder, "--memory", "1GiB", "--json").json["ranks"]
    assert rank["needed_bytes"] == rank["device_bytes"]
    assert rank["kv_cache_tokens"] is None
    result = run("plan", encoder, "--memory", "1000B")
    assert result.code == 1
    assert result.err.splitlines()[1].endswith("for weights")


def test_it_is_loaded_and_inspected(run: Run, encoder: Path) -> None:
    """``load`` and ``inspect`` know the architecture."""
    result = run("load", encoder, "--tp", 2)
    assert (result.code, result.err) == (0, "")
    assert "skipped 2: embeddings are pooled" in result.out
    assert "BertModel (supported)" in run("inspect", encoder).out


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_it_generates_nothing(run: Run, encoder: Path, command: str) -> None:
    """The refusal names the architecture and the method that computes embeddings."""
    prompt = ["--prompt", "x"] if command == "generate" else []
    result = run(command, encoder, "--device", "cpu", *prompt)
    assert result.code == 1
    assert "BertModel is an encoder and generates no text: LLM.embed" in result.err
    assert "Traceback" not in result.err
