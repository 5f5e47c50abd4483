"""Greedy generation for a batch of prompts, over a paged KV cache."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from vllm_module.module import vLLMModule
from vllm_module.runtime.kv_cache import KVCache

PAGE_SIZE = 16


def stream(
    model: vLLMModule,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_tokens: Collection[int] = (),
) -> Iterator[dict[int, int]]:
    """Yield, a step at a time, the next token of each prompt that is still going.

    What is wrong with the prompts is raised by the call, before the first step.

    Args:
        model: a loaded causal language model; every rank of a tensor-parallel one makes the
            same calls and gets the same tokens.
        prompts: token ids, of any lengths; each is stepped as one batch with the others.
        max_new_tokens: most tokens for each prompt.
        stop_tokens: a prompt ends with the first of these, which is yielded too.

    Raises:
        ValueError: no new tokens, an empty prompt, a token outside the vocabulary, or a prompt
            that with its new tokens exceeds the model's context.

    """
    _check(model, prompts, max_new_tokens)
    return _steps(model, prompts, max_new_tokens, stop_tokens)


def _steps(
    model: vLLMModule,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_tokens: Collection[int],
) -> Iterator[dict[int, int]]:
    parameter = next(p for p in model.parameters() if p.dtype.itemsize > 1)  # not quantized
    pages = sum(-(-(len(prompt) + max_new_tokens) // PAGE_SIZE) for prompt in prompts)
    cache = KVCache(model, pages, PAGE_SIZE, parameter.device, parameter.dtype)
    try:
        batch = {index: list(prompt) for index, prompt in enumerate(prompts)}
        done = dict.fromkeys(batch, 0)
        for _ in range(max_new_tokens):
            if not batch:
                return
            tokens = _step(model, cache, batch, done)
            yield tokens
            for index, token in tokens.items():
                done[index] += len(batch[index])
                batch[index] = [token]
                if token in stop_tokens:
                    cache.free(index)
                    del batch[index]
    finally:
        cache.close()


@torch.inference_mode()
def _step(
    model: vLLMModule, cache: KVCache, batch: dict[int, list[int]], done: dict[int, int]
) -> dict[int, int]:
    device = cache.device
    metadata = cache.append({index: len(new) for index, new in batch.items()})
    ids = [token for new in batch.values() for token in new]
    positions = [done[index] + i for index, new in batch.items() for i in range(len(new))]
    causal: Any = model
    hidden = model(
        torch.tensor(ids, device=device), torch.tensor(positions, device=device), metadata
    )
    last = metadata.query_start_loc[1:].long() - 1
    logits = causal.compute_logits(hidden[last])
    return dict(zip(batch, logits.argmax(-1).tolist(), strict=True))


def _check(model: vLLMModule, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    config: Any = model.config
    limit = getattr(config, "context_length", None)
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {index} is empty")
        outside = [token for token in prompt if not 0 <= token < config.vocab_size]
        if outside:
            raise ValueError(
                f"prompt {index} has token {outside[0]}, outside of the vocabulary of "
                f"{config.vocab_size}"
            )
        if limit and len(prompt) + max_new_tokens > limit:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens, which with {max_new_tokens} new ones "
                f"exceed the model's context of {limit}"
            )
