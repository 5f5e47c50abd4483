"""The comparison of a user's checkpoint with transformers."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_module import LLM
from vllm_module.build import registry
from vllm_module.cli import comparison
from vllm_module.layers import Attention
from vllm_module.models.qwen3 import Qwen3ForCausalLM
from vllm_module.runtime.outputs import CompletionOutput, RequestOutput
from vllm_module.runtime.sampling.sampler import Logprob

Run = Callable[..., Any]
PRECISE = "--dtype", "float32", "--device", "cpu", "--tokens", "6"


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_right_checkpoint_agrees(run: Run, folder: Path, tp_size: int) -> None:
    """Logprobs and tokens are transformers', on one rank and two, without a tokenizer."""
    result = run("check", folder, *PRECISE, "--tp", tp_size, "--json")
    assert result.code == 0, result.err
    found = result.json
    assert found["agrees"]
    assert (found["tensor_parallel_size"], found["tolerance"]) == (tp_size, 1e-3)
    assert len(found["prompts"]) == 3
    stored = [name for file in folder.glob("*.safetensors") for name in load_file(file)]
    count = len(stored)
    assert found["weights"] == {"stored": count, "compared": count, "different": []}
    for each in found["prompts"]:
        assert len(each["ids"]) == 6
        assert each["difference"] < 1e-4
        assert (each["others"], each["gap"], each["agrees"]) == (0, 0.0, True)


def test_a_wrong_computation_is_told(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attention with another scale differs, is said to, and the exit code is 1."""
    attend = Attention.forward

    def wrong(self: Attention, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.scale = 1.0
        return attend(self, *args, **kwargs)

    monkeypatch.setattr(Attention, "forward", wrong)
    result = run("check", folder, *PRECISE)
    assert result.code == 1
    assert "DIFFERS: logprobs differ by at most" in result.out
    assert "0 of 3 prompts agree" in result.out
    allowed = run("check", folder, *PRECISE, "--tolerance", "1000")
    assert (allowed.code, "DIFFERS" in allowed.out) == (0, False)


def test_a_tensor_that_is_loaded_wrong_is_told(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token that differs is told, with its position and the one of transformers."""
    post = Qwen3ForCausalLM.process_weights_after_loading

    def permuted(self: Any) -> None:
        post(self)
        weight = self.lm_head.weight
        weight.data[:130] = weight.data[:130].flip(0)

    monkeypatch.setattr(Qwen3ForCausalLM, "process_weights_after_loading", permuted)
    result = run("check", folder, *PRECISE, "--json")
    assert result.code == 1
    assert result.json["weights"]["different"] == ["lm_head.weight"]
    for each in result.json["prompts"]:
        position, own, theirs = each["first_other"]
        assert position == len(each["prompt_ids"])
        assert own == each["ids"][0] != theirs
        assert 0 < each["worst"] < len(each["prompt_ids"]) + len(each["ids"])
    shown = run("check", folder, *PRECISE)
    assert f"the first other token is {own} at position {position}, where transformers" in shown.out
    # However much logprobs may differ, a tensor that the engine holds is another one.
    allowed = run("check", folder, *PRECISE, "--tolerance", "1000", "--json")
    assert [each["agrees"] for each in allowed.json["prompts"]] == [True] * 3
    assert (allowed.code, allowed.json["agrees"]) == (1, False)


RENAMED = """
from vllm_module.models.qwen3 import Qwen3ForCausalLM as Base

class Qwen3ForCausalLM(Base):
    weight_aliases = {"transformer": "model", "output": "lm_head"}
"""


@pytest.mark.parametrize("tp_size", [1, 2])
def test_weights_under_other_names_are_compared(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp_size: int
) -> None:
    """A model's aliases lead to the tensors of the files, all of them and by their names there."""
    # Replaced: what a process registers stays, because no user needs to take it back.
    monkeypatch.setattr(registry, "registered", registry.Registrations())
    monkeypatch.setattr(registry, "_from_files", {})
    code = tmp_path / "renamed.py"
    code.write_text(RENAMED)
    tensors = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
    heads = {"model": "transformer", "lm_head": "output"}
    renamed = {
        f"{heads[name.partition('.')[0]]}.{name.partition('.')[2]}": each
        for name, each in tensors.items()
    }
    save_file(renamed, tmp_path / "model.safetensors")
    shutil.copy(folder / "config.json", tmp_path)
    settings: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "tensor_parallel_size": tp_size,
    }
    with LLM(str(tmp_path), model_code=code, **settings) as llm:
        assert comparison.compare_weights(llm) == (len(tensors), len(tensors), [])
        name = "transformer.norm.weight"
        llm.update_weights({name: -renamed[name]})
        assert comparison.compare_weights(llm).different == [name]


