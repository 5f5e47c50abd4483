"""Many ranks that agree: over a network in memory, where each rank is a thread."""

from __future__ import annotations

import os
import random
import runpy
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_module.distributed import exchange
from vllm_module.distributed.news import ENDED, News, neighbours

HERE = Path(__file__).parent
SUPPORT = runpy.run_path(str(HERE.parent / "support.py"))


AT_LENGTH = "AT_LENGTH" in os.environ


# Others of these wait for seconds, which a busy machine takes as well.
@pytest.mark.parametrize("first", [3, 24, 129] if AT_LENGTH else [24])
def test_drawn_faults_are_named_by_all_others(first: int, tmp_path: Path) -> None:
    """Of up to 40 ranks, any number dies, refuses, hangs and is stopped: all others name them.

    ``make laws`` sets ``AT_LENGTH``.
    """
    draws = 40 if AT_LENGTH else 1
    script, log = HERE / "draw_faults.py", tmp_path / "log"
    code = SUPPORT["run_program"](script, first, first + draws, log=log, limit=3000)
    assert (code, log.read_text()) == (0, "")


def test_a_rank_that_ends_in_the_second_round_keeps_nobody_in_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others that have all results have sent their last message, and are neither awaited nor named.

    This rank has their results, too, and learns before it goes on that the connection of one is
    closed.
    """

    def peer(rank: int, *_: object) -> SimpleNamespace:
        ended = rank == 3
        return SimpleNamespace(
            rank=rank, heard=1 if ended else 2, leaves=ended, gone=ended, listening=False,
            telling=0, tell=lambda frame: None,
        )  # fmt: skip

    # Real connections are in this state for less than a millisecond.
    monkeypatch.setattr(exchange, "Peer", peer)
    call = exchange._Exchange(None, 1, 5, 0)
    with call._changed:
        call._results = dict.fromkeys(range(5), b"")
        call._note({3: ENDED})
    call._go_round(1, 1.0, "had not finished")
    with call._changed:
        call._closed = True  # which ends the thread that tells others
        call._changed.notify_all()
    assert call._failures == {3: ENDED}


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8, 9, 31, 32, 33, 1000, 1024])
def test_neighbours_bring_every_result_in_few_messages(size: int) -> None:
    """A rank that has heard all neighbours, round by round, has what every rank has returned."""
    known = [{rank} for rank in range(size)]
    rounds = [neighbours(rank, size) for rank in range(size)]
    for step in range(len(rounds[0])):
        before = [set(each) for each in known]
        for rank in range(size):
            for to, of in rounds[rank][step].items():
                assert before[rank].issuperset(of)  # it has what it sends
                assert rank in rounds[to][step]  # and hears of who hears of it
                known[to] |= set(of)
    assert all(len(each) == size for each in known)
    messages = sum(map(len, rounds[0]))
    assert messages <= 2 * size.bit_length()
    assert len({to for each in rounds[0] for to in each}) == messages


def test_news_agree_in_any_order() -> None:
    """Ranks that hear the same, in another order or twice, know the same."""
    told = [
        News.read(text)
        for text in (
            b'[[[3, "failed: ValueError: x"]], false, 1, [], [[2, [1, 5, "w"]]]]',
            b'[[[3, "%s"], [5, "%s"]], false, 1, [2], []]' % (ENDED.encode(), ENDED.encode()),
            b'[[[5, "hangs"]], true, 2, [4, 6], [[2, [3, -1, ""]], [6, [1, 2, "w"]]]]',
            b'[[], false, 2, [7], [[2, [2, 4, "w"]]]]',
            b'[[[3, "had not finished"]], false, 1, [0], []]',
        )
    ]
    choose, found = random.Random(0), set()
    for _ in range(50):
        news = News(1, 8)
        news.has_finished = True
        for each in choose.sample(told * 2, 10):
            news.add(**each)
        found.add(news.written())
        assert {0, 2} >= {*news.silent()}  # these may have answered the first question
    failures = b'[[3, "failed: ValueError: x"], [5, "hangs"]]'
    expected = b"[%s, true, 2, [1, 4, 6, 7], [[2, [3, -1, %s]], [6, [1, 2, %s]]]]" % (
        failures, b'""', b'"w"',
    )  # fmt: skip
    assert found == {expected}


@pytest.mark.parametrize(
    ("waits", "named"),
    [
        ({}, [0, 2]),
        ({2: 0}, [0]),
        ({2: 0, 0: 1}, [0, 2]),  # for one that has answered
        ({2: 0, 0: 2}, [0, 2]),
        ({2: 3}, [0, 2]),
        ({2: -1}, [0, 2]),  # it waits for none any more
    ],
)
def test_who_waits_for_one_that_hangs_is_not_named(waits: dict[int, int], named: list[int]) -> None:
    """Ranks 0 and 2 of 4 are silent; rank 3 names those that hold up the others."""
    news = News(3, 4)
    news.add({}, waits={rank: (1, of, "w") for rank, of in waits.items()})
    assert news.hanging([0, 2]) == named


def test_who_is_silent_follows_from_all_that_was_heard() -> None:
    """Who has neither failed nor answered one of the last two questions that the rank heard."""
    choose = random.Random(2)
    for _ in range(100):
        news, heard, answers = News(0, 6), [0], {0: set[int]()}
        news.has_finished = choose.random() < 0.5
        failed: set[int] = set()
        for _ in range(8):
            question = choose.choice([0, heard[-1], heard[-1] + 1, heard[-1] + 2])
            told = {*choose.sample(range(1, 6), choose.randrange(3))}
            failed |= {choose.randrange(1, 6)} if choose.random() < 0.1 else set()
            news.add(dict.fromkeys(failed, ENDED), question=question, finished=told)
            question = max(question or heard[-1], bool(failed))  # a failure is the first
            if question > heard[-1]:
                heard.append(question)
                answers[question] = {0} if news.has_finished else set()
            answers[question] |= told
            answered = set[int]().union(*(answers[each] for each in heard[-2:]))
            assert news.silent() == sorted({*range(6)} - answered - failed)


def test_who_is_waited_for_in_the_end() -> None:
    """By a chain of those that wait, which may begin with this rank, or end where it begins."""
    news = News(0, 6)
    waits = {1: (1, 2, "b"), 2: (1, 3, "c"), 4: (2, -1, ""), 5: (1, 0, "f"), 0: (1, 5, "a")}
    news.add({}, waits=waits)
    found = [news.awaited(rank, "a") for rank in range(1, 6)]
    assert found == [(3, "c"), (3, "c"), (3, "a"), (4, "a"), (0, "f")]
    news.add({}, waits={2: (2, -1, ""), 1: (1, 0, "b")})  # the second one is no news
    assert [news.awaited(rank, "a") for rank in (1, 2)] == [(2, "b"), (2, "a")]


class Looks(dict[int, Any]):
    """A dictionary of which few entries are looked up."""

    left = 10

    def get(self, *key: Any) -> Any:
        self.left -= 1
        assert self.left > 0, "the search has no end"
        return super().get(*key)


def test_ranks_that_wait_for_each_other_are_an_end() -> None:
    """All ways in which four ranks may wait, in circles with this rank and without it."""
    for to in product(range(-1, 4), repeat=4):
        for first in range(1, 4):
            passed, rank = [0], first
            while rank not in passed and to[rank] >= 0:
                passed.append(rank)
                rank = to[rank]
            news = News(0, 4)
            news.waits = Looks({each: (1, other, f"of {other}") for each, other in enumerate(to)})
            what = f"of {rank}" if len(passed) > 1 else "of the first"
            assert news.awaited(first, "of the first") == (rank, what)


def test_ranks_stay_connected_whichever_fail() -> None:
    """Ranks that send to those beyond failed ones reach all that are left."""
    choose = random.Random(1)
    for _ in range(300):
        size = choose.randrange(2, 40)
        failed = set(choose.sample(range(size), choose.randrange(size)))
        news = [News(rank, size) for rank in range(size)]
        for each in news:
            each.add(dict.fromkeys(failed, ENDED))
        left = [rank for rank in range(size) if rank not in failed]
        reached, through = {left[0]}, [left[0]]
        for rank in through:
            to = news[rank].beyond()
            assert all(rank in news[other].beyond() for other in to)
            through += sorted(to - reached)
            reached |= to
        assert reached == set(left)
