"""The layout of a trainer's ``state_dict()``: DTensors, and tensors that ranks hold whole.

Only torch's public interface is used: a DTensor's mesh and placements say which box a rank holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import mul
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from vllm_module.base.messages import describe_error, printable_name, shorten
from vllm_module.base.process_groups import gather_objects
from vllm_module.layout.layout import Layout, StoredTensorLayout
from vllm_module.layout.shards import layout_of_shards
from vllm_module.layout.views import Box, Ints

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Names: TypeAlias = Mapping[str, str] | Callable[[str], str]


class _Entry(NamedTuple):
    """A tensor of a rank's state dict: its name in the checkpoint, and the box that is there."""

    name: str
    shape: Ints
    dtype: str
    box: Box | None


def layout_of_state_dict(
    state_dict: Mapping[str, Any],
    group: dist.ProcessGroup | None = None,
    names: Names | None = None,
) -> Layout:
    """Return the layout of what the ranks of a trainer have in ``model.state_dict()``.

    Every rank of the trainer makes the call, and all get the same layout. Its parameters have the
    trainer's names, so :func:`send_boxes` takes each rank's state dict as it is. It changes only if
    the model is sharded in another way.

    Args:
        state_dict: this rank's tensors, by name. A DTensor's mesh and placements say which box is
            here; of another tensor each rank that has it holds all elements. Ranks may have
            different tensors, as stages of a pipeline do.
        group: the trainer's ranks, by default the world.
        names: the name in the checkpoint of each name in ``state_dict``, a mapping or a function,
            if they differ. It is the same on every rank.

    Raises ``ValueError`` on all ranks if one cannot describe a tensor, ranks differ in what one is,
    or two have one name in the checkpoint. It names them.

    """
    here: dict[str, _Entry] | str
    failure = None
    try:
        here = {path: _entry(path, each, names) for path, each in state_dict.items()}
    except Exception as error:  # of the caller's function, too: the other ranks wait for this one
        failure, here = error, describe_error(error)
    is_alone = group is None and not dist.is_initialized()
    held: list[dict[str, _Entry]] = []
    for rank, told in enumerate([here] if is_alone else gather_objects(here, group)):
        if isinstance(told, str):
            raise ValueError(f"rank {rank}: {told}") from failure
        held.append(told)
    found = _agreed(held)
    entries = [StoredTensorLayout(at, each.shape, each.dtype, at, 0) for at, each in found.items()]
    shards = layout_of_shards(
        entries,
        len(held),
        lambda path, _, rank: held[rank][path].box if path in held[rank] else None,
    )
    # Parameters keep the trainer's names.
    named = (replace(each, name=found[each.name].name) for each in shards.tensors)
    return replace(shards, tensors=tuple(named))


def _agreed(held: list[dict[str, _Entry]]) -> dict[str, _Entry]:
    """Return each tensor of the ranks once; raise ``ValueError`` if two are not told apart."""
    found: dict[str, _Entry] = {}
    of_name: dict[str, str] = {}
    for rank, entries in enumerate(held):
        for path, entry in entries.items():
            first, other = found.setdefault(path, entry), of_name.setdefault(entry.name, path)
            if first[:3] != entry[:3]:
                raise ValueError(
                    f"{printable_name(path)} is {_shown(entry)} on rank {rank}, and "
                    f"{_shown(first)} on a rank before it: a name stands for one tensor of the "
                    "checkpoint on all ranks"
                )
            if other != path:
                raise ValueError(
                    f"{printable_name(other)} and {printable_name(path)} are both "
                    f"{printable_name(entry.name)} in the checkpoint: leave one of them out of the "
                    "state dict, or give it another name"
                )
    return found


def _shown(entry: _Entry) -> str:
    return f"{printable_name(entry.name)} with shape {list(entry.shape)} in {entry.dtype}"


def _entry(path: str, tensor: Any, names: Names | None) -> _Entry:
    """Return what this rank tells the others of a tensor."""
    from torch.distributed.tensor import DTensor  # takes a while, and no engine has one

    name: object = path
    if names is not None:
        name = names.get(path) if isinstance(names, Mapping) else names(path)
    if not isinstance(name, str):
        raise ValueError(
            f"names gives {shorten(name)} for {printable_name(path)}, expected its name in the "
            "checkpoint: add it to names, or leave the tensor out of the state dict"
        )
    is_shard = isinstance(tensor, DTensor)
    local = tensor.to_local() if is_shard else tensor
    if type(local) not in (torch.Tensor, torch.nn.Parameter):
        raise ValueError(
            f"{printable_name(path)} is a {type(local).__name__}{' of ranks' if is_shard else ''}, "
            "expected a DTensor of plain tensors or a plain tensor: convert it, or leave it out of "
            "the state dict"
        )
    shape = tuple(tensor.shape)
    box = _box_here(path, tensor) if is_shard else ((0,) * len(shape), shape)
    if box is not None and tuple(local.shape) != box[1]:
        raise ValueError(
            f"{printable_name(path)}: of shape {list(shape)} and {shorten(tensor.placements)} this "
            f"rank should hold {list(box[1])}, and has {list(local.shape)}: divide it as "
            "distribute_tensor does, or give each rank's box to layout_of_shards"
        )
    return _Entry(name, shape, str(tensor.dtype).removeprefix("torch."), box)


def _box_here(path: str, tensor: DTensor) -> Box | None:
    """Return the box of a DTensor that this rank holds; ``None`` if it is not in the mesh.

    Axes of a mesh divide a dimension from left to right, each as ``torch.chunk`` does. Where FSDP2
    divides what tensor parallelism has divided, the left axis comes later: its placement has the
    number of shards that there are before, as ``split_factor``. Which shard of an axis is here, the
    axis's process group says: its ranks ascend, also where those of the mesh do not.
    """
    mesh, axes_of = tensor.device_mesh, dict[int, list[int]]()
    if mesh.get_coordinate() is None:
        return None
    for axis in reversed(range(mesh.ndim)):
        placement: Any = tensor.placements[axis]
        if placement.is_replicate():
            continue
        split_factor = getattr(placement, "split_factor", 1 if placement.is_shard() else None)
        axes = axes_of.setdefault(getattr(placement, "dim", 0), [])  # in the order of dividing
        made = [*itertools.accumulate((mesh.size(each) for each in axes), mul, initial=1)]
        if split_factor not in made:
            raise ValueError(
                f"{printable_name(path)} has the placements {shorten(tensor.placements)}, of which "
                f"{shorten(placement)} leaves this rank no box of it: redistribute it to Shard "
                "and Replicate"
            )
        axes.insert(made.index(split_factor), axis)
    start, size = [0] * tensor.ndim, [*tensor.shape]
    for dim, axes in axes_of.items():
        for axis in axes:
            share = -(-size[dim] // mesh.size(axis))
            first = min(size[dim], mesh.get_local_rank(axis) * share)
            start[dim] += first
            size[dim] = min(share, size[dim] - first)
    return tuple(start), tuple(size)
