"""Weights pushed by a trainer into ranks that run: real processes over gloo."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Pytest's importlib mode has no imports between test files.
SCRIPT = Path(__file__).with_name("buckets_in_processes.py")
PUSHED: Any = runpy.run_path(str(SCRIPT))
SIZE, SUPPORT, BROKEN, PAIRS = (PUSHED[name] for name in ("SIZE", "SUPPORT", "BROKEN", "PAIRS"))
STRANGE, UnprintableError = (PUSHED[name] for name in ("STRANGE", "UnprintableError"))
weights, tensors_of_all_kinds = (PUSHED[name] for name in ("weights", "tensors_of_all_kinds"))
same = PUSHED["same"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """Run the script; return a function that gives the notes of a case, by rank."""

    def run(directory: Path) -> None:
        log = directory / "log"
        code = SUPPORT["run_program"](SCRIPT, directory, log=log, limit=2 * SUPPORT["LIMIT"])
        assert code == 0, log.read_text()

    directory: Path = SUPPORT["fill_once"](tmp_path_factory.getbasetemp(), "buckets", run)

    def notes(case: str) -> list[dict[str, Any]]:
        files = [directory / f"{case}.{rank}" for rank in range(BROKEN.get(case, SIZE))]
        return [json.loads(file.read_text()) if file.exists() else {} for file in files]

    return notes


Ran = Callable[[str], list[dict[str, Any]]]


def raised(notes: list[dict[str, Any]]) -> list[str | None]:
    return [note.get("raised") for note in notes]


def test_the_old_weights_are_not_the_new_ones() -> None:
    """The old and the new weights differ in every tensor."""
    old, new = weights(3), weights(7)
    assert len(new) == 7
    assert not any(same(old[name], new[name]) for name in new)


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("seed", range(4))
def test_an_update_gives_the_bits_of_a_fresh_load(ran: Ran, bucket_bytes: int, seed: int) -> None:
    """With any bucket size and order each rank gets its shards, in the same memory."""
    expected = {"returned": {"new": True, "stayed": True, "runs": True}}
    assert ran(f"bits {bucket_bytes} {seed}") == [{"returned": None}, expected, expected]


@pytest.mark.parametrize("case", ["from a file", "last in step"])
def test_handles_are_sent_and_failures_leave_ranks_in_step(ran: Ran, case: str) -> None:
    """Handles of a checkpoint arrive like tensors; so does what is sent after failures."""
    expected = {"returned": {"new": True, "stayed": True, "runs": True}}
    assert ran(case) == [{"returned": None}, expected, expected]


def test_rounds_follow_each_other(ran: Ran) -> None:
    """Weights may be sent in several calls, and the last one completes them."""
    expected = {"returned": {"filled": [2, 3], "new": [False, True]}}
    assert ran("two rounds")[1:] == [expected, expected]


def test_every_dtype_and_form_arrives(ran: Ran) -> None:
    """Scalars, empty, expanded and strided tensors of all dtypes arrive bit for bit."""
    count = len(tensors_of_all_kinds())
    assert count > 100
    assert ran("all kinds")[1:] == [{"returned": {"wrong": [], "count": count}}] * 2
    assert ran("kinds on two hosts") == ran("all kinds")


@pytest.mark.parametrize("who", ["of", "for"])
def test_a_rank_that_can_share_no_memory(ran: Ran, who: str) -> None:
    """As where the system has no such memory: all that it sends or receives arrives."""
    assert ran(f"kinds {who} one without offers") == ran("all kinds")


def test_digests_are_sent_with_tensors(ran: Ran) -> None:
    """Every dtype and form has the digest that was sent; a tensor that was damaged is named."""
    assert ran("kinds with digests") == [{"returned": None}] + [{"returned": []}] * 2
    *others, damaged = ran("damaged on the way")
    assert damaged["raised"] == "WeightReadError"
    assert damaged["message"].startswith("t1: rank 2 of 3 (this one) has received the digest")
    for note in others:
        assert (note["raised"], note["ranks"]) == ("RankError", [2])
        assert note["message"].startswith("rank 2 of 3 failed: WeightReadError: t1: ")


@pytest.mark.parametrize(("case", "places"), [("one memory", 1), ("two memories", 2)])
def test_the_memory_of_buckets_is_used_again(ran: Ran, case: str, places: int) -> None:
    """A tensor that was kept holds a later bucket's values: of the last one, or the one before.

    On one host there are two. The trainer's source makes a tensor when the one before is freed.
    """
    expected = {"returned": {"places": places, "first": [8.0] * 12}}
    assert ran(case) == [{"returned": {"alive": [0] * 9}}, expected, expected]


def test_no_memory_is_offered_at_the_end(ran: Ran) -> None:
    """All of it is freed, after rounds that failed, too; the system keeps what is still open."""
    assert ran("offered at the end") == [{"returned": []}] * 3


def test_nothing_and_nothing_more_are_well(ran: Ran) -> None:
    """Sending no pair works, and so does taking no more after the last tensor."""
    assert ran("nothing") == [{"returned": None}] + [{"returned": [0, 0, 1]}] * 2
    names = list(PAIRS)
    assert ran("takes all and asks no more") == [{"returned": None}] + [{"returned": names}] * 2


@pytest.mark.parametrize(("count", "runs"), [(0, True), (1, True), (2, False)])
def test_a_trainer_that_fails_breaks_every_update(ran: Ran, count: int, runs: bool) -> None:
    """Receivers raise its message, and a model to which a bucket was written refuses to run."""
    sender, *receivers = ran(f"sender fails after {count}")
    text = f"the optimizer lost {list(weights(7))[count]}"
    assert (sender["raised"], sender["message"]) == ("OSError", text)
    for note in receivers:
        assert (note["raised"], note["runs"]) == ("WeightReadError", runs)
        assert f"rank 0 of 3 failed: OSError: {text}\n" in note["message"]


@pytest.mark.parametrize("bucket", [1, 2])
@pytest.mark.parametrize("who", [1, 2])
def test_a_receiver_that_refuses_stops_all(ran: Ran, who: int, bucket: int) -> None:
    """It raises its own error; the trainer and the other receivers name it, in every bucket."""
    notes = ran(f"{who} refuses in bucket {bucket}")
    own = notes.pop(who)
    text = f"t{3 * bucket - 3} is not wanted"
    assert (own["raised"], own["message"]) == ("LookupError", text)
    for note in notes:
        assert (note["raised"], note["ranks"]) == ("RankError", [who])
        assert note["message"].startswith(f"rank {who} of 3 failed: LookupError: {text}\n")


@pytest.mark.parametrize("bucket", [1, 2])
@pytest.mark.parametrize("who", [1, 2])
def test_a_receiver_that_leaves_early_is_named_by_all(ran: Ran, who: int, bucket: int) -> None:
    """If a block does not take every tensor, every rank raises, that one too."""
    for rank, note in enumerate(ran(f"{who} leaves in bucket {bucket}")):
        assert (note["raised"], note["ranks"]) == ("RankError", [who])
        name = f"rank {who} of 3" + (" (this one)" if rank == who else "")
        assert note["message"].startswith(f"{name} left the block of receive_weights before")


def test_an_iterator_that_is_closed_was_not_exhausted(ran: Ran) -> None:
    """A block that closes the iterator has not taken every tensor."""
    assert [note["ranks"] for note in ran("closed early")] == [[1]] * 3


def test_a_name_the_model_refuses_is_told_to_the_trainer(ran: Ran) -> None:
    """Its rank raises the model's report, and the others quote it."""
    sender, refuser, other = ran("model refuses")
    assert refuser["raised"] == "UnexpectedWeightError"
    assert not refuser["runs"]
    for note in (sender, other):
        assert (note["raised"], note["ranks"]) == ("RankError", [1])
        assert "failed: UnexpectedWeightError: Model refuses" in note["message"]
        assert "norm.scale" in note["message"]


