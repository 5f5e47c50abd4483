"""Scenarios of :func:`vllm_module.distributed.together`, for ``scenarios.py``."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from vllm_module.base import waiting
from vllm_module.distributed import exchange, together
from vllm_module.distributed.exchange import call_with
from vllm_module.errors import RankError

wait_until = runpy.run_path(str(Path(__file__).parents[1] / "support.py"))["wait_until"]
SCENARIOS: dict[str, tuple[int, Callable[[Path, int], Any]]] = {}
TIMEOUT = 5.0  # seconds, of scenarios with a rank that hangs
PATIENCE = 3600.0  # of all others: a rank that waits so long is killed before, and its test fails

# Limits in seconds of waiting for other ranks. They are no options: this process, which is a script
# alone, sets them to what a busy machine cannot exceed, or what a scenario about them reaches.
waiting.SILENCE = 1.0
exchange._PATIENCE = PATIENCE  # type: ignore[misc]
exchange._FAREWELL = 10.0  # type: ignore[misc]
exchange._EVIDENCE = 2.0  # type: ignore[attr-defined]


def scenario(size: int) -> Callable[[Callable[[Path, int], Any]], Callable[[Path, int], Any]]:
    def enter(function: Callable[[Path, int], Any]) -> Callable[[Path, int], Any]:
        def run(directory: Path, rank: int) -> Any:
            dist.init_process_group("gloo")
            dist.barrier()
            return function(directory, rank)

        SCENARIOS[function.__name__] = (size, run)
        return function

    return enter


def happens(directory: Path) -> None:
    """Record that this rank is about to fail."""
    (directory / f"event.{os.environ['RANK']}").write_text(str(time.time()))


def await_events(directory: Path, count: int = 1) -> None:
    """Wait until ``count`` ranks are about to fail."""
    wait_until(lambda: len(list(directory.glob("event.*"))) >= count, "a rank fails")


def await_survivors(directory: Path) -> None:
    """Wait until all ranks that do not fail have returned or raised."""

    def all_have() -> bool:
        files = [*directory.glob("rank*.json"), *directory.glob("event.*")]
        return len(files) == int(os.environ["WORLD_SIZE"])

    wait_until(all_have, "the survivors return or raise")


def die(directory: Path) -> NoReturn:
    happens(directory)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def hang(directory: Path) -> None:
    happens(directory)
    await_survivors(directory)  # after its timeout


def patience(actions: Iterable[Any]) -> float:
    return TIMEOUT if {hang, stop} & set(actions) else PATIENCE


def actions(size: int, **of_ranks: Callable[[Path], Any]) -> Callable[[Path, int], Any]:
    """Run an action in the work of some ranks; the others finish after it has begun."""
    timeout = patience(of_ranks.values())

    def run(directory: Path, rank: int) -> Any:
        def work() -> Any:
            if action := of_ranks.get(f"rank{rank}"):
                return action(directory)
            if timeout == TIMEOUT:  # which begins when a rank has finished
                await_events(directory, len(of_ranks))
            return rank

        return together(work, timeout=timeout)

    return run


def refuse(directory: Path) -> None:
    happens(directory)
    raise ValueError(f"refused by {os.environ['RANK']}\nand a second line")


def stop(directory: Path) -> None:
    """Stop this process by a signal, as a debugger does, until the survivors have raised."""
    happens(directory)
    if os.fork() == 0:
        try:
            await_survivors(directory)
        finally:
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)


def be_slow(directory: Path) -> str:
    time.sleep(1)
    return "slow"


for name, size, ranks in (
    ("first_dies", 3, {"rank0": die}),
    ("last_dies", 4, {"rank3": die}),
    ("one_of_two_dies", 2, {"rank0": die}),
    ("two_die", 4, {"rank0": die, "rank2": die}),
    ("one_hangs", 3, {"rank0": hang}),
    ("one_is_stopped", 3, {"rank1": stop}),
    ("one_dies_one_hangs", 4, {"rank1": die, "rank2": hang}),
    ("one_refuses", 3, {"rank1": refuse}),
    ("two_refuse", 4, {"rank0": refuse, "rank3": refuse}),
    ("one_refuses_one_dies", 3, {"rank0": refuse, "rank2": die}),
    ("one_is_slow", 3, {"rank2": be_slow}),
    # In larger groups, not all ranks are neighbours.
    ("two_of_many_die", 8, {"rank2": die, "rank5": die}),
    ("one_of_many_is_stopped", 7, {"rank1": stop}),
    ("most_of_many_refuse", 9, {f"rank{rank}": refuse for rank in (0, 1, 2, 4, 5, 7, 8)}),
):
    function = actions(size, **ranks)
    function.__name__ = name
    scenario(size)(function)


@scenario(3)
def one_never_comes(directory: Path, rank: int) -> Any:
    if rank == 1:
        hang(directory)
    await_events(directory)
    return together(lambda: rank, timeout=TIMEOUT)


@scenario(3)
def one_hangs_in_a_call_inside(directory: Path, rank: int) -> Any:
    """Who has waited for it does not wait for as long again in the call around."""
    exchange._PATIENCE = 1.0  # type: ignore[misc]

    def work() -> Any:
        if rank == 1:
            hang(directory)
        await_events(directory)
        return together(lambda: rank, timeout=TIMEOUT)

    return together(work, timeout=PATIENCE, refusals=(Exception,))


@scenario(3)
def one_is_stopped_and_work_names_it(directory: Path, rank: int) -> Any:
    """The errors of others, who have waited for it in their work, are not kept for it either."""

    def work() -> Any:
        if rank == 1:
            stop(directory)
        await_events(directory)
        call = call_with(None)
        assert call is not None
        for what in range(9):  # more messages than a stopped process takes
            call.say_waits(1, f"message {what}")
            wait_until(lambda: not call._fresh, "the others are told")
        raise KeyError(call.failure([1], "hangs"))

    return together(work, timeout=PATIENCE)


@scenario(3)
def one_dies_before_it_comes(directory: Path, rank: int) -> Any:
    if rank == 1:
        die(directory)
    return together(lambda: rank, timeout=PATIENCE)


@scenario(3)
def one_refuses_and_others_stagger(directory: Path, rank: int) -> Any:
    """The others learn of it at different times; none waits for a rank that has left."""
    exchange._FAREWELL = PATIENCE  # type: ignore[misc]

    def work() -> None:
        if rank == 0:
            refuse(directory)
        time.sleep(0.015 * rank)

    return together(work, timeout=PATIENCE)


@scenario(2)
def one_refuses_before_the_other_comes(directory: Path, rank: int) -> Any:
    if rank == 1:
        wait_until((directory / "rank0.json").exists, "rank 0 has waited long enough")
    exchange._PATIENCE = 0.5  # type: ignore[misc]
    return together(lambda: refuse(directory) if rank == 0 else rank, timeout=PATIENCE)


def collective(action: Callable[[Path], Any]) -> Callable[[Path, int], Any]:
    """Run ``action`` on rank 1 while the others wait for it in a collective of their work."""

    def run(directory: Path, rank: int) -> Any:
        def work() -> None:
            (directory / f"waiting{rank}").touch()
            if rank == 1:
                wait_until(lambda: len(list(directory.glob("waiting*"))) == 3, "all are there")
                time.sleep(0.1)  # by then they are likely to be inside
                action(directory)
            dist.all_reduce(torch.ones(3))

        return together(work, timeout=PATIENCE)

    return run


for name, action in (("collective_refused", refuse), ("collective_dies", die)):
    function = collective(action)
    function.__name__ = name
    scenario(3)(function)


@scenario(2)
def each_fails_for_itself(directory: Path, rank: int) -> Any:
    """A RuntimeError of this rank is not attributed to a peer that has not failed."""

    def work() -> None:
        if rank == 1:
            happens(directory)
            raise RuntimeError("of rank 1 itself")

    return together(work, timeout=PATIENCE)


@scenario(2)
def two_threads_at_once(directory: Path, rank: int) -> Any:
    """The second call is refused in the same group, and works in a group of its own."""
    other = dist.new_group()
    inside, refused = threading.Barrier(2), threading.Event()
    first: list[Any] = []

    def work() -> int:
        inside.wait()
        refused.wait()
        return rank

    thread = threading.Thread(target=lambda: first.extend(together(work, timeout=PATIENCE)))
    thread.start()
    inside.wait()
    said = []
    for group in (None, dist.group.WORLD):
        try:
            together(lambda: 7, timeout=PATIENCE, group=group)
        except RuntimeError as error:
            said.append(str(error))
    second = together(lambda: 5, timeout=PATIENCE, group=other)
    refused.set()
    thread.join()
    again = together(lambda: 3, timeout=PATIENCE)
    return [said, first, second, again]


@scenario(4)
def one_dies_when_it_has_told_one_other(directory: Path, rank: int) -> Any:
    """Rank 1 receives that rank 0 finished, and ranks 2 and 3 do not."""
    if rank == 0:
        tell = exchange.Peer.tell

        def tell_one(self: Any, message: Any) -> None:
            if self.rank != 1:
                die(directory)
            tell(self, message)
            wait_until(lambda: not self.telling, "the message has gone out")

        exchange.Peer.tell = tell_one  # type: ignore[method-assign]
    return together(lambda: rank, timeout=PATIENCE)


@scenario(3)
def one_is_interrupted_while_it_waits(directory: Path, rank: int) -> Any:
    """Rank 1 waits for rank 2, which finishes when rank 1 has raised."""
    hear = exchange._Exchange._hear

    def interrupted(self: Any, *arguments: Any) -> Any:
        threading.Thread(target=interrupt).start()
        return hear(self, *arguments)

    def interrupt() -> None:
        time.sleep(0.1)  # by then it is likely to wait; it is interrupted in any case
        happens(directory)
        os.kill(os.getpid(), signal.SIGINT)

    def work() -> None:
        if rank == 2:
            wait_until((directory / "rank1.json").exists, "rank 1 is interrupted")

    if rank == 1:
        # A shell has its background jobs ignore SIGINT, and what they start inherits that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        exchange._Exchange._hear = interrupted  # type: ignore[method-assign]
    return together(work, timeout=PATIENCE)


@scenario(3)
def one_leaves_by_sys_exit(directory: Path, rank: int) -> Any:
    def work() -> None:
        if rank == 1:
            happens(directory)
            raise SystemExit(3)

    return together(work, timeout=PATIENCE)


@scenario(4)
def one_of_a_subgroup_dies(directory: Path, rank: int) -> Any:
    """Ranks 1 and 3 of the world are one group, and ranks 0 and 2 another."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = pairs[rank % 2]
    with contextlib.suppress(ValueError):
        together(lambda: 0, timeout=PATIENCE, group=pairs[1 - rank % 2])
        raise AssertionError("a rank outside of the group took part in it")

    def work() -> int:
        if rank == 3:
            die(directory)
        return rank

    return together(work, timeout=PATIENCE, group=mine)


