"""A small model with every kind of module, and its checkpoint, whose names are written by hand.

Pytest's importlib mode allows no imports between test files: use ``runpy.run_path``.
"""

from __future__ import annotations

import torch
from torch import nn

from vllm_module import vLLMModule
from vllm_module.layers import (
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    SiluAndMul,
    VocabParallelEmbedding,
)


class MLP(vLLMModule):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            8, [12, 12], bias=False, shard_names=["gate_proj", "up_proj"]
        )
        self.act_fn = SiluAndMul()
        self.down_proj = RowParallelLinear(12, 8, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class Block(vLLMModule):
    skipped_weights = {"rotary": "computed"}

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(8, 2, 4, 2, bias=True)
        self.mlp = MLP()
        self.norm = RMSNorm(8)
        self.plain = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(self.norm(self.mlp(x))) + self.qkv_proj(x).mean()


class Model(vLLMModule):
    def __init__(self, blocks: int = 2, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(10, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = ParallelLMHead(10, 8)
        if tied:
            self.head.tie_weights(self.embed)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def block_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, rows in (("q_proj", 8), ("k_proj", 4), ("v_proj", 4)):
        shapes |= {f"{name}.weight": (rows, 8), f"{name}.bias": (rows,)}
    shapes |= {f"mlp.{name}_proj.weight": (12, 8) for name in ("gate", "up")}
    shapes |= {"mlp.down_proj.weight": (8, 12), "mlp.down_proj.bias": (8,), "norm.weight": (8,)}
    shapes |= {"plain.0.weight": (8, 8), "plain.0.bias": (8,)}
    return shapes | {
        f"plain.1.{name}": (8,) for name in ("weight", "bias", "running_mean", "running_var")
    }


def block_checkpoint(count: int = 7) -> dict[str, torch.Tensor]:
    """Return a checkpoint of one block, whose batch norm has counted ``count`` batches."""
    generator = torch.Generator().manual_seed(count)
    tensors = {n: torch.rand(shape, generator=generator) for n, shape in block_shapes().items()}
    return tensors | {"plain.1.num_batches_tracked": torch.tensor(count)}


def checkpoint(blocks: int = 2, *, head: bool = True) -> dict[str, torch.Tensor]:
    """Return a whole checkpoint of a model; without ``head``, of a model that ties its head."""
    generator = torch.Generator().manual_seed(0)
    tensors = {"embed.weight": torch.rand((10, 8), generator=generator)}
    for i in range(blocks):
        tensors |= {f"blocks.{i}.{n}": tensor for n, tensor in block_checkpoint(7 + i).items()}
    if head:
        tensors["head.weight"] = torch.rand((10, 8), generator=generator)
    return tensors
