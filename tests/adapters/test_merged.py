"""A merged checkpoint is PEFT's ``merge_and_unload``, tensor by tensor and bit by bit."""

from __future__ import annotations

import errno
import json
import os
import runpy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from vllm_module import ModelConfig
from vllm_module.adapters import open_adapter
from vllm_module.adapters.merging import additions
from vllm_module.cli import main
from vllm_module.errors import MissingWeightError, UnsupportedModelError, WeightLoadError
from vllm_module.export.merged import merge

SUPPORT = runpy.run_path(str(Path(__file__).with_name("support.py")))
FAMILIES, Tuned = SUPPORT["FAMILIES"], SUPPORT["Tuned"]
adapt, load_base, logits_of = SUPPORT["adapt"], SUPPORT["load_base"], SUPPORT["logits_of"]
Tensors = dict[str, torch.Tensor]
WEIGHTS = "adapter_model.safetensors"


def stored(folder: Path) -> Tensors:
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def as_peft(base: Path, adapter: Path, folder: Path) -> Tensors:
    """Return the tensors that transformers saves of PEFT's merged model."""
    with warnings.catch_warnings():  # of what transformers has renamed since
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
        merged = peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()
        merged.save_pretrained(folder)
    return stored(folder)


def merged(base: Path, adapter: Path, out: Path, **settings: Any) -> Tensors:
    merge(ModelConfig(model=str(base)), adapter, out, **settings)
    return stored(out)


