"""Whatever the schedule, every architecture's greedy tokens are those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from vllm_module import ModelConfig, get_model
from vllm_module.distributed import run_ranks

PROMPTS = 5
LONGEST = 40 + 64  # tokens of a sequence


@st.composite
def schedules(draw: st.DrawFn) -> dict[str, Any]:
    """Draw page sizes, room for hardly more than one sequence or for all, chunks and arrivals."""
    page_size = draw(st.sampled_from([3, 8, 16]))
    least = -(-LONGEST // page_size)
    return {
        "page_size": page_size,
        "pages": least + draw(st.sampled_from([1, 4, 4 * least])),
        "host_pages": draw(st.sampled_from([0, least])),
        "max_num_batched_tokens": draw(st.sampled_from([5, 16, 200])),
        "pauses": draw(st.lists(st.integers(0, 9), min_size=2 * PROMPTS, max_size=2 * PROMPTS)),
        "order": draw(st.permutations([*range(PROMPTS), *range(PROMPTS)])),
        "steps": draw(st.lists(st.integers(1, 64), min_size=2 * PROMPTS, max_size=2 * PROMPTS)),
    }


@pytest.mark.parametrize("size", [1, 2])
def test_greedy_tokens_do_not_depend_on_the_schedule(
    checkpoint: Any, generated: Any, size: int
) -> None:
    """Arrivals in any order, chunks, pages, preemption, swapping and prefixes change no token.

    Each prompt comes twice, so that it may find its beginning in the cache.
    """
    reference = checkpoint.reference
    preempted = []

    @given(schedules())
    @settings(max_examples=4 if size == 1 else 1, phases=[Phase.generate])
    def run(schedule: dict[str, Any]) -> None:
        order, steps = schedule.pop("order"), schedule.pop("steps")
        if "dynamic" in str(checkpoint.folder):  # what a chunk sees is how long it was by then
            schedule |= {"max_num_batched_tokens": 4000, "pages": 400}
        prompts = [reference.prompts[index] for index in order]

        def serve(_: int) -> tuple[list[list[int]], int]:
            model = get_model(model_config=ModelConfig(model=str(checkpoint.folder)))
            return generated(model, prompts, steps, **schedule)

        for tokens, preemptions in run_ranks(size, serve):
            for index, count, got in zip(order, steps, tokens, strict=True):
                assert got == reference.tokens[index][:count]
            preempted.append(preemptions)

    run()
    # Behind a window pages are given back, and there may be enough of them.
    roomy = any(name in str(checkpoint.folder) for name in ("dynamic", "mistral-window"))
    if size == 1 and not roomy:
        assert sum(preempted) > 0, "the caches were too large for anything to happen"
