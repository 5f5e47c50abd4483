"""State dicts that gloo processes describe, and send to one more: ``state_dicts.py RANKS FOLDER``.

The last of RANKS processes receives, the others are a trainer's. Each writes to ``FOLDER/RANK.pt``,
by case, what it has, and what torch's ``full_tensor()`` makes of it. With one process, that is each
rank of a larger mesh in turn, by torch's fake process group, which sends nothing.
"""

from __future__ import annotations

import itertools
import math
import runpy
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers it
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from vllm_module.base.process_groups import private_group
from vllm_module.cooperative import receive_boxes, send_boxes
from vllm_module.layout import Layout, TransferPlan, layout_of_shards, layout_of_state_dict
from vllm_module.layout.layout_file import layout_json

SUPPORT = runpy.run_path(str(Path(__file__).parents[1] / "support.py"))
LIMIT = 60.0
AXES = (2, 3, 2)


class Given(NamedTuple):
    """What a rank gives: its tensors, and the names that they have in the checkpoint."""

    state_dict: dict[str, Any]
    names: Any = None


class Wrapped(torch.Tensor):
    """A tensor whose values may be elsewhere, as those of torchao's subclasses are."""


def drawn(*shape: int) -> torch.Tensor:
    """Return the same numbers on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def trained() -> nn.Module:
    """Return a model with sizes that ranks cannot share evenly, one of 16 bits, and buffers."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 7), nn.Embedding(5, 3), nn.LayerNorm(9), nn.BatchNorm1d(3))
    return model.append(nn.Linear(4, 2, bias=False, dtype=torch.bfloat16))


def fsdp(mesh: Any) -> Given:
    """Return FSDP2's shards, under other names."""
    model: Any = trained()
    for module in model:
        fully_shard(module, mesh=mesh)
    return Given(model.state_dict(), lambda name: f"model.layers.{name}")


def placed(mesh: Any, *every: Any) -> Given:
    """Return a tensor of each placement, of sizes that divide evenly and not, and a plain one."""
    tensors: dict[str, Any] = {"plain": drawn(3, 2)}
    for number, placements in enumerate(every):
        for shape in ((7, 5), (8, 4), (1, 3)):
            tensors[f"{number}.{shape}"] = distribute_tensor(drawn(*shape), mesh, placements)
    return Given(tensors, {name: f"w.{name}" for name in tensors} | {"of nobody": "w"})


