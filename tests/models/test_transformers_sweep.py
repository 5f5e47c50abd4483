"""Models of transformers in the wrapper: a part of ``make sweep``, tokens, and what is refused."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module import LLM, ModelConfig, SamplingParams
from vllm_module.distributed import tensor_parallel
from vllm_module.errors import UnsupportedModelError, WeightLoadError
from vllm_module.model_source import ModelSource
from vllm_module.wrapped.mask import MaskRule, rule_of

_sweep = runpy.run_path(str(Path(__file__).with_name("sweep.py")))
try_type: Callable[..., dict[str, Any]] = _sweep["try_type"]
tiny_model: Callable[..., Any] = _sweep["tiny_model"]

# Dense, windows and soft caps, experts stored apart and packed, shared K/V, sinks, a tied head.
RIGHT = ("smollm3", "gemma2", "mixtral", "granitemoe", "gpt_oss", "deepseek_v3", "gpt_neox")
REFUSED = {
    "bert": "is_causal is false",
    "mamba": "recurrent state",
    "bloom": "takes no position_ids",
    "bart": "encoder-decoder",
    "doge": "a mask of its own",
    "falcon": "0 times",
}


@pytest.mark.parametrize("kind", RIGHT)
def test_logits_are_those_of_transformers(kind: str) -> None:
    """A wrapped model loads what transformers saves, and gives its logits on 1 and 2 ranks."""
    result = try_type(kind, (1, 2))
    assert result["outcome"] == "right", result
    assert result["sizes"]["2"]["outcome"] == "right", result


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_would_be_wrong_is_refused(kind: str) -> None:
    """What cannot be computed right is refused, with its reason."""
    result = try_type(kind, (1,))
    assert result["outcome"] == "refused", result
    assert REFUSED[kind] in result["reason"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with windows, saved by transformers."""
    folder = tmp_path_factory.mktemp("mistral")
    tiny_model("mistral").save_pretrained(folder)
    return folder


def test_tokens_are_those_of_transformers(llama: Path) -> None:
    """Greedy tokens of prompts of mixed lengths, in chunks, are those of the full forward."""
    library = tiny_model("mistral")
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [40, 41], [99]]
    options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True}
    with LLM(
        str(llama),
        model_impl="transformers",
        max_model_len=64,
        max_num_batched_tokens=8,
        **options,
    ) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(max_tokens=32, temperature=0, ignore_eos=True),
            use_tqdm=False,
        )
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(prompt)
        for _ in range(32):
            with torch.no_grad():
                tokens.append(int(library(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert [*output.outputs[0].token_ids] == tokens[len(prompt) :]


def _changed(folder: Path, tmp_path: Path, **entries: Any) -> Path:
    config = json.loads((folder / "config.json").read_text()) | entries
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"model_type": "of_next_year"}, "knows no model_type of_next_year"),
        ({"architectures": ["NoSuchForCausalLM"], "model_type": "t5"}, "no causal language model"),
        ({"num_attention_heads": "four"}, "refuses config.json"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope scaling of type dynamic",
        ),
    ],
)
def test_a_configuration_that_is_not_understood_is_refused(
    llama: Path, tmp_path: Path, entries: dict[str, Any], expected: str
) -> None:
    """A type, an entry or a rope that the wrapper cannot serve is named."""
    with pytest.raises(WeightLoadError, match=expected):
        _source(_changed(llama, tmp_path, **entries)).build(torch.device("cpu"))


def test_heads_that_do_not_divide_are_refused(llama: Path) -> None:
    """Four heads on three ranks are refused with the numbers."""
    with (
        tensor_parallel(rank=0, size=3),
        pytest.raises(WeightLoadError, match=r"4 attention heads cannot be shared evenly by 3"),
    ):
        _source(llama).build(torch.device("cpu"))


def test_native_is_not_replaced(llama: Path) -> None:
    """With auto, a model of ours is taken where there is one; with native no other is."""
    source = ModelSource.find(ModelConfig(model=str(llama)))
    assert type(source.build(torch.device("cpu"))).__module__ == "vllm_module.models.llama"


def test_native_alone_refuses_what_is_not_ours(llama: Path, tmp_path: Path) -> None:
    """model_impl native refuses an architecture that only transformers has."""
    folder = _changed(llama, tmp_path, architectures=["SmolLM3ForCausalLM"], model_type="smollm3")
    with pytest.raises(UnsupportedModelError, match="model_impl is 'native'"):
        ModelSource.find(ModelConfig(model=str(folder), model_impl="native"))


def test_masks_are_recognized_by_their_values() -> None:
    """A window, a chunk and all tokens before are told apart; another mask is none of them."""
    assert rule_of(lambda b, h, q, k: k <= q, None) == MaskRule()
    assert rule_of(lambda b, h, q, k: (k <= q) & (k > q - 9), 9) == MaskRule(window=9)
    assert rule_of(lambda b, h, q, k: (k <= q) & (k // 9 == q // 9), 9) == MaskRule(chunk=9)
    assert rule_of(lambda b, h, q, k: (k <= q) & (k > q - 10), 9) is None
    assert rule_of(lambda b, h, q, k: k >= 0, None) is None


def _source(folder: Path) -> ModelSource:
    config = ModelConfig(model=str(folder), model_impl="transformers", dtype="float32")
    return ModelSource.find(config)
