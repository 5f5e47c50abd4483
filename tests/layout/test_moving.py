"""Boxes that ranks send each other, out of parameters that hold several slots."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist

from vllm_module.base.process_groups import private_group
from vllm_module.cooperative import receive_boxes, send_boxes
from vllm_module.distributed import tensor_parallel
from vllm_module.layers import MergedColumnParallelLinear
from vllm_module.layout import TransferPlan
from vllm_module.testing import random_weights

LIMIT = 10.0


def fused(rank: int, size: int) -> MergedColumnParallelLinear:
    with tensor_parallel(rank=rank, size=size):
        return MergedColumnParallelLinear(6, [8, 8], bias=True, shard_names=("gate", "up"))


def test_a_slot_in_the_middle_of_a_parameter_is_sent() -> None:
    """The second slot of a rank's part begins where the first one ends."""
    weights = random_weights(fused(0, 1).expected_weights(), seed=1)
    source = fused(0, 2).plan_weights(weights).layout(2)
    plan = TransferPlan(source, fused(0, 1).plan_weights(weights).layout(1))
    store = dist.HashStore()

    def work(rank: int) -> dict[str, torch.Tensor]:
        group = private_group(store, rank, 3, torch.device("cpu"), timedelta(seconds=LIMIT))
        if rank == 2:
            return dict(receive_boxes(plan, group=group, timeout=LIMIT))
        layer = fused(rank, 2)
        layer.load_weights(weights)
        send_boxes(plan, source, dict(layer.named_parameters()), group=group, timeout=LIMIT)
        return {}

    with ThreadPoolExecutor(3) as threads:
        *_, arrived = threads.map(work, range(3))
    assert arrived.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(arrived[name], tensor, rtol=0, atol=0)
