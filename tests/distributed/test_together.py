"""Processes that work together: one dies, hangs, refuses or differs, and the others name it."""

from __future__ import annotations

import json
import math
import os
import runpy
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from vllm_module import ModelConfig, get_model
from vllm_module.distributed import run_ranks

HERE = Path(__file__).parent
TIMEOUT = runpy.run_path(str(HERE / "working_together.py"))["TIMEOUT"]
MARGIN = 60.0  # seconds that a busy machine may take besides
SUPPORT = runpy.run_path(str(HERE.parent / "support.py"))

DIED = {
    "first_dies": [0],
    "last_dies": [3],
    "one_of_two_dies": [0],
    "two_die": [0, 2],
    "two_of_many_die": [2, 5],
    "one_dies_before_it_comes": [1],
    "one_dies_when_it_has_told_one_other": [0],
    "collective_dies": [1],
    "load_first_dies": [0],
    "load_last_dies": [1],
    "load_without_a_cpu_group_one_dies": [1],
}
HANG = {"one_hangs": [0], "one_is_stopped": [1], "one_never_comes": [1], "load_one_hangs": [1]}
HANG["one_of_many_is_stopped"] = [1]
REFUSE = {
    "one_refuses": ([1], "ValueError: refused by 1\nand a second line"),
    "collective_refused": ([1], "ValueError: refused by 1\nand a second line"),
    "each_fails_for_itself": ([1], "RuntimeError: of rank 1 itself"),
    "one_refuses_and_others_stagger": ([0], "ValueError: refused by 0"),
    "two_refuse": ([0, 3], "ValueError: refused by 3"),
    "most_of_many_refuse": ([0, 1, 2, 4, 5, 7, 8], "ValueError: refused by 4"),
    "one_is_interrupted_while_it_waits": ([1], "stopped: KeyboardInterrupt"),
    "one_leaves_by_sys_exit": ([1], "SystemExit: 3"),
    "load_one_file_damaged": ([2], "CheckpointFormatError: "),
    "load_one_folder_missing": ([1], "CheckpointFormatError: "),
    "load_one_shard_differs": ([3], "DuplicateWeightError: model.embed_tokens.weight"),
}
DIFFER = {
    "load_other_names": ([1], "rank 1 of 3 differs from the others:\n  checkpoint files: "),
    "load_other_values": ([3], "rank 3 of 4 differs from the others:\n  checkpoint files: "),
    "load_other_value_unseen": ([0], "model.norm.weight after loading: "),
    "load_other_config": ([0, 1], "config.json's rms_norm_eps: 1e-06 on rank 0; 1e-05 on rank 1"),
    "load_other_dtype": ([2], "dtype: torch.float32 on ranks 0, 1; torch.float16 on rank 2"),
}