def assert_same(got: Tensors, want: Tensors) -> None:
    assert got.keys() == want.keys()
    assert {name: tensor.dtype for name, tensor in got.items()} == {
        name: tensor.dtype for name, tensor in want.items()
    }
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_family(tuned: Callable[[str], Any], family: str, tmp_path: Path) -> None:
    """Every tensor has PEFT's bits, and the new checkpoint computes what the adapter does."""
    one = tuned(family)
    result = merge(ModelConfig(model=str(one.base)), one.adapter, tmp_path / "out", file_bytes=5000)
    got, want = stored(tmp_path / "out"), as_peft(one.base, one.adapter, tmp_path / "peft")
    assert_same(got, want)
    before = stored(one.base)
    changed = {name for name in got if not torch.equal(got[name], before[name])}
    assert changed == {*result.merged} != set()
    assert result.written == sum(tensor.nbytes for tensor in got.values())
    copies = {
        n: t for n, t in load_file(one.adapter / WEIGHTS).items() if ".base_layer.weight" in n
    }
    assert result.read == result.written + sum(copy.nbytes for copy in copies.values())
    logits = logits_of(load_base(tmp_path / "out"), one.ids)
    torch.testing.assert_close(logits, one.logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_16_bits(
    tuned: Callable[[str], Any], family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Sums are rounded where PEFT rounds them: of experts and embeddings twice."""
    one = tuned(family)
    AutoModelForCausalLM.from_pretrained(one.base, dtype=dtype).save_pretrained(tmp_path / "base")
    tensors = load_file(one.adapter / WEIGHTS)
    for name in tensors:
        if ".base_layer.weight" in name:
            tensors[name] = tensors[name].to(dtype)
    (tmp_path / "adapter").mkdir()
    save_file(tensors, tmp_path / "adapter" / WEIGHTS)
    settings = (one.adapter / "adapter_config.json").read_text()
    (tmp_path / "adapter" / "adapter_config.json").write_text(settings)
    got = merged(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    want = as_peft(tmp_path / "base", tmp_path / "adapter", tmp_path / "peft")
    assert_same(got, want)


@pytest.mark.parametrize("given", [{}, {"rms_norm_eps": 0.5}])
def test_the_new_checkpoint_is_of_the_configuration_that_was_merged(
    tuned: Callable[[str], Any], given: dict[str, Any], tmp_path: Path
) -> None:
    """Overrides are written, so it computes what PEFT does of transformers' model with them."""
    one = tuned("llama")
    merge(ModelConfig(model=str(one.base), hf_overrides=given), one.adapter, tmp_path / "out")
    before, after = (
        json.loads((folder / "config.json").read_text()) for folder in (one.base, tmp_path / "out")
    )
    assert after == before | given
    base = AutoModelForCausalLM.from_pretrained(one.base, **given)
    with warnings.catch_warnings(), torch.no_grad():  # of what transformers has renamed since
        warnings.simplefilter("ignore")
        theirs = peft.PeftModel.from_pretrained(base, one.adapter)
        expected = theirs(input_ids=one.ids[None]).logits[0]
    logits = logits_of(load_base(tmp_path / "out"), one.ids)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_a_dtype_that_only_the_tensors_say_stays(
    tuned: Callable[[str], Any], tmp_path: Path
) -> None:
    """A norm in float32 is behind the others, and before them in a safetensors file."""
    one, base = tuned("llama"), tmp_path / "base"
    state = AutoModelForCausalLM.from_pretrained(one.base, dtype=torch.bfloat16).state_dict()
    base.mkdir()
    state["model.norm.weight"] = state["model.norm.weight"].float()
    torch.save(state, base / "pytorch_model.bin")
    config = json.loads((one.base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "dtype"}))
    merge(ModelConfig(model=str(base)), one.adapter, tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(base).dtype == torch.bfloat16
    assert AutoConfig.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_what_the_model_skips_is_kept(tmp_path: Path) -> None:
    """A pooler, which embeddings do not need, is in PEFT's checkpoint and in ours."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("bert", **sizes, intermediate_size=32, vocab_size=32)
    model = AutoModel.from_config(config)
    model.save_pretrained(tmp_path / "base")
    tuned = adapt(
        model,
        tmp_path / "adapter",
        target_modules=["query", "dense"],
        exclude_modules=["pooler.dense"],
    )
    tuned.merge_and_unload().save_pretrained(tmp_path / "theirs")
    got = merged(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert_same(got, stored(tmp_path / "theirs"))


def test_a_layer_that_is_named_by_its_parameter(
    tuned: Callable[[str], Any], tmp_path: Path
) -> None:
    """PEFT rounds what it adds to it first, and what it adds to a module together with the sum."""
    model = AutoModelForCausalLM.from_pretrained(tuned("qwen3").base, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    names = {"target_modules": ["q_proj"], "target_parameters": ["o_proj.weight"]}
    adapt(model, tmp_path / "adapter", **names)
    got = merged(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert_same(got, as_peft(tmp_path / "base", tmp_path / "adapter", tmp_path / "peft"))


def tied_llama(folder: Path) -> Any:
    torch.manual_seed(1)
    entries = SUPPORT["_SIZES"] | {"tie_word_embeddings": True}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **entries)).float()
    model.save_pretrained(folder)
    return model


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_tied_embeddings(tmp_path: Path) -> None:
    """Other layers are merged, and the head stays tied; a layer that is tied is refused."""
    for name, targets in (("linear", ["q_proj", "down_proj"]), ("embedding", ["embed_tokens"])):
        adapt(tied_llama(tmp_path / "base"), tmp_path / name, target_modules=targets)
    got = merged(tmp_path / "base", tmp_path / "linear", tmp_path / "out")
    assert_same(got, as_peft(tmp_path / "base", tmp_path / "linear", tmp_path / "peft"))
    assert "lm_head.weight" not in got
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"]
    # PEFT adds to the one tensor of both: its merged model is another than with the adapter.
    theirs = as_peft(tmp_path / "base", tmp_path / "embedding", tmp_path / "theirs")
    base, merged_model = (
        AutoModelForCausalLM.from_pretrained(tmp_path / each) for each in ("base", "theirs")
    )
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "embedding")
    with torch.no_grad():
        ids = torch.arange(9)[None]
        assert not torch.allclose(adapted(ids).logits, merged_model(ids).logits, atol=0.1)
    assert "lm_head.weight" not in theirs
    with pytest.raises(UnsupportedModelError, match=r"embed_tokens has an adapter, and shares its"):
        merged(tmp_path / "base", tmp_path / "embedding", tmp_path / "not")
    assert not (tmp_path / "not").exists()


def test_refused(tuned: Callable[[str], Any], tmp_path: Path) -> None:
    """What does not fit is refused by name before a folder is made."""
    one, other, out = tuned("llama"), tuned("qwen3"), tmp_path / "out"
    with pytest.raises(WeightLoadError, match="refuses"):
        merged(one.base, tuned("gpt2").adapter, out)
    with pytest.raises(ValueError, match="full precision"):
        merge(ModelConfig(model=str(one.base), quantization="fp8"), one.adapter, out)

    def changed(source: Any, change: Callable[[Tensors], Any]) -> Path:
        tensors = load_file(source.adapter / WEIGHTS)
        change(tensors)
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        folder.mkdir()
        save_file(tensors, folder / WEIGHTS)
        settings = (source.adapter / "adapter_config.json").read_text()
        (folder / "adapter_config.json").write_text(settings)
        return folder

    def name(tensors: Tensors, part: str) -> str:
        return next(each for each in tensors if part in each)

    without = changed(other, lambda tensors: tensors.pop(name(tensors, "q_proj.lora_B")))
    with pytest.raises(MissingWeightError, match=r"q_proj\.lora_B"):
        merged(other.base, without, out)
    broken = changed(
        other, lambda tensors: tensors[name(tensors, "o_proj.lora_A")].fill_(float("nan"))
    )
    with pytest.raises(WeightLoadError, match=r"o_proj\.lora_A of the adapter has a NaN"):
        merged(other.base, broken, out)
    foreign = changed(
        one, lambda tensors: tensors[name(tensors, "embed_tokens.base_layer")].mul_(1.01)
    )
    with pytest.raises(WeightLoadError, match="is another one than the base model's"):
        merged(one.base, foreign, out)
    large = changed(other, lambda tensors: tensors[name(tensors, "o_proj.lora_A")].fill_(3e38))
    with pytest.raises(WeightLoadError, match=r"o_proj\.weight has a NaN or an infinite number"):
        merged(other.base, large, out)
    assert not out.exists()


def test_experts_that_the_base_stores_together(tuned: Callable[[str], Any], tmp_path: Path) -> None:
    """A and B of single experts are not added to one tensor of all of them."""
    one = tuned("qwen3_moe")
    tensors = stored(one.base)
    beginning = "model.layers.1.mlp.experts"
    parts = {
        part: torch.stack([tensors.pop(f"{beginning}.{i}.{part}_proj.weight") for i in range(4)])
        for part in ("gate", "up", "down")
    }
    tensors[f"{beginning}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], 1)
    tensors[f"{beginning}.down_proj"] = parts["down"]
    (tmp_path / "base").mkdir()
    save_file(tensors, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    (tmp_path / "base" / "config.json").write_text((one.base / "config.json").read_text())
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    path = f"base_model.model.{beginning}.2.down_proj"
    pair = {f"{path}.lora_A.weight": torch.ones(4, 16), f"{path}.lora_B.weight": torch.ones(32, 4)}
    save_file(pair, adapter / WEIGHTS)
    (adapter / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 4}')
    with pytest.raises(UnsupportedModelError, match=r"2\.down_proj has an A and a B, and the base"):
        merged(tmp_path / "base", adapter, tmp_path / "out")
    got = merged(one.base, adapter, tmp_path / "apart")
    before = stored(one.base)
    changed = [name for name in got if not torch.equal(got[name], before[name])]
    assert changed == [f"{beginning}.2.down_proj.weight"]
    torch.testing.assert_close(got[changed[0]] - before[changed[0]], torch.full((32, 16), 4.0))


def test_the_command(
    tuned: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """convert writes the same files, and says how many tensors it has changed."""
    one, out = tuned("qwen3"), tmp_path / "out"
    given = ["convert", str(one.base), "--adapter", str(one.adapter), "--out"]
    assert main([*given, str(out), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qvo"]
    names += [f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    assert sorted(shown["merged"]) == sorted(names)
    assert_same(stored(out), merged(one.base, one.adapter, tmp_path / "other"))
    assert main([*given, str(tmp_path / "text")]) == 0
    assert "6 tensors changed: " in capsys.readouterr().out
    for wrong in (["--quantization", "fp8"], ["--ignore", "lm_head"], ["--group-size", "64"]):
        assert main([*given, str(tmp_path / "no"), *wrong]) == 2
        assert "--quantization" in capsys.readouterr().err


@pytest.mark.parametrize("at", ["the first file", "a name", "a tensor", "the end"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk(
    tuned: Callable[[str], Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    at: str,
    code: int,
) -> None:
    """The command says so, with advice, and leaves nothing behind; with more space it succeeds."""
    one, out, left = tuned("qwen3"), tmp_path / "disk/out", [9000]
    pwrite, opened, given = os.pwrite, Path.open, (str(one.base), "--adapter", str(one.adapter))

    def full(*_: object, path: Path | None = None) -> Any:
        where = () if path is None else (str(path),)
        raise OSError(code, os.strerror(code), *where)

    def some(descriptor: int, data: Any, offset: int) -> int:
        """Write as much as there is space for, and then nothing."""
        part = data[: left[0]] if left[0] else full()
        left[0] -= len(part)
        return pwrite(descriptor, part, offset)

    def no_name(path: Path, *arguments: Any, **named: Any) -> Any:
        if path.name == "model.safetensors" and path.is_relative_to(tmp_path):
            full(path=path)
        return opened(path, *arguments, **named)

    owner, name, faulty = {
        "the first file": (Path, "write_bytes", full),
        "a name": (Path, "open", no_name),
        "a tensor": (os, "pwrite", some),
        "the end": (os, "fsync", full),
    }[at]
    command = ["convert", *given, "--out", str(out)]
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, faulty)
        assert main(command) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    reason = f"{out} cannot be written: {os.strerror(code)}; free space, or name a place on another"
    assert told == f"error: {reason} disk"
    assert list(out.parent.iterdir()) == []
    assert main(command) == 0
    assert_same(stored(out), merged(one.base, one.adapter, tmp_path / "other"))


def test_a_model_that_makes_other_tensors_is_refused(tuned: Callable[[str], Any]) -> None:
    """A sum would be of what is stored, and the model loads something that it has made of it."""
    one = tuned("llama")
    base, tensors = load_base(one.base), stored(one.base)
    made = tensors | {"model.norm.weight": tensors["model.norm.weight"].clone()}
    with open_adapter(one.adapter) as (settings, weights):
        expected = additions(base.plan_weights(tensors), tensors, settings, weights)
        assert additions(base.plan_weights(made), tensors, settings, weights) == expected
        name = next(iter(expected))
        made[name] = tensors[name].clone()
        with pytest.raises(UnsupportedModelError, match=f"loads something else than {name}"):
            additions(base.plan_weights(made), tensors, settings, weights)
