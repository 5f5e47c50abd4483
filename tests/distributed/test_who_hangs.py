"""Which rank is named when one has waited too long, and what others have said of their waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from vllm_module.base.process_groups import private_group
from vllm_module.cooperative.rank_transfer import RankTransfer
from vllm_module.distributed import Waiting, tensor_parallel, together
from vllm_module.distributed.exchange import call_with
from vllm_module.errors import RankError, WeightReadError
from vllm_module.layers import ReplicatedLinear
from vllm_module.layout import TransferPlan

SIZE, LIMIT = 3, 30.0


def plan() -> TransferPlan:
    """Return a plan in which two ranks send to one."""
    with tensor_parallel(rank=0, size=1):
        layer = ReplicatedLinear(2, 2, bias=False)
    whole = layer.plan_weights({"weight": torch.zeros(2, 2)})
    return TransferPlan(whole.layout(2), whole.layout(1))


def on_ranks(
    work: Callable[[int, dist.ProcessGroup], None], expected: tuple[type[Exception], ...]
) -> None:
    """Call ``work`` together on ranks, which are threads here, and expect an error of each."""
    store = dist.HashStore()

    def run(rank: int) -> None:
        group = private_group(store, rank, SIZE, torch.device("cpu"), timedelta(seconds=LIMIT))
        try:
            with pytest.raises(expected):
                together(lambda: work(rank, group), timeout=LIMIT, group=group)
        finally:
            group.shutdown()

    with ThreadPoolExecutor(SIZE) as threads:
        list(threads.map(run, range(SIZE)))


RING = {0: 1, 1: 2, 2: 0}
CASES: dict[str, tuple[list[dict[int, int]], int, int, int]] = {
    # What ranks say one after another (-1: nothing any more), who waits for whom, who is named.
    "itself, by one other": ([{1: 0}], 0, 1, 1),
    "itself, by two others": ([RING], 0, 1, 1),
    "itself, as a target": ([RING], 2, 0, 0),
    "one that waits for none": ([{}], 0, 1, 1),
    "one that waits no more": ([RING, dict.fromkeys(RING, -1)], 2, 1, 1),
    "the first one, by another": ([{1: 0}], 2, 1, 0),
    "another by one": ([{1: 2}], 0, 1, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_the_rank_that_waits_for_none_is_named(case: str) -> None:
    """It is the end of what all have said; a rank never names itself."""
    said, who, peer, named = CASES[case]
    told = threading.Barrier(SIZE)
    last = {rank: (len(said), to) for rank, to in said[-1].items()}
    errors: list[Exception] = []

    def work(rank: int, group: dist.ProcessGroup) -> None:
        waiting, call = Waiting(group), call_with(group)
        assert call is not None
        for step in said:
            match step.get(rank):
                case None:
                    pass
                case -1:
                    waiting.say()
                case to:
                    waiting.say(to, "w")
        end = time.monotonic() + LIMIT
        # No public function tells what others have said so far.
        while {r: each[:1] for r, each in call._news.waits.items()} != {
            r: each[:1] for r, each in last.items()
        }:
            assert time.monotonic() < end, "news have not arrived"
            time.sleep(0.01)
        told.wait(LIMIT)
        if rank == who:
            errors.append(RankTransfer(plan(), group, 5.0, "")._late(peer, "w"))
            raise errors[0]

    on_ranks(work, (RankError, WeightReadError))
    (error,) = errors
    assert str(error).startswith(f"rank {named} ended, left or hangs")
    assert ("which waits for it" in str(error)) == (named != peer)
    if isinstance(error, RankError):  # of a rank of the source
        assert error.ranks == (named,)


def test_a_peer_that_left_for_another_one_is_not_blamed() -> None:
    """A message fails when its peer leaves, which it does when it is told that a third failed."""
    errors: list[Exception] = []

    def work(rank: int, group: dist.ProcessGroup) -> None:
        if rank == 2:
            raise LookupError("of the third")
        call, end = call_with(group), time.monotonic() + LIMIT
        assert call is not None
        if rank == 1:
            return
        transfer = RankTransfer(plan(), group, 5.0, "")
        while not call._failures:  # no public function tells what others have said so far
            assert time.monotonic() < end, "news have not arrived"
            time.sleep(0.01)
        try:
            with transfer._naming(1, [(SimpleNamespace(name="w"), 0)]):
                raise RuntimeError("Connection closed by peer")
        except (RankError, WeightReadError) as error:
            errors.append(error)
            raise

    on_ranks(work, (RankError, LookupError))
    (error,) = errors
    assert str(error).startswith("rank 2 of 3 failed: LookupError: of the third\n")
    assert "Rank 1 was to send or take w" in str(error)
    assert isinstance(error, RankError)
    assert error.ranks == ()