def test_a_refusal_midway_stops_the_others_midway(ran: Ran) -> None:
    """No rank has all new weights when one has stopped before the end."""
    notes = ran("model refuses midway")
    assert raised(notes) == ["RankError", "OverflowError", "RankError"]
    assert not any(note["new"] for note in notes[1:])


def test_several_failures_are_all_told(ran: Ran) -> None:
    """The trainer names all receivers that failed; each of these raises its own error."""
    sender, *receivers = ran("two fail")
    assert sender["ranks"] == [1, 2]
    assert "rank 2 of 3 failed: LookupError: of 2" in sender["message"]
    assert raised(receivers) == ["LookupError"] * 2
    assert raised(ran("all fail")) == ["TypeError", "LookupError", "LookupError"]


@pytest.mark.parametrize("kind", [*STRANGE, "unprintable"])
def test_errors_of_any_kind_and_text_are_told(ran: Ran, kind: str) -> None:
    """Messages that are empty, broken, long or control a terminal arrive short and escaped."""
    error = type(STRANGE.get(kind) or UnprintableError()).__name__
    sender, *receivers = ran(f"strange {kind} sent")
    # A generator must not raise StopIteration: Python makes it a RuntimeError.
    sent = "RuntimeError" if kind == "stop" else error
    assert raised([sender, *receivers]) == [sent, "WeightReadError", "WeightReadError"]
    other_sender, other, own = ran(f"strange {kind} received")
    assert raised([other_sender, other, own]) == ["RankError", "RankError", error]
    for note in (*receivers, other_sender, other):
        assert f"failed: {sent if note in receivers else error}" in note["message"]
        assert len(note["message"]) < 500
        assert all(line.isprintable() for line in note["message"].splitlines())


