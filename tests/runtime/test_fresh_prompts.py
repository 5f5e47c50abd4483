"""Which steps the host knows to be of whole prompts."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch

from vllm_module import vLLMModule
from vllm_module.kernels.attention.fresh_attention import KERNEL
from vllm_module.kernels.choices import trying
from vllm_module.layers import attention
from vllm_module.runtime.cache.kv_cache import KVCache
from vllm_module.runtime.cache.page_pool import PagePool
from vllm_module.runtime.engine import Engine
from vllm_module.runtime.model_runner import ModelRunner
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.scheduler import Scheduler

CPU, LAYERS, PAGE, BUDGET = torch.device("cpu"), 2, 4, 16
LONG = list(range(3, 3 + BUDGET + 5))  # computed in two chunks


class Served:
    """An engine with a real model, and the lengths of the prompts that torch attended to."""

    def __init__(self, model: vLLMModule) -> None:
        self.fresh: list[list[int]] = []
        self.cache = KVCache(model, 60, PAGE, CPU, torch.float32)
        scheduler = Scheduler(PagePool(60, PAGE), PagePool(0, PAGE), 8, BUDGET)
        self.engine = Engine(ModelRunner(model, CPU, 8, 20).run, scheduler, 130, 80)
        self._count = 0

    def tokens(self, *prompts: list[int]) -> list[list[int]]:
        """Return what follows each prompt."""
        requests = []
        for prompt in prompts:
            self._count += 1
            params = SamplingParams(temperature=0, max_tokens=4)
            requests.append(self.engine.add(str(self._count), prompt, params))
        while self.engine.requests:
            self.engine.step()
        return [request.sequences[0].output for request in requests]


@pytest.fixture
def served(model: vLLMModule, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    made = Served(deepcopy(model))
    original = attention.fresh_attention

    def noted(query: Any, key: Any, value: Any, starts: torch.Tensor, *rest: Any) -> torch.Tensor:
        made.fresh.append(starts.diff().tolist())
        return original(query, key, value, starts, *rest)

    monkeypatch.setattr(attention, "fresh_attention", noted)
    yield made
    made.cache.close()


def test_prompts_of_which_nothing_is_cached_are_fresh(served: Served) -> None:
    """Neither steps that decode are, nor later chunks, nor prompts with a cached prefix."""
    prompts = [[5, 6, 7, 8, 9, 10], [11, 12], LONG]
    plain = [served.tokens(prompt) for prompt in prompts]
    assert served.fresh == []  # torch was not chosen
    served.engine.resume()  # nothing is cached
    with trying({KERNEL: "torch"}):
        for prompt, expected in zip(prompts, plain, strict=True):
            assert served.tokens(prompt) == expected
        assert served.fresh == [[6]] * LAYERS + [[2]] * LAYERS + [[BUDGET]] * LAYERS
        served.fresh.clear()
        assert served.tokens(prompts[0]) == plain[0]  # its first page is cached
        assert served.fresh == []


def test_a_mixed_step_is_not_fresh(served: Served) -> None:
    """If one sequence has more tokens than the step, all are read from pages."""
    prompts = [[5, 6, 7], [11, 12, 13, 14]]
    plain = [tokens for prompt in prompts for tokens in served.tokens(prompt)]
    served.engine.resume()
    with trying({KERNEL: "torch"}):
        assert served.tokens(*prompts) == plain
        assert served.fresh == [[3, 4]] * LAYERS
        served.fresh.clear()
        served.engine.resume()
        first = served.engine.add("first", prompts[0], SamplingParams(temperature=0, max_tokens=9))
        served.engine.step()
        assert served.fresh == [[3]] * LAYERS
        (second,) = served.tokens(prompts[1])
        assert served.fresh == [[3]] * LAYERS
        assert [first.sequences[0].output[:4], second] == plain
