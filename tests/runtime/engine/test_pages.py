"""The pages that sequences have: shared, cached, copied, sent and freed."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from vllm_module.runtime.cache.page_pool import PagePool
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.step_inputs import Step

# Pytest's importlib mode has no imports between test files.
PAGED: Any = runpy.run_path(str(Path(__file__).with_name("paged.py")))
expected, Setup, greedy, computed_by = (
    PAGED[name] for name in ("expected", "Setup", "greedy", "computed_by")
)


def test_a_step_sends_each_page_once() -> None:
    """A step that decodes sends a page when it allocates it, and else no entry of the tables."""
    setup = Setup(num_pages=60, max_num_batched_tokens=100)
    requests = [setup.engine.add(str(index), [index] * 9, greedy(20)) for index in range(4)]
    while setup.engine.requests:
        setup.engine.step()
        (*_, step) = setup.pages.steps
        if step.max_query_len == 1:
            grown = [context for context in step.context_lens if context % setup.size == 1]
            assert [len(pages) for _, _, pages in step.new_pages] == [1] * len(grown)
    sent = sum(len(pages) for step in setup.pages.steps for _, _, pages in step.new_pages)
    held = [-(-(len(r.sequences[0].tokens) - 1) // setup.size) for r in requests]
    assert sent == sum(held)


def test_a_common_prefix_is_computed_once() -> None:
    """Full pages of an earlier prompt are shared, even after its request has ended."""
    setup = Setup(num_pages=40, max_num_batched_tokens=100)
    long = [1, 2] * 10
    setup.engine.add("first", long, greedy(4))
    setup.run()
    before = sum(len(step.input_ids) for step in setup.pages.steps)
    request = setup.engine.add("second", [*long, 0, 1], greedy(4))
    setup.run()
    assert sum(len(step.input_ids) for step in setup.pages.steps) - before == 2 + 3
    assert request.sequences[0].output == expected([*long, 0, 1], 4)


def test_samples_share_the_pages_of_their_prompt() -> None:
    """n samples compute and store the prompt once; each copies the last page when it writes."""
    setup = Setup(num_pages=40, max_num_batched_tokens=100)
    setup.engine.add("one", [1] * 10, greedy(5, n=4))
    setup.engine.step()
    setup.engine.step()
    assert sum(len(step.input_ids) for step in setup.pages.steps) == 10 + 4
    assert setup.num_pages - setup.pool.free_pages == 2 + 4
    assert len(setup.pages.steps[1].pages.copied) == 3
    setup.run()


def test_samples_fork_without_a_free_page() -> None:
    """When samples have no page to write to, the last is preempted, and all of them finish."""
    setup = Setup(num_pages=4, max_num_batched_tokens=100)
    request = setup.engine.add("full", [1] * 14, greedy(2, n=3))
    setup.run()
    assert [s.output for s in request.sequences] == [expected([1] * 14, 2)] * 3
    assert setup.scheduler.preemptions > 0


def test_cached_free_pages_are_not_counted_twice() -> None:
    """A prompt is admitted if there are free pages besides the free ones that it reuses."""
    setup = Setup(num_pages=6, max_num_batched_tokens=100)
    setup.engine.add("first", [1] * 8, greedy(1))
    setup.run()
    setup.engine.add("holds", [2] * 9, greedy(3))
    setup.engine.step()
    later = setup.engine.add("later", [1] * 16, greedy(1))
    while setup.engine.requests:
        setup.engine.step()
    assert later.sequences[0].output == expected([1] * 16, 1)


def test_pages_before_the_window_are_freed() -> None:
    """With a sliding window in every layer, a sequence has only the pages its window needs."""
    setup = Setup(num_pages=60, window=8, max_num_batched_tokens=100)
    request = setup.engine.add("long", [1] * 5, greedy(150))
    while setup.engine.requests:
        setup.engine.step()
        held = setup.num_pages - setup.pool.free_pages
        assert held <= 8 // 4 + 2
    assert request.sequences[0].output == expected([1] * 5, 150, window=8)


def test_a_sequence_that_fills_the_cache_ends_there() -> None:
    """A sequence can use the whole cache, and then ends with the reason "length"."""
    setup = Setup(num_pages=4)
    request = setup.engine.add("big", [1] * 6, greedy(100))
    setup.run()
    (sequence,) = request.sequences
    assert (len(sequence.tokens), sequence.finish_reason) == (16, "length")


@pytest.mark.parametrize("length", range(1, 10))
def test_pages_of_every_sample_are_found_with_the_salt_of_the_prompt(length: int) -> None:
    """And with no other, whether the prompt, or only a sample's output, fills the first page."""
    setup = Setup(num_pages=40)
    params = SamplingParams(temperature=1, seed=0, max_tokens=9, n=3)
    request = setup.engine.add("x", [1] * length, params, cache_salt="mine")
    setup.run()
    assert len({tuple(each.tokens) for each in request.sequences}) == 3
    for each in request.sequences:
        full = (len(each.tokens) - 1) // setup.size  # the last token was not computed
        for salt in ("mine", None, "other"):
            found = setup.pool.find_cached(each.tokens, full, salt)
            assert len(found) == (full if salt == "mine" else 0)


