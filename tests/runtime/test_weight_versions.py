"""Which weights computed which tokens, by the versions that samples list."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from vllm_module import LLM, SamplingParams

TEN = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module", params=[False, True], ids=["in turn", "overlapped"])
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(
        str(folder), dtype="float32", kv_cache_memory_bytes=1 << 20, async_scheduling=request.param
    ) as llm:
        yield llm


def test_tokens_have_the_version_of_their_weights(folder: Path, llm: LLM) -> None:
    """A head of zeros gives only token 0, so tokens show their weights; the versions agree."""
    head: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).lm_head.weight
    assert llm.weight_version == "0"

    first = llm.generate([[1, 2]], TEN, use_tqdm=False)[0].outputs[0]
    assert first.weight_versions == [("0", 10)]
    stream = llm.stream([1, 2], TEN)
    for _ in range(3):
        output = next(stream)
    zeros = {"lm_head.weight": torch.zeros_like(head)}  # of equal logits, the first is taken
    llm.update_weights(zeros, weight_version="step-1")
    for _ in range(4):
        output = next(stream)
    llm.update_weights({"lm_head.weight": head.detach()}, weight_version="step-2")
    llm.update_weights({"model.norm.weight": torch.ones(16)})
    *_, output = stream
    sample = output.outputs[0]
    assert sample.token_ids[:3] == first.token_ids[:3]
    assert sample.token_ids[3:7] == [0, 0, 0, 0]
    assert sample.weight_versions == [("0", 3), ("step-1", 4), ("step-2+1", 3)]
    with pytest.raises(ValueError, match="unknown"):
        llm.update_weights({"unknown": torch.ones(1)}, weight_version="never")
    with pytest.raises(ValueError, match="weight_version should be text or None, got 5"):
        llm.update_weights({}, weight_version=5)
    assert llm.weight_version == "step-2+1"
    llm.update_weights({"model.norm.weight": torch.ones(16)})
    assert llm.weight_version == "step-2+2"
    llm.engine.weight_version = "0"
    llm.reload_weights()
    assert llm.weight_version == "1"
    llm.engine.weight_version = "0"


def test_an_output_that_was_taken_stays_as_it_was(llm: LLM) -> None:
    """Later tokens, logprobs, versions and times are in later outputs alone."""
    params = copy.copy(TEN)
    params.logprobs = params.prompt_logprobs = 1
    taken = []
    for number, output in enumerate(llm.stream([1, 2, 3], params)):
        taken.append((output, copy.deepcopy(output)))
        if number % 3 == 1:
            llm.update_weights({"model.norm.weight": torch.ones(16)})
    assert len(taken) == 10
    assert len(output.outputs[0].weight_versions) == 4
    for output, then in taken:
        assert output == then
