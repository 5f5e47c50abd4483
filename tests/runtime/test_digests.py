"""The digest of a running engine: that of its checkpoint, whatever ranks and files it came from."""

from __future__ import annotations

import io
import json
import re
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import LLM, LoadConfig, ModelConfig, SamplingParams, get_model
from vllm_module.cli import main
from vllm_module.core.digests import ModelDigest
from vllm_module.core.module import vLLMModule
from vllm_module.core.named_tensors import named_tensors
from vllm_module.distributed import pipeline_parallel
from vllm_module.errors import (
    CheckpointFormatError,
    ModelNotReadyError,
    WeightLoadError,
    WeightReadError,
)
from vllm_module.export.sharded_state import shard
from vllm_module.kernels.digest.digest import digest_box
from vllm_module.testing import random_weights
from vllm_module.weights.digests import digests_file

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 130,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without a tokenizer, in two files."""
    folder = tmp_path_factory.mktemp("digests")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    config = AutoConfig.from_pretrained(folder)
    weights = random_weights(AutoModelForCausalLM.from_config(config).state_dict())
    names = sorted(weights)
    for part in range(2):
        save_file({n: weights[n] for n in names[part::2]}, folder / f"model-{part}.safetensors")
    return folder


def engine(folder: Path, **arguments: Any) -> LLM:
    return LLM(str(folder), skip_tokenizer_init=True, **arguments)


def stored(folder: Path) -> dict[str, str]:
    """Return what the command prints of the files."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert main(["digest", str(folder), "--json"]) == 0
    return {each["name"]: each["digest"] for each in json.loads(printed.getvalue())["tensors"]}


def digest(llm: LLM) -> ModelDigest:
    with llm:
        return llm.digest()


def test_an_engine_has_the_digest_of_its_checkpoint(folder: Path) -> None:
    """On one rank and on two, in the checkpoint's dtype, as the command prints it."""
    expected = stored(folder)
    one = digest(engine(folder))
    assert one.differences(expected) == []
    two = digest(engine(folder, tensor_parallel_size=2))
    assert two == one
    assert two.hex == one.hex


def test_updates_in_any_order_give_the_digest_of_a_fresh_load(folder: Path) -> None:
    """An update of everything, in two halves, leads to the other checkpoint's digest and back."""
    weights = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
    other = {name: tensor * 2 for name, tensor in weights.items()}
    with engine(folder) as llm:
        first = llm.digest()
        names = sorted(weights, key=lambda name: name[::-1])
        for part in (names[::2], names[1::2]):
            llm.update_weights({name: other[name] for name in part})
        changed = llm.digest()
        assert changed.differences(first) == sorted(
            name for name in weights if not torch.equal(weights[name], other[name])
        )
        llm.update_weights(weights)
        assert llm.digest() == first
        llm.sleep(level=2)
        with pytest.raises(WeightReadError, match="holds no values"):
            llm.digest()
        llm.update_weights(other)
        assert llm.digest().differences(changed) == []


def test_an_update_is_compared_with_the_digests_it_should_have(folder: Path) -> None:
    """An engine whose weights are not what was meant stops, and goes on after the right ones."""
    weights = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
    digests = stored(folder)
    with engine(folder) as llm:
        llm.update_weights(weights, digests=digests)
        name = "model.layers.1.self_attn.k_proj.weight"
        wrong = {**weights, name: weights[name].roll(1, 0)}
        with pytest.raises(WeightReadError, match=r"layers\.1\.self_attn\.k_proj\.weight: send"):
            llm.update_weights(wrong, digests=digests)
        with pytest.raises(ModelNotReadyError, match="digests"):
            llm.generate([[1, 2]])
        llm.update_weights(weights, digests=digests)
        assert llm.generate([[1, 2]], SamplingParams(max_tokens=1))[0].outputs


