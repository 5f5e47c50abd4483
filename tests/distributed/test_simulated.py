"""Ranks in one process: their collectives, what they inherit, and how they fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch

from vllm_module.distributed import (
    SimulatedGroup,
    run_ranks,
    tensor_parallel,
    tensor_parallel_group,
)
from vllm_module.layers import (
    ColumnParallelLinear,
    ParallelLMHead,
    RowParallelLinear,
    VocabParallelEmbedding,
)


def without_hanging(fn: Callable[[], Any]) -> Any:
    """Call ``fn`` and return or raise what it does; fail if it takes more than five minutes."""
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.extend(("returned", fn()))
        except BaseException as error:
            outcome.extend(("raised", error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(300)
    assert outcome, "it hangs"
    if outcome[0] == "raised":
        raise outcome[1]
    return outcome[1]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_reduce_sums_over_the_ranks(size: int) -> None:
    """all_reduce gives every rank the sum, in the same bits, and leaves its argument alone."""

    def rank_fn(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mine = torch.randn(3, 5, generator=torch.Generator().manual_seed(rank))
        kept = mine.clone()
        return kept, mine, tensor_parallel_group().all_reduce(mine)

    kept, after, sums = zip(*run_ranks(size, rank_fn), strict=True)
    for rank in range(size):
        assert torch.equal(kept[rank], after[rank])
        assert torch.equal(sums[rank], sums[0])
    torch.testing.assert_close(sums[0], torch.stack(kept).sum(0))


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_gather_joins_in_rank_order(size: int, dim: int) -> None:
    """all_gather joins the ranks' tensors along the dimension in rank order, views included."""
    whole = torch.arange(4 * 6 * 12).view(4 * 6, 12)

    def rank_fn(rank: int) -> torch.Tensor:
        part = whole.tensor_split(size, dim)[rank]  # of dim 1: a view that is not contiguous
        return tensor_parallel_group().all_gather(part, dim)

    for gathered in run_ranks(size, rank_fn):
        assert torch.equal(gathered, whole)


def test_collectives_one_after_another_do_not_mix() -> None:
    """Each of many rounds gives its own values, though ranks arrive at different times."""

    def rank_fn(rank: int) -> list[float]:
        group = tensor_parallel_group()
        generator = torch.Generator().manual_seed(rank)
        sums = []
        for turn in range(200):
            if torch.rand((), generator=generator) < 0.1:
                threading.Event().wait(0.001)
            sums.append(group.all_reduce(torch.tensor([10.0 * turn + rank])).item())
        return sums

    expected = [40.0 * turn + 6 for turn in range(200)]
    assert run_ranks(4, rank_fn) == [expected] * 4


def test_a_tensor_may_be_overwritten_after_its_collective() -> None:
    """A rank that changes its tensor after a collective does not change it for other ranks."""

    def rank_fn(rank: int) -> list[tuple[bool, bool]]:
        group = tensor_parallel_group()
        right = []
        for _ in range(100):
            mine = torch.full((4096,), float(rank + 1))
            summed = group.all_reduce(mine)
            mine.fill_(-1)
            mine = torch.full((4096,), float(rank))
            gathered = group.all_gather(mine)
            mine.fill_(-1)
            in_order = torch.arange(4.0).repeat_interleave(4096)
            right.append((bool((summed == 10).all()), torch.equal(gathered, in_order)))
        return right

    assert run_ranks(4, rank_fn) == [[(True, True)] * 100] * 4


def test_results_come_in_rank_order() -> None:
    """run_ranks returns the results by rank, in whatever order the ranks end."""

    def rank_fn(rank: int) -> tuple[int, int, int]:
        threading.Event().wait(0.01 * (3 - rank))
        group = tensor_parallel_group()
        return rank, group.rank, group.size

    assert run_ranks(3, rank_fn) == [(0, 0, 3), (1, 1, 3), (2, 2, 3)]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_fails_ends_the_others(failing: int) -> None:
    """run_ranks raises what a rank raises, and the ranks that wait for that rank end."""
    ended = []

    def rank_fn(rank: int) -> None:
        try:
            group = tensor_parallel_group()
            group.all_reduce(torch.ones(1))
            if rank == failing:
                raise KeyError(f"rank {rank} cannot go on")
            group.all_reduce(torch.ones(1))
            group.all_reduce(torch.ones(1))
        finally:
            ended.append(rank)

    with pytest.raises(KeyError, match=f"rank {failing} cannot go on"):
        without_hanging(lambda: run_ranks(3, rank_fn))
    assert sorted(ended) == [0, 1, 2]