class Outcome(NamedTuple):
    """Exit codes, notes and logs of a scenario, by rank, and when the last rank failed."""

    codes: dict[int, int | str]
    notes: dict[int, dict[str, Any]]
    event: float
    logs: dict[int, str]

    def survivors(self, failed: Iterable[int]) -> dict[int, dict[str, Any]]:
        return {rank: note for rank, note in self.notes.items() if rank not in failed}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all scenarios, each rank of each in a process of its own."""

    def run(directory: Path) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(HERE / "scenarios.py"), str(directory)]
        subprocess.run(command, check=True, timeout=6 * SUPPORT["LIMIT"], env=environment)

    directory: Path = SUPPORT["fill_once"](tmp_path_factory.getbasetemp(), "scenarios", run)
    return directory


@pytest.fixture
def outcome(directory: Path, request: pytest.FixtureRequest) -> Outcome:
    """The outcome of the scenario that the test names."""
    folder = directory / request.param
    codes = json.loads((folder / "codes.json").read_text())
    notes = {rank: folder / f"rank{rank}.json" for rank in map(int, codes)}
    return Outcome(
        {int(rank): code for rank, code in codes.items()},
        {rank: json.loads(path.read_text()) for rank, path in notes.items() if path.exists()},
        max((float(path.read_text()) for path in folder.glob("event.*")), default=0.0),
        {int(rank): (folder / f"rank{rank}.log").read_text() for rank in codes},
    )


def check_survivors(outcome: Outcome, failed: list[int]) -> None:
    survivors = outcome.survivors(failed)
    assert len(survivors) + len(failed) == len(outcome.codes)
    for rank, note in survivors.items():
        assert note["raised"] == "RankError", note
        assert note["ranks"] == failed, note
        assert outcome.codes[rank] == 1  # and neither hung nor aborted while it ended


@pytest.mark.parametrize(("outcome", "failed"), DIED.items(), ids=DIED, indirect=["outcome"])
def test_a_rank_that_dies_is_named_by_every_survivor(outcome: Outcome, failed: list[int]) -> None:
    """Every survivor names the killed process, whenever it dies, and no other rank."""
    check_survivors(outcome, failed)
    assert [outcome.codes[rank] for rank in failed] == [-9] * len(failed)
    for note in outcome.survivors(failed).values():
        for rank in failed:
            assert f"rank {rank} of {len(outcome.codes)} ended" in note["message"]


@pytest.mark.parametrize(("outcome", "failed"), HANG.items(), ids=HANG, indirect=["outcome"])
def test_a_rank_that_hangs_is_named_within_the_timeout(outcome: Outcome, failed: list[int]) -> None:
    """Survivors say who they wait for, until the timeout; the late rank raises as well."""
    check_survivors(outcome, failed)
    for rank in outcome.survivors(failed):
        assert f"waiting for rank {failed[0]} of {len(outcome.codes)}" in outcome.logs[rank]
    for note in outcome.survivors(failed).values():
        assert TIMEOUT * 0.9 < note["at"] - outcome.event < TIMEOUT + MARGIN
        assert f"had not finished {TIMEOUT:g} s after rank" in note["message"]
    for rank in failed:
        assert outcome.notes[rank]["raised"] == "RankError"
        assert outcome.codes[rank] == 1


@pytest.mark.parametrize("outcome", ["one_hangs_in_a_call_inside"], indirect=True)
def test_a_limit_is_not_waited_for_twice(outcome: Outcome) -> None:
    check_survivors(outcome, [1])
    for note in outcome.survivors([1]).values():
        assert TIMEOUT * 0.9 < note["at"] - outcome.event < TIMEOUT + MARGIN


@pytest.mark.parametrize("outcome", ["one_is_stopped_and_work_names_it"], indirect=True)
def test_a_stopped_rank_does_not_keep_the_errors_of_others(outcome: Outcome) -> None:
    """Each raises its own error at once: a rank that hangs would not take it."""
    for note in outcome.survivors([1]).values():
        assert note["raised"] == "KeyError"
        assert "rank 1 of 3 hangs: it hangs" in note["message"]


@pytest.mark.parametrize("outcome", ["one_dies_one_hangs"], indirect=True)
def test_all_that_failed_are_named(outcome: Outcome) -> None:
    """Survivors name both the rank that died and the rank that hangs."""
    check_survivors(outcome, [1, 2])


@pytest.mark.parametrize("outcome", ["one_refuses_one_dies"], indirect=True)
def test_a_refusal_does_not_hide_a_death(outcome: Outcome) -> None:
    """A survivor names both the rank that refused and the one that died."""
    check_survivors(outcome, [0, 2])
    assert outcome.notes[0]["raised"] == "ValueError"


@pytest.mark.parametrize(("outcome", "expected"), REFUSE.items(), ids=REFUSE, indirect=["outcome"])
def test_a_rank_that_raises_says_why_to_all(
    outcome: Outcome, expected: tuple[list[int], str]
) -> None:
    """The rank raises its own error; the others name the rank and quote the error."""
    failed, words = expected
    check_survivors(outcome, failed)
    for note in outcome.survivors(failed).values():
        assert words in note["message"]
    for rank in failed:
        assert outcome.notes[rank]["raised"] != "RankError"
        assert outcome.codes[rank] in (1, 3, -2)


@pytest.mark.parametrize("outcome", ["one_refuses_before_the_other_comes"], indirect=True)
def test_a_rank_that_refuses_does_not_wait_long_for_others_to_come(outcome: Outcome) -> None:
    """It raises, whatever its timeout is; a rank that makes the call later reads that it left."""
    first, late = outcome.notes[0], outcome.notes[1]
    assert (first["raised"], late["raised"], late["ranks"]) == ("ValueError", "RankError", [0])
    assert "rank 0 of 2 ended, or left" in late["message"]


@pytest.mark.parametrize(("outcome", "expected"), DIFFER.items(), ids=DIFFER, indirect=["outcome"])
def test_ranks_with_another_checkpoint_are_named_on_all(
    outcome: Outcome, expected: tuple[list[int], str]
) -> None:
    """Every rank, that one too, names the ranks that differ from the majority and the entries."""
    for rank, note in outcome.notes.items():
        assert note["raised"] == "RankError", note
        assert note["ranks"] == expected[0]
        assert expected[1] in note["message"]
        assert outcome.codes[rank] == 1


@pytest.mark.parametrize("outcome", ["one_is_slow"], indirect=True)
def test_a_slow_rank_is_waited_for(outcome: Outcome) -> None:
    """A rank that finishes within the timeout does not fail."""
    assert [note["returned"] for note in outcome.notes.values()] == [[0, 1, "slow"]] * 3
    assert set(outcome.codes.values()) == {0}


@pytest.mark.parametrize("outcome", ["results_of_all_kinds"], indirect=True)
def test_results_reach_every_rank(outcome: Outcome) -> None:
    """Results arrive for every size, type, call, nesting and group; every thread ends."""
    assert [note["returned"] for note in outcome.notes.values()] == [[]] * 4
    assert set(outcome.codes.values()) == {0}


@pytest.mark.parametrize("outcome", ["refusals_of_all_kinds"], indirect=True)
def test_whatever_is_raised_can_be_told(outcome: Outcome) -> None:
    """So are exceptions without text, with too much of it, not picklable, or that end a process."""
    expected = [
        ("ValueError", "failed: ValueError"),
        ("ValueError", "failed: ValueError: long long"),
        ("ValueError", "\n11 ..."),
        ("ValueError", "\\ud800 is no character"),
        ("_BrokenError", "_BrokenError: (its message is broken: KeyError)"),
        ("Local", "Local: of a class that cannot be pickled"),
        ("KeyboardInterrupt", "failed: KeyboardInterrupt"),
        ("SystemExit", "failed: SystemExit: 5"),
        ("TypeError", "cannot be sent to the other ranks: TypeError"),
    ]
    assert set(outcome.codes.values()) == {0}
    for rank, note in outcome.notes.items():
        for turn, (raised, words) in enumerate(expected):
            name, ranks, *message = note["returned"][turn]
            if turn % 3 == rank:
                assert name == raised
            else:
                assert (name, ranks) == ("RankError", [turn % 3])
                assert words in message[0]
                assert len(message[0]) < 2500


@pytest.mark.parametrize("outcome", ["some_refuse_and_go_on"], indirect=True)
def test_a_refusal_that_is_expected_leaves_the_group_usable(outcome: Outcome) -> None:
    """Every rank raises, those that refused their own error, and the next call works."""
    one = ["rank 1 of 3 failed: KeyError: 'of 1'", [1], True]
    two = "rank 0 of 3 failed: ValueError: of 0\nrank 2 of 3 failed: ValueError: of 2"
    well = ["returned", [0, 1, 2]]
    other = ["rank 0 of 3 failed: OSError: of 0", [0], False]
    expected = {
        0: [one, ["ValueError"], well, ["OSError"]],
        1: [["KeyError"], [two, [0, 2], True], well, other],
        2: [one, ["ValueError"], well, other],
    }
    assert {rank: note["returned"] for rank, note in outcome.notes.items()} == expected


@pytest.mark.parametrize("outcome", ["one_of_a_subgroup_dies"], indirect=True)
def test_a_subgroup_numbers_its_own_ranks(outcome: Outcome) -> None:
    """Its ranks give the number in the group and in the world; another group goes on."""
    assert [outcome.notes[rank]["returned"] for rank in (0, 2)] == [[0, 2]] * 2
    assert outcome.notes[1]["ranks"] == [1]
    assert "rank 1 of 2 (rank 3 of the world) ended" in outcome.notes[1]["message"]
    assert outcome.codes == {0: 0, 1: 1, 2: 0, 3: -9}


@pytest.mark.parametrize("outcome", ["two_threads_at_once"], indirect=True)
def test_two_threads_do_not_take_each_others_results(outcome: Outcome) -> None:
    """A second call with the same group is refused during the first, which goes on."""
    for note in outcome.notes.values():
        said, first, second, again = note["returned"]
        assert [message.partition(":")[0] for message in said] == [
            "another thread of this process works together with the same process group"
        ] * 2
        assert (first, second, again) == ([0, 1], [5, 5], [3, 3])
    assert set(outcome.codes.values()) == {0}


@pytest.mark.parametrize("outcome", ["a_group_without_a_cpu"], indirect=True)
def test_a_group_that_cannot_talk_says_what_to_initialize(outcome: Outcome) -> None:
    """A group of a GPU backend alone is refused before the work, with what to write instead."""
    for note in outcome.notes.values():
        assert note["raised"] == "ValueError"
        assert "init_process_group('cpu:gloo,cuda:nccl')" in note["message"]


def test_processes_load_what_simulated_ranks_do(directory: Path) -> None:
    """get_model loads the same model in 1, 2, 3 and 4 processes as in simulated ranks."""
    total = runpy.run_path(str(HERE / "loading_together.py"))["total"]
    for size in (1, 2, 3, 4):
        config = ModelConfig(model=str(directory / "good"))
        expected = run_ranks(size, lambda rank, c=config: total(get_model(model_config=c)))
        for rank in range(size):
            note = json.loads((directory / f"load_at_{size}/rank{rank}.json").read_text())
            assert note["returned"] == pytest.approx(expected[rank], rel=1e-5)


def test_replicas_load_each_for_itself(directory: Path) -> None:
    """Each of two groups of two processes loads what two simulated ranks load."""
    total = runpy.run_path(str(HERE / "loading_together.py"))["total"]
    expected = {
        name: run_ranks(
            2,
            lambda _, n=name: total(get_model(model_config=ModelConfig(model=str(directory / n)))),
        )
        for name in ("good", "other values")
    }
    for rank in range(4):
        note = json.loads((directory / f"load_replicas/rank{rank}.json").read_text())
        own = expected[("good", "other values")[rank % 2]][rank // 2]
        good = expected["good"][rank // 2]
        assert note["returned"] == pytest.approx([own, good], rel=1e-5), note


@pytest.mark.parametrize("outcome", ["load_replica_dies"], indirect=True)
def test_a_replica_that_fails_leaves_the_other_alone(outcome: Outcome) -> None:
    """Only the ranks of its group name the one that died, by its number in the group."""
    assert outcome.codes == {0: 0, 1: 1, 2: 0, 3: -9}
    assert outcome.notes[1]["ranks"] == [1]
    assert "rank 1 of 2 (rank 3 of the world) ended" in outcome.notes[1]["message"]


@pytest.mark.parametrize("outcome", ["load_without_a_cpu_group"], indirect=True)
def test_a_group_without_a_cpu_loads_all_the_same(outcome: Outcome) -> None:
    """Its ranks exchange messages over a temporary gloo group, in every load."""
    assert outcome.codes == dict.fromkeys(range(3), 0), outcome.notes


@pytest.fixture(scope="module")
def tokens_of(directory: Path) -> dict[str, list[list[int]]]:
    """Tokens that a lone process computes of two checkpoints."""
    module = runpy.run_path(str(HERE / "engines_together.py"))
    found = {}
    for name in ("good", "other values"):
        with module["engine"](directory / "alone", name) as llm:
            found[name] = module["tokens"](llm)
    assert found["good"] != found["other values"]
    return found


def returned(outcome: Outcome) -> list[Any]:
    assert set(outcome.codes.values()) == {0}, outcome.notes
    return [outcome.notes[rank]["returned"] for rank in sorted(outcome.notes)]


@pytest.mark.parametrize("outcome", ["engine_in_each_process"], indirect=True)
def test_an_engine_of_one_rank_is_a_guest(
    outcome: Outcome, tokens_of: dict[str, list[list[int]]]
) -> None:
    """It leaves the program's process group alone, which may begin and end before or after it."""
    assert returned(outcome) == [[True, [1, 1], [3, 3], [tokens_of["good"]] * 4]] * 2


