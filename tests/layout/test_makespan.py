"""Simulated times of plans, compared with sums written by hand."""

from __future__ import annotations

import pytest

from vllm_module.layout import (
    Layout,
    Links,
    StoredTensorLayout,
    TransferPlan,
    fastest_plan,
    layout_of_shards,
    rows,
    simulate,
)

LINKS = Links(network=100.0, host=1000.0)


def layout(ranks: int, rows_of: int = 1) -> Layout:
    """A tensor of 800 bytes, in rows of ``ranks / rows_of`` parts that so many ranks have each."""
    entry = StoredTensorLayout("w", (80, 5), "bfloat16", "w", 0)
    return layout_of_shards(
        [entry], ranks, lambda _, shape, rank: rows(shape, rank // rows_of, ranks // rows_of)
    )


def test_a_bandwidth_divides_the_bytes() -> None:
    """Two ranks send 400 bytes each to one; from one to two they go one after another, too."""
    for plan in (TransferPlan(layout(2), layout(1)), TransferPlan(layout(1), layout(2))):
        assert simulate(plan, LINKS) == pytest.approx((8.0, 8.0))
    side_by_side = TransferPlan(layout(2), layout(2))
    assert simulate(side_by_side, LINKS) == pytest.approx((4.0, 4.0))


def test_latencies_boxes_and_stragglers_are_added() -> None:
    """Each batch is a message; a slow rank's messages take so many times as long."""
    plan = TransferPlan(layout(2), layout(2))
    late = simulate(plan, LINKS._replace(latency=0.25, box=2.0), batches=4)
    # The first is packed before it begins, and the last is unpacked when all have arrived.
    assert late.makespan == pytest.approx(2.0 / 4 + 4.0 + 4 * 0.25 + 2.0 / 4)
    slow = simulate(plan, LINKS, slow={("target", 1): 3.0})
    assert slow == pytest.approx((12.0, 4.0))


def test_a_relay_is_chosen_if_the_host_is_faster() -> None:
    """Four ranks of a host keep all rows: over the network these come once, or four times."""
    source, target = layout(1), layout(4, rows_of=4)
    direct, chosen = simulate(TransferPlan(source, target), LINKS), None
    assert direct.makespan == pytest.approx(32.0)
    chosen, times = fastest_plan(source, target, LINKS, target_node=4)
    assert sum(chosen.sent_bytes().values()) == 800
    assert times.makespan < 12
    chosen, _ = fastest_plan(source, target, LINKS._replace(host=10.0), target_node=4)
    assert sum(chosen.sent_bytes().values()) == 3200


def test_gathering_is_chosen_if_boxes_cost_much() -> None:
    """A rank gets 80 boxes or, if neighbours join them first, fewer."""
    source, target = layout(80), layout(1)
    cheap, _ = fastest_plan(source, target, LINKS._replace(host=1e-3), source_node=8)
    assert cheap.descriptors() == 80
    dear, _ = fastest_plan(source, target, LINKS._replace(host=1e9, latency=5.0), source_node=8)
    assert dear.descriptors() < 64


@pytest.mark.parametrize("host", [10.0, 99.0, 1e3, 1e9])
@pytest.mark.parametrize("box", [0.0, 0.01])
def test_none_of_the_four_plans_is_faster(host: float, box: float) -> None:
    """Those that are not made, because they cannot be faster, are not either."""
    source, target = layout(80), layout(8, rows_of=4)
    links = LINKS._replace(host=host, box=box, latency=0.01)
    plans = [
        TransferPlan(source, target, source_node=gathers, target_node=relays)
        for gathers in (1, 8) for relays in (1, 4)
    ]  # fmt: skip
    times = [simulate(plan, links).makespan for plan in plans]
    assert len(set(times)) > 1
    _, found = fastest_plan(source, target, links, source_node=8, target_node=4)
    assert found.makespan == min(times)


def test_a_relay_without_gathering_is_not_left_out() -> None:
    """All four ranks keep all rows, from 80 that have one each: the network is used once."""
    source, target = layout(80), layout(4, rows_of=4)
    relayed, *others = (
        simulate(TransferPlan(source, target, source_node=gathers, target_node=relays), LINKS)
        for gathers, relays in ((1, 4), (1, 1), (4, 1), (4, 4))
    )
    assert all(relayed.makespan < each.makespan for each in others)
    assert fastest_plan(source, target, LINKS, source_node=4, target_node=4)[1] == relayed


def test_links_of_one_bandwidth_are_two_links() -> None:
    """A relay sends over the network and its host at once: no bound is above what it takes."""
    plan = TransferPlan(layout(2), layout(4, rows_of=2), target_node=2)
    assert any(route.relayed for route in plan.routes)
    for host in (99.0, 100.0, 101.0):
        found = simulate(plan, Links(network=100.0, host=host), batches=1000)
        assert found.bound == pytest.approx(4.0, rel=0.02)
        assert found.bound <= found.makespan < 4.1


def test_every_expert_is_a_box_and_the_slower_end_counts() -> None:
    """Boxes are counted by expert; two stragglers are as late as the later one."""
    entry = StoredTensorLayout("experts.{expert}.w", (4, 5), "bfloat16", "w", 0, None, (0, 5))
    one = layout_of_shards([entry], 1, lambda _, shape, rank: rows(shape, rank, 1))
    plan = TransferPlan(one, one)
    slow = {("source", 0): 2.0, ("target", 0): 3.0}
    assert simulate(plan, LINKS).makespan == pytest.approx(2.0)
    # Packing takes longer than the link here: one part of eight after another is packed.
    assert simulate(plan, LINKS._replace(box=1.0)).makespan == pytest.approx(5.0 + (2.0 + 5.0) / 8)
    assert simulate(plan, LINKS, slow=slow).makespan == pytest.approx(6.0)
    assert simulate(plan, LINKS, slow={("source", 0): 2.0}).makespan == pytest.approx(4.0)
    # A rank packs and unpacks in its own time, whatever the other end's.
    for end in ("source", "target"):
        late = simulate(plan, LINKS._replace(box=1.0), batches=1, slow={(end, 0): 4.0})
        assert late.makespan == pytest.approx(5.0 + (2.0 + 5.0) * 4.0)