class _BrokenError(Exception):
    def __str__(self) -> str:
        raise KeyError("no message")


def _raise(error: BaseException) -> NoReturn:
    raise error


@scenario(3)
def refusals_of_all_kinds(directory: Path, rank: int) -> Any:
    """A failure breaks its group only, and not other groups of the same ranks."""
    local = type("Local", (Exception,), {"__reduce__": None})
    kinds: list[Callable[[], Any]] = [
        lambda: _raise(ValueError()),
        lambda: _raise(ValueError("long " * 200_000)),
        lambda: _raise(ValueError("\n".join(map(str, range(1000))))),
        lambda: _raise(ValueError("\ud800 is no character")),
        lambda: _raise(_BrokenError()),
        lambda: _raise(local("of a class that cannot be pickled")),
        lambda: _raise(KeyboardInterrupt()),
        lambda: _raise(SystemExit(5)),
        lambda: threading.Lock(),  # a result that cannot be pickled
    ]
    said = []
    groups = [dist.new_group() for _ in kinds]
    for turn, (kind, group) in enumerate(zip(kinds, groups, strict=True)):
        failing = turn % 3
        try:
            together(kind if rank == failing else lambda: None, timeout=PATIENCE, group=group)
        except BaseException as error:
            said.append([type(error).__name__, list(getattr(error, "ranks", ()))])
            if isinstance(error, RankError):
                said[-1].append(str(error))
        assert together(lambda t=turn: (t, rank), timeout=PATIENCE) == [(turn, r) for r in range(3)]
    return said


