"""Boxes that ranks send each other, out of parameters that hold several slots."""

from __future__ import annotations

import runpy
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from vllm_module.base.process_groups import private_group
from vllm_module.cooperative import moved, rank_transfer, receive_boxes, send_boxes
from vllm_module.cooperative.nixl import FRAME
from vllm_module.core.layout_of import layout_of_module
from vllm_module.distributed import tensor_parallel
from vllm_module.errors import RankError, WeightReadError
from vllm_module.layers import MergedColumnParallelLinear, ReplicatedLinear
from vllm_module.layout import Layout, StoredTensorLayout, TransferPlan, layout_of_shards, rows
from vllm_module.layout.messages import RELAYED
from vllm_module.testing import random_weights

LIMIT = 10.0
SIMULATED = runpy.run_path(str(Path(__file__).parents[1] / "runtime" / "simulated_device.py"))


def fused(rank: int, size: int) -> MergedColumnParallelLinear:
    with tensor_parallel(rank=rank, size=size):
        return MergedColumnParallelLinear(6, [8, 8], bias=True, shard_names=("gate", "up"))


Tensors = dict[str, torch.Tensor]


def in_one_buffer(parameters: Tensors) -> Tensors:
    """Return the tensors as views of one memory, with numbers between them, as FSDP has them."""
    room, at = torch.full((sum(each.numel() + 3 for each in parameters.values()),), 99.0), 0
    views = {}
    for name, each in parameters.items():
        views[name] = room[at + 3 : at + 3 + each.numel()].view(each.shape).copy_(each)
        at += each.numel() + 3
    return views


def transposed(parameters: Tensors) -> Tensors:
    """Return the tensors with the strides of transposed ones."""
    return {name: each.t().contiguous().t() for name, each in parameters.items()}


def received(
    plan: TransferPlan,
    source: Layout,
    weights: Any,
    transport: Any,
    held: Callable[[Tensors], Tensors] = dict,
) -> list[Any]:
    """Return what each rank of the target gets of two ranks of the source, which are threads.

    ``held`` are a source's parameters in other memory.
    """
    store, size = dist.HashStore(), 2 + plan.target_ranks

    def work(rank: int) -> dict[str, torch.Tensor]:
        group = private_group(store, rank, size, torch.device("cpu"), timedelta(seconds=LIMIT))
        if rank > 1:
            return dict(receive_boxes(plan, group=group, timeout=LIMIT, transport=transport))
        layer = fused(rank, 2)
        layer.load_weights(weights)
        parameters = held({name: each.data for name, each in layer.named_parameters()})
        send_boxes(plan, source, parameters, group=group, timeout=LIMIT, transport=transport)
        return {}

    with ThreadPoolExecutor(size) as threads:
        return [*threads.map(work, range(size))][2:]