def test_what_is_compared_is_told(run: Run, folder: Path) -> None:
    """The head names the model, its dtype, ranks, implementation and the other side."""
    for impl in ("native", "transformers"):
        result = run("check", folder, *PRECISE, "--model-impl", impl)
        assert result.code == 0, result.err
        first, second, third, fourth, *_, last = result.out.splitlines()
        head = "Qwen3ForCausalLM in float32 on cpu, on 1 rank, against transformers"
        assert first.startswith(head)
        assert second == f"model_impl: {impl}"
        assert "prompts are made up" in third
        assert re.fullmatch(r"(\d+) of \1 tensors compared with the files: bit for bit .*", fourth)
        assert last == "3 of 3 prompts agree"


def test_prompts_without_a_tokenizer_are_refused(run: Run, folder: Path) -> None:
    """Texts that were given are not replaced by others."""
    result = run("check", folder, *PRECISE, "--prompt", "a tree")
    assert result.code == 1
    assert "has no tokenizer.json" in result.err


def test_texts_are_encoded_by_the_checkpoints_tokenizer(run: Run, with_text: Path) -> None:
    """Prompts are texts where there is a tokenizer; the table says how far they agree."""
    result = run("check", with_text, *PRECISE, "--prompt", "a tree")
    assert result.code == 0, result.err
    assert "'a tree'" in result.out
    assert "6 of 6 tokens are transformers' first choice" in result.out


def test_nothing_to_compare_with(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without transformers, the extra is named; random numbers of its own are no oracle."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    lacking = {}
    for path in copy.glob("*.safetensors"):
        lacking |= load_file(path)
        path.unlink()
    (copy / "model.safetensors.index.json").unlink()
    del lacking["model.norm.weight"]
    save_file(lacking, copy / "model.safetensors", {"format": "pt"})
    with (
        pytest.raises(comparison.CommandError, match=r"1 tensor with random.*model\.norm\.weight"),
        comparison.transformers_model(copy, torch.float32, torch.device("cpu")),
    ):
        pass
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = run("check", folder, *PRECISE)
    assert result.code == 1
    assert "pip install 'transformers<6,>=5.0'" in result.err


def test_what_is_not_a_number_is_far() -> None:
    """NaN is no agreement, and the same infinity on both sides is."""
    infinite = torch.tensor([-torch.inf, 1.0])
    assert comparison._distance(infinite, infinite.clone()) == 0.0
    assert comparison._distance(infinite, torch.tensor([-5.0, 1.0])) == torch.inf
    assert comparison._distance(infinite, torch.tensor([-torch.inf, torch.nan])) == torch.inf


def test_tokens_agree_only_where_both_are_as_probable() -> None:
    """Equal logprobs do not excuse another token than the most probable one."""
    same = comparison.Compared(None, [1], [2], 0.1, 0, 0, 0.0, None)
    assert same.agrees(0.1)
    assert not same.agrees(0.09)
    assert not replace(same, others=1, gap=0.2, first_other=(1, 2, 3)).agrees(0.1)
    assert replace(same, others=1, gap=0.1, first_other=(1, 2, 3)).agrees(0.1)


def test_what_differs_is_told_by_its_position() -> None:
    """Each logprob and each choice of six positions, changed alone; the prompt begins at 0."""
    prompt, ids, vocab = [4, 2, 0], [3, 1, 2], 5
    row = [*prompt, *ids]
    logits = torch.zeros(len(row), vocab)
    for position, token in enumerate(ids, len(prompt)):
        logits[position - 1, token] = 3  # which greedy decoding takes
    theirs = logits.log_softmax(-1)

    def compared(changed: torch.Tensor) -> comparison.Compared:
        entries = [
            {token: Logprob(float(one), 1) for token, one in enumerate(each)} for each in theirs
        ]
        sample = CompletionOutput(0, "", ids, 0.0, entries[len(prompt) - 1 : -1])
        logprobs = [None, *entries[: len(prompt) - 1]]
        output = RequestOutput("0", None, prompt, [sample], True, logprobs)
        model: Any = torch.nn.Linear(1, 1)
        model.forward = lambda input_ids, use_cache: SimpleNamespace(logits=changed[None])
        return comparison.compare(model, output)

    same = comparison.Compared(None, prompt, ids, 0.0, 1, 0, 0.0, None)
    assert compared(logits) == same
    for position in range(1, len(row)):
        for token in range(vocab):
            changed = logits.clone()
            changed[position - 1, token] += 5
            found = compared(changed)
            far = (changed.log_softmax(-1) - theirs).abs().max().item()
            assert (found.difference, found.worst) == (pytest.approx(far), position)
            if position < len(prompt) or token == row[position]:
                assert (found.others, found.gap, found.first_other) == (0, 0.0, None)
            else:
                assert found.gap == pytest.approx(2)  # 5 is more than 3 by this
                assert (found.others, found.first_other) == (1, (position, row[position], token))
