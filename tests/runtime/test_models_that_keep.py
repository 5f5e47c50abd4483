"""A user's models that keep something from step to step give the tokens that they give eagerly."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_module import LLM, SamplingParams, register_model
from vllm_module.build import registry
from vllm_module.kernels.matmul import linear
from vllm_module.kernels.matmul.products import Products
from vllm_module.kernels.recording import Recording
from vllm_module.models.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP, LlamaModel
from vllm_module.runtime import recorded_steps
from vllm_module.runtime.ranks import executor

pytest.importorskip("numba")
CONFIG: dict[str, Any] = {
    "architectures": ["KeepsForCausalLM"], "dtype": "float32", "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
CALLS: list[int] = []
ROUNDS = [[[1, 2, 3]], [[1, 2, 3, 4], [7, 8]], [[5, 6, 7, 8, 9, 10]]]


class KeepsMLP(LlamaMLP):
    """An MLP with what a model may keep; ``change`` is set by a test."""

    change: Callable[[Any, Tensor], Tensor]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.count, self.seen, self.known = 0, list[int](), dict[str, int]()
        self.other = SimpleNamespace(count=0)
        self.kept = torch.zeros(1)
        self.array = np.zeros(1, np.float32)
        self.memory: Tensor | None = None
        self.register_buffer("steps", torch.zeros(1), persistent=False)
        self.steps: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(type(self).change(self, x))


class KeepsDecoderLayer(LlamaDecoderLayer):
    mlp_class = KeepsMLP


class KeepsModel(LlamaModel):
    layer_class = KeepsDecoderLayer


class KeepsForCausalLM(LlamaForCausalLM):
    model_class = KeepsModel


def number(mlp: Any, x: Tensor) -> Tensor:
    mlp.count += 1
    return x if mlp.count < 9 else -x


def entries(mlp: Any, x: Tensor) -> Tensor:
    mlp.seen.append(0)
    return x if len(mlp.seen) < 9 else -x


def entry(mlp: Any, x: Tensor) -> Tensor:
    mlp.known["steps"] = mlp.known.get("steps", 0) + 1
    return x if mlp.known["steps"] < 9 else -x


def of_an_object(mlp: Any, x: Tensor) -> Tensor:
    mlp.other.count += 1
    return x if mlp.other.count < 9 else -x


def array(mlp: Any, x: Tensor) -> Tensor:
    mlp.array += 1
    return x if mlp.array < 9 else -x


def buffer(mlp: Any, x: Tensor) -> Tensor:
    mlp.steps.add_(1)
    return x * torch.where(mlp.steps < 7, 1, -1)


def tensor(mlp: Any, x: Tensor) -> Tensor:
    mlp.kept.add_(1)
    return x * torch.where(mlp.kept < 7, 1, -1)


def another_tensor(mlp: Any, x: Tensor) -> Tensor:
    mlp.kept = mlp.kept + 1
    return x * torch.where(mlp.kept < 7, 1, -1)


def of_the_prompt(mlp: Any, x: Tensor) -> Tensor:
    if len(x) > 2:
        mlp.memory = x.mean(0, keepdim=True)
    return x + mlp.memory


def number_of_the_prompt(mlp: Any, x: Tensor) -> Tensor:
    if len(x) > 2:
        mlp.count = len(x)
    return x if mlp.count % 2 else -x


def drawn(mlp: Any, x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


def drawn_in_place(mlp: Any, x: Tensor) -> Tensor:
    return x + torch.empty_like(x).normal_()


@torch.library.custom_op("keeps::counted", mutates_args=())
def counted(x: Tensor, first: bool) -> Tensor:
    """Count calls outside of the model, as an operation does that meets other processes."""
    CALLS.append(0)
    if first:
        CALLS.clear()
    return x.clone() if len(CALLS) < 9 else -x


def of_another_library(mlp: Any, x: Tensor) -> Tensor:
    return counted(x, len(x) > 2)


def tokens(llm: LLM) -> list[list[list[int]]]:
    torch.manual_seed(0)
    asked = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    found = []
    for prompts in ROUNDS:
        given = [{"prompt_token_ids": each} for each in prompts]
        outputs = llm.generate(given, asked, use_tqdm=False)
        found.append([list(each.outputs[0].token_ids) for each in outputs])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keeps")
    torch.manual_seed(0)
    model = KeepsForCausalLM(KeepsForCausalLM.config_class(**CONFIG))
    save_file(
        {
            name: torch.ones(each.shape) if each.dim() == 1 else torch.randn(each.shape) * 0.3
            for name, each in model.expected_weights().items()
        },
        path / "model.safetensors",
    )
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Register the model, and choose the loops for its tiny weights; list what is done again."""
    again, found = Recording.again, list[int]()

    def counted(recording: Recording) -> None:
        found.append(1)
        again(recording)

    # Replaced: what a process registers stays, because no user needs to take it back.
    monkeypatch.setattr(registry, "registered", registry.Registrations())
    register_model("KeepsForCausalLM", KeepsForCausalLM)
    # Tiny weights gain nothing from the loops, and a busy machine has strange clocks.
    monkeypatch.setattr(linear, "_LARGE_WEIGHT", 1)
    chosen = Products(floats=range(1, 9), codes=8, pages=True)
    monkeypatch.setattr(executor, "fastest_for", lambda *_, **__: chosen)
    monkeypatch.setattr(recorded_steps, "_GAIN", 0)
    monkeypatch.setattr(Recording, "again", counted)  # counts what is done again
    yield found
    registry._announced.cache_clear()


def both(
    folder: Path, change: Callable[[Any, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
    """Return the tokens of an engine that records no steps, and of one that may."""
    monkeypatch.setattr(KeepsMLP, "change", staticmethod(change), raising=False)  # the case's
    found = []
    for eager in (True, False):
        with LLM(folder, device="cpu", max_model_len=64, enforce_eager=eager) as llm:
            found.append(tokens(llm))
    return found[0], found[1]


@pytest.mark.parametrize(
    "change",
    [number, entries, entry, of_an_object, array, buffer, tensor, another_tensor, drawn,
     drawn_in_place, of_another_library],
)  # fmt: skip
def test_a_step_that_changes_what_is_kept_is_computed_once(
    change: Any, folder: Path, replayed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, recorded = both(folder, change, monkeypatch)
    assert recorded == eager
    assert not replayed


@pytest.mark.parametrize("change", [of_the_prompt, number_of_the_prompt])
def test_what_a_prompt_leaves_is_that_of_the_last_prompt(
    change: Any, folder: Path, replayed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, recorded = both(folder, change, monkeypatch)
    assert recorded == eager


def test_what_is_read_and_not_changed_is_recorded(
    folder: Path, replayed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(mlp: Any, x: Tensor) -> Tensor:
        return x * (1 + mlp.count + len(mlp.seen)) + mlp.kept + mlp.steps

    eager, recorded = both(folder, read, monkeypatch)
    assert recorded == eager
    assert replayed


def test_an_address_that_a_model_takes_is_refused(
    folder: Path, replayed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No recording sees what is done with it."""

    def at_an_address(mlp: Any, x: Tensor) -> Tensor:
        y = x.clone()
        first = ctypes.c_float.from_address(y.data_ptr())
        first.value = max(first.value, 0.1) * 3
        return y

    eager, recorded = both(folder, at_an_address, monkeypatch)
    assert recorded == eager
    assert not replayed
