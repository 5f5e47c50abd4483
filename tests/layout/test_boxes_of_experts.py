"""Boxes of experts that are cut in several slots, which ranks hold in different numbers."""

from __future__ import annotations

import torch

from vllm_module import vLLMModule
from vllm_module.layout.layout_file import layout_json, parse_layout
from vllm_module.parameters import BasevLLMParameter, Dim, Experts, Slot
from vllm_module.weights.region import Region


class Holder(vLLMModule):
    """Two experts' rows of a slot that few ranks have, and of one that four parts are cut from."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        slots = Slot("even", 1, min(32, size), 24), Slot("odd", 24, min(4, size), 24)
        self.scale = BasevLLMParameter(
            Dim((Slot("", 1, 1, 1),)), Dim(slots, 1), tp_rank=rank, tp_size=size,
            transposed=False, dtype=torch.float32, experts=Experts(2, 0, 1, True),
        )  # fmt: skip


def test_ranks_that_hold_the_same_have_the_same_boxes() -> None:
    """The first rank has the small slot, too; its boxes of the other are those of the second."""
    tensor = torch.arange(50.0).view(2, 1, 25)
    plan = Holder(0, 8).plan_weights({"scale": Region.of("scale", tensor)})
    layout = plan.layout(8)
    assert parse_layout(layout_json(layout)) == layout
    boxes = {
        (box.start, box.size)
        for partition in layout.partitions
        for held in partition.held
        for box in held.boxes
        if 0 not in box.size
    }
    assert boxes == {((0, 0, 0), (2, 1, 1)), *(((0, 0, 1 + 6 * n), (2, 1, 6)) for n in range(4))}
