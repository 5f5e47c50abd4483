from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM

from vllm_module.cli import serving
from vllm_module.cli.output import CommandError
from vllm_module.errors import CheckpointFormatError, RankError

Run = Callable[..., Any]
IDS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4]]
MOST = 8


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """Return transformers' greedy tokens."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = []
    for ids in IDS:
        row = torch.tensor([ids])
        mask = torch.ones_like(row)
        out = model.generate(row, attention_mask=mask, do_sample=False, max_new_tokens=MOST)
        tokens.append(out[0, len(ids) :].tolist())
    return tokens


def arguments(*ids: list[int]) -> list[str]:
    prompts = [word for each in ids for word in ("--prompt-ids", ",".join(map(str, each)))]
    return [*prompts, "--max-new-tokens", str(MOST), "--dtype", "float32", "--device", "cpu"]


@pytest.mark.parametrize("tp_size", [1, 2])
def test_tokens_are_those_of_transformers(
    run: Run, folder: Path, expected: list[list[int]], tp_size: int
) -> None:
    """They are the same in one process and in two, alone and in a batch, without a tokenizer."""
    result = run("generate", folder, "--tp", tp_size, *arguments(*IDS), "--json").json
    assert [each["ids"] for each in result["completions"]] == expected
    assert [each["prompt_ids"] for each in result["completions"]] == IDS
    assert {each["text"] for each in result["completions"]} == {None}
    assert {each["stopped"] for each in result["completions"]} == {False}
    assert {each["error"] for each in result["completions"]} == {None}
    assert result["seconds"] > 0
    assert (result["tensor_parallel_size"], result["dtype"]) == (tp_size, "float32")
    if tp_size == 1:
        alone = run("generate", folder, *arguments(IDS[0]))
        assert (alone.code, alone.out) == (0, ",".join(map(str, expected[0])) + "\n")


def test_several_prompts_are_told_apart(run: Run, folder: Path, expected: list[list[int]]) -> None:
    """Each is printed when it is complete, after its number."""
    result = run("generate", folder, *arguments(*IDS))
    lines = [f"[{i}] {','.join(map(str, ids))}" for i, ids in enumerate(expected, start=1)]
    assert result.out.splitlines() == lines


def test_a_stop_token_ends_a_prompt(
    run: Run, folder: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    """generation_config.json names the token; in JSON, ``stopped`` is true."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    stop = expected[0][2]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stop}))
    result = run("generate", tmp_path, *arguments(IDS[0]), "--json").json
    (completion,) = result["completions"]
    assert completion["ids"] == expected[0][: expected[0].index(stop) + 1]
    assert completion["stopped"] is True