def test_the_first_error_is_the_one_raised() -> None:
    """If several ranks fail, run_ranks raises the first error, not its consequences."""

    def rank_fn(rank: int) -> None:
        if rank == 1:
            raise KeyError("the cause")
        try:
            tensor_parallel_group().all_reduce(torch.ones(1))
        except BaseException as error:
            raise ValueError("the consequence") from error

    for _ in range(20):
        with pytest.raises(KeyError, match="the cause"):
            without_hanging(lambda: run_ranks(3, rank_fn))


@pytest.mark.parametrize("leaving", [0, 1])
def test_a_rank_that_leaves_early_is_an_error(leaving: int) -> None:
    """A collective that not every rank calls is an error that says so, not a hang."""

    def rank_fn(rank: int) -> None:
        group = tensor_parallel_group()
        group.all_reduce(torch.ones(1))
        if rank != leaving:
            group.all_reduce(torch.ones(1))

    with pytest.raises(RuntimeError, match=rf"rank {leaving} of 3 has ended"):
        without_hanging(lambda: run_ranks(3, rank_fn))


def test_ranks_can_run_again_after_a_failure() -> None:
    """After a failed run the next one works, and the caller is in no group."""

    def fail(rank: int) -> None:
        raise KeyError(rank)

    with pytest.raises(KeyError):
        run_ranks(2, fail)
    one = torch.ones(1)
    assert run_ranks(2, lambda rank: tensor_parallel_group().all_reduce(one).item()) == [2, 2]
    group = tensor_parallel_group()
    assert (group.rank, group.size) == (0, 1)


def test_ranks_take_the_callers_gradient_mode_and_device() -> None:
    """A rank has the caller's gradient mode, default device and context variables."""
    variable: ContextVar[str] = ContextVar("variable", default="unset")

    def rank_fn(rank: int) -> tuple[bool, str, str]:
        return torch.is_grad_enabled(), torch.empty(1).device.type, variable.get()

    assert run_ranks(2, rank_fn) == [(True, "cpu", "unset")] * 2
    variable.set("set")
    with torch.no_grad(), torch.device("meta"):
        assert run_ranks(2, rank_fn) == [(False, "meta", "set")] * 2
    with torch.inference_mode():
        assert run_ranks(2, rank_fn) == [(False, "cpu", "set")] * 2


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0), (5, 1)])
def test_a_rank_outside_of_the_size_is_refused(rank: int, size: int) -> None:
    """A rank that is not in range(size) is refused with both numbers."""
    numbers = rf"rank {rank} is outside of range\({size}\)"
    with pytest.raises(ValueError, match=numbers):
        SimulatedGroup(rank, size)
    with pytest.raises(ValueError, match=numbers), tensor_parallel(rank=rank, size=size):
        pass


def test_rank_and_size_have_no_defaults() -> None:
    """tensor_parallel needs both by name: a forgotten rank would load shard 0 everywhere."""
    group: Any = object()
    both = {"rank": 0, "size": 2, "group": group}
    for arguments in ({}, {"rank": 0}, {"size": 2}, {"rank": 0, "group": group}, both):
        refused = pytest.raises(ValueError, match="either rank= and size=, or group=")
        with refused, tensor_parallel(**arguments):
            pass
    with pytest.raises(TypeError, match="positional"):
        tensor_parallel(0, 2)  # type: ignore[misc]


def test_contexts_nest() -> None:
    """The innermost tensor_parallel applies; leaving it, also by an error, restores the outer."""

    def fail_inside() -> None:
        with tensor_parallel(rank=2, size=3) as inner:
            assert tensor_parallel_group() is inner
            raise KeyError

    with tensor_parallel(rank=1, size=2) as outer:
        with pytest.raises(KeyError):
            fail_inside()
        assert tensor_parallel_group() is outer
    assert tensor_parallel_group().size == 1


@pytest.mark.parametrize(
    ("build", "x"),
    [
        (lambda: RowParallelLinear(8, 4, bias=False), torch.ones(1, 4)),
        (lambda: ColumnParallelLinear(4, 8, bias=False, gather_output=True), torch.ones(1, 4)),
        (lambda: VocabParallelEmbedding(100, 4), torch.zeros(1, dtype=torch.int64)),
        (lambda: ParallelLMHead(100, 4), torch.ones(1, 4)),
    ],
)
def test_a_sharded_module_alone_says_what_it_needs(build: Any, x: torch.Tensor) -> None:
    """A rank run outside of run_ranks raises an error naming the rank, the size and run_ranks."""
    with tensor_parallel(rank=1, size=2):
        layer = build()
    layer.load_weights({"weight": torch.ones(layer.weight.checkpoint_shape(""))})
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 .*run_ranks\(size, fn\)"):
        layer(x)
    with pytest.raises(RuntimeError, match="size 2 runs among 3 ranks"):
        without_hanging(lambda: run_ranks(3, lambda rank: layer(x)))
