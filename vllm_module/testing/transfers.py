"""The law of transfers: elements get to each rank that keeps them, once, and to no other one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from vllm_module.layout import Layout, layout_of_shards, rows
from vllm_module.layout.hops import Hop, Route
from vllm_module.layout.layout import HeldBox, StoredTensorLayout
from vllm_module.layout.transfer import TransferPlan
from vllm_module.layout.views import Box, place
from vllm_module.testing.case import Case, law
from vllm_module.testing.checkpoints import CheckpointForm
from vllm_module.testing.layouts import boxed
from vllm_module.testing.strategies import tp_sizes
from vllm_module.weights.region import Region

_Held = dict[tuple[str, int], list[tuple[HeldBox, torch.Tensor]]]  # by name and rank


@law
def assert_transfers(case: Case) -> None:
    """Law 12: a plan of two layouts moves every element to each rank that keeps it, once.

    Both have the tensors of one form of the checkpoint, in which layers may be fused.
    The source is this module on another number of ranks, or shards by rows, by any dimension, or of
    replicas. Each rank's boxes are cut out of tensors whose elements are numbered, and are sent as
    the plan says; what arrives is compared with what the target's layout says by itself.
    """
    tensors = CheckpointForm.choose(case.whole, case.random).of(case.tensors)
    regions = {name: Region.of(name, tensor) for name, tensor in tensors.items()}
    target = case.build(0, case.size).plan_weights(regions).layout(case.size)
    source = _source(case, target, regions)
    node: dict[str, Any] = {"source_node": case.choose((1, 1, 2, 4), "ranks of a source's host")}
    node["target_node"] = case.choose((1, 1, 2, 3), "ranks of a target's host")
    most = case.choose((1, 2, 64), "most parts")
    try:
        plan = TransferPlan(source, target, most=most, **node)
    except ValueError as error:
        raise AssertionError("a plan is refused, and the source has everything") from error
    assert_plan_moves(plan, source, target, **node)


def _source(case: Case, target: Layout, regions: dict[str, Region]) -> Layout:
    drawn = case.draw(tp_sizes(), "ranks of the source")
    kind = case.choose(("module", "rows", "replicas", "any dimension"), "the source's shards")
    if kind == "module":
        size = case.accepted(drawn)
        return case.build(0, size).plan_weights(regions).layout(size)
    replicas = 2 if kind == "replicas" else 1

    def box_of(name: str, shape: tuple[int, ...], rank: int) -> Box | None:
        if not shape:
            return ((), ()) if rank < replicas else None
        dim = hash_of(name) % len(shape) if kind == "any dimension" else 0
        (first, *_), (count, *_) = rows((shape[dim],), rank // replicas, drawn)
        start = tuple(first if at == dim else 0 for at in range(len(shape)))
        return start, tuple(count if at == dim else n for at, n in enumerate(shape))

    def hash_of(name: str) -> int:
        return case.seed + sum(map(ord, name))

    return layout_of_shards(target.tensors, drawn * replicas, box_of)


def assert_plan_moves(
    plan: TransferPlan,
    source: Layout,
    target: Layout,
    *,
    source_node: int = 1,
    target_node: int = 1,
) -> None:
    """Carry a plan out with numbered elements, and compare what arrives with the target's layout.

    Raises ``AssertionError`` if something arrives twice, elsewhere, or not at all, or is sent by a
    rank that does not have it.
    """
    held, kept = _held(source, full=True), _held(target, full=False)
    for route in plan.routes:
        for entry in route.tensors:
            for expert in range(*route.experts):
                name = _name(entry, expert)
                gathered: dict[tuple[int, int], torch.Tensor] = {}
                for hop in _of(route.gathered, expert):
                    assert hop.source // source_node == hop.target // source_node, "another host"
                    assert (hop.target, hop.box) not in gathered, f"{name} is gathered twice"
                    value = _read(held, name, hop.source, route, hop.box)
                    gathered[hop.target, hop.box] = value
                arrived: dict[tuple[int, int], torch.Tensor] = {}
                for hop in _of(route.sent, expert):
                    if hop.box in route.parts:
                        value = _joined(route, hop.box, hop.source, gathered, name)
                    else:
                        value = _read(held, name, hop.source, route, hop.box)
                    _write(kept, name, hop.target, route, hop.box, value)
                    arrived[hop.target, hop.box] = value
                for hop in _of(route.relayed, expert):
                    assert hop.source // target_node == hop.target // target_node, "another host"
                    value = arrived[hop.source, hop.box]
                    _write(kept, name, hop.target, route, hop.box, value)
    for (name, rank), boxes in kept.items():
        numbers = torch.arange(math.prod(_shape(target, name)))
        for box, got in boxes:
            view = box.view or _shape(target, name)
            expected = boxed(numbers, view, None, box.start, box.size)
            assert torch.equal(got, expected), f"rank {rank} lacks elements of {name}"


def _shape(layout: Layout, name: str) -> tuple[int, ...]:
    return layout.find(name)[0].shape


def _name(entry: StoredTensorLayout, expert: int) -> str:
    return entry.name if entry.experts is None else entry.name.replace("{expert}", str(expert))


def _of(hops: tuple[Hop, ...], expert: int) -> Iterator[Hop]:
    return (hop for hop in hops if hop.experts[0] <= expert < sum(hop.experts))


def _held(layout: Layout, *, full: bool) -> _Held:
    """Return each rank's boxes of each tensor, with their elements' numbers or -1."""
    held: _Held = {}
    for name, entry, expert in layout.names():
        if entry.tied_to is not None:
            continue
        numbers = torch.arange(math.prod(entry.shape))
        for ranks, box in layout.held_by(entry, expert):
            for rank in ranks if box.numel else ():
                of_rank = held.setdefault((name, rank), [])
                # A tensor may be held twice, as that of two parameters.
                if all((box.start, box.size) != (each.start, each.size) for each, _ in of_rank):
                    values = boxed(numbers, entry.shape, box.view, box.start, box.size)
                    values = values.clone(memory_format=torch.contiguous_format)
                    of_rank.append((box, values if full else torch.full_like(values, -1)))
    return held


def _places(held: _Held, name: str, rank: int, route: Route, part: Box) -> Iterator[torch.Tensor]:
    for box, values in held.get((name, rank), ()):
        at = place((box.start, box.size), box.view or route.tensors[0].shape, part, route.view)
        if at is not None:
            yield values.as_strided(at.shape, at.strides, at.offset)


def _read(held: _Held, name: str, rank: int, route: Route, box: int) -> torch.Tensor:
    for found in _places(held, name, rank, route, route.boxes[box]):
        return found.clone()
    raise AssertionError(f"rank {rank} sends {route.boxes[box]} of {name}, which it does not have")


def _write(kept: _Held, name: str, rank: int, route: Route, box: int, value: torch.Tensor) -> None:
    found = list(_places(kept, name, rank, route, route.boxes[box]))
    assert found, f"rank {rank} gets {route.boxes[box]} of {name}, which it does not keep"
    for each in found:
        assert bool((each == -1).all()), f"rank {rank} gets elements of {name} twice"
        each.copy_(value)


def _joined(
    route: Route, box: int, rank: int, gathered: dict[tuple[int, int], torch.Tensor], name: str
) -> torch.Tensor:
    """Return a box that a rank has gathered, put together by the starts of its parts."""
    start, size = route.boxes[box]
    joined = torch.full(size, -1)
    for part in route.parts[box]:
        assert (rank, part) in gathered, f"rank {rank} has not gathered all of a box of {name}"
        begin, count = route.boxes[part]
        view = joined
        for dim, (first, number) in enumerate(zip(begin, count, strict=True)):
            view = view.narrow(dim, first - start[dim], number)
        view.copy_(gathered[rank, part])
    return joined
