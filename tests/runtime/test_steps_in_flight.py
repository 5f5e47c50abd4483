"""Few pages while other steps of a pipeline are in flight: who is preempted, and who waits."""

from __future__ import annotations

from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_module.runtime.cache.page_pool import PagePool
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.scheduler import Scheduler
from vllm_module.runtime.sequence import Request, Sequence
from vllm_module.runtime.step_inputs import Step

PARAMS = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


def in_pairs(
    lengths: list[int], pages: int, on_host: int
) -> tuple[Scheduler, list[Sequence], Step]:
    """Two steps of two sequences each, of which the second one stays in flight."""
    scheduler = Scheduler(PagePool(pages, 4), PagePool(on_host, 4), 8, 99, batches=2)
    sequences = [
        Request(str(at), [at] * count, PARAMS, at, 100).sequences[0]
        for at, count in enumerate(lengths)
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert [[s for s, _ in step.scheduled] for step in (first, second)] == [
        sequences[:2], sequences[2:],
    ]  # fmt: skip
    scheduler.mark_computed(first)
    for sequence in sequences[:2]:
        sequence.tokens.append(7)
    return scheduler, sequences, second


@pytest.mark.parametrize("on_host", [0, 8])
def test_what_is_not_in_flight_is_preempted_for_an_earlier_sequence(on_host: int) -> None:
    """So the pages of the last sequence do not lie idle until all steps in flight have ended."""
    scheduler, (one, two, three, four), second = in_pairs([3, 4, 3, 4], 4, on_host)
    assert [s for s, _ in scheduler.schedule().scheduled] == [one]
    scheduler.mark_computed(second)
    for sequence in (three, four):
        sequence.tokens.append(7)
    assert scheduler.in_flight == {one}
    step = scheduler.schedule()
    assert [s for s, _ in step.scheduled] == [two, three]
    assert scheduler.waiting == [four]
    assert len(step.pages.swapped_out) == (1 if on_host else 0)


def test_nothing_is_preempted_in_vain_while_a_step_is_in_flight() -> None:
    """An empty step is not run, so it could not copy pages to the host."""
    scheduler, (one, two, three, four), second = in_pairs([4, 3, 3, 3], 4, on_host=8)
    two.tokens += [7] * 12  # needs three more pages, and the two behind it have one each
    scheduler.in_flight.add(one)
    scheduler.mark_computed(second)
    step = scheduler.schedule()
    assert not step.scheduled
    assert not step.pages.swapped_out
    assert scheduler.running == [one, two, three, four]


def test_what_a_step_that_is_not_run_was_to_swap_out_is_computed_again() -> None:
    """As where the adapter of its only sequence cannot be read: the host has nothing."""
    scheduler = Scheduler(PagePool(4, 4), PagePool(8, 4), 8, 99, prefix_caching=False)
    first, second = (Request(str(at), [at] * 7, PARAMS, at, 100).sequences[0] for at in range(2))
    for sequence in (first, second):
        scheduler.add(sequence)
    scheduler.mark_computed(scheduler.schedule())
    first.tokens += [7, 7]
    second.tokens.append(7)
    step = scheduler.schedule()
    assert [sequence for sequence, _ in step.scheduled] == [first]
    assert len(step.pages.swapped_out) == len(second.host_pages) == 2
    scheduler.finish(first)
    scheduler.undo(step)
    assert (scheduler.host.free_pages, scheduler.pool.free_pages) == (8, 4)
    step = scheduler.schedule()
    assert step.scheduled == [(second, 8)]
    assert not step.pages.swapped_in


def served(scheduler: Scheduler, lengths: list[tuple[int, int]]) -> Counter[int]:
    """Serve prompts of some tokens until each has so many more; count the steps that each waits.

    A sequence waits for a step that it is not in, nor in another one in flight, while it has pages.
    """
    left, waits = {}, Counter[int]()
    for at, (prompt, more) in enumerate(lengths):
        sequence = Request(str(at), [at] * prompt, PARAMS, at, 999).sequences[0]
        scheduler.add(sequence)
        left[sequence] = more
    launched: deque[Step] = deque()
    while left:
        while len(launched) < scheduler.batches:
            step = scheduler.schedule()
            if not step.scheduled:
                assert not step.pages.swapped_out, "a step that is not run copies no pages"
                break
            launched.append(step)
        assert launched, "nothing is in flight, and nothing can be scheduled"
        waits.update(s.request.arrival for s in scheduler.running if s not in scheduler.in_flight)
        step = launched.popleft()
        scheduler.mark_computed(step)
        for sequence, _ in step.scheduled:
            if sequence.num_computed < len(sequence.tokens):
                continue
            sequence.tokens.append(1)
            left[sequence] -= 1
            if not left[sequence]:
                del left[sequence]
                sequence.finish_reason = "length"
                scheduler.finish(sequence)
    assert scheduler.pool.free_pages == scheduler.pool.num_pages
    return waits


def test_no_sequence_idles_on_its_pages_for_long() -> None:
    """Of two stages, all eight sequences run on, though pages are short at every fourth token."""
    scheduler = Scheduler(PagePool(28, 16), PagePool(0, 16), 8, 64, False, batches=2)
    waits = served(scheduler, [(8, 120)] * 8)
    assert scheduler.preemptions > 3
    assert max(waits.values()) <= 4


@given(data=st.data())
def test_every_request_is_served_with_few_pages(data: st.DataObject) -> None:
    """Whatever the lengths, pages, pages on the host, windows and steps in flight are."""
    count = st.integers(1, 40)
    lengths = data.draw(st.lists(st.tuples(count, count), min_size=1, max_size=8), "lengths")
    size = data.draw(st.sampled_from([1, 4, 16]), "page")
    least = max(-(-sum(each) // size) for each in lengths)
    pages = PagePool(least + data.draw(st.integers(0, least), "further pages"), size)
    host = PagePool(data.draw(st.sampled_from([0, 8, 100]), "on the host"), size)
    rows, most = data.draw(st.integers(1, 8), "rows"), data.draw(st.integers(8, 64), "tokens")
    window, batches = data.draw(st.none() | st.just(8)), data.draw(st.integers(1, 4), "steps")
    served(Scheduler(pages, host, rows, most, False, window, batches=batches), lengths)
