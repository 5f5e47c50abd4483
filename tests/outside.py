"""A model from outside, its checkpoint and file, and fixtures of tests with such models.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module import LLM, SamplingParams
from vllm_module.build import registry
from vllm_module.models.llama import LlamaConfig, LlamaForCausalLM
from vllm_module.testing import random_weights, write_checkpoint

CPU = torch.device("cpu")
NAMES = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
CONFIG: dict[str, Any] = {
    "architectures": ["OutsideForCausalLM"],
    "n_embd": 16,
    "intermediate_size": 32,
    "n_layer": 1,
    "n_head": 4,
    "vocab_size": 32,
    "n_positions": 64,
    "dtype": "float32",
}

# A user's file: its model reads other names, and ties the head unless config.json says otherwise.
CODE = f"""
from vllm_module.models.llama import LlamaConfig, LlamaForCausalLM

class OutsideConfig(LlamaConfig):
    attribute_map = { ({ours: stored for stored, ours in NAMES.items()})!r}
    tie_word_embeddings: bool = True

class OutsideForCausalLM(LlamaForCausalLM):
    config_class = OutsideConfig
"""


class Outside(LlamaForCausalLM):
    class config_class(LlamaConfig):
        attribute_map = {ours: stored for stored, ours in NAMES.items()}
        tie_word_embeddings: bool = True


def forget_files() -> None:
    """Make this process one that has not run any file of a user's."""
    registry.registered.files.clear()
    registry._from_files.clear()
    for name in [name for name in sys.modules if name.startswith("model_code_mine")]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def _registrations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget what a test registers: the registry belongs to the process."""
    # Replaced: what a process registers stays, because no user needs to take it back.
    monkeypatch.setattr(registry, "registered", registry.Registrations())
    yield
    forget_files()
    registry._announced.cache_clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a checkpoint of the architecture from outside."""
    folder = tmp_path_factory.mktemp("outside")
    model = Outside(Outside.config_class(**CONFIG))
    write_checkpoint(folder, random_weights(model.expected_weights(), seed=0), config=CONFIG)
    return folder


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(CODE)
    return tmp_path / "mine.py"


def tokens(folder: Path, **options: Any) -> list[int]:
    with LLM(str(folder), device="cpu", kv_cache_memory_bytes=1 << 18, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        (output,) = llm.generate({"prompt_token_ids": [1, 2, 3]}, params, use_tqdm=False)
        assert output.error is None
        return output.outputs[0].token_ids
