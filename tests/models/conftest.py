"""Tiny checkpoints that transformers saves, and what transformers computes with each."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from hypothesis import settings
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

STEPS = 32
# Those before give a token by a hair.
FIRST_SEEDS = {
    "granite-tied-biases-one-kv-head": 23, "qwen3-next": 2, "qwen3-moe": 1, "olmo2": 1,
    "olmo2-biases-one-kv-head": 1, "mixtral": 1, "llama-yarn-tied-biases-one-kv-head": 1,
    "llama-linear": 1, "llama-dynamic": 1, "llama": 1, "gemma2": 1, "bamba": 1,
}  # fmt: skip
WITHIN = 1e-4  # tolerance of each logit, in float32

# Layers are tested against the laws with more examples. Models only wire them together.
settings.register_profile("models", settings.get_profile("ci"), max_examples=2)

HERE = Path(__file__).parent

# runpy, because pytest's importlib mode has no imports between test files.
_one_rank = runpy.run_path(str(Path(__file__).with_name("one_rank.py")))
_fill_once = runpy.run_path(str(Path(__file__).parents[1] / "support.py"))["fill_once"]
_configurations = runpy.run_path(str(Path(__file__).with_name("configurations.py")))
CONFIGS: dict[str, dict[str, Any]] = _configurations["CONFIGS"]
FILES: dict[str, dict[str, Any]] = _configurations["FILES"]


@dataclass(frozen=True)
class Reference:
    """What transformers computes for each prompt alone."""

    prompts: list[list[int]]
    prompt_logits: list[torch.Tensor]  # [tokens, vocab] of each prompt
    tokens: list[list[int]]  # STEPS greedy tokens for each prompt
    step_logits: torch.Tensor  # [STEPS, prompts, vocab]

    @property
    def job(self) -> tuple[list[list[int]], int]:
        """The arguments of ``compute`` (in one_rank.py) after the folder."""
        return self.prompts, len(self.step_logits)

    def first(self, steps: int) -> Reference:
        """Return the reference of fewer steps."""
        tokens = [each[:steps] for each in self.tokens]
        return replace(self, tokens=tokens, step_logits=self.step_logits[:steps])

    @property
    def is_robust(self) -> bool:
        """Whether logits within the tolerance give these tokens, and the tokens vary."""
        best, second = self.step_logits.topk(2).values.unbind(-1)
        varied = all(len(set(row)) > 3 for row in self.tokens)
        return varied and (best - second).min().item() > 2 * WITHIN

    def check_prompts(self, computed: dict[str, Any]) -> None:
        """Compare the prompts' logits with those that ``compute`` returned."""
        for logits, expected in zip(computed["prompt_logits"], self.prompt_logits, strict=True):
            torch.testing.assert_close(logits, expected, rtol=0, atol=WITHIN)

    def check(self, computed: dict[str, Any]) -> None:
        """Compare all logits and tokens with those that ``compute`` returned."""
        self.check_prompts(computed)
        torch.testing.assert_close(computed["step_logits"], self.step_logits, rtol=0, atol=WITHIN)
        assert computed["tokens"] == self.tokens


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    reference: Reference


EMBEDDINGS = ("embed_tokens", "lm_head", ".wte.", ".wpe.")


def randomized(config: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """Return a model whose weights, norms and biases are large enough to expose a wrong one."""
    entries = dict(config)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**entries))
    generator = torch.Generator().manual_seed(seed)
    # Gemma and Qwen3-Next add 1 to weights of norms, and Gemma multiplies its embeddings by 8.
    gemma = config["model_type"].startswith("gemma")
    qwen3_next = config["model_type"].startswith(("qwen3_next", "qwen3_5"))
    for name, parameter in model.named_parameters():
        mean = 0.0
        if ("norm" in name or ".ln_" in name) and name.endswith("weight"):
            scale = 1.0  # both signs, because a tied head would otherwise repeat the last token
            mean = -1.0 if gemma or (qwen3_next and "linear_attn" not in name) else 0.0
        elif "embed_tokens" in name and gemma:
            scale = 0.2
        elif "lm_head" in name and qwen3_next:
            # Rounding its states once changes larger logits by more than the tolerance.
            scale = 0.15
        elif name.endswith("bias") or any(part in name for part in EMBEDDINGS):
            scale = 0.5
        else:
            scale = 0.15
        parameter.data.normal_(mean, scale, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.5, generator=generator)
    return model


def save(folder: Path, model: PreTrainedModel) -> Path:
    """Save ``model`` with transformers in several files with an index."""
    model.save_pretrained(folder, max_shard_size="60KB")
    assert (folder / "model.safetensors.index.json").is_file()
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def _generated(model: PreTrainedModel, prompts: list[list[int]]) -> Any:
    """Return what generating greedily after ``prompts`` gives, which are padded to one length."""
    longest = max(map(len, prompts))
    lengths = torch.tensor([[len(prompt)] for prompt in prompts])
    return model.generate(
        torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts]),
        attention_mask=(torch.arange(longest) >= longest - lengths).long(),
        do_sample=False,
        max_new_tokens=STEPS,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )


def _computed(
    model: PreTrainedModel, prompt: list[int], guess: list[int]
) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """Return the logits of a prompt alone, its greedy tokens, and the logits that give these.

    If each token of ``guess`` has the largest logit after the prompt and the tokens before it,
    generating step by step would give the same.
    """
    if len(guess) == STEPS:
        logits = model(torch.tensor([prompt + guess[:-1]])).logits[0]
        steps = logits[len(prompt) - 1 :]
        if steps.argmax(-1).tolist() == guess:
            return logits[: len(prompt)], guess, steps
    out = _generated(model, [prompt])
    tokens = out.sequences[0, len(prompt) :].tolist()
    return model(torch.tensor([prompt])).logits[0], tokens, torch.cat(out.logits)


@torch.no_grad()
def _refer(folder: Path, dtype: torch.dtype = torch.float32, robust: bool = False) -> Reference:
    """Load ``folder`` with transformers and compute the reference.

    If it must be robust, it ends with the first prompt for which it is not.
    """
    # Eager attention writes the softmax out. The fused function is under test.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    model.eval()
    vocab = model.config.vocab_size
    generator = torch.Generator().manual_seed(1)
    lengths = (16, 1, 40, 5, 17)  # 16 fills a page, 17 starts another
    prompts = [torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths]
    prompts[0][:2] = [0, vocab - 1]
    # States are rounded in each step, and some frequencies depend on how many tokens there are.
    ropes = str(getattr(model.config, "rope_parameters", None))
    guesses: list[list[int]] = [[] for _ in prompts]
    if not (model._is_stateful or "dynamic" in ropes or "longrope" in ropes):
        guesses = _generated(model, prompts).sequences[:, max(lengths) :].tolist()
    prompt_logits, tokens, step_logits = [], [], []
    for prompt, guess in zip(prompts, guesses, strict=True):
        of_prompt, of_steps, logits = _computed(model, prompt, guess)
        prompt_logits.append(of_prompt)
        tokens.append(of_steps)
        step_logits.append(logits)
        reference = Reference(prompts, prompt_logits, tokens, torch.stack(step_logits, dim=1))
        if robust and not reference.is_robust:
            break
    return reference


def make_checkpoint(folder: Path, config: dict[str, Any], first: int = 0) -> Checkpoint:
    """Draw weights until the reference that transformers computes with them is robust."""
    for seed in count(first):
        assert seed < 40, "no weights found that generate robustly"
        reference = _refer(save(folder, randomized(config, seed)), robust=True)
        if reference.is_robust:
            return Checkpoint(folder, reference)
    raise AssertionError


# How a model is wired changes little of what these laws are about, which take most of the time.
# They hold for all layers, and each for a third of the models: "make laws" holds all for all.
# test_stages.py compares stages of each model with the whole.
COSTLY = "assert_laid_out", "assert_cost_linear", "assert_pure", "assert_staged"


@pytest.hookimpl(tryfirst=True)  # the other hook leaves out what is marked
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and item.originalname.endswith("_keeps_the_law"):
            law, name = item.callspec.params["law"].__name__, item.originalname.encode()
            is_costly = item.path.parent == HERE and law in COSTLY
            if is_costly and (crc32(name) + COSTLY.index(law)) % 3:
                item.add_marker(pytest.mark.at_length)


@pytest.fixture(autouse=True, scope="session")
def _no_progress_bars() -> Iterator[None]:
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@pytest.fixture(autouse=True)
def _few_examples() -> Iterator[None]:
    before = settings.get_current_profile_name()
    settings.load_profile("models")
    yield
    settings.load_profile(before)


@pytest.fixture(autouse=True, scope="module")
def _one_thread_per_rank() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # a simulated rank is a thread, and four would share two cores
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Return the tiny checkpoint of a name in CONFIGS. Each is made once for all workers."""
    checkpoints: dict[str, Checkpoint] = {}

    def make(directory: Path) -> None:
        name = directory.name.removeprefix("tiny-")
        made = make_checkpoint(directory / name, CONFIGS[name], FIRST_SEEDS.get(name, 0))
        file = made.folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | FILES.get(name, {})))
        torch.save(vars(made.reference), directory / "reference.pt")

    def get(name: str) -> Checkpoint:
        if name not in checkpoints:
            made = _fill_once(tmp_path_factory.getbasetemp(), f"tiny-{name}", make)
            reference = Reference(**torch.load(made / "reference.pt"))
            checkpoints[name] = Checkpoint(made / name, reference)
        return checkpoints[name]

    return get


@pytest.fixture(scope="session", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tiny: Callable[[str], Checkpoint]) -> Checkpoint:
    """Return each tiny checkpoint in turn."""
    return tiny(request.param)


@pytest.fixture(scope="session")
def compute() -> Callable[..., dict[str, Any]]:
    """Return ``compute`` of one_rank.py."""
    return _one_rank["compute"]  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def build() -> Callable[..., Any]:
    """Return ``build`` of one_rank.py."""
    return _one_rank["build"]  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def generate() -> Callable[..., tuple[list[list[int]], int]]:
    """Return ``generate`` of one_rank.py."""
    return _one_rank["generate"]  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def refer() -> Callable[..., Reference]:
    """Return the function that computes a folder's reference with transformers."""
    return _refer
