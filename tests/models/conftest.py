"""Tiny checkpoints that transformers saved, and what transformers computes with each of them."""

from __future__ import annotations

import copy
import runpy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

STEPS = 64
WITHIN = 1e-4  # of each logit, in float32

# pytest's importlib mode knows no sibling imports, and torchrun runs the same file as a script.
_one_rank = runpy.run_path(str(Path(__file__).with_name("one_rank.py")))


def config_of(kind: str, **entries: Any) -> dict[str, Any]:
    small = {
        "vocab_size": 130,  # padded to 192: the last of 4 ranks holds padding alone
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,  # fewer than 4 ranks
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return {"model_type": kind, **small, **entries}


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,  # so low that wavelengths lie on both sides of each threshold
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}

MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.0625,
    "logits_scaling": 2.0,
}

CONFIGS = {
    "granite": config_of("granite", **MULTIPLIERS, num_hidden_layers=3),
    "granite-tied-biases-one-kv-head": config_of(
        "granite",
        **MULTIPLIERS,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        num_key_value_heads=1,
    ),
    "llama": config_of("llama", num_key_value_heads=4, vocab_size=97),
    "llama-tied-biases": config_of(
        "llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "llama-llama3": config_of("llama", rope_parameters=LLAMA3),
    "llama-llama3-tied-biases-one-kv-head": config_of(
        "llama",
        rope_parameters=LLAMA3,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        num_key_value_heads=1,
    ),
    "llama-yarn": config_of("llama", rope_parameters=YARN, vocab_size=97),
    "llama-yarn-tied-biases-one-kv-head": config_of(
        "llama",
        rope_parameters=YARN | {"attention_factor": 1.25, "truncate": False},
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        num_key_value_heads=1,
    ),
    "llama-linear": config_of("llama", rope_parameters=LINEAR, mlp_bias=True),
    # One prompt is longer than this limit; the others pass it while they are generated.
    "llama-dynamic": config_of(
        "llama", rope_parameters=DYNAMIC, max_position_embeddings=32, attention_bias=True
    ),
    "llama-gelu-head-size": config_of("llama", head_dim=24, hidden_act="gelu_pytorch_tanh"),
    "mistral-window": config_of("mistral", sliding_window=5, num_hidden_layers=3),
    "mistral": config_of("mistral", sliding_window=None, head_dim=24, tie_word_embeddings=True),
    "qwen2": config_of("qwen2", tie_word_embeddings=True),
    "qwen2-window-one-kv-head": config_of(
        "qwen2",
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=1,
        num_hidden_layers=3,
        num_key_value_heads=1,
    ),
    "qwen2-window-unused": config_of(
        "qwen2", use_sliding_window=False, sliding_window=6, max_window_layers=0
    ),
    "qwen3": config_of("qwen3", head_dim=24, num_attention_heads=8, num_key_value_heads=8),
    "qwen3-tied-biases-window": config_of(
        "qwen3",
        head_dim=24,
        num_attention_heads=8,
        attention_bias=True,
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=1,
        rope_parameters=YARN,
    ),
}


@dataclass(frozen=True)
class Reference:
    """What transformers computes, a prompt at a time."""

    prompts: list[list[int]]
    prompt_logits: list[torch.Tensor]  # [tokens, vocab] of each prompt
    tokens: list[list[int]]  # STEPS of each prompt
    step_logits: torch.Tensor  # [STEPS, prompts, vocab]

    @property
    def job(self) -> tuple[list[list[int]], int]:
        """What ``compute`` of one_rank.py takes after the folder."""
        return self.prompts, STEPS

    @property
    def is_robust(self) -> bool:
        """Whether logits within the tolerance must give these tokens, and more than a few."""
        best, second = self.step_logits.topk(2).values.unbind(-1)
        differ = all(len(set(row)) > 3 for row in self.tokens)
        return differ and (best - second).min().item() > 2 * WITHIN

    def check(self, computed: dict[str, Any]) -> None:
        """Compare what ``compute`` of one_rank.py returned."""
        close = {"rtol": 0, "atol": WITHIN}
        for logits, expected in zip(computed["prompt_logits"], self.prompt_logits, strict=True):
            torch.testing.assert_close(logits, expected, **close)
        torch.testing.assert_close(computed["step_logits"], self.step_logits, **close)
        assert computed["tokens"] == self.tokens


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    reference: Reference


def randomized(config: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """Return a model with weights, norms and biases large enough for a wrong one to show."""
    entries = dict(config)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**entries))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            scale = 1.0  # of both signs: a tied head would else repeat the last token for ever
        elif name.endswith("bias") or "embed_tokens" in name or "lm_head" in name:
            scale = 0.5
        else:
            scale = 0.15
        parameter.data.normal_(0, scale, generator=generator)
    return model


def save(folder: Path, model: PreTrainedModel) -> Path:
    """Have transformers save ``model`` in several files, with an index."""
    model.save_pretrained(folder, max_shard_size="60KB")
    assert (folder / "model.safetensors.index.json").is_file()
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@torch.no_grad()
def _refer(folder: Path, dtype: torch.dtype = torch.float32) -> Reference:
    """Have transformers load ``folder`` and compute."""
    # Eager attention: the softmax written out, not the fused function that is under test.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    model.eval()
    vocab = model.config.vocab_size
    generator = torch.Generator().manual_seed(1)
    lengths = (16, 1, 40, 5, 17)  # 16 and 17 end on either side of a page's edge
    prompts = [torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths]
    prompts[0][:2] = [0, vocab - 1]
    prompt_logits, tokens, step_logits = [], [], []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        # A copy each: dynamic scaling leaves the longest length it has seen in the model.
        prompt_logits.append(copy.deepcopy(model)(ids).logits[0])
        out = copy.deepcopy(model).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=STEPS,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens.append(out.sequences[0, len(prompt) :].tolist())
        step_logits.append(torch.cat(out.logits))
    return Reference(prompts, prompt_logits, tokens, torch.stack(step_logits, dim=1))


def make_checkpoint(folder: Path, config: dict[str, Any]) -> Checkpoint:
    """Draw weights until what transformers generates with them is robust."""
    for seed in count():
        assert seed < 10, "no weights found that generate robustly"
        reference = _refer(save(folder, randomized(config, seed)))
        if reference.is_robust:
            return Checkpoint(folder, reference)
    raise AssertionError


@pytest.fixture(autouse=True, scope="session")
def _no_progress_bars() -> Iterator[None]:
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@pytest.fixture(autouse=True, scope="session")
def _one_thread_a_rank() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # four simulated ranks would else wait on a team of threads each
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Give the tiny checkpoint of a name in CONFIGS, made once."""
    made: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in made:
            made[name] = make_checkpoint(tmp_path_factory.mktemp(name), CONFIGS[name])
        return made[name]

    return get


@pytest.fixture(scope="session", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tiny: Callable[[str], Checkpoint]) -> Checkpoint:
    """Each of the tiny checkpoints in turn."""
    return tiny(request.param)


@pytest.fixture(scope="session")
def compute() -> Callable[..., dict[str, Any]]:
    """Give ``compute`` of one_rank.py."""
    return _one_rank["compute"]  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def generated() -> Callable[..., tuple[list[list[int]], int]]:
    """Give ``generated`` of one_rank.py."""
    return _one_rank["generated"]  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def refer() -> Callable[..., Reference]:
    """Give the function that has transformers load a folder and compute."""
    return _refer
