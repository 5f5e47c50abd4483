"""The digest of a running engine: that of its checkpoint, whatever ranks and files it came from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vllm_module import LLM
from vllm_module.core.digests import ModelDigest
from vllm_module.errors import RankError


def stored(folder: Path) -> dict[str, str]:
    """Return what the command prints of the files."""
    command = [sys.executable, "-m", "vllm_module.cli", "digest", str(folder), "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    return {each["name"]: each["digest"] for each in json.loads(done.stdout)["tensors"]}


def digest(llm: LLM) -> ModelDigest:
    try:
        return llm.digest()
    finally:
        llm.shutdown()


def test_an_engine_has_the_digest_of_its_checkpoint(folder: Path) -> None:
    """On one rank and on two, in the checkpoint's dtype, as the command prints it."""
    expected = stored(folder)
    one = digest(LLM(str(folder), dtype="float32"))
    assert one.differences(expected) == []
    two = digest(LLM(str(folder), dtype="float32", tensor_parallel_size=2))
    assert two == one
    assert two.hex == one.hex


def test_updates_in_any_order_give_the_digest_of_a_fresh_load(folder: Path) -> None:
    """An update of everything, in two halves, leads to the other checkpoint's digest and back."""
    weights = load_file(next(folder.glob("*.safetensors")))
    other = {name: tensor * 2 for name, tensor in weights.items()}
    llm = LLM(str(folder), dtype="float32")
    try:
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
        llm.sleep()
        with pytest.raises((RuntimeError, RankError)):
            llm.digest()
        llm.wake_up()
        assert llm.digest() == first
    finally:
        llm.shutdown()
