"""The digest of a running engine: that of its checkpoint, whatever ranks and files it came from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import LLM, ModelConfig, SamplingParams
from vllm_module.core.digests import ModelDigest
from vllm_module.errors import ModelNotReadyError, WeightReadError
from vllm_module.export.sharded_state import shard
from vllm_module.testing import random_weights

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
    command = [sys.executable, "-m", "vllm_module.cli", "digest", str(folder), "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    return {each["name"]: each["digest"] for each in json.loads(done.stdout)["tensors"]}


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


def test_a_sharded_state_has_the_digest_of_its_checkpoint(folder: Path, tmp_path: Path) -> None:
    """Files that are cut for two ranks, fused and padded hold the same elements."""
    shard(ModelConfig(model=str(folder)), 2, tmp_path / "sharded")
    found = digest(engine(tmp_path / "sharded", tensor_parallel_size=2))
    assert found.differences(stored(folder)) == []