def divided_twice(mesh: Any) -> Given:
    """Return FSDP2's shards of what tensor parallelism has divided, by rows and by columns."""
    torch.manual_seed(4)
    model: Any = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 5))
    parallelize_module(model, mesh["right"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for module in model:
        fully_shard(module, mesh=mesh["left"])
    return Given(model.state_dict())


def stages(mesh: Any) -> Given:
    """Return the tensors of one of two stages, which two ranks share, and one that both have."""
    stage, ranks = mesh.get_local_rank("left"), mesh["right"]
    of_stage = distribute_tensor(drawn(5, 3 + stage), ranks, [Shard(0)])
    shared = distribute_tensor(drawn(3, 4), ranks, [Shard(1)])
    return Given({f"layers.{stage}.weight": of_stage, "embed.weight": shared})


def of_two_ranks() -> Given:
    """Return a tensor that two of four ranks share; the others have it without elements."""
    mesh = DeviceMesh("cpu", [1, 2])
    return Given({"w": distribute_tensor(drawn(5, 3), mesh, [Shard(0)])})


LINE = [Shard(0)], [Shard(1)], [Replicate()]
GRID = [*itertools.product([Shard(0), Shard(1), Replicate()], repeat=2)]
# By number of the trainer's ranks: cases by name, each of a mesh of one axis and one of two.
CASES: dict[int, dict[str, Callable[[Any, Any], Given]]] = {
    2: {
        "fsdp": lambda line, _: fsdp(line),
        "placed": lambda line, _: placed(line, *LINE),
    },
    4: {
        "fsdp": lambda line, _: fsdp(line),
        "hsdp": lambda _, grid: fsdp(grid),
        "fsdp in another order": lambda _, __: fsdp(DeviceMesh("cpu", [3, 1, 0, 2])),
        "hsdp in another order": lambda _, __: fsdp(
            DeviceMesh("cpu", [[3, 2], [1, 0]], mesh_dim_names=("left", "right"))
        ),
        "placed": lambda line, _: placed(line, *LINE),
        "on a grid": lambda _, grid: placed(grid, *GRID),
        "fsdp and tp": lambda _, grid: divided_twice(grid),
        "stages": lambda _, grid: stages(grid),
        "two ranks": lambda _, __: of_two_ranks(),
    },
}


def refused(rank: int, mesh: Any) -> dict[str, Given]:
    """Return what two ranks refuse; some of it is wrong on the second one alone."""
    plain, shard = drawn(4, 4), distribute_tensor(drawn(4, 4), mesh, [Shard(0)])

    def of_local(local: torch.Tensor, placement: Any, rows: int) -> Given:
        size: Any = {"shape": (rows, 4), "stride": (4, 1)}
        return Given({"w": DTensor.from_local(local, mesh, [placement], run_check=False, **size)})

    return {
        "partial": of_local(plain, Partial(), 4),
        "strided": of_local(plain, _StridedShard(0, split_factor=3), 8),
        "divided otherwise": of_local(drawn(1 + 2 * rank, 4), Shard(0), 4),
        "no tensor": Given({"w": plain} | ({"extra": b"1"} if rank else {})),
        "a subclass": Given({"w": plain.as_subclass(Wrapped)}),
        "shards of a subclass": of_local(plain.as_subclass(Wrapped), Shard(0), 8),
        "no name": Given({"w": plain, "v": shard}, {"w": "weight"}),
        "a function": Given({"w": plain}, (lambda name: {}[name]) if rank else str),
        "two names": Given({"w": plain, "v": shard}, lambda _: "weight"),
        "two names on two ranks": Given({"wv"[rank]: plain}, lambda _: "weight"),
        "one name for two": Given({"w": plain}, lambda name: f"{name}.{rank}"),
        "two shapes": Given({"w": drawn(4, 3 + rank)}),
        "two dtypes": Given({"w": plain.bfloat16() if rank else plain}),
    }


def described(given: Given, group: Any) -> tuple[Layout, dict[str, Any]]:
    """Return the layout of what ranks give, and notes of it and of this rank's tensors."""
    tensors = given.state_dict
    layout = layout_of_state_dict(tensors, group, given.names)
    held = {
        name: each.to_local() if isinstance(each, DTensor) else each
        for name, each in tensors.items()
    }
    full = {
        name: each.full_tensor() if isinstance(each, DTensor) else each
        for name, each in tensors.items()
        if not isinstance(each, DTensor) or each.device_mesh.get_coordinate() is not None
    }
    return layout, {"layout": layout_json(layout), "held": held, "full": full}


def run(rank: int, ranks: int, folder: Path) -> None:
    dist.init_process_group("gloo")
    trainers = dist.new_group(list(range(ranks)))
    notes: dict[str, Any] = {}
    line: Any = None
    grid: Any = None
    if rank < ranks:
        line = init_device_mesh("cpu", (ranks,))
    if rank < ranks == 4:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("left", "right"))
    for case, give in CASES[ranks].items():
        shared: list[Any] = [None]
        if rank < ranks:
            given = give(line, grid)
            shared[0], notes[case] = described(given, trainers)
        dist.broadcast_object_list(shared, src=0)
        source: Layout = shared[0]
        target = layout_of_shards(
            source.tensors, 1, lambda _, shape, __: ((0,) * len(shape), shape)
        )
        plan = TransferPlan(source, target)
        if rank < ranks:
            send_boxes(plan, source, given.state_dict, timeout=LIMIT)
        else:
            notes[case] = dict(receive_boxes(plan, timeout=LIMIT))
    if rank < ranks == 2:
        for case, given in refused(rank, line).items():
            try:
                layout_of_state_dict(given.state_dict, trainers, given.names)
            except ValueError as error:
                notes[case] = str(error)
    torch.save(notes, folder / f"{rank}.pt")
    dist.destroy_process_group()


def on_three_axes(folder: Path) -> None:
    """Note which elements each rank of a mesh of three axes has, for all placements there are."""
    every = [*itertools.product([Shard(0), Shard(1), Replicate()], repeat=3)]
    two, six = (_StridedShard(0, split_factor=factor) for factor in (2, 6))
    # Where rows divide evenly: else torch's shards of these are not those that FSDP2 makes.
    strided = [
        (six, Shard(0), Shard(0)),
        (two, two, Shard(0)),
        (Shard(0), two, Shard(0)),
        (two, Replicate(), Shard(0)),
        (two, Shard(1), Shard(0)),
    ]
    given = [*itertools.product([(24, 12), (13, 7), (5, 1)], every)]
    given += itertools.product([(24, 12)], strided)
    notes: dict[str, Any] = {}
    for rank in range(math.prod(AXES)):
        dist.init_process_group("fake", rank=rank, world_size=math.prod(AXES))
        mesh = init_device_mesh("cpu", AXES)
        store: Any = dist.HashStore()  # type: ignore[attr-defined]  # torch's stubs lack it
        limit = timedelta(seconds=LIMIT)
        alone = private_group(store, 0, 1, torch.device("cpu"), limit)
        for shape, placements in given:
            numbered = torch.arange(math.prod(shape)).view(shape)
            tensor = distribute_tensor(numbered, mesh, placements, src_data_rank=None)
            layout = layout_of_state_dict({"w": tensor}, alone)
            boxes = [(*box.start, *box.size) for _, _, found in layout.held_on(0) for box in found]
            notes[f"{rank} {shape} {placements}"] = boxes, tensor.to_local(), numbered
        dist.destroy_process_group()
    torch.save(notes, folder / "0.pt")


def main(processes: int, folder: Path) -> None:
    torch.set_num_threads(1)
    if processes == 1:
        on_three_axes(folder)
        return
    pids = SUPPORT["fork_ranks"](
        processes, lambda rank: run(rank, processes - 1, folder), port=SUPPORT["free_port"]()
    )
    sys.exit(max(map(abs, SUPPORT["exit_codes"](pids))))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