def test_text_comes_token_by_token(
    run: Run, with_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single prompt is printed, and then its text in pieces that together are the text."""
    prompt = ("--prompt", "tree", "--max-new-tokens", "12")
    whole = run("generate", with_text, *prompt, "--json").json["completions"][0]
    assert whole["prompt"] == "tree"
    assert len(whole["prompt_ids"]) == 4
    pieces = []

    def record(*values: object, end: str = "\n", flush: bool = False) -> None:
        pieces.append("".join(map(str, values)) + end)

    # Captured output is one text; this keeps the pieces that were printed one by one.
    monkeypatch.setattr("vllm_module.cli.commands.generate.print", record, raising=False)
    assert run("generate", with_text, *prompt).out == "tree"
    assert "".join(pieces) == whole["text"] + "\n"
    assert len([piece for piece in pieces if piece]) > 3
    monkeypatch.undo()
    assert run("generate", with_text, *prompt).out == f"tree{whole['text']}\n"
    several = run("generate", with_text, *prompt, "--prompt", "tree")
    assert several.out == f"[1] tree{whole['text']}\n[2] tree{whole['text']}\n"


def test_a_seed_draws_the_same_tokens(run: Run, folder: Path, expected: list[list[int]]) -> None:
    """With a temperature, the seed decides which tokens are drawn; --top-k 1 is greedy."""
    drawn = ("--temperature", 1.5, "--top-p", 0.95, *arguments(IDS[0]), "--seed")
    once, again, other = (run("generate", folder, *drawn, seed).out for seed in (7, 7, 8))
    assert once == again != other
    greedy = run("generate", folder, *drawn, 7, "--top-k", 1).out
    assert greedy == ",".join(map(str, expected[0])) + "\n"


def test_options_left_out_are_those_of_the_checkpoint(
    run: Run, folder: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    """The command says which it took; an option that is given counts."""
    shutil.copytree(folder, tmp_path / "model")
    entries = {"temperature": 5.0, "top_k": 3, "max_new_tokens": 4}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(entries))
    prompt = ("--prompt-ids", ",".join(map(str, IDS[0])), "--dtype", "float32")
    result = run("generate", tmp_path / "model", *prompt, "--top-k", 1)
    said = "sampling: max_tokens 4, temperature 5.0 (generation_config.json)\n"
    said += "ended at 4 tokens; --max-new-tokens takes another number\n"
    assert result == (0, ",".join(map(str, expected[0][:4])) + "\n", said)
    given = (*prompt, "--temperature", 0, "--top-k", 0, "--max-new-tokens", 5)
    result = run("generate", tmp_path / "model", *given)
    assert result == (0, ",".join(map(str, expected[0][:5])) + "\n", "")


@pytest.mark.parametrize(
    ("error", "prints"),
    [
        (RankError("rank 1 differs", [1], recoverable=True), [0]),
        (RankError("all differ", [0, 1, 2], recoverable=True), [0]),
        (RankError("rank 0 was killed", [0]), [1]),
        (RankError("ranks 0 and 1 were killed", [0, 1]), [2]),
        (CheckpointFormatError("no config.json"), [0]),
    ],
    ids=lambda value: str(value),
)
def test_one_rank_prints_why_all_of_them_stop(
    error: Exception, prints: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the first of those that are there."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    printing = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises((typer.Exit, CommandError, CheckpointFormatError)) as raised:
            serving._refuse(error)
        printing += [] if isinstance(raised.value, typer.Exit) else [rank]
    assert printing == prints


def test_text_ends_at_a_stop_string(run: Run, with_text: Path) -> None:
    """No part of the stop string is printed."""
    prompt = ("--prompt", "tree", "--max-new-tokens", "12")
    text = run("generate", with_text, *prompt, "--json").json["completions"][0]["text"]
    stop = text[5:8]
    options = (*prompt, "--stop", "never", "--stop", stop)
    cut = run("generate", with_text, *options, "--json").json["completions"][0]
    assert cut["text"] == text[: text.index(stop)]
    assert cut["stopped"] is True
    assert run("generate", with_text, *options).out == f"tree{cut['text']}\n"


def test_a_prompt_that_is_refused_does_not_hold_up_others(
    run: Run, folder: Path, expected: list[list[int]]
) -> None:
    """The others are printed, the refusal names the prompt, and the exit code is 1."""
    bad = ["--prompt-ids", "1,500"]
    result = run("generate", folder, *bad, *arguments(*IDS))
    assert result.code == 1
    assert sorted(result.out.splitlines()) == [
        f"[{i}] {','.join(map(str, ids))}" for i, ids in enumerate(expected, start=2)
    ]
    assert result.err == "error: prompt 1: token 500 is outside of the vocabulary of 130\n"
    result = run("generate", folder, *bad, *arguments(*IDS), "--json")
    assert result.code == 1
    errors = [completion["error"] for completion in result.json["completions"]]
    assert errors == ["token 500 is outside of the vocabulary of 130", None, None, None]


LONG = ",".join(["1"] * 64)
REFUSED = {
    "empty": (["--prompt", ""], "the prompt has no tokens"),
    "outside": (["--prompt-ids", "130"], "token 130 is outside of the vocabulary of 130"),
    "long": (["--prompt-ids", LONG], "64 tokens, and with one more a sequence has at most 64"),
    "longer": (["--prompt-ids", "1", "--max-model-len", "65"], "65 exceeds the 64 positions"),
    "ranks": (
        ["--prompt-ids", "1", "--tp", "2", "--quantization", "fp8_per_block"],
        "ends inside a scale block of 128",
    ),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_run_is_refused(
    run: Run, with_text: Path, options: list[str], message: str
) -> None:
    """There is one message on standard error, and no traceback of this or another process."""
    result = run("generate", with_text, *options)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("error: ")
    assert message in result.err
    assert "Traceback" not in result.err


USAGE = {
    "neither": ([], "give --prompt or --prompt-ids"),
    "both": (["--prompt", "a", "--prompt-ids", "1"], "give --prompt or --prompt-ids"),
    "no ids": (["--prompt-ids", "1,x"], "'1,x' is not a list of token ids such as 1,2,3"),
    "no text": (["--prompt", "a\udcff"], r"'a\udcff' is no text"),
    "no tokens": (["--prompt-ids", "1", "--max-new-tokens", "0"], "--max-new-tokens"),
    "temperature": (["--prompt-ids", "1", "--temperature", "nan"], "for --temperature: should"),
    "top-p": (["--prompt-ids", "1", "--top-p", "1.5"], "for --top-p: should"),
    "top-k": (["--prompt-ids", "1", "--top-k", "-2"], "for --top-k: should"),
    "no stop": (["--prompt-ids", "1", "--stop", ""], "for --stop: should"),
    "stop": (["--prompt-ids", "1", "--stop", "a\udcff"], r"'a\udcff' is no text"),
    "cache": (["--prompt-ids", "1", "--kv-cache-dtype", "int3"], "'int3' is not one of"),
}


@pytest.mark.parametrize(("options", "message"), USAGE.values(), ids=USAGE)
def test_wrong_usage(run: Run, folder: Path, options: list[str], message: str) -> None:
    """The exit code is 2; the message says what is wrong and names the help."""
    result = run("generate", folder, *options)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert result.err.endswith("Try: vllm-module generate --help\n")


def test_text_needs_a_tokenizer(run: Run, folder: Path) -> None:
    """The refusal says that token ids can be given instead."""
    result = run("generate", folder, "--prompt", "a")
    assert result.code == 1
    assert "has no tokenizer.json" in result.err
    assert "token ids" in result.err
    result = run("generate", folder, "--prompt-ids", "1", "--stop", "a")
    assert (result.code, "stop strings need a tokenizer" in result.err) == (1, True)
