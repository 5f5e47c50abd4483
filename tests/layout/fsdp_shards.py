"""Digests of FSDP2's shards in two gloo processes, by DTensor: ``fsdp_shards.py FOLDER``.

Each rank writes, for each parameter, the digest of its local shard, as text.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from vllm_module.kernels.digest.digest import digest_box

SUPPORT = runpy.run_path(str(Path(__file__).parents[1] / "support.py"))


def trained() -> nn.Module:
    """Return a model with sizes that two ranks cannot share evenly, and one tensor of 16 bits."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 7), nn.Embedding(5, 3), nn.LayerNorm(9))
    return model.append(nn.Linear(4, 2, bias=False, dtype=torch.bfloat16))


def shard(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    model: Any = trained()
    for module in model:
        fully_shard(module, mesh=mesh)
    found = {}
    for name, parameter in model.named_parameters():
        shape = parameter.shape
        _, starts = compute_local_shape_and_global_offset(shape, mesh, parameter.placements)
        local = parameter.to_local().detach()
        digest = digest_box(local, tuple(starts), tuple(shape)) if local.numel() else None
        found[name] = None if digest is None else digest.sums
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    pids = SUPPORT["fork_ranks"](2, lambda rank: shard(folder, rank), port=SUPPORT["free_port"]())
    SUPPORT["exit_codes"](pids)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
