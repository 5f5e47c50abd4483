from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import ModelConfig, get_model
from vllm_module.build.model_source import ModelSource
from vllm_module.cli.demo import checks, steps
from vllm_module.cli.demo.checkpoint import PARAGRAPH
from vllm_module.cli.demo.damage import refuse_damaged
from vllm_module.cli.demo.transcript import Transcript
from vllm_module.cli.output import CommandError, console
from vllm_module.distributed import run_ranks
from vllm_module.weights import open_checkpoint

Run = Callable[..., Any]


def test_the_demo_shows_and_checks_all_of_it(run: Run, tmp_path: Path) -> None:
    """It ends in a text that every size and transformers generate, and in three refusals."""
    keep = tmp_path / "kept"
    result = run("demo", "--keep", keep)
    assert (result.code, result.err) == (0, "")
    out = result.out
    assert [int(n) for n in re.findall(r"^(\d)\. ", out, re.MULTILINE)] == [1, 2, 3, 4, 5]
    assert re.search(
        r"self_attn\.k_proj +all +\[32/2, 128\] +cut in 2 +32.8 kB +k_proj of …qkv_proj", out
    )
    assert out.count("are the checkpoint, bit for bit") == 3
    assert out.count("logits are those of size 1, within") == 2
    quoted = " ".join(line.removeprefix("   │ ") for line in out.splitlines() if "│" in line)
    assert PARAGRAPH in quoted
    assert "tokens at size 1, 2 and 4" in out
    assert "the same tokens from transformers" in out
    assert "missing 1: the checkpoint lacks them" in out
    assert "unexpected 1: the model has no place for them" in out
    assert "Qwen3ForCausalLM cannot run: not loaded" in out
    assert "it was cut off" in out
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    shown = re.findall(r"\$ make demo\n(.*?)```", readme, re.DOTALL)[0].splitlines()
    masked = {re.sub(r"\d+", "0", line) for line in out.splitlines()}  # figures differ by machine
    assert [line for line in shown if re.sub(r"\d+", "0", line) not in masked] == []
    assert "\x1b" not in out
    assert max(len(line) for line in out.splitlines() if "│" in line) <= 80
    # Other commands can use the folder that was kept, and the demo does not write to it again.
    again = run("generate", keep, "--prompt", "A model", "--max-new-tokens", 20)
    assert PARAGRAPH.startswith(again.out[:-1])
    assert len(again.out) > len("A model") + 20
    assert "is not empty" in run("demo", "--keep", keep).err


def test_another_checkpoint(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo says what it leaves out: sizes that do not divide, text without a tokenizer,
    transformers if it is not installed.
    """
    config = AutoConfig.for_model(
        "llama", vocab_size=70, hidden_size=24, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=6, num_key_value_heads=6, max_position_embeddings=64,
        eos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    # What it returns where transformers is not installed; these tests need it installed.
    monkeypatch.setattr(steps, "transformers_tokens", lambda *_: None)
    result = run("demo", "--checkpoint", tmp_path)
    assert (result.code, result.err) == (0, "")
    assert "size 4 is left out: 6 attention heads cannot be shared evenly by 4" in result.out
    assert "the same 24 tokens at size 1 and 2" in result.out
    assert "[1, 2] is continued by [" in result.out
    assert "(the extra vllm-module[demo]), adds the comparison" in result.out


def test_another_text_is_a_failure(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If transformers generates another text, the exit code is 1 and both texts are shown."""
    # The real transformers generates the same text.
    monkeypatch.setattr(steps, "transformers_tokens", lambda *_: ("9.9", [7, 7]))
    result = run("demo", "--checkpoint", folder)
    assert result.code == 1
    assert "error: transformers 9.9 generated another text:\n[1, 2] is continued by [7, 7]\n" in (
        result.err
    )


def test_wrong_shards_are_found(folder: Path) -> None:
    """A changed value and a missing rank are each found."""
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
    one = checks.SizeResult(1, [0], torch.tensor([1.0, 2.0]))
    near = checks.SizeResult(2, [0, 0], torch.tensor([1.0, 2.0 + 1e-6]))
    assert near.logits_difference(one) < 1e-5
    for wrong in (2.01, torch.nan):
        far = checks.SizeResult(2, [0, 0], torch.tensor([1.0, wrong]))
        with pytest.raises(CommandError, match="size 2 differ from those at size 1"):
            far.logits_difference(one)


def test_any_tensor_of_a_model_without_attention_is_renamed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no name ends as that of queries, the step with damage takes another."""
    config = AutoConfig.for_model(
        "mamba2", vocab_size=70, hidden_size=8, num_hidden_layers=1, num_heads=4, head_dim=4,
        state_size=4, n_groups=1, eos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    refuse_damaged(Transcript(console()), ModelSource.find(ModelConfig(model=str(tmp_path))))
    assert re.search(r"renamed to backbone\.\S+_old\.\w+:", capsys.readouterr().out)