def test_a_failure_cannot_be_swallowed(ran: Ran) -> None:
    """A block that goes on after the iterator raised raises the same on leaving."""
    sender, *receivers = ran("failure swallowed")
    assert sender["raised"] == "TypeError"
    for note in receivers:
        assert note["raised"] == note["swallowed"] == "WeightReadError"
        assert "expected pairs of name and tensor" in note["message"]


def test_the_iterator_ends_with_its_block(ran: Ran) -> None:
    """After its block the iterator raises, instead of starting a collective alone."""
    note = ran("used too late")[1]
    assert note["raised"] == "RuntimeError"
    assert "block of receive_weights was left" in note["message"]


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        ("cannot be packed", "WeightReadError", "m (Tensor, torch.float32) cannot be packed"),
        ("bucket of nothing", "ValueError", "bucket_bytes is 0"),
        ("name no text", "TypeError", "got 3 and Tensor"),
    ],
)
def test_what_cannot_be_sent_is_refused_on_all_ranks(
    ran: Ran, case: str, kind: str, text: str
) -> None:
    """The trainer raises its mistake, and so do the receivers that wait."""
    sender, *receivers = ran(case)
    assert sender["raised"] == kind
    assert raised(receivers) == ["WeightReadError"] * 2
    assert all(text in note["message"] for note in (sender, *receivers))


def test_a_rank_without_memory_for_a_bucket_stops_all(ran: Ran) -> None:
    """Ranks allocate before bytes are sent; one that cannot is named by the others."""
    sender, other, own = ran("no memory")
    assert own["raised"] == "OutOfMemoryError"
    assert sender["ranks"] == other["ranks"] == [2]
    assert "OutOfMemoryError: of this device" in sender["message"]
    sender, other, own = ran("no shared memory")
    assert own["raised"] == "OSError"
    assert sender["ranks"] == other["ranks"] == [2]
    assert "OSError: of this host" in sender["message"]


@pytest.mark.parametrize(
    ("case", "ranks", "text"),
    [
        ("two send", [0, 2], "of 3 ranks 2 send: [0, 2]"),
        ("nobody sends", [], "of 3 ranks 0 send"),
        ("another source", [2], "receives with src=1, but rank 0 sends"),
        ("source zero", [1], "receives with src=0, but rank 2 sends"),
        ("another device", [2], "receives on meta, but rank 0 sends on cpu"),
    ],
)
def test_calls_that_do_not_belong_together_are_told(
    ran: Ran, case: str, ranks: list[int], text: str
) -> None:
    """If ranks disagree on the sender or the device, all raise the same error."""
    for note in ran(case):
        assert (note["raised"], note["ranks"]) == ("RankError", ranks)
        assert text in note["message"]


def test_a_subgroup_has_numbers_of_its_own(ran: Ran) -> None:
    """Ranks have their numbers in the group, and messages add those in the world."""
    notes = ran("subgroup")
    assert notes[1]["names"] == list(PAIRS)
    for note in notes[1:]:
        assert note["ranks"] == [0]
        assert "rank 0 of 2 (rank 1 of the world)" in note["message"]
        assert "receives with src=2, but rank 1 sends" in note["message"]


@pytest.mark.parametrize(
    ("case", "rank"), [("trainer killed", 0), ("receiver killed", 1), ("receiver interrupted", 1)]
)
def test_a_rank_that_is_killed_or_interrupted_holds_up_nobody(
    ran: Ran, case: str, rank: int
) -> None:
    """The others raise without waiting for the group's timeout, though none of them ends."""
    notes = ran(case)
    own = notes.pop(rank)
    assert own.get("raised") == ("KeyboardInterrupt" if "interrupted" in case else None)
    for note in notes:
        assert (note["raised"], note["cause"]) == ("RankError", "RuntimeError")
        assert "lost touch with the others" in note["message"]
        # All ranks have the first bucket, of three tensors, and none has the second.
        assert f"sent, after {list(PAIRS)[2]}: " in note["message"]
