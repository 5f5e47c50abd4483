"""Groups of torch.distributed, those included that torch keeps no record of.

torch's functions on a group (``get_rank``, ``get_backend_config``) need its default group and its
record of the group. A program destroys both with ``destroy_process_group()``. The functions here
ask the group itself.

Torch has no public way to a group beside the default one: ``new_group`` needs that one, and
``init_process_group`` makes it. So :func:`private_group` takes torch's private classes;
``tests/weights/test_meeting.py`` fails if they change.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_names = itertools.count()  # an id of a group may be used again by the next one
_c10d: Any = dist  # torch.distributed has these classes; its type hints lack them


def private_group(
    store: Any, rank: int, size: int, device: torch.device, timeout: timedelta
) -> dist.ProcessGroup:
    """Return a group of ``size`` processes that meet in ``store``, and in no other group.

    Neither the default group nor torch's record of groups changes, so a program's own
    ``init_process_group`` and ``destroy_process_group``, before or afterwards, have no effect on
    it. It has gloo, and NCCL too if ``device`` is a CUDA device, which has to be the current one.
    """
    group = _c10d.ProcessGroup(store, rank, size)
    kinds = _c10d.ProcessGroup.BackendType
    gloo = _c10d.ProcessGroupGloo(_c10d.PrefixStore("gloo", store), rank, size, timeout)
    group._set_default_backend(kinds.GLOO)
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    if device.type == "cuda":
        options = _c10d.ProcessGroupNCCL.Options()
        options._timeout = timeout
        nccl = _c10d.ProcessGroupNCCL(_c10d.PrefixStore("nccl", store), rank, size, options)
        group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
    # torch.compile finds groups by their names.
    group._set_group_name(f"private {next(_names)}")
    _c10d.distributed_c10d._register_process_group(group.group_name, group)
    made: dist.ProcessGroup = group
    return made


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return this process's rank in a group, by default torch's, and the group's size.

    The rank is -1 for the value that ``new_group`` returns in processes outside of the group.
    """
    if group is None:
        return dist.get_rank(), dist.get_world_size()
    outside: object = dist.GroupMember.NON_GROUP_MEMBER
    return (-1, 0) if group == outside else (group.rank(), group.size())


def sends_between_cpus(group: dist.ProcessGroup | None) -> bool:
    """Tell whether a group can send CPU tensors."""
    group = dist.group.WORLD if group is None else group
    assert group is not None
    return torch.device("cpu") in group._device_types


def rank_in_world(group: dist.ProcessGroup | None, rank: int) -> str:
    """Return `` (rank … of the world)`` for a rank of a part of torch's default group, else ""."""
    if group is None or not dist.is_initialized() or group.size() == dist.get_world_size():
        return ""
    try:
        return f" (rank {dist.get_global_rank(group, rank)} of the world)"
    except ValueError:  # torch has no record of the group
        return ""


def cut_off(ranks: Iterable[int], group: dist.ProcessGroup | None, tag: int) -> None:
    """Close this process's connections to all others, by a wait for one of them that times out.

    Gloo closes them so; NCCL has no such wait. No message may have ``tag``.
    """
    for rank in ranks:  # some may be closed
        with suppress(RuntimeError, ValueError):
            memory = torch.empty(1, dtype=torch.uint8, device="cpu")
            work = dist.irecv(memory, group=group, group_src=rank, tag=tag)
            assert work is not None
            work.wait(timedelta(milliseconds=1))


def gather_objects(value: object, group: dist.ProcessGroup | None) -> list[Any]:
    """Return each rank's ``value``, which is pickled, by rank."""
    # Not dist.all_gather_object: where it raises, torch looks up the group, and raises that error.
    device = torch.device("cpu" if sends_between_cpus(group) else "cuda")
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = _gather(torch.tensor([len(data)], device=device), group)
    most = max(int(size) for size in sizes)
    padded = torch.zeros(most, dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    gathered = _gather(padded, group)
    return [
        pickle.loads(each[: int(size)].cpu().numpy().tobytes())
        for each, size in zip(gathered, sizes, strict=True)
    ]


def _gather(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(rank_and_size(group)[1])]
    work = dist.all_gather(parts, tensor, group=group, async_op=True)
    assert work is not None
    work.wait()
    return parts