@pytest.mark.parametrize("outcome", ["engines_of_two_ranks"], indirect=True)
def test_every_rank_calls_engines_of_a_launcher(
    outcome: Outcome, tokens_of: dict[str, list[list[int]]]
) -> None:
    """A policy and a reference of two ranks give each rank its outputs, updates and refusals."""
    good, other = tokens_of["good"], tokens_of["other values"]
    results = returned(outcome)
    for rank, result in enumerate(results):
        assert (result["untouched"], result["sums"]) == (True, [10])
        assert result["place"] == [rank % 2, 2]
        found = result["tokens"]
        assert (found["policy"], found["reference"]) == (good, other)
        names = ("updated", "refused", "alone", "last")
        assert [found[name] for name in names] == [other] * 4
        assert result["differences"] == []
        assert result["said"].startswith(
            "MisshapenWeightError" if rank % 2 else "RankError: rank 1"
        )
        assert "model.norm.weight: expected shape [48], got [7]" in result["said"]
        for error, what in zip(result["alone"], ("a rank cannot ask", "in one order"), strict=True):
            assert error.startswith("ValueError: ")
            assert what in error
    for first in (0, 2):  # seeds are drawn by the engine's first rank
        assert results[first]["drawn"] == results[first + 1]["drawn"]
    assert results[0]["drawn"] != results[2]["drawn"]


