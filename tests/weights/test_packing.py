"""Places of tensors in a bucket, and which names of weights belong together."""

from __future__ import annotations

import pytest
import torch

from vllm_module.errors import WeightReadError
from vllm_module.weights import buckets
from vllm_module.weights.changes import Changes, find_changes
from vllm_module.weights.packing import PackedTensor, aligned, gaps_of

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("before", [0, 1, 8, 16, 17, 24])
@pytest.mark.parametrize("count", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("steps", [False, True])
def test_anything_may_follow_anything(
    dtype: torch.dtype, before: int, count: int | None, steps: bool
) -> None:
    """A tensor, or none to all of its elements, comes back bit by bit, whatever is before it.

    Without steps, indices are there, as versions before sent them.
    """
    memory, new = torch.full((256,), 7, dtype=torch.uint8), torch.arange(1, 4).to(dtype)
    weight: torch.Tensor | Changes = new
    if count is not None:
        weight = Changes(torch.arange(count), new[:count], (3,))
    gaps = gaps_of(weight) if steps else None
    place = PackedTensor("w", dtype, (3,), aligned(before), None, count, gaps)
    place.fill(memory, weight)
    found = place.within(memory)
    if isinstance(weight, Changes):
        assert found.indices.tolist() == [*range(count or 0)]
        assert torch.equal(found.values, weight.values)
    else:
        assert torch.equal(found, new)
    assert place.nbytes <= 3 * (8 + dtype.itemsize) + 16
    assert count != 0 or place.nbytes == 0
    assert memory[: place.start].eq(7).all()
    assert memory[place.start + place.nbytes :].eq(7).all()


@pytest.mark.parametrize("most", [0, 255, 256, 65535, 65536, 2**31 - 1, 2**31])
def test_indices_are_steps_of_the_fewest_bytes(most: int) -> None:
    """One large step makes all of them as wide; the largest of each width, and one more."""
    indices = torch.tensor([0, 3, 3 + most] if most else [0])
    weight = Changes(indices, torch.ones(len(indices)), (2**32,))
    place = PackedTensor("w", torch.float32, (2**32,), 16, None, len(indices), gaps_of(weight))
    memory = torch.zeros(128, dtype=torch.uint8)
    place.fill(memory, weight)
    assert torch.equal(place.within(memory).indices, indices)
    width = 1 + (most > 255) + 2 * (most > 65535) + 4 * (most > 2**31 - 1)
    assert place.gaps.itemsize == width


def test_changes_are_found_at_both_sides_of_every_edge() -> None:
    """A large tensor is compared piece by piece: 2**22 elements, of which the last has fewer."""
    places = [0, 2**22 - 1, 2**22, 2**23 - 1, 2**23, 2**23 + 6]
    old = torch.zeros(2**23 + 7, dtype=torch.uint8)
    new = old.clone()
    new[places] = torch.arange(1, 7, dtype=torch.uint8)
    changes = find_changes(old, new)
    assert (changes.indices.tolist(), changes.values.tolist()) == (places, [*range(1, 7)])


def test_indices_that_are_refused_have_no_steps() -> None:
    wrong = Changes(torch.tensor([5, 2]), torch.ones(2), (9,))
    place = PackedTensor("w", torch.float32, (9,), 0, None, 2, gaps_of(wrong))
    with pytest.raises(WeightReadError, match="ascending"):
        place.fill(torch.zeros(64, dtype=torch.uint8), wrong)


@pytest.mark.parametrize(
    ("sent", "expected", "fits"),
    [
        ("a", "a", True), ("a", None, True), (None, None, True), ("", "", True), ("", None, True),
        ("a", "b", False), (None, "a", False), ("a", "", False), ("", "a", False),
        (None, "", False),
    ],
)  # fmt: skip
def test_a_version_is_expected_or_not(
    sent: str | None, expected: str | None, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A receiver that names none takes any; an empty name is a name."""
    monkeypatch.setattr(buckets, "rank_in_world", lambda *_: "")
    transfer = object.__new__(buckets._Transfer)
    transfer.rank, transfer.size, transfer.group = 0, 2, None
    statuses = [
        buckets._Status(None, "cpu", None, None, sent, True),
        buckets._Status(0, "cpu", None, None, expected, True),
    ]
    verdict = transfer._verdict(statuses)
    assert (verdict is None) is fits, verdict
