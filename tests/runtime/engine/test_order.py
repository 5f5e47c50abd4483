"""Which sequences a step has, in which order, and how many of their tokens."""

from __future__ import annotations

import runpy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from vllm_module.runtime.cache.page_pool import PagePool
from vllm_module.runtime.scheduler import Scheduler
from vllm_module.runtime.sequence import Request
from vllm_module.runtime.step_inputs import Step

# Pytest's importlib mode has no imports between test files.
PAGED: Any = runpy.run_path(str(Path(__file__).with_name("paged.py")))
expected, Setup, greedy = (PAGED[name] for name in ("expected", "Setup", "greedy"))


def test_samples_beyond_max_num_seqs_take_turns_with_the_rows_of_the_tables() -> None:
    """A sample that loses its row has its pages listed again, and gets the same tokens."""
    setup = Setup(num_pages=60, max_num_seqs=3, max_num_batched_tokens=100)
    requests = [setup.engine.add(str(index), [index] * 9, greedy(12, n=3)) for index in range(3)]
    listed = []
    while setup.engine.requests:
        setup.engine.step()
        listed += [(row, first) for row, first, _ in setup.pages.steps[-1].new_pages]
        assert len(setup.scheduler.running) <= 9
    assert {row for row, _ in listed} == {0, 1, 2}
    assert sum(first == 0 for _, first in listed) > 9  # more often than there are samples
    for index, request in enumerate(requests):
        assert [s.output for s in request.sequences] == [expected([index] * 9, 12)] * 3
    setup.run()


def test_the_first_sequence_is_never_preempted() -> None:
    """When pages run out, the last sequences start over, and the first one goes on."""
    setup = Setup(num_pages=8, prefix_caching=False)
    for index in range(4):
        setup.engine.add(str(index), [index] * 7, greedy(16))
    first = setup.engine.requests["0"].sequences[0]
    computed = 0
    while first.finish_reason is None:
        setup.engine.step()
        assert first.finish_reason or first.num_computed > computed
        computed = first.num_computed
    assert setup.scheduler.preemptions > 0
    setup.run()


def test_swapped_sequences_do_not_start_over() -> None:
    """With enough host memory, no token is computed twice."""
    setup = Setup(num_pages=8, host_pages=20, prefix_caching=False, max_num_batched_tokens=100)
    for index in range(4):
        setup.engine.add(str(index), [index] * 7, greedy(16))
    setup.run()
    assert setup.scheduler.preemptions > 0
    assert sum(len(step.input_ids) for step in setup.pages.steps) == 4 * (7 + 16 - 1)


def test_the_order_is_that_of_arrival_after_a_preemption_too() -> None:
    """Earlier requests are served first, whichever were preempted."""
    setup = Setup(num_pages=9, prefix_caching=False)
    requests = [setup.engine.add(str(index), [index] * 9, greedy(8)) for index in range(4)]
    order: list[str] = []
    while setup.engine.requests:
        setup.engine.step()
        for queue in (setup.scheduler.running, setup.scheduler.waiting):
            arrivals = [sequence.request.arrival for sequence in queue]
            assert arrivals == sorted(arrivals)
        order += [r.request_id for r in requests if r.finished and r.request_id not in order]
    assert order == ["0", "1", "2", "3"]


def test_sequences_decode_while_a_long_prompt_is_computed() -> None:
    """While a long prompt is computed in chunks, a running sequence gets a token every step."""
    setup = Setup(num_pages=60, max_num_batched_tokens=8)
    short = setup.engine.add("short", [1], greedy(20))
    setup.engine.step()
    setup.engine.add("long", [2] * 40, greedy(1))
    for step in range(5):
        setup.engine.step()
        assert len(short.sequences[0].output) == step + 2
        assert len(setup.pages.steps[-1].input_ids) == 8
    setup.run()


def test_samples_have_the_place_of_their_request() -> None:
    """Samples run before requests that arrived later."""
    setup = Setup(num_pages=40, max_num_batched_tokens=100)
    setup.engine.add("first", [1] * 5, greedy(5, n=3))
    setup.engine.add("second", [2] * 5, greedy(5))
    setup.engine.step()
    assert [(s.request.arrival, s.index) for s in setup.scheduler.running] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
    ]
    setup.run()