@pytest.mark.parametrize("outcome", ["trained_weights_move"], indirect=True)
def test_shards_of_a_trainer_move_to_an_engine(
    outcome: Outcome, tokens_of: dict[str, list[list[int]]]
) -> None:
    """Boxes arrive in place with the trainer's digests; a sender that dies is named by all."""
    assert outcome.codes == {0: 0, 1: -9, 2: 0, 3: 0}
    sender, *results = (outcome.notes[rank]["returned"] for rank in (0, 2, 3))
    assert sender.startswith("RankError: ")
    assert "rank 1 of 4 ended" in sender
    shapes = runpy.run_path(str(HERE / "loading_together.py"))["SHAPES"].items()
    # Vectors are kept by both ranks of the engine, all other weights by one of them.
    kept = sum(math.prod(shape) * (2 if len(shape) == 1 else 1) * 4 for _, shape in shapes)
    for result in results:
        assert result["before"] == tokens_of["good"]
        assert result["after"] == result["last"] == tokens_of["other values"]
        assert result["same"]  # addresses
        assert result["sent"] == kept
        assert "rank 1 of 4 ended" in result["said"] or "rank 1 ended" in result["said"]


@pytest.mark.parametrize("outcome", ["a_program_goes_on"], indirect=True)
def test_a_program_with_a_process_group_loses_no_rank(
    outcome: Outcome, tokens_of: dict[str, list[list[int]]]
) -> None:
    """Without a word the world is one engine, which says so; all ranks go on when it is closed."""
    first, second = returned(outcome)
    assert first == [2, tokens_of["good"], 3]
    assert second[0::2] == [2, 3]
    assert "give distributed_executor_backend='external_launcher'" in second[1]
    assert "the 2 processes that were launched are the ranks of this engine" in outcome.logs[0]
    assert "exit" not in "".join(outcome.logs.values())