def test_digests_of_no_tensor_are_refused_before_anything_is_written(folder: Path) -> None:
    """A name that the model lacks, what is no digest, and what an update cannot change."""
    weights = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
    digests, name = stored(folder), "model.layers.1.self_attn.k_proj.weight"
    changed = {**weights, name: weights[name] * 2}
    new = digests | {name: digest_box(changed[name]).hex}
    wrong: list[tuple[Any, str]] = [
        ({**new, "model.layers.2.norm.weight": digests[name]}, r"name model\.layers\.2\.n"),
        (
            {**new, "model.norm.weigt": digests[name]},
            r"name model\.norm\.weigt, and the model has no",
        ),
        (
            {name: 5},
            "the digest of 'model.layers.1.self_attn.k_proj.weight' should be text of 32 h",
        ),
        ({name: digests[name][1:]}, "should be text of 32 hexadecimal digits"),
        ({5: digests[name]}, "the digest of 5 should be"),
        ([name], "digests should be digests by name, or None"),
    ]
    with engine(folder) as llm:
        first = llm.digest()
        for given, message in wrong:
            for sent in (changed, iter(changed.items())):
                with pytest.raises(ValueError, match=message):
                    llm.update_weights(sent, digests=given, weight_version="new")
        other = {"model.norm.weight": weights["model.norm.weight"]}
        with pytest.raises(WeightReadError, match=r"does not send .*k_proj.*Nothing was written"):
            llm.update_weights(other, digests=new)
        assert (llm.digest(), llm.weight_version) == (first, "0")
        assert llm.generate([[1, 2]], SamplingParams(max_tokens=1))[0].outputs
        llm.update_weights(other, digests=digests)
        llm.update_weights(changed, digests=new, weight_version="new")


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}])
def test_digests_may_have_any_name_that_a_checkpoint_may_have(
    folder: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """A tied tensor under both names, one that is stored fused, and one that a rule skips."""
    weights = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
    save_file({n: t.clone() for n, t in weights.items()}, tmp_path / "model.safetensors")
    sent = {name: tensor * 2 for name, tensor in weights.items()}
    path = "model.layers.0.self_attn."
    parts = [sent.pop(f"{path}{each}_proj.weight") for each in "qkv"]
    sent[f"{path}qkv_proj.weight"] = torch.cat(parts)
    sent[f"{path}rotary_emb.inv_freq"] = torch.ones(4)
    digests = {name: digest_box(tensor).hex for name, tensor in sent.items()}
    with engine(tmp_path, **settings) as llm:
        llm.update_weights(sent, digests=digests)
        one = {name: each for name, each in sent.items() if name != "model.embed_tokens.weight"}
        llm.update_weights(iter(one.items()), digests=digests)
        for name in ("model.norm.weigt", "model.layers.2.mlp.up_proj.weight"):
            with pytest.raises(ValueError, match="the model has no such tensor"):
                llm.update_weights(sent, digests={**digests, name: digests["lm_head.weight"]})
        fused = f"{path}qkv_proj.weight"
        for other in (
            {"model.norm.weight": sent["model.norm.weight"]},
            {f"{path}q_proj.weight": parts[0]},
        ):
            held = llm.digest()
            with pytest.raises(ValueError, match=r"several tensors.*such as .*\.q_proj\.weight"):
                llm.update_weights(other, digests={fused: digests[fused]})
            assert llm.digest() == held
        sent[fused] = torch.cat(parts[::-1])
        with pytest.raises(WeightReadError, match=r"layers\.0\.self_attn\.qkv_proj\.weight: send"):
            llm.update_weights(sent, digests=digests)


def test_what_other_pipeline_stages_hold_is_no_stage_s_own(folder: Path) -> None:
    """A stage skips all names below a part of another one, misspelt ones among them."""
    wrong = "model.norm.weigt"
    names = {"model.norm.weight": 1, "model.layers.0.mlp.up_proj.weight": 0, wrong: None}
    for rank in range(2):
        with pipeline_parallel(rank=rank, size=2):
            model = get_model(model_config=ModelConfig(model=str(folder)))
        own = {name for name, stage in names.items() if stage == rank}
        assert named_tensors(model, names).keys() == own


def test_an_override_that_looks_at_tensors_is_asked_for_no_names() -> None:
    """What it makes of a name shows when the tensor comes; the module's own names are known."""

    class Halves(vLLMModule):
        def __init__(self) -> None:
            super().__init__()
            self.upper, self.lower = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))

        def load_weights(self, weights: Any) -> set[str]:
            halves = [
                (name, half)
                for _, t in weights
                for name, half in zip(("upper", "lower"), t.view(2, 2), strict=True)
            ]
            return super().load_weights(halves)

    found = named_tensors(Halves(), ["upper", "both"])
    assert found == {"upper": (("upper", ""),), "both": (("both", None),)}


