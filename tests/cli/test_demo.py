from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module import ModelConfig, get_model
from vllm_module.cli.demo import checks, steps
from vllm_module.cli.demo.checkpoint import PARAGRAPH
from vllm_module.cli.output import CommandError
from vllm_module.distributed import run_ranks
from vllm_module.weights import open_checkpoint

Run = Callable[..., Any]


def test_the_demo_shows_and_checks_all_of_it(run: Run, tmp_path: Path) -> None:
    """From nothing to a text that every size and transformers agree on, and two refusals."""
    keep = tmp_path / "kept"
    result = run("demo", "--keep", keep)
    assert (result.code, result.err) == (0, "")
    out = result.out
    assert [int(n) for n in re.findall(r"^(\d)\. ", out, re.MULTILINE)] == [1, 2, 3, 4, 5]
    assert re.search(r"self_attn\.k_proj +8192:16384 of 16384 +→ self_attn\.qkv_proj +slot k_", out)
    assert out.count("are the checkpoint bit for bit") == 3
    assert out.count("logits are those of size 1, within") == 2
    said = " ".join(line.removeprefix("   │ ") for line in out.splitlines() if "│" in line)
    assert PARAGRAPH in said
    assert "tokens at size 1, 2 and 4" in out
    assert "the same from transformers" in out
    assert "missing 1: the checkpoint lacks them" in out
    assert "unexpected 1: the model has no place for them" in out
    assert "Qwen3ForCausalLM cannot run: not loaded" in out
    assert "it was cut off" in out
    assert "\x1b" not in out
    # What was kept is a checkpoint like any other, and the folder is not written to again.
    again = run("generate", keep, "--prompt", "A model", "--max-new-tokens", 200)
    assert again.out == PARAGRAPH + "\n"
    assert "is not empty" in run("demo", "--keep", keep).err


def test_a_checkpoint_of_ones_own(
    run: Run, folder: Path, edited: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a tokenizer it goes on from token ids; without transformers it says so."""
    monkeypatch.setattr(steps, "transformers_tokens", lambda *_: None)
    result = run("demo", "--checkpoint", folder)
    assert (result.code, result.err) == (0, "")
    assert "[1, 2] goes on with [" in result.out
    assert "pip install vllm-module[demo] adds the comparison" in result.out


def test_sizes_that_do_not_divide_are_left_out(run: Run, tmp_path: Path) -> None:
    """The demo goes on with the sizes that do, and says which do not and why."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama", vocab_size=70, hidden_size=24, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=6, num_key_value_heads=6, max_position_embeddings=64,
        eos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    result = run("demo", "--checkpoint", tmp_path)
    assert (result.code, result.err) == (0, "")
    assert "size 4 is left out: 6 attention heads cannot be shared evenly by 4" in result.out
    assert "the same 24 tokens at size 1 and 2" in result.out


def test_another_text_is_a_failure(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If transformers says something else, the exit code is 1 and both texts are shown."""
    monkeypatch.setattr(steps, "transformers_tokens", lambda *_: ("9.9", [7, 7]))
    result = run("demo", "--checkpoint", folder)
    assert result.code == 1
    assert "error: transformers 9.9 generated another text:\n[1, 2] goes on with [7, 7]\n" in (
        result.err
    )


def test_wrong_shards_are_found(folder: Path) -> None:
    """One changed value, and one rank's shard in the place of another's, are each found."""
    models = run_ranks(2, lambda _: get_model(model_config=ModelConfig(model=str(folder))))
    with open_checkpoint(folder) as checkpoint:
        checks.check_shards(checkpoint, models)
        with pytest.raises(CommandError, match="the shards of 1 ranks do not cover"):
            checks.check_shards(checkpoint, models[1:])
        weight = dict(models[1].named_parameters())["model.layers.1.self_attn.qkv_proj.weight"]
        weight.data[-1, -1] += 1
        with pytest.raises(CommandError, match=r"qkv_proj\.weight holds other values than"):
            checks.check_shards(checkpoint, models)


def test_other_logits_are_found() -> None:
    """Differences beyond rounding raise, and so does NaN."""
    one = checks.Visit(1, [0], torch.tensor([1.0, 2.0]), [])
    near = checks.Visit(2, [0, 0], torch.tensor([1.0, 2.0 + 1e-6]), [])
    assert near.difference(one) < 1e-5
    for wrong in (2.01, torch.nan):
        far = checks.Visit(2, [0, 0], torch.tensor([1.0, wrong]), [])
        with pytest.raises(CommandError, match="size 2 differ from those at size 1"):
            far.difference(one)
