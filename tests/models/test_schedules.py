"""Whatever the schedule, every architecture's greedy tokens are those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from vllm_module.distributed import run_ranks

PROMPTS = 5
STEPS = 32  # as in conftest.py
LONGEST = 40 + STEPS  # tokens of a sequence

# Every kind of cache, of positions and of layers, with windows in all layers, in some and in none.
NAMES = (
    "bamba",
    "cohere2",
    "gemma2",
    "gemma3",
    "glm4",
    "deepseek-v3",
    "gpt-oss",
    "gpt2",
    "llama",
    "llama-dynamic",
    "llama-longrope",
    "mistral-window",
    "mamba2",
    "qwen3-moe",
    "qwen3-next",
    "qwen3-tied-biases-window",
)
# These have a cache, positions and layers as some of the others: "make laws" tries them.
ALIKE = (
    "cohere",
    "glm",
    "deepseek-v2",
    "granite-4",
    "granite-tied-biases-one-kv-head",
    "lfm2-moe",
    "lfm3",
    "mistral",
    "mixtral",
    "nemotron-h",
    "olmo2",
    "olmo-hybrid",
    "olmoe",
    "qwen2-moe",
    "qwen3",
    "qwen3.5-moe",
    "phi3",
    "qwen2-window-one-kv-head",
    "starcoder2",
)
# A window in every layer frees pages early, so nothing has to be preempted.
ENOUGH_PAGES = ("mistral-window", "phi3", "starcoder2")


@st.composite
def schedules(draw: st.DrawFn) -> dict[str, Any]:
    """Draw page sizes, page counts for one sequence up to all, chunk sizes and arrivals."""
    page_size = draw(st.sampled_from([3, 8, 16]))
    least = -(-LONGEST // page_size)
    return {
        "page_size": page_size,
        "pages": least + draw(st.sampled_from([1, 4, 4 * least])),
        "host_pages": draw(st.sampled_from([0, least])),
        "max_num_batched_tokens": draw(st.sampled_from([5, 16, 200])),
        "pauses": draw(st.lists(st.integers(0, 9), min_size=2 * PROMPTS, max_size=2 * PROMPTS)),
        "order": draw(st.permutations([*range(PROMPTS), *range(PROMPTS)])),
        "steps": draw(st.lists(st.integers(1, STEPS), min_size=2 * PROMPTS, max_size=2 * PROMPTS)),
    }


# Ranks have one scheduler; of experts, one is tried. test_recurrent_engine.py has states of ranks.
@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, 1) for name in NAMES),
        *(pytest.param(name, 1, marks=pytest.mark.at_length) for name in ALIKE),
        ("qwen3-moe", 2),
    ],
)
def test_greedy_tokens_do_not_depend_on_the_schedule(
    tiny: Any, build: Any, generate: Any, name: str, size: int
) -> None:
    """Arrival order, chunks, pages, preemption, swapping and prefix caching change no token.

    Each prompt comes twice, so that the second can find its prefix in the cache.
    """
    checkpoint = tiny(name)
    reference = checkpoint.reference
    preempted = []

    @given(schedules())
    @settings(max_examples=2, phases=[Phase.generate])  # the first one is the simplest
    def run(schedule: dict[str, Any]) -> None:
        order, steps = schedule.pop("order"), schedule.pop("steps")
        prompts = [reference.prompts[index] for index in order]

        def serve(_: int) -> tuple[list[list[int]], int]:
            return generate(build(checkpoint.folder), prompts, steps, **schedule)

        for tokens, preemptions in run_ranks(size, serve):
            for index, count, output in zip(order, steps, tokens, strict=True):
                assert output == reference.tokens[index][:count]
            preempted.append(preemptions)

    run()
    if size == 1 and name not in ENOUGH_PAGES:
        assert sum(preempted) > 0, "no schedule was tight enough to preempt"
