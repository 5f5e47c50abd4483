"""A report's message: numbered names are folded without loss, and every character is printable."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable, Iterable

import pytest
import torch

from vllm_module import WeightLoadError
from vllm_module.core.report import LoadReport, Problem, fold
from vllm_module.errors import MissingPackageError, RankError
from vllm_module.layers import RMSNorm


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ([], []),
        (["a.b"], ["a.b"]),
        (["l.0.w", "l.1.w", "l.3.w"], ["l.{0..1,3}.w"]),
        (["l.0.w", "l.0.w"], ["l.0.w"]),
        ([f"l.{i}.e.{j}.w" for i in range(3) for j in range(2)], ["l.{0..2}.e.{0..1}.w"]),
        (["l.0.e.0", "l.0.e.1", "l.1.e.0"], ["l.{0..1}.e.0", "l.0.e.1"]),
        (["a.0.w", "a.#.w"], ["a.0.w", "a.#.w"]),
        (["l.00.w", "l.0.w"], ["l.00.w", "l.0.w"]),
        ([f"l.{'9' * 5000}.w"], [f"l.{'9' * 5000}.w"]),
        (["0", "1"], ["{0..1}"]),
    ],
)
def test_fold(names: list[str], folded: list[str]) -> None:
    """Names that differ in numbers only become one, and other names stay as they are."""
    assert sorted(fold(names)) == sorted(folded)


@pytest.mark.parametrize(
    "pattern", ["x." * 505 + "%d.z", "0." * 505 + "%d.z", "%d." + "0.x." * 250, "%d"]
)
def test_long_names_are_folded_in_linear_time(pattern: str) -> None:
    """Folding takes some passes over the components of all names, however many a name has.

    About 8 passes; 600 if it looked at every number of a name. Time is compared with a pass over
    the same components, because a busy machine takes longer for both.
    """
    names = [pattern % number for number in range(2500)]
    folded: list[str] = []

    def fold_them() -> None:
        folded[:] = fold(names)

    def pass_over_them() -> None:
        for name in names:
            for component in name.split("."):
                len(component)

    def passes() -> float:
        return _seconds(fold_them) / _seconds(pass_over_them)

    assert any(passes() < 60 for _ in range(3))
    at_first = pattern.startswith("0.")  # the number is beyond those that are folded
    assert folded == (names if at_first else [pattern.replace("%d", "{0..2499}")])


def _seconds(work: Callable[[], None]) -> float:
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


def test_names_of_a_file_cannot_rewrite_a_terminal() -> None:
    """The message is printable and short, whatever names a checkpoint has."""
    names = ["\x1b[2J\nevil", "a" * 1000, "\u202e.weight", "b" * 500 + ".weight"]
    for count in range(1, 5):
        with pytest.raises(WeightLoadError) as refused:
            RMSNorm(2).load_weights({name: torch.ones(2) for name in names[:count]})
        message = str(refused.value)
        assert all(line.isprintable() for line in message.splitlines())
        assert len(message) < 600 * count + 400
        report = refused.value.report
        assert [problem.name for problem in report.unexpected] == names[:count]


@pytest.mark.parametrize("kind", ["missing", "unexpected", "duplicated", "misshapen"])
def test_a_long_message_counts_the_lines_that_it_leaves_out(kind: str) -> None:
    """Whatever their number, each problem has a line, or is counted in the one that ends them."""
    lengths = set()
    for number in range(80):
        names = [chr(0x4E00 + each) for each in range(number)]
        problems = [Problem(name, f"why {name}") for name in names]
        lines = str(LoadReport(**{kind: problems})).splitlines()[2:]
        shown = [line for line in lines if "more line" not in line]
        assert shown == [f"  {name}: {why}" for name, why in problems[: len(shown)]]
        left_out = number - len(shown)
        assert lines[len(shown) :] == ([f"  … and {left_out} more lines"] if left_out else [])
        lengths.add(len(lines))
    assert max(lengths) < 60  # it is cut at all


@pytest.mark.parametrize("kind", [WeightLoadError, MissingPackageError])
@pytest.mark.parametrize("named", [True, False])
def test_the_report_of_an_error_is_no_part_of_its_message(
    kind: type[WeightLoadError], named: bool
) -> None:
    """However it is given, also after a copy, as processes exchange it."""
    error = kind("why", report=["x"]) if named else kind("why", ["x"])
    for each in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (str(each), each.args, each.report) == ("why", ("why",), ["x"])


@pytest.mark.parametrize("ranks", [(0, 9, 33), (33, 0, 9), {33, 9, 0}, ()])
def test_ranks_of_an_error_are_in_order(ranks: Iterable[int]) -> None:
    """Whoever finds them: a set has no order of its own; a copy from another process is equal."""
    error = RankError("they hang", ranks, recoverable=True)
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert each.ranks == tuple(sorted(ranks))
        assert (str(each), each.recoverable) == ("they hang", True)
