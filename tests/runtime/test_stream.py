"""Batched generation: a prompt's tokens do not depend on its company."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_module import vLLMModule
from vllm_module.layers import Attention
from vllm_module.runtime.generate import PAGE_SIZE, stream


def tokens_of(model: vLLMModule, prompts: list[list[int]], most: int, **kw: Any) -> list[list[int]]:
    steps = list(stream(model, prompts, most, **kw))
    return [[step[i] for step in steps if i in step] for i in range(len(prompts))]


def prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(130, (length,), generator=generator).tolist()


@torch.no_grad()
def without_cache(model: Any, ids: list[int], most: int) -> list[int]:
    """Compute each token from the whole sequence."""
    ids = list(ids)
    for _ in range(most):
        hidden = model(torch.tensor(ids), torch.arange(len(ids)))
        ids.append(int(model.compute_logits(hidden[-1:]).argmax()))
    return ids[-most:]


def test_a_batch_gives_what_each_prompt_gives_alone(model: vLLMModule) -> None:
    """Prompts of several lengths, pages' edges among them, step together and stay themselves."""
    lengths = (1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 2 * PAGE_SIZE, 5)
    prompts = [prompt(length) for length in lengths]
    together = tokens_of(model, prompts, 18)
    assert together == [tokens_of(model, [ids], 18)[0] for ids in prompts]
    assert together[3:] == [without_cache(model, ids, 18) for ids in prompts[3:]]
    assert len({tuple(tokens) for tokens in together}) == len(prompts)


def test_a_prompt_ends_with_its_first_stop_token(model: vLLMModule) -> None:
    """The stop token is yielded, the prompt leaves the batch, and the others go on."""
    prompts = [prompt(7), prompt(9)]
    first, second = tokens_of(model, prompts, 12)
    stop = next(token for token in first if token not in second)
    stopped, other = tokens_of(model, prompts, 12, stop_tokens={stop})
    assert stopped == first[: first.index(stop) + 1]
    assert other == second


def test_all_prompts_stopped_ends_the_stream(model: vLLMModule) -> None:
    """No step is taken for an empty batch."""
    (first,) = tokens_of(model, [prompt(7)], 5)
    assert len(list(stream(model, [prompt(7)], 5, stop_tokens={first[0]}))) == 1
    assert list(stream(model, [], 5)) == []


def test_the_cache_leaves_the_model_however_the_stream_ends(model: vLLMModule) -> None:
    """A stream that is dropped midway takes its pages along."""
    steps = stream(model, [prompt(3)], 5)
    next(steps)
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    assert all(layer.kv_cache is not None for layer in layers)
    steps.close()  # type: ignore[attr-defined]
    assert all(layer.kv_cache is None for layer in layers)


@pytest.mark.parametrize(
    ("prompts", "most", "message"),
    [
        ([[1], []], 4, "prompt 1 is empty"),
        ([[1, 130]], 4, "token 130, outside of the vocabulary of 130"),
        ([[-1]], 4, "token -1, outside"),
        ([[1] * 100], 29, "100 tokens, which with 29 new ones exceed the model's context of 128"),
        ([[1]], 0, "max_new_tokens must be at least 1, got 0"),
    ],
)
def test_wrong_prompts_are_refused_by_the_call(
    model: vLLMModule, prompts: list[list[int]], most: int, message: str
) -> None:
    """The message has the prompt and the numbers, and comes before the first step is asked for."""
    with pytest.raises(ValueError, match=message):
        stream(model, prompts, most)


def test_the_whole_context_can_be_used(model: vLLMModule) -> None:
    """A prompt may fill the context to its last position."""
    (tokens,) = tokens_of(model, [[1] * 120], 8)
    assert len(tokens) == 8