@pytest.mark.parametrize("transport", ["group", "nixl"])
def test_a_slot_in_the_middle_of_a_parameter_is_sent(transport: Any) -> None:
    """The second slot of a rank's part begins where the first one ends."""
    if transport == "nixl":
        pytest.importorskip("nixl")
    weights = random_weights(fused(0, 1).expected_weights(), seed=1)
    source = fused(0, 2).plan_weights(weights).layout(2)
    plan = TransferPlan(source, fused(0, 1).plan_weights(weights).layout(1))
    (arrived,) = received(plan, source, weights, transport)
    assert arrived.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(arrived[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("held", [in_one_buffer, transposed])
def test_boxes_of_tensors_that_lie_elsewhere(held: Callable[[Tensors], Tensors]) -> None:
    """A trainer's tensors are views of larger memory, or have other strides."""
    weights = random_weights(fused(0, 1).expected_weights(), seed=1)
    source = fused(0, 2).plan_weights(weights).layout(2)
    for ranks in (1, 2):
        target = fused(0, 1).plan_weights(weights).layout(ranks)
        for arrived in received(TransferPlan(source, target), source, weights, "group", held):
            torch.testing.assert_close(arrived, weights, rtol=0, atol=0)


def test_a_parameter_with_other_strides_is_copied_once() -> None:
    """Else a batch with all experts of a parameter would have as many copies of all of it."""
    weights = random_weights(fused(0, 1).expected_weights(), seed=1)
    layer = fused(0, 1)
    layer.load_weights(weights)
    source = layer.plan_weights(weights).layout(1)
    parameters = transposed({name: each.data for name, each in layer.named_parameters()})
    copies: Tensors = {}
    for route in TransferPlan(source, source).routes:
        for entry in route.tensors:
            each = moved.Moved(entry.name, 0, route, entry.parameter)
            ((_, _, values),) = moved.held_values(source, each, 0, parameters, copies)
            torch.testing.assert_close(values, weights[entry.name], rtol=0, atol=0)
            if entry.parameter == "weight":
                copy = copies["weight"].untyped_storage()
                assert values.untyped_storage().data_ptr() == copy.data_ptr()
    assert copies.keys() == {"weight"}  # a bias has no other strides


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64])
@pytest.mark.parametrize("shape", [(3, 5), (1 << 11, 1 << 10), (0, 4), ()], ids=str)
def test_zeros_are_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Those of a large tensor, and of a small one, can be written."""
    zeros = moved.zeros_of(shape, dtype)
    assert (zeros.shape, zeros.dtype) == (shape, dtype)
    assert not zeros.view(torch.uint8).any() if shape else zeros.item() == 0
    zeros.fill_(2)
    assert bool((zeros.float() == 2).all())


class OneProcess:
    """Does as ``NixlCarrier`` does where ranks are threads: a frame says which memory it is."""

    memories: ClassVar[list[torch.Tensor]] = []

    def offered(self, memory: torch.Tensor) -> torch.Tensor:
        self.memories.append(memory)
        (number,) = (at for at, each in enumerate(self.memories) if each is memory)
        return torch.full((FRAME,), number, dtype=torch.uint8)

    def start(self, frame: torch.Tensor, room: torch.Tensor) -> None:
        room.copy_(self.memories[int(frame[0])])

    def finish(self, started: None, limit: timedelta) -> None:
        assert limit.total_seconds() == LIMIT

    def release(self) -> None:
        """Keep the memory: another rank may look for its own."""


@pytest.mark.parametrize("transport", ["group", "nixl"])
def test_ranks_of_a_host_relay_to_each_other(
    transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the two parts of a tensor each goes to one of two ranks, which passes it to the other."""
    monkeypatch.setattr(rank_transfer, "NixlCarrier", OneProcess)  # the package is optional
    weights = random_weights(fused(0, 1).expected_weights(), seed=1)
    source = fused(0, 2).plan_weights(weights).layout(2)
    target = fused(0, 1).plan_weights(weights).layout(2)
    plan = TransferPlan(source, target, target_node=2)
    assert {(each.source, each.target) for each in plan.messages[RELAYED]} == {(0, 1), (1, 0)}
    for arrived in received(plan, source, weights, transport):
        torch.testing.assert_close(arrived, weights, rtol=0, atol=0)


def linear(features: int, rows: int, dtype: torch.dtype) -> ReplicatedLinear:
    return ReplicatedLinear(features, rows, bias=False, params_dtype=dtype)