@pytest.mark.parametrize("outcome", ["a_program_ends"], indirect=True)
def test_other_ranks_exit_with_a_program_without_a_process_group(
    outcome: Outcome, tokens_of: dict[str, list[list[int]]]
) -> None:
    """As documented: rank 0 runs the script, the others run the model, say so and exit with 0."""
    assert returned(outcome) == [tokens_of["good"], "exit 0"]
    assert "rank 0 closes the engine, and exit then" in outcome.logs[0]
    said = "rank 1: rank 0 has closed the engine, and this process exits"
    assert [said in outcome.logs[rank] for rank in (0, 1)] == [False, True]
    assert "init_process_group before LLM" in outcome.logs[1]


@pytest.mark.parametrize("outcome", ["ranks_of_its_own"], indirect=True)
def test_one_process_of_a_world_starts_ranks_for_itself(
    outcome: Outcome, tokens_of: dict[str, list[list[int]]]
) -> None:
    """Two engines with started ranks live in one process; the other processes wait for nothing."""
    good, other = tokens_of["good"], tokens_of["other values"]
    assert returned(outcome) == [[3, [good, other, other]], [3, []]]


@pytest.mark.parametrize("outcome", ["sizes_that_do_not_fit"], indirect=True)
def test_a_world_that_does_not_fit_is_refused_with_its_numbers(outcome: Outcome) -> None:
    """Every process raises by itself: nothing else is done than what was asked for."""
    expected = [
        "tensor_parallel_size is 2, and torchrun has started 3 ranks",
        "engines of 2 ranks do not divide the 3 processes that were launched",
        "'uni' is an engine of one process",
        "'mp', 'ray', 'uni' or 'external_launcher', got 'slurm'",
    ]
    for messages in returned(outcome):
        for message, words in zip(messages, expected, strict=True):
            assert words in message


