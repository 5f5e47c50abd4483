"""What one rank computes, in numbers that float32 holds exactly; also a script.

``one_rank.py DIRECTORY``, under torchrun, saves ``DIRECTORY/rank<R>.pt``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vllm_module.distributed import (
    ProcessGroup,
    expert_parallel,
    tensor_parallel,
    tensor_parallel_group,
)
from vllm_module.layers import (
    FusedMoE,
    MergedColumnParallelLinear,
    ParallelLMHead,
    RowParallelLinear,
    VocabParallelEmbedding,
)


def whole_numbers(*shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count) * 7 % 11 - 5).float().view(shape)


class Product(nn.Module):
    """An activation of whole numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return gate * up


def experts() -> FusedMoE:
    """Return 5 experts, of which a token goes to one, so that its weight is exactly 1."""
    layer = FusedMoE(5, 1, 5, 12, activation=Product())
    shapes = {name: tuple(tensor.shape) for name, tensor in layer.expected_weights().items()}
    layer.load_weights({name: whole_numbers(*shape) for name, shape in shapes.items()})
    return layer


@torch.no_grad()
def compute() -> dict[str, torch.Tensor]:
    """Run each collective, and each layer that uses one, on the group that is here."""
    group = tensor_parallel_group()
    tensor = whole_numbers(4, 6, 2) * (group.rank + 1)
    results = {
        "place": torch.tensor([group.rank, group.size]),
        "sum": group.all_reduce(tensor),
        "sum of a view": group.all_reduce(tensor.transpose(0, 1)),
        "untouched": tensor,
        **{f"joined along {dim}": group.all_gather(tensor, dim) for dim in (0, 1, 2, -1)},
        "joined views": group.all_gather(tensor.transpose(0, 2), 1),
        "joined integers": group.all_gather(torch.tensor([group.rank])),
    }
    up = MergedColumnParallelLinear(
        5, [12, 24], gather_output=True, shard_names=["gate_proj", "up_proj"]
    )
    names = ("weight", "bias")
    up.load_weights(
        {
            f"{slot}.{name}": whole_numbers(*getattr(up, name).checkpoint_shape(slot))
            for slot in up.shard_names
            for name in names
        }
    )
    down = RowParallelLinear(36, 5, input_is_parallel=False)
    embedding, head = VocabParallelEmbedding(200, 5), ParallelLMHead(200, 5, bias=True)
    for layer in (down, embedding, head):
        shapes = {n: p.checkpoint_shape("") for n, p in layer.named_parameters()}
        layer.load_weights({name: whole_numbers(*shape) for name, shape in shapes.items()})
    hidden = embedding(torch.arange(200))
    results["hidden"] = hidden
    results["up"] = up(hidden)
    results["down"] = down(results["up"])
    results["logits"] = head(hidden)
    tokens, logits = whole_numbers(12, 5), whole_numbers(5, 12).T
    with expert_parallel():
        results["experts"] = experts()(tokens, logits)
    own = range(2 * group.rank, 2 * group.rank + 2 * (group.rank % 3))  # none on rank 0
    place: dict[str, Any] = {"rank": group.rank, "size": group.size}
    if isinstance(group, ProcessGroup):
        place = {"group": dist.group.WORLD}
    with expert_parallel(**place):
        results["own experts"] = experts()(tokens[own], logits[own])
    results["own tokens"] = torch.tensor(own, dtype=torch.int64)
    return results


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        assert isinstance(tensor_parallel_group(), ProcessGroup)
        with tensor_parallel(rank=0, size=1) as alone:  # a surrounding group comes first
            assert tensor_parallel_group() is alone
        torch.save(compute(), directory / f"rank{dist.get_rank()}.pt")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
