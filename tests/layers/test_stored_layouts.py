"""How checkpoints store a parameter, written out in small numbers, and what each rank keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_module.errors import ShardingError
from vllm_module.parameters import BasevLLMParameter, Dim, Experts, Slot
from vllm_module.weights import read_into

GATE_UP = (Slot("gate", 2, 2), Slot("up", 2, 2))
# Key heads 1 and 2: query, key, and two values of each.
QKV_GROUPS = Dim((Slot("q", 2, 2), Slot("k", 2, 2), Slot("v", 4, 2)), groups=2)

# The dimensions for two ranks, the stored numbers by slot, and what each of the ranks holds.
LAYOUTS: dict[str, tuple[tuple[Dim, ...], dict[str | None, Any], list[Any]]] = {
    "one slot after the other": (
        (Dim(GATE_UP, groups=1),),
        {"": [1, 2, 11, 12]},
        [[1, 11], [2, 12]],
    ),
    "slots that alternate": (
        (Dim(GATE_UP, groups=2),),
        {"": [1, 11, 2, 12]},
        [[1, 11], [2, 12]],
    ),
    "slots in groups of unequal shares": (
        (QKV_GROUPS,),
        {"": [1, 11, 21, 22, 2, 12, 23, 24]},
        [[1, 11, 21, 22], [2, 12, 23, 24]],
    ),
    "a slot that all ranks keep": (
        (Dim((Slot("q", 4, 2), Slot("k", 2, 1)), groups=1),),
        {"": [1, 2, 3, 4, 11, 12]},
        [[1, 2, 11, 12], [3, 4, 11, 12]],
    ),
    "one slot in groups, padded inside one": (
        (Dim((Slot("a", 4, 2, padded=6),), groups=2),),
        {"": [1, 2, 3, 4]},
        [[1, 2, 3], [4, 0, 0]],
    ),
    "one slot in groups, stored as pairs": (
        (Dim((Slot("a", 8, 2, pairs=4),), groups=2),),
        {"": [1, 3, 2, 4, 5, 7, 6, 8]},
        [[1, 2, 3, 4], [5, 6, 7, 8]],
    ),
    "slots as pairs, one after the other": (
        (Dim((Slot("a", 4, 1, pairs=4), Slot("b", 4, 1, pairs=4)), groups=1),),
        {"": [1, 3, 2, 4, 5, 7, 6, 8]},
        [[1, 2, 3, 4, 5, 6, 7, 8]] * 2,
    ),
    "a rank's groups of several features": (
        (Dim((Slot("q", 8, 2), Slot("k", 4, 2)), groups=2),),
        {"": [1, 2, 3, 4, 11, 12, 5, 6, 7, 8, 13, 14]},
        [[1, 2, 3, 4, 11, 12], [5, 6, 7, 8, 13, 14]],
    ),
    "alternating slots with padding": (
        (Dim((Slot("gate", 3, 2, padded=4), Slot("up", 3, 2, padded=4)), groups=3),),
        {"": [1, 11, 2, 12, 3, 13]},
        [[1, 2, 11, 12], [3, 0, 13, 0]],
    ),
    "heads stored as pairs": (
        (Dim((Slot("", 8, 2, pairs=4),)),),
        {"": [1, 3, 2, 4, 5, 7, 6, 8]},
        [[1, 2, 3, 4], [5, 6, 7, 8]],
    ),
    "one slot of two stored as pairs": (
        (Dim((Slot("q", 4, 1, pairs=4), Slot("v", 4, 2))),),
        {"q": [1, 3, 2, 4], "v": [11, 12, 13, 14]},
        [[1, 2, 3, 4, 11, 12], [1, 2, 3, 4, 13, 14]],
    ),
    "the same as one tensor": (
        (Dim((Slot("q", 4, 1, pairs=4), Slot("v", 4, 2))),),
        {None: [1, 3, 2, 4, 11, 12, 13, 14]},
        [[1, 2, 3, 4, 11, 12], [1, 2, 3, 4, 13, 14]],
    ),
    "padding between slots": (
        (Dim((Slot("a", 3, 2, padded=4), Slot("b", 1, 2, padded=2)), groups=1),),
        {"": [1, 2, 3, 11]},
        [[1, 2, 11], [3, 0, 0]],
    ),
}
TRANSPOSED: dict[str, tuple[tuple[Dim, ...], dict[str | None, Any], list[Any]]] = {
    "a square": (
        (Dim.cut(2, 2), Dim.whole(2)),
        {"": [[1, 3], [2, 4]]},
        [[[1, 2]], [[3, 4]]],
    ),
    "rows cut by their stored columns": (
        (Dim.whole(2), Dim.cut(4, 2)),
        {"": [[1, 5], [2, 6], [3, 7], [4, 8]]},
        [[[1, 2], [5, 6]], [[3, 4], [7, 8]]],
    ),
    "slots that alternate": (
        (Dim(GATE_UP, groups=2), Dim.whole(1)),
        {"": [[1, 11, 2, 12]]},
        [[[1], [11]], [[2], [12]]],
    ),
}


def held(parameters: list[BasevLLMParameter], stored: dict[str | None, Any]) -> list[Any]:
    """Return what each rank holds of ``stored``, as lists."""
    results = []
    for meta in parameters:
        real = meta.materialize_on("cpu")
        for slot, numbers in stored.items():
            tensor = torch.tensor(numbers, dtype=torch.float32)
            assert real.accepts(slot, tensor.shape), (slot, real.checkpoint_shape(slot))
            for source, destination in real.cut(tensor, slot):
                read_into(source, destination)
        results.append(real.tolist())
    return results


def of_ranks(*dims: Dim, **arguments: Any) -> list[BasevLLMParameter]:
    return [
        BasevLLMParameter(*dims, tp_rank=rank, tp_size=2, dtype=torch.float32, **arguments)
        for rank in range(2)
    ]


@pytest.mark.parametrize(("dims", "stored", "expected"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_stored_order_is_undone(dims: Any, stored: Any, expected: list[Any]) -> None:
    """Each rank holds its part of every slot, one slot after the other."""
    assert held(of_ranks(*dims), stored) == expected


@pytest.mark.parametrize(("dims", "stored", "expected"), TRANSPOSED.values(), ids=TRANSPOSED)
def test_what_is_stored_transposed_is_held_as_declared(
    dims: Any, stored: Any, expected: list[Any]
) -> None:
    """The dimensions of a parameter are declared as it holds them; a square is transposed too."""
    assert held(of_ranks(*dims, transposed=True), stored) == expected


# Three experts with a row for gate and one for up, of two features.
APART = {
    "0.gate": [[1, 2]], "0.up": [[3, 4]],
    "1.gate": [[5, 6]], "1.up": [[7, 8]],
    "2.gate": [[9, 10]], "2.up": [[11, 12]],
}  # fmt: skip
PACKED = [[[1, 2], [3, 4]], [[5, 6], [7, 8]], [[9, 10], [11, 12]]]


def experts(size: int, parts: int, *, together: bool = False) -> list[BasevLLMParameter]:
    """Return the parameters of ranks that spread the experts, or cut the input of each."""
    output = Dim((Slot("gate", 1), Slot("up", 1)), groups=1 if together else None)
    return [
        BasevLLMParameter(
            output,
            Dim.cut(2, parts),
            tp_rank=rank,
            tp_size=max(size, parts),
            dtype=torch.float32,
            experts=Experts(3, rank if size > 1 else 0, size, together),
        )
        for rank in range(max(size, parts))
    ]


@pytest.mark.parametrize("form", ["apart", "packed", "together only"])
def test_experts_are_kept_whole_or_cut(form: str) -> None:
    """Spread over ranks, the first keep one more; four ranks leave one without; or all are cut."""
    stored: dict[str | None, Any] = dict(APART)
    if form != "apart":
        stored = {"" if form == "together only" else None: PACKED}

    def of(size: int, parts: int) -> list[Any]:
        return held(experts(size, parts, together=form == "together only"), stored)

    assert of(2, 1) == [PACKED[:2], PACKED[2:]]
    assert of(4, 1) == [[PACKED[0]], [PACKED[1]], [PACKED[2]], []]
    assert of(1, 2) == [
        [[[1], [3]], [[5], [7]], [[9], [11]]],
        [[[2], [4]], [[6], [8]], [[10], [12]]],
    ]


def test_ranks_share_a_group() -> None:
    """With fewer key heads than ranks, a rank has its queries of a group and all of its keys."""
    dim = Dim((Slot("q", 4, 4), Slot("k", 2, 2)), groups=2)
    ranks = [
        BasevLLMParameter(dim, tp_rank=rank, tp_size=4, dtype=torch.float32) for rank in range(4)
    ]
    assert held(ranks, {"": [1, 2, 11, 3, 4, 12]}) == [[1, 11], [2, 11], [3, 12], [4, 12]]


def test_the_names_of_slots_are_paths() -> None:
    """A slot has a component for each dimension whose slots are stored apart."""
    (parameter,) = experts(1, 1)
    assert list(parameter.slots) == list(APART)
    assert parameter.checkpoint_shape("2.up") == (1, 2)
    assert parameter.checkpoint_shape(None) == (3, 2, 2)
    (parameter,) = experts(1, 1, together=True)
    assert list(parameter.slots) == [""]
    assert parameter.checkpoint_shape("") == (3, 2, 2)


def test_a_rank_reads_nothing_of_an_expert_that_it_drops() -> None:
    """The tensor of such an expert is accepted, and no piece of it is read."""
    _, last = experts(2, 1)
    assert last.accepts("0.up", torch.Size([1, 2]))
    assert not list(last.pieces(torch.zeros(1, 2), "0.up"))
    pieces = list(last.pieces(torch.zeros(3, 2, 2), None))
    assert [tuple(piece.source.shape) for piece in pieces] == [(1, 1, 2)] * 2


REFUSED = {
    "a group cut in two": (
        lambda: of_ranks(Dim((Slot("a", 6, 2), Slot("b", 6, 2)), groups=3)),
        ShardingError,
        "in 3 groups are cut inside a group",
    ),
    "groups that do not divide": (
        lambda: Dim(GATE_UP, groups=3),
        ShardingError,
        "cannot be stored in 3 equal groups",
    ),
    "padding inside a group": (
        lambda: Dim((Slot("a", 6, 2, padded=8), Slot("b", 6, 2, padded=8)), groups=2),
        ShardingError,
        "4 features ends inside a group, which has 3 of them",
    ),
    "half a head of pairs": (
        lambda: Slot("q", 12, 2, pairs=4),
        ShardingError,
        "6 features is no number of whole runs of 4",
    ),
    "pairs of an odd size": (lambda: Slot("q", 6, 1, pairs=3), ShardingError, "whole runs of 3"),
    "pairs with padding": (
        lambda: Slot("q", 8, 2, padded=16, pairs=4),
        ShardingError,
        "stored as pairs",
    ),
    "pairs in groups": (
        lambda: Dim((Slot("q", 8, 1, pairs=4), Slot("k", 8)), groups=2),
        ValueError,
        "cannot be stored as pairs as well",
    ),
    "a transposed vector": (
        lambda: of_ranks(Dim.whole(2), transposed=True),
        ValueError,
        "cannot be stored transposed",
    ),
    "two dimensions in groups": (
        lambda: of_ranks(Dim(GATE_UP, groups=2), Dim(GATE_UP, groups=2)),
        ValueError,
        "one dimension at most",
    ),
    "two dimensions as pairs": (
        lambda: of_ranks(*[Dim((Slot("", 4, 1, pairs=4),))] * 2),
        ValueError,
        "one dimension at most",
    ),
    "units that mix alternating slots": (
        lambda: Dim((Slot("a", 4), Slot("b", 4)), groups=2).in_units(4, "scale block"),
        ShardingError,
        "would mix",
    ),
    "units that mix pairs": (
        lambda: Dim((Slot("", 8, 1, pairs=4),)).in_units(2, "scale block"),
        ShardingError,
        "would mix",
    ),
    "a rank outside of its group": (lambda: Experts(4, 2, 2), ShardingError, r"range\(2\)"),
}


@pytest.mark.parametrize(("build", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_layouts_that_cannot_be_are_refused(
    build: Any, error: type[Exception], message: str
) -> None:
    """The message has the numbers that do not fit each other."""
    with pytest.raises(error, match=message):
        build()