def test_no_step_has_more_than_max_num_seqs() -> None:
    """Neither waiting requests nor forked samples make a step larger than allowed."""
    for n in (1, 3):
        setup = Setup(num_pages=60, max_num_seqs=3, max_num_batched_tokens=100)
        for index in range(5):
            setup.engine.add(str(index), [index] * 5, greedy(5, n=n))
        setup.run()
        assert max(len(step.table_rows) for step in setup.pages.steps) == 3


def test_no_step_has_more_than_max_num_batched_tokens_or_an_empty_sequence() -> None:
    setup = Setup(num_pages=60, max_num_batched_tokens=7)
    for index in range(5):
        setup.engine.add(str(index), [index] * 5, greedy(5))
    setup.run()
    for step in setup.pages.steps:
        assert len(step.input_ids) <= 7
        assert all(begin < end for begin, end in pairwise(step.query_start_loc))


@pytest.mark.parametrize("window", [None, 3, 6])
@pytest.mark.parametrize("length", [18, 19, 20, 21])
def test_a_swapped_sequence_is_admitted_once_its_pages_fit(window: int | None, length: int) -> None:
    """It needs the pages that it holds and those of its next tokens, not those that it passed."""
    setup = Setup(num_pages=16, size=2, host_pages=16, prefix_caching=False, window=window)
    (sequence,) = setup.engine.add("one", [1] * 7, greedy(25)).sequences
    while len(sequence.tokens) < length:
        setup.engine.step()
    setup.scheduler._preempt(sequence, Step())
    passed = sequence.pages.count(-1)
    assert (passed > 3) == (window is not None)
    needed = -(-length // 2) - passed
    taken = setup.pool.allocate(setup.pool.free_pages - needed + 1)
    assert not setup.scheduler.schedule().scheduled
    setup.pool.free(taken[:1])
    assert setup.scheduler.schedule().scheduled == [(sequence, 1)]


def test_a_preemption_leaves_the_time_of_the_first_admission() -> None:
    """A request waited until then, and not until it was admitted again."""
    setup = Setup(num_pages=8, prefix_caching=False, max_num_batched_tokens=100)
    requests = [setup.engine.add(str(index), [index] * 7, greedy(16)) for index in range(4)]
    first: dict[str, float] = {}
    while setup.engine.requests:
        setup.engine.step()
        for each in requests:
            if each.metrics.scheduled_ts:
                first.setdefault(each.request_id, each.metrics.scheduled_ts)
    assert max(each.metrics.num_preemptions for each in requests) > 0
    assert {each.request_id: each.metrics.scheduled_ts for each in requests} == first


def test_nothing_is_admitted_before_a_sequence_that_waits_for_pages() -> None:
    """While another step is in flight, a prompt's next pages are too few: later ones wait, too."""
    scheduler = Scheduler(PagePool(5, 4), PagePool(0, 4), 8, 8, batches=2)
    long, other, short = (
        Request(str(at), [1] * count, greedy(1), at, 100).sequences[0]
        for at, count in enumerate((16, 8, 1))
    )
    scheduler.add(long)
    first = scheduler.schedule()
    scheduler.add(other)
    second = scheduler.schedule()
    assert (first.scheduled, second.scheduled) == ([(long, 8)], [(other, 8)])
    scheduler.mark_computed(first)
    scheduler.add(short)
    assert scheduler.schedule().scheduled == []
    assert scheduler.waiting == [short]
    scheduler.mark_computed(second)
    assert scheduler.schedule().scheduled[0] == (long, 8)
    assert scheduler.in_flight == {long}
    scheduler.reset()
    assert not scheduler.in_flight, "or nothing is ever preempted"


def test_no_sequence_of_a_step_loses_its_row_to_another_one() -> None:
    """All rows are those of a step in flight and of this one, which needs one more."""
    scheduler = Scheduler(PagePool(20, 4), PagePool(0, 4), 3, 100, batches=2)
    requests = [Request(str(at), [1, 2], greedy(5, n=2), at, 100) for at in range(2)]
    for request in requests:
        scheduler.add(request.sequences[0])
    for step in [scheduler.schedule() for _ in requests]:
        scheduler.mark_computed(step)
    for request in requests:
        scheduler.fork(request)
        for sequence in request.sequences:
            sequence.tokens.append(3)
    for request in requests:
        scheduled = [sequence for sequence, _ in scheduler.schedule().scheduled]
        assert scheduled == request.sequences
        assert len({sequence.row for sequence in scheduled} - {-1}) == 2