@pytest.mark.parametrize(
    ("other", "version", "wrong"),
    [
        ((6, 4, torch.bfloat16), "1", None),
        ((6, 4, torch.float16), "1", "by another plan"),
        ((6, 4, torch.int16), "1", "by another plan"),
        ((4, 6, torch.bfloat16), "1", "by another plan"),
        ((3, 8, torch.bfloat16), "1", "by another plan"),
        ((6, 4, torch.bfloat16), "", "of another version than '1'"),
        ((6, 4, torch.bfloat16), "11", "of another version than '1'"),
    ],
)
def test_a_message_of_as_many_bytes_for_another_plan_is_refused(
    other: tuple[int, int, torch.dtype], version: str, wrong: str | None
) -> None:
    """Another dtype or shape of the same size would be read as numbers that nobody has sent."""
    expects, sends = linear(6, 4, torch.bfloat16), linear(*other)
    weights = {"weight": torch.arange(24, dtype=other[2]).view(other[1], other[0])}
    for each in (expects, sends):
        each.load_weights({"weight": torch.zeros(each.weight.shape, dtype=each.weight.dtype)})
    sends.load_weights(weights)
    layouts = [layout_of_module(each) for each in (sends, expects)]
    plans = [TransferPlan(each, each) for each in layouts]
    store = dist.HashStore()

    def work(rank: int) -> dict[str, torch.Tensor]:
        group = private_group(store, rank, 2, torch.device("cpu"), timedelta(seconds=LIMIT))
        if rank:
            return dict(receive_boxes(plans[1], group=group, timeout=LIMIT, weight_version="1"))
        parameters = dict(sends.named_parameters())
        with suppress(RankError):  # the other rank may have left
            send_boxes(
                plans[0], layouts[0], parameters, group=group, timeout=1.0, weight_version=version
            )
        return {}

    with ThreadPoolExecutor(2) as threads:
        _, arrived = (threads.submit(work, rank) for rank in range(2))
        if wrong is None:
            torch.testing.assert_close(arrived.result(), weights, rtol=0, atol=0)
            return
        with pytest.raises(WeightReadError, match=f"rank 0 sends weights {wrong}.*expects weight"):
            arrived.result()


def test_a_box_of_one_element_has_bytes_whatever_its_stride() -> None:
    """They are those of its number, as the system stores it."""
    box = torch.arange(12.0).view(3, 4)[1:2, 2]
    assert bytes(moved.bytes_of(box).tolist()) == struct.pack("=f", 6.0)


def test_a_rank_without_memory_blames_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails here is raised as it is, before anything is sent."""

    def no_memory(box: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory for a message")

    weights = random_weights(fused(0, 1).expected_weights(), seed=1)
    source = fused(0, 1).plan_weights(weights).layout(1)
    plan = TransferPlan(source, source)
    layer = fused(0, 1)
    layer.load_weights(weights)
    monkeypatch.setattr(moved, "bytes_of", no_memory)
    store = dist.HashStore()

    def work(rank: int) -> None:
        group = private_group(store, rank, 2, torch.device("cpu"), timedelta(seconds=LIMIT))
        if rank == 0:
            with pytest.raises(torch.OutOfMemoryError):
                send_boxes(plan, source, dict(layer.named_parameters()), group=group, timeout=1)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(work, range(2)))


def test_boxes_of_a_device_are_joined_on_the_host() -> None:
    """A copy of all of them on the device might not fit there."""
    entry = StoredTensorLayout("w", (4, 3), "uint8", "w", 0)
    source, target = (
        layout_of_shards([entry], ranks, lambda _, shape, rank, of=ranks: rows(shape, rank, of))
        for ranks in (1, 4)
    )
    (route,) = TransferPlan(source, target).routes
    boxes = [(moved.Moved("w", 0, route, "w"), at) for at in range(4)]
    device = SIMULATED["SimulatedDevice"]()
    with device.present():
        parts = [torch.full((3,), at, dtype=torch.uint8, device="cuda") for at in range(4)]
        message = moved.packed(boxes, lambda _, at: parts[at])
    assert message.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert "cat" not in device.operators


def test_a_group_that_sends_between_no_cpus_is_refused() -> None:
    """Messages are in host memory, which NCCL cannot send; torch's fake backend stands for it."""
    c10d: Any = torch._C._distributed_c10d
    group = c10d.ProcessGroup(dist.HashStore(), 0, 2)
    backend = c10d.FakeProcessGroup._create_internal(0, 2, c10d.FakeProcessGroup.Options())
    group._register_backend(torch.device("cuda"), c10d.ProcessGroup.BackendType.CUSTOM, backend)
    entry = StoredTensorLayout("w", (4, 3), "uint8", "w", 0)
    source = layout_of_shards([entry], 1, lambda _, shape, rank: rows(shape, rank, 1))
    with pytest.raises(ValueError, match=r"in host memory.*cannot carry.*'cpu:gloo,cuda:nccl'"):
        send_boxes(TransferPlan(source, source), source, {"w": torch.zeros(4, 3)}, group=group)