@pytest.mark.parametrize("swapped", [False, True])
def test_pages_in_use_during_an_update_are_not_reused(swapped: bool) -> None:
    """Neither full pages nor pages that were half computed, swapped out or not."""
    setup = Setup(num_pages=4, host_pages=1, max_num_batched_tokens=100)
    setup.engine.add("long", [1] * 12, greedy(2))
    (half,) = setup.engine.add("short", [2] * 2, greedy(6)).sequences
    setup.engine.step()
    if swapped:
        setup.engine.step()
        assert len(half.host_pages) == 1
    assert half.num_computed == 2
    setup.engine.resume()
    setup.run()
    assert half.output == expected([2] * 2, 6)
    assert computed_by(setup, half.tokens[:7]) == 7
    assert computed_by(setup, [1] * 12) == 12


def test_exactly_the_pages_before_the_window_are_freed() -> None:
    """A sequence has exactly the pages in its window, after starting over too."""
    setup = Setup(
        num_pages=13, window=8, prefix_caching=False, max_num_seqs=5, max_num_batched_tokens=6
    )
    for index in range(5):
        setup.engine.add(str(index), [index] * 5, greedy(30))
    while setup.engine.requests:
        setup.engine.step()
        for sequence in setup.scheduler.running:
            held = [page >= 0 for page in sequence.pages]
            left = max(0, sequence.num_computed - 8 + 1) // 4
            assert held == [index >= left for index in range(-(-sequence.num_computed // 4))]
    assert setup.scheduler.preemptions > 0


def test_the_first_pages_of_a_prompt_are_evicted_last() -> None:
    """Pages freed first are allocated first, and a sequence's last page is freed first."""
    setup = Setup(num_pages=6, max_num_batched_tokens=100)
    first = [1, 2] * 8
    assert computed_by(setup, first) == 16
    assert computed_by(setup, [*first, 0]) == 1
    assert computed_by(setup, [3] * 13) == 13  # on the pages that were freed first
    assert computed_by(setup, first) == 16 - 8


def test_the_pool_refuses_impossible_calls() -> None:
    """Allocating more pages than are free, and freeing a page without references."""
    pool = PagePool(2, 4)
    (page,) = pool.allocate(1)
    with pytest.raises(RuntimeError, match="2 pages are needed and 1 are free"):
        pool.allocate(2)
    assert pool.free_pages == 1
    pool.free([page])
    with pytest.raises(RuntimeError, match=f"page {page} is freed, and has no references"):
        pool.free([page])
    assert pool.free_pages == 2


def test_pages_of_output_are_reused_by_the_next_turn() -> None:
    """A prompt that continues an earlier output reuses its full pages."""
    setup = Setup(num_pages=40, max_num_batched_tokens=100)
    first = setup.engine.add("first", [1] * 3, greedy(10))
    setup.run()
    assert computed_by(setup, [*first.sequences[0].tokens, 0]) == 14 - 12


def test_full_pages_from_before_an_update_are_not_reused() -> None:
    setup = Setup(num_pages=20, max_num_batched_tokens=100)
    assert [computed_by(setup, [1] * 9) for _ in range(2)] == [9, 1]
    setup.engine.resume()
    assert computed_by(setup, [1] * 9) == 9


def test_pages_before_the_window_are_freed_after_starting_over() -> None:
    """A preempted sequence frees pages before its window as it did the first time."""
    setup = Setup(num_pages=20, window=4, prefix_caching=False)
    (sequence,) = setup.engine.add("again", [1] * 5, greedy(30)).sequences
    while setup.engine.requests:
        setup.engine.step()
        if len(sequence.output) == 12 and not setup.scheduler.preemptions:
            setup.scheduler._preempt(sequence, Step())
        held = [page >= 0 for page in sequence.pages]
        left = max(0, sequence.num_computed - 4 + 1) // 4
        assert (
            held == [index >= left for index in range(-(-sequence.num_computed // 4))] or not held
        )
    assert setup.scheduler.preemptions


def test_a_prompt_counts_once_however_many_samples_it_has() -> None:
    """Of tokens that were computed or cached, too; each sample's own tokens count."""
    setup = Setup(num_pages=40, max_num_batched_tokens=100)
    for index, n in enumerate((1, 3, 2)):
        setup.engine.add(str(index), [1] * 10, greedy(5, n=n))
        setup.run()
    totals = setup.engine.totals
    assert (totals.prompt_tokens, totals.cached_tokens) == (3 * 10, 2 * 8)
    assert totals.generation_tokens == (1 + 3 + 2) * 5


def test_pages_of_its_own_are_no_cached_tokens() -> None:
    """A request that is preempted in its prompt finds its own pages, which it has computed."""
    setup = Setup(num_pages=5, max_num_batched_tokens=5)
    setup.engine.add("a", [1, 2, 3, 4], greedy(10))
    request = setup.engine.add("b", [9, 8] * 7, greedy(2))
    setup.run()
    assert setup.scheduler.preemptions > 0
    assert request.num_cached_tokens == 0
    assert setup.engine.totals.cached_tokens == 0