@scenario(3)
def some_refuse_and_go_on(directory: Path, rank: int) -> Any:
    """After a refusal that is expected, the same group goes on; after another error it does not."""
    outcomes = []
    for refusing, kind in (((1,), KeyError), ((0, 2), ValueError), ((), KeyError), ((0,), OSError)):

        def work(ranks: tuple[int, ...] = refusing, kind: type[Exception] = kind) -> int:
            if rank in ranks:
                raise kind(f"of {rank}")
            return rank

        try:
            result = together(work, timeout=PATIENCE, refusals=(KeyError, ValueError))
            outcomes.append(["returned", result])
        except RankError as error:
            outcomes.append([str(error), list(error.ranks), error.recoverable])
        except Exception as error:
            outcomes.append([type(error).__name__])
    return outcomes


@scenario(4)
def results_of_all_kinds(directory: Path, rank: int) -> Any:
    """Results are small or large, of different types, in repeated, nested and subgroup calls."""
    mine = [None, "text", b"x" * 3_000_000, {"tensor": torch.arange(5)}][rank]
    for _ in range(3):
        none, text, large, table = together(lambda: mine, timeout=PATIENCE)
        assert (none, text, large) == (None, "text", b"x" * 3_000_000)
        assert torch.equal(table["tensor"], torch.arange(5))
    for size in (4080, 4087, 4088, 4089, 5000):  # where a message needs a second part
        assert (
            together(lambda n=size: b"y" * (n - 40), timeout=PATIENCE) == [b"y" * (size - 40)] * 4
        )

    pair = [dist.new_group([0, 3]), dist.new_group([2, 1])][rank in (1, 2)]

    def nested() -> Any:
        with torch.device("meta"), torch.inference_mode():
            inner = together(lambda: rank, timeout=PATIENCE, group=pair)
        return inner, together(
            lambda: together(lambda: rank + 1, timeout=PATIENCE), timeout=PATIENCE
        )

    each = [([0, 3], [[1, 2, 3, 4]] * 4), ([1, 2], [[1, 2, 3, 4]] * 4)]
    expected = [each[0], each[1], each[1], each[0]]
    assert sorted(together(nested, timeout=PATIENCE)[rank][0]) == expected[rank][0]
    busy = [dist.isend(torch.tensor([rank]), dst=(rank + 1) % 4)]  # of the user's own
    assert together(lambda: rank, timeout=PATIENCE) == [0, 1, 2, 3]
    got = torch.zeros(1, dtype=torch.int64)
    dist.recv(got, src=(rank - 1) % 4)
    busy[0].wait()
    assert got.item() == (rank - 1) % 4

    def threads() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name.startswith("together")]

    wait_until(lambda: not threads(), "its threads end")
    return threads()


@scenario(2)
def a_group_without_a_cpu(directory: Path, rank: int) -> Any:
    group = dist.new_group(backend="cuda:gloo")
    return together(lambda: rank, timeout=PATIENCE, group=group)
