"""Plans between layouts: compared with hops written by hand; the law has drawn ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vllm_module.layout import Layout, StoredTensorLayout, TransferPlan, layout_of_shards, rows
from vllm_module.layout.layout_file import problems
from vllm_module.layout.views import cut, refined
from vllm_module.testing.transfers import assert_plan_moves


def layout(ranks: int, dim: int | None, *, replicas: int = 1, **shapes: tuple[int, ...]) -> Layout:
    """Return tensors that ``ranks`` share along a dimension; each has all of it for ``None``."""
    tensors = [
        StoredTensorLayout(name, shape, "bfloat16", name, 0) for name, shape in shapes.items()
    ]

    def box_of(_: str, shape: tuple[int, ...], rank: int) -> tuple[tuple[int, ...], ...]:
        if dim is None:
            return (0,) * len(shape), shape
        (first, *_rest), (count, *_sizes) = rows((shape[dim],), rank // replicas, ranks)
        start = tuple(first if at == dim else 0 for at in range(len(shape)))
        return start, tuple(count if at == dim else n for at, n in enumerate(shape))

    return layout_of_shards(tensors, ranks * replicas, box_of)  # type: ignore[arg-type]


def experts(ranks: int, dim: int | None, count: int = 4) -> Layout:
    """Return the tensors of experts, each cut by rows, or all experts of a rank together."""
    name = "experts.{expert}.w"
    if dim is not None:
        entry = StoredTensorLayout(name, (4, 2), "float8_e4m3fn", name, 0, None, (0, count))
        return layout_of_shards([entry], ranks, lambda _, shape, rank: rows(shape, rank, ranks))
    share = count // ranks
    entries = [
        StoredTensorLayout(name, (4, 2), "float8_e4m3fn", name, 0, None, (first, share))
        for first in range(0, count, share)
    ]
    whole = [layout_of_shards([each], ranks, lambda *_: ((0, 0), (4, 2))) for each in entries]
    held = [
        (rank, each.partitions[0].held[0].boxes, each.tensors[0].experts)
        for rank, each in enumerate(whole)
    ]
    first = layout_of_shards(
        [StoredTensorLayout(name, (4, 2), "float8_e4m3fn", name, 0, None, (0, count))],
        ranks, lambda *_: ((0, 0), (4, 2)),
    )  # fmt: skip
    groups = tuple(
        type(first.partitions[0].held[0])((rank,), boxes, numbers) for rank, boxes, numbers in held
    )
    return type(first)(
        first.format, 1, "experts", ranks, first.parameters,
        ((tuple(range(ranks)), (share, 4, 2)),),
        (type(first.partitions[0])(groups),), first.tensors,
    )  # type: ignore[arg-type]  # fmt: skip


def hops(plan: TransferPlan) -> list[tuple[int, int, object, object]]:
    return [
        (hop.source, hop.target, *route.boxes[hop.box])
        for route in plan.routes
        for hop in route.sent
    ]


def test_rows_to_columns() -> None:
    """Each rank sends every other one the rectangle that both have."""
    plan = TransferPlan(layout(2, 0, w=(4, 6)), layout(3, 1, w=(4, 6)))
    assert hops(plan) == [
        (source, target, (2 * source, 2 * target), (2, 2))
        for target in range(3)
        for source in range(2)
    ]
    assert plan.sent_bytes() == {(source, to): 8 for source in range(2) for to in range(3)}


def test_a_tensor_without_elements_goes_nowhere() -> None:
    """Its views are of any shape without elements."""
    plan = TransferPlan(layout(2, 1, w=(0, 6), v=(4, 6)), layout(3, 1, w=(0, 6), v=(4, 6)))
    alone = TransferPlan(layout(2, 1, v=(4, 6)), layout(3, 1, v=(4, 6)))
    assert plan.sent_bytes() == alone.sent_bytes()
    assert refined([(0, 4), (2, 0, 2)]) == (0,)
    assert not cut(((0, 0), (0, 4)), (0, 4), (0,))


def test_replicas_share_the_sending() -> None:
    """Of ranks that have the same, each sends as much."""
    plan = TransferPlan(layout(2, 0, replicas=3, w=(6, 5)), layout(6, None, w=(6, 5)))
    sent = [0] * 6
    for (source, _), nbytes in plan.sent_bytes().items():
        sent[source] += nbytes
    assert sent == [2 * 3 * 5 * 2] * 6


def test_boxes_are_gathered_and_relayed_within_hosts() -> None:
    """Rows of eight ranks arrive in two boxes, once on each host, and a plan without does 8."""
    source, target = layout(8, 0, w=(16, 3)), layout(4, None, w=(16, 3))
    assert TransferPlan(source, target, most=2).descriptors() == 8
    plan = TransferPlan(source, target, source_node=4, target_node=2, most=2)
    (route,) = plan.routes
    assert sorted(route.boxes[hop.box] for hop in route.sent) == [
        ((0, 0), (8, 3)), ((0, 0), (8, 3)), ((8, 0), (8, 3)), ((8, 0), (8, 3)),
    ]  # fmt: skip
    assert {(hop.source // 4, hop.target // 2) for hop in route.sent} == {
        (host, to) for host in range(2) for to in range(2)
    }
    assert sum(plan.sent_bytes().values()) == 2 * 16 * 3 * 2
    assert len(route.relayed) == 4
    assert_plan_moves(plan, source, target, source_node=4, target_node=2)


def test_experts_go_where_they_are_kept() -> None:
    """One route serves the experts of a layer; each rank gets its own."""
    source, target = experts(2, 0), experts(2, None)
    plan = TransferPlan(source, target)
    (route,) = plan.routes
    assert {(hop.source, hop.target, hop.experts) for hop in route.sent} == {
        (source, target, (2 * target, 2)) for source in range(2) for target in range(2)
    }
    assert_plan_moves(plan, source, target)


def test_a_rank_that_has_later_experts_gets_the_others_alone() -> None:
    """In place, rank 1 keeps what it has, though rank 0 has all experts."""

    def held(*of_ranks: tuple[int, int]) -> Layout:
        made = experts(2, None)
        groups = zip(made.partitions[0].held, of_ranks, strict=True)
        kept = tuple(replace(group, experts=each) for group, each in groups)
        return replace(made, partitions=(replace(made.partitions[0], held=kept),))

    plan = TransferPlan(held((0, 4), (2, 2)), held((0, 4), (0, 4)), in_place=True)
    assert plan.sent_bytes() == {(0, 0): 4 * 8, (0, 1): 2 * 8, (1, 1): 2 * 8}


@pytest.mark.parametrize("dim", [0, None])
@pytest.mark.parametrize("kept", [[(0, 2), (3, 1)], [(1, 2)], [(0, 1), (2, 1)]], ids=str)
def test_experts_that_the_target_lacks_stay_where_they_are(
    dim: int | None, kept: list[tuple[int, int]]
) -> None:
    """The target names some of the experts that the source has, in one range or in several."""
    source, target = experts(2, 0), experts(2, dim)
    (whole,) = target.tensors
    target = replace(target, tensors=tuple(replace(whole, experts=each) for each in kept))
    plan = TransferPlan(source, target)
    assert [route.experts for route in plan.routes] == [(at, at + n) for at, n in kept]
    assert sum(plan.sent_bytes().values()) == 4 * 2 * sum(n for _, n in kept)
    assert_plan_moves(plan, source, target)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)], ids=str)
def test_shards_alike_of_other_experts_are_kept_apart(order: tuple[int, ...]) -> None:
    """Tensors of one shape and of one, some or no experts have the layout that each has alone."""
    entries = [
        StoredTensorLayout("plain", (4, 2), "float16", "", 0),
        StoredTensorLayout("a.{expert}.w", (4, 2), "float16", "", 0, None, (0, 3)),
        StoredTensorLayout("b.{expert}.w", (4, 2), "float16", "", 0, None, (1, 2)),
        StoredTensorLayout("c.w", (4, 2), "float16", "", 0),
    ]

    def held(*some: StoredTensorLayout) -> dict[str, list[object]]:
        made = layout_of_shards(some, 2, lambda _, shape, rank: rows(shape, rank, 2))
        assert list(problems(made)) == []
        return {name: list(made.held_by(entry, at)) for name, entry, at in made.names()}

    assert held(*(entries[at] for at in order)) == {
        name: boxes for each in entries for name, boxes in held(each).items()
    }


def test_a_range_of_a_merged_dimension_is_cut_at_its_rows() -> None:
    """Elements 5 to 18 of [4, 6] are the end of a row, a row, and the start of one, as by hand."""
    assert refined([(24,), (4, 6), (2, 12), (4, 1, 6)]) == (2, 2, 6)
    assert cut(((5,), (14,)), (24,), (4, 6)) == [
        ((0, 5), (1, 1)), ((1, 0), (2, 6)), ((3, 0), (1, 1)),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="runs of 4 elements do not divide runs of 6"):
        refined([(2, 6), (3, 4)])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (layout(2, 0, v=(4, 6)), "w is kept by the target, and the source's layout lacks it"),
        (layout(2, 0, w=(6, 4)), r"w has shape \[4, 6\] in the .* and \[6, 4\] in the source's"),
        (
            layout_of_shards(
                layout(1, None, w=(4, 6)).tensors, 2,
                lambda _, shape, rank: rows(shape, rank, 2) if rank else None,
            ),
            "w: no rank of the source holds some of the elements that rank 0",
        ),
    ],
)  # fmt: skip
def test_a_source_that_lacks_something_is_refused(source: Layout, message: str) -> None:
    """The error names the tensor, before anything moves."""
    with pytest.raises(ValueError, match=message):
        TransferPlan(source, layout(2, 1, w=(4, 6)))


def test_experts_go_to_names_of_their_own() -> None:
    """Each from the rank that holds it; and back to ranks that hold some of them."""
    names = {f"experts.{number}.w": (4, 2) for number in range(4)}
    spread = experts(2, None)
    for alone in (layout(1, None, **names), layout(3, 0, **names)):
        tensors = tuple(replace(each, dtype="float8_e4m3fn") for each in alone.tensors)
        apart = replace(alone, tensors=tensors)
        plan = TransferPlan(spread, apart)
        assert_plan_moves(plan, spread, apart)
        for route in plan.routes:
            (entry,) = route.tensors
            number = int(entry.name.split(".")[1])
            assert {hop.source for hop in route.sent} == {number // 2}, entry.name
        assert_plan_moves(TransferPlan(apart, spread), apart, spread)
