"""Weights that a trainer's ranks send as boxes to each rank of an engine, wherever that runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from vllm_module.cooperative.moving import receive_boxes
from vllm_module.cooperative.rank_transfer import Transport
from vllm_module.distributed import together
from vllm_module.errors import RankError, WeightReadError
from vllm_module.layout import TransferPlan
from vllm_module.weights.meeting import init_weight_transfer


@dataclass(frozen=True)
class SentBoxes:
    """What ``LLM.update_weights`` takes in place of weights: where its ranks meet a trainer's.

    ``llm.update_weights(SentBoxes(plan, host, port))`` has each rank of the engine meet those of
    the trainer, and take its boxes from them. The rank that calls it gets its own boxes alone. On
    each rank of the trainer, from 0 on::

        group = init_weight_transfer(host, port, rank, plan.source_ranks + plan.target_ranks)
        together(lambda: send_boxes(plan, layout, tensors, group=group), timeout=60, group=group)

    Args:
        plan: from the trainer's layout to ``llm.layout()``.
        host, port: where rank 0 of the trainer is reached.
        bucket_bytes, weight_version, transport: those of ``send_boxes``, the same as there.
        timeout: seconds to wait until all have come, and of each message afterwards.

    """

    plan: TransferPlan
    host: str
    port: int
    bucket_bytes: int = 1 << 28
    timeout: float = 600.0
    weight_version: str = ""
    transport: Transport = "group"

    def update(
        self, rank: int, update: Callable[[Iterator[tuple[str, torch.Tensor]]], None]
    ) -> None:
        """Call ``update`` with the weights that a rank of the engine gets.

        Raises ``WeightReadError`` if a rank of either side did not come, has ended, left or hangs,
        or sends weights of another version or plan, and what ``update`` raises.
        """
        size = self.plan.source_ranks + self.plan.target_ranks
        number = self.plan.source_ranks + rank
        try:
            group = init_weight_transfer(self.host, self.port, number, size, timeout=self.timeout)
            weights = receive_boxes(
                self.plan,
                group=group,
                bucket_bytes=self.bucket_bytes,
                timeout=self.timeout,
                weight_version=self.weight_version,
                transport=self.transport,
            )
            together(lambda: update(weights), timeout=self.timeout, group=group)
        except RankError as error:  # of another group than the engine's, which goes on
            raise WeightReadError(
                f"the weights of an update did not all come to rank {rank} of the engine, which is "
                f"rank {number} of the {size} that move them: {error}"
            ) from error