@pytest.mark.parametrize("outcome", ["a_rank_of_an_engine_dies"], indirect=True)
def test_a_rank_that_dies_in_an_engine_of_a_launcher_is_named(outcome: Outcome) -> None:
    """The other rank of the engine raises, names it, and its engine has ended."""
    check_survivors(outcome, [1])


def test_one_rank_speaks_for_a_command(directory: Path) -> None:
    """The exit code is 1 on every survivor, and one rank prints one message."""
    expected = {
        "command_first_dies": {1: "error: rank 0 of 3 ended"},
        "command_one_hangs": {0: "error: rank 1 of 2 had not finished"},
        "command_all_refuse": {0: "error: "},
        "command_one_refuses": {0: "error: rank 3 of 4 failed: DuplicateWeightError: model."},
        "command_one_refuses_first_dies": {
            1: "error: rank 0 of 3 ended", 2: "error: rank 2: model.embed_tokens.weight and",
        },
        "command_other_config": {0: "error: rank 1 of 3 differs"},
        "command_other_value_unseen": {0: "error: rank 0 of 3 differs"},
    }  # fmt: skip
    for name, said in expected.items():
        codes = json.loads((directory / name / "codes.json").read_text())
        for rank, code in codes.items():
            path = directory / name / f"rank{rank}.json"
            if not path.exists():
                assert code == -9
                continue
            result = json.loads(path.read_text())["returned"]
            assert code == result["code"] == 1, (name, rank, result)
            assert result["out"] == ""
            notice = "waiting for rank "  # of one that is silent, before it is given up
            first = next((x for x in result["err"].splitlines() if not x.startswith(notice)), "")
            assert first.startswith(said.get(int(rank), "")), (name, rank, result)
            assert bool(result["err"]) == (int(rank) in said), (name, rank, result)
            assert "Traceback" not in result["err"]
