"""``LLM.serve``: outputs in the order in which prompts are complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import LLM, SamplingParams
from vllm_module.runtime.metrics import StepStats

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [10, 11, 12, 13]]
NEW = 6
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
REFUSED = "token 500 is outside of the vocabulary of 60"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    config = AutoConfig.for_model(
        "llama", vocab_size=60, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("checkpoint")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    with LLM(str(folder), kv_cache_memory_bytes=1 << 18, dtype="float32") as llm:
        yield llm


def test_each_output_comes_when_it_is_complete(llm: LLM) -> None:
    """A prompt has the tokens that it has alone; one that is refused comes at once."""
    alone = [llm.generate(each, GREEDY, use_tqdm=False)[0].outputs[0].token_ids for each in PROMPTS]
    found = list(llm.serve([*PROMPTS[:2], [500], *PROMPTS[2:]], GREEDY))
    index, refused = found.pop(0)
    assert (index, refused.error, refused.finished) == (2, REFUSED, True)
    outputs = dict(found)
    assert [outputs[i].outputs[0].token_ids for i in (0, 1, 3, 4)] == alone
    assert all(len(each) == NEW for each in alone)


def test_outputs_after_every_token(llm: LLM) -> None:
    """Each prompt has an output of one token, of two, and so on."""
    counts: dict[int, list[int]] = {}
    for index, output in llm.serve(PROMPTS, GREEDY, every_token=True):
        counts.setdefault(index, []).append(len(output.outputs[0].token_ids))
    assert counts == {index: [*range(1, NEW + 1)] for index in range(4)}


@pytest.mark.parametrize("concurrency", [1, 3])
def test_prompts_are_taken_as_others_end(llm: LLM, concurrency: int) -> None:
    """No more prompts run at a time, and an iterator is not read ahead of them."""
    taken: list[int] = []
    complete = 0

    def prompts() -> Iterator[list[int]]:
        for index, prompt in enumerate(PROMPTS):
            assert len(taken) - complete < concurrency
            taken.append(index)
            yield prompt

    for index, output in llm.serve(prompts(), GREEDY, concurrency=concurrency):
        assert output.prompt_token_ids == PROMPTS[index]
        complete += 1
    assert (complete, taken) == (4, [0, 1, 2, 3])


def test_steps_are_measured(llm: LLM) -> None:
    """The steps compute every token but the last of each prompt, in the pages that these take."""
    steps: list[StepStats] = []
    list(llm.serve(PROMPTS, GREEDY, on_step=steps.append))
    computed = sum(sum(step.counts) for step in steps)
    assert computed == sum(len(prompt) + NEW - 1 for prompt in PROMPTS)
    assert [len(step.counts) for step in steps] == [4] * NEW
    assert all(step.used_pages == 4 and step.seconds > 0 for step in steps)  # of 16 tokens
    assert llm.model_config.block_size == 16
    assert llm.model_config.num_gpu_blocks >= 4


CLOSE: dict[str, Callable[[Any], object]] = {
    "closed": lambda outputs: outputs.close(),
    "dropped": lambda outputs: None,
}


@pytest.mark.parametrize("how", CLOSE)
def test_requests_end_with_the_iterator(llm: LLM, how: str) -> None:
    """Closing or dropping it frees all pages."""
    outputs = llm.serve(PROMPTS, GREEDY, every_token=True)
    next(outputs)
    assert len(llm.engine.requests) == 4
    CLOSE[how](outputs)
    del outputs
    assert not llm.engine.requests
    pool = llm.engine.scheduler.pool
    assert pool.free_pages == pool.num_pages


def test_what_cannot_be_served(llm: LLM) -> None:
    """A number below 1, and what is no prompt, are refused; nothing runs then."""
    with pytest.raises(ValueError, match="concurrency should be a number from 1 or None, got 0"):
        next(llm.serve(PROMPTS, GREEDY, concurrency=0))
    with pytest.raises(ValueError, match="prompts should be one or a sequence of them"):
        next(llm.serve(None, GREEDY))  # type: ignore[arg-type]  # that is the case
    (refused,) = llm.serve([[500]], GREEDY)
    assert refused[1].error == REFUSED


def test_a_step_that_fails_ends_every_request(llm: LLM) -> None:
    """An error in ``on_step`` is raised, and no request stays behind."""

    def fail(_: StepStats) -> None:
        raise KeyError("measured")

    with pytest.raises(KeyError, match="measured"):
        list(llm.serve(PROMPTS, GREEDY, on_step=fail))
    assert not llm.engine.requests
