"""Commands on adapters: what they list, plan, compare and generate."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from vllm_module import LLM
from vllm_module.adapters import AdapterConfig
from vllm_module.cli import main

SUPPORT = runpy.run_path(str(Path(__file__).with_name("support.py")))
CPU = ["--device", "cpu", "--dtype", "float32"]
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: object) -> tuple[int, str, str]:
        code = main([str(each) for each in arguments])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


def broken(source: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    tensors = load_file(source / "adapter_model.safetensors")
    change(tensors)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = (source / "adapter_config.json").read_text()
    (folder / "adapter_config.json").write_text(settings)
    return folder


def test_inspect_and_digest(tuned: Callable[[str], Any], run: Any, tmp_path: Path) -> None:
    """An adapter's folder is a checkpoint: its settings are shown, and why they are refused."""
    folder = tuned("llama").adapter
    tensors = load_file(folder / "adapter_model.safetensors")
    code, out, _ = run("inspect", folder, "--json")
    found = json.loads(out)
    assert code == 0
    assert {each["name"] for each in found["tensors"]} == set(tensors)
    assert found["adapter"]["refused"] is None
    assert " v_proj:2, alpha_pattern=o_proj:3.0" in found["adapter"]["settings"]
    assert "use_rslora=True" in run("inspect", folder)[1]
    digests = json.loads(run("digest", folder, "--json")[1])["tensors"]
    assert {each["name"] for each in digests} == set(tensors)
    other = broken(folder, tmp_path / "other", lambda tensors: None)
    settings = json.loads((folder / "adapter_config.json").read_text()) | {"use_dora": True}
    (other / "adapter_config.json").write_text(json.dumps(settings))
    assert "use_dora is True, which is not computed here" in run("inspect", other)[1]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
def test_plan(tuned: Callable[[str], Any], run: Any, family: str, ranks: int) -> None:
    """The plan's modules are PEFT's, and its bytes those that an engine's rank holds."""
    one = tuned(family)
    given = ["plan", one.base, "--tp", ranks, "--dtype", "float32", "--adapter", one.adapter]
    code, out, _ = run(*given, "--json")
    assert code == 0
    found = json.loads(out)["adapter"]
    config = peft.PeftConfig.from_pretrained(one.adapter)
    for each in found["modules"]:
        if each["name"].endswith(("q_proj", "o_proj")) and family != "llama":
            assert each["rank"] == config.r
            assert each["scale"] == config.lora_alpha / config.r
    stored = load_file(one.adapter / "adapter_model.safetensors")
    sizes = [t.nbytes for name, t in stored.items() if ".base_layer.weight" not in name]
    assert sum(each["bytes"] for each in found["modules"]) == sum(sizes)
    with LLM(
        str(one.base), dtype="float32", kv_cache_memory_bytes=1 << 20, tensor_parallel_size=ranks
    ) as llm:
        assert found["rank_bytes"][0] == llm.load_adapter("a", one.adapter).num_bytes
    assert len(found["rank_bytes"]) == ranks
    shown = run(*given)[1]
    assert f"{len(found['modules'])} modules; in memory" in shown
    if family == "llama":  # A and B of qkv, o, gate and up, and down in two layers, of rank 16
        numbers = 3 * 32 + 64 // ranks + 32 // ranks + 32 + 2 * 32 + 64 // ranks + 32 // ranks + 32
        assert found["slot_bytes"] == 2 * 16 * numbers * 4
        assert "each of max_loras, with max_lora_rank=7" in " ".join(shown.split())


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_plan_of_experts_that_are_spread(
    tuned: Callable[[str], Any], run: Any, family: str, ranks: int
) -> None:
    """Each of the ranks is there, with its experts' A and B, and those of all other layers."""
    one = tuned(family)

    def planned(*settings: object) -> Any:
        code, out, err = run("plan", one.base, *settings, "--adapter", one.adapter, "--json")
        assert code == 0, err
        return json.loads(out)["adapter"]["rank_bytes"]

    (alone,) = planned("--dtype", "float32")
    stored = load_file(one.adapter / "adapter_model.safetensors")
    of_experts = sum(each.nbytes for name, each in stored.items() if ".experts" in name)
    assert 0 < of_experts < alone
    spread = planned("--dtype", "float32", "--expert-parallel-size", ranks)
    assert spread == [alone - of_experts + of_experts // ranks] * ranks


def test_load(tuned: Callable[[str], Any], run: Any, tmp_path: Path) -> None:
    """Each rank loads what ``plan`` says it will; a broken adapter is refused by name."""
    one = tuned("mixtral")
    given = [one.base, "--adapter", one.adapter, "--tp", 2]
    planned = json.loads(run("plan", *given, "--json")[1])["adapter"]["rank_bytes"]
    code, out, _ = run("load", *given, *CPU, "--json")
    assert code == 0
    loads = [each["adapter"] for each in json.loads(out)["ranks"]]
    assert [each["bytes"] for each in loads] == planned
    assert {each["layers"] for each in loads} == {6}
    assert "adapter on rank 1: 6 layers, " in run("load", *given, *CPU)[1]
    tensor = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    other = broken(one.adapter, tmp_path / "other", lambda tensors: tensors.pop(tensor))
    code, _, err = run("load", one.base, "--adapter", other, *CPU)
    assert code == 1
    assert "model.layers.0.self_attn.q_proj.lora_A" in err


def test_plan_refuses(tuned: Callable[[str], Any], run: Any) -> None:
    code, _, err = run("plan", tuned("llama").base, "--adapter", tuned("mixtral").adapter)
    assert code == 1
    assert "has no 'experts'" in err


def test_check(
    tuned: Callable[[str], Any], run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens with an adapter are those of transformers with PEFT; a wrong one is told."""
    one = tuned("qwen3")
    given = ["check", one.base, *CPU, "--tokens", "6", "--json", "--adapter"]
    code, out, err = run(*given, one.adapter)
    assert code == 0, err
    found = json.loads(out)
    assert found["agrees"]
    assert max(each["difference"] for each in found["prompts"]) < 1e-4
    unknown = {"base_model.model.x.lora_A.weight": torch.ones(4, 32)}
    code, _, err = run(
        *given, broken(one.adapter, tmp_path / "a", lambda each: each.update(unknown))
    )
    assert (code, "has no 'x'" in err) == (1, True)
    scale = AdapterConfig.scale
    # What check is to find: another factor than PEFT has.
    monkeypatch.setattr(AdapterConfig, "scale", lambda *a, **k: 1.1 * scale(*a, **k))
    code, out, _ = run(*given, one.adapter)
    assert (code, json.loads(out)["agrees"]) == (1, False)


def test_generate(tuned: Callable[[str], Any], run: Any) -> None:
    """Tokens are those of PEFT, on one rank and on two."""
    one = tuned("qwen3")
    base = AutoModelForCausalLM.from_pretrained(one.base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, one.adapter).eval()
    ids = [3, 1, 4, 1, 5]
    with torch.no_grad():
        for _ in range(8):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    given = ["generate", one.base, *CPU, "--prompt-ids", "3,1,4,1,5", "--max-new-tokens", "8"]
    want = ",".join(map(str, ids[5:]))
    for ranks in (1, 2):
        code, out, err = run(*given, "--adapter", one.adapter, "--tp", ranks)
        assert (code, out.strip()) == (0, want), err
    assert run(*given)[1].strip() != want
    code, _, err = run(*given, "--adapter", one.base)
    assert code == 1
    assert "adapter_config.json" in err