def test_a_sharded_state_has_the_digest_of_its_checkpoint(folder: Path, tmp_path: Path) -> None:
    """Files that are cut for two ranks, fused and padded hold the same elements."""
    shard(ModelConfig(model=str(folder)), 2, tmp_path / "sharded")
    found = digest(engine(tmp_path / "sharded", tensor_parallel_size=2))
    assert found.differences(stored(folder)) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"quantization": "fp8"},
        {"quantization": "fp8", "dtype": "bfloat16"},
        {"quantization": "fp8", "tensor_parallel_size": 2},
    ],
    ids=str,
)
def test_an_update_that_is_quantized_or_cast_is_compared_with_what_was_sent(
    folder: Path, settings: dict[str, Any]
) -> None:
    """The digests are the sender's, in its dtype; the engine keeps them in that update alone."""
    weights = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
    sent = {name: digest_box(tensor).hex for name, tensor in weights.items()}
    name = "model.layers.1.mlp.up_proj.weight"
    with engine(folder, **settings) as llm:
        llm.update_weights(weights, digests=sent)
        held = llm.digest().tensors
        assert held[name] != sent[name]
        llm.update_weights(weights, digests=held)  # scales that each rank has computed, too
        llm.update_weights({name: weights[name]}, digests={name: held[name]})
        rolled = {name: weights[name].roll(1, 0)}
        with pytest.raises(WeightReadError, match=r"layers\.1\.mlp\.up_proj\.weight: send"):
            llm.update_weights(rolled, digests={name: sent[name]})
        llm.update_weights(weights)
        model = llm.executor.worker.model
        assert (model.load_state.sources, model.keep_digests) == ({}, False)
        with pytest.raises(WeightLoadError, match="unknown"):
            llm.update_weights({"unknown": rolled[name]}, digests={"unknown": sent[name]})
        assert not model.keep_digests


def test_weights_are_compared_with_the_digests_beside_them(folder: Path, tmp_path: Path) -> None:
    """A load on any ranks refuses, by name, a file that is not what its digests were made of."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    names = stored(folder)
    (copy / "digests.json").write_text(json.dumps(digests_file([names])))
    asked = {"load_config": LoadConfig(digests=True), "dtype": "bfloat16", "quantization": "fp8"}
    with engine(copy, **asked) as llm:
        assert llm.apply_model(read_digests) == [names]
    with engine(copy, tensor_parallel_size=2, **asked) as llm:
        llm.reload_weights()
    path = copy / "model-1.safetensors"
    weights = load_file(path)
    name = next(name for name in weights if name.endswith("proj.weight"))
    weights[name][3, 1] += 1
    save_file(weights, path)
    message = f"{re.escape(name)}: ranks? 0.* read values whose digests are not those in"
    engine(copy).close()
    for size in (1, 2):
        with pytest.raises(WeightReadError, match=message):
            engine(copy, tensor_parallel_size=size, **asked)
    (copy / "digests.json").write_text(
        '{"format": "vllm-module digests", "version": 1, "parts": [1]}'
    )
    with pytest.raises(CheckpointFormatError, match="is damaged: parts should be a list"):
        engine(copy, **asked)


def read_digests(model: Any) -> dict[str, str]:
    found: dict[str, str] = model.load_report.digests.tensors
    return found
