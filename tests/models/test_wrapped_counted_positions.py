"""Models of transformers that count positions, though they are given those of their tokens."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.mistral import modeling_mistral

from vllm_module import LLM, ModelConfig, SamplingParams
from vllm_module.build.model_source import ModelSource
from vllm_module.errors import UnsupportedModelError
from vllm_module.wrapped.counted_positions import TOKENS, Counting, EarlierTokens

# Pytest's importlib mode has no imports between test files.
SWEEP = runpy.run_path(str(Path(__file__).with_name("sweep.py")))


@pytest.mark.parametrize("floor_scale", [4, 16, 17])
def test_temperature_by_position_is_that_of_each_sequence(tmp_path: Path, floor_scale: int) -> None:
    """Llama 4 counts the tokens of a batch; several prompts get transformers' logprobs of each."""
    library = SWEEP["tiny_model"](
        "llama4_text", num_key_value_heads=2, no_rope_layers=[0, 0], attn_scale=2.0,
        floor_scale=floor_scale, attention_chunk_size=64,
    )  # fmt: skip
    library.save_pretrained(tmp_path)
    prompts = [[(7 * at + 13 * length) % 120 + 4 for at in range(length)] for length in (15, 19, 9)]
    with LLM(
        str(tmp_path), model_impl="transformers", dtype="float32", device="cpu", max_model_len=64,
        skip_tokenizer_init=True, max_num_batched_tokens=24,
    ) as llm:  # fmt: skip
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=1),
            use_tqdm=False,
        )
    for prompt, output in zip(prompts, outputs, strict=True):
        made = output.outputs[0]
        tokens = torch.tensor([*prompt, *made.token_ids])
        with torch.no_grad():
            logits = library(input_ids=tokens[None], use_cache=False).logits[
                0, len(prompt) - 1 : -1
            ]
        expected = logits.log_softmax(-1).gather(-1, tokens[len(prompt) :, None])[:, 0]
        assert made.logprobs is not None
        pairs = zip(made.logprobs, made.token_ids, strict=True)
        logprobs = [each[token].logprob for each, token in pairs]
        torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=1e-4)


def test_counted_positions_that_cannot_be_put_right_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that counts the tokens of a batch, and asks no cache how many came before."""
    SWEEP["tiny_model"]("mistral").save_pretrained(tmp_path)
    forward: Any = modeling_mistral.MistralMLP.forward

    def counting(mlp: Any, x: torch.Tensor) -> torch.Tensor:
        late = torch.arange(x.shape[1], device=x.device) // 1000  # of no short sequence
        return forward(mlp, x * (1 + late[:, None]))

    # No published class does this and takes position_ids.
    monkeypatch.setattr(modeling_mistral.MistralMLP, "forward", counting)
    config = ModelConfig(model=str(tmp_path), model_impl="transformers", dtype="float32")
    with pytest.raises(UnsupportedModelError, match="MistralForCausalLM counts positions itself"):
        ModelSource.find(config).build(torch.device("cpu"))


def test_counted_positions_are_told_from_other_numbers() -> None:
    """Shapes, numbers of other lengths, and what is only counted are no positions of tokens."""
    hidden = torch.zeros(1, TOKENS, 4, device="meta")
    with Counting() as counting, torch.device("meta"):
        counted = torch.arange(TOKENS).float() * 2
        counted.to(hidden)
        hidden * torch.arange(4)
        hidden * counted.sum()
        assert counting.function is None
        hidden + counted.view(-1, 1)
        assert counting.function == "add"


def test_indices_of_rows_are_no_positions() -> None:
    """A router's ``scores[arange(tokens), best]`` is of each token; a table's row is a position."""
    scores = torch.zeros(TOKENS, 4, device="meta")
    best = torch.zeros(TOKENS, dtype=torch.int64, device="meta")
    with Counting() as counting, torch.device("meta"):
        rows = torch.arange(TOKENS)
        chosen = scores[rows, best]
        scores.index_add_(0, rows, scores)
        scores[rows, best] = chosen
        assert counting.function is None
        scores[:, 0] = rows
    assert counting.function == "__setitem__"
    with Counting() as counting, torch.device("meta"):
        torch.zeros(TOKENS + 3, 4)[torch.arange(TOKENS)]
    assert counting.function == "__getitem__"


def test_lengths_put_counted_positions_right() -> None:
    """What the stand-in for a cache tells, added to the count of a batch, is the positions."""
    positions = torch.tensor([0, 1, 2, 5, 0, 1, 9])
    assert torch.equal(torch.arange(7) + EarlierTokens(positions).get_seq_length(3), positions)
