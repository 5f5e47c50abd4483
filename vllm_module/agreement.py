"""Ranks that load together, each in a process of its own: what they compare, and who is named."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from vllm_module.config import HFConfig
from vllm_module.distributed import ProcessGroup, tensor_parallel_group, together
from vllm_module.errors import RankError
from vllm_module.module import vLLMModule
from vllm_module.parameters import BasevLLMParameter
from vllm_module.quantization import Rules
from vllm_module.tree import locations
from vllm_module.weights import Checkpoint

T = TypeVar("T")


@contextmanager
def loading_group(timeout: float) -> Iterator[ProcessGroup | None]:
    """Give the group whose ranks load together; a world of NCCL alone gets a gloo meanwhile."""
    group = tensor_parallel_group()
    if not isinstance(group, ProcessGroup) or group.size == 1:
        yield None
        return
    is_world = group.group in (None, dist.group.WORLD)
    if not is_world or "cpu" in dist.get_backend_config(group.group):
        yield group
        return
    # Of the world only: all of its processes have to take part in making any group.
    beside = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    try:
        yield ProcessGroup(beside)
    finally:
        dist.destroy_process_group(beside)


def in_step(
    work: Callable[[], T],
    describe: Callable[[T], Mapping[str, str]],
    timeout: float,
    group: ProcessGroup | None,
    compare: Callable[[Sequence[Mapping[str, str]]], None],
) -> T:
    """Do ``work``; with a ``group``, on every rank of it, and ``compare`` the descriptions.

    Raises what ``work`` raises here, and ``RankError`` for what other ranks did instead.
    """
    if group is None:
        return work()
    results = []

    def described() -> Mapping[str, str]:
        results.append(work())
        return describe(results[0])

    compare(together(described, timeout=timeout, group=group.group))
    return results[0]


def demand_same_tensors(digests: Sequence[Mapping[str, str]]) -> None:
    """Raise ``RankError`` where tensors differ that every rank keeps whole."""
    kept = set(digests[0]).intersection(*digests[1:])
    demand_alike([{name: said[name] for name in said if name in kept} for said in digests])


def demand_alike(descriptions: Sequence[Mapping[str, str]]) -> None:
    """Raise ``RankError``, naming ranks whose description is not that of most, and what differs."""
    alike: dict[frozenset[tuple[str, str]], list[int]] = {}
    for rank, description in enumerate(descriptions):
        alike.setdefault(frozenset(description.items()), []).append(rank)
    if len(alike) == 1:
        return
    most, *others = sorted(alike.values(), key=len, reverse=True)
    tie = len(most) == len(others[0])
    ranks = [rank for few in ([most, *others] if tie else others) for rank in few]
    versus = " and ".join(map(_ranks, [most, *others] if tie else others))
    differ = "differ" if tie else f"differ{'s' if len(ranks) == 1 else ''} from the others"
    lines = [f"{versus} of {len(descriptions)} {differ}:"]
    for name in dict.fromkeys(name for description in descriptions for name in description):
        said: dict[str, list[int]] = {}
        for rank, description in enumerate(descriptions):
            said.setdefault(description.get(name, "not there"), []).append(rank)
        if len(said) > 1:
            values = "; ".join(f"{_brief(value)} on {_ranks(of)}" for value, of in said.items())
            lines.append(f"  {name}: {values}")
    if len(lines) > 12:
        lines[12:] = [f"  and {len(lines) - 12} more"]
    lines.append("Give every rank the same checkpoint, configuration and dtype.")
    raise RankError("\n".join(lines), ranks)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _brief(value: str) -> str:
    return value if len(value) <= 50 else f"{value[:20]}..."


def describe(
    config: HFConfig, dtype: torch.dtype, rules: Rules | None, checkpoint: Checkpoint
) -> dict[str, str]:
    """Say what a model is made from, so that ranks can compare it before they read a tensor."""
    entries = config.model_dump()
    said = {
        f"config.json's {name}": json.dumps(entries[name], sort_keys=True, default=repr)
        for name in sorted(entries)
    }
    chosen = {"dtype": str(dtype), "quantization": repr(rules)}
    return {"checkpoint files": checkpoint.fingerprint, **chosen, **said}


def digests(model: vLLMModule) -> dict[str, str]:
    """Return a digest of each tensor that this rank keeps whole, by its name."""
    # Not what is made of others, such as scales, which may depend on how those are cut.
    kept = {location.path: location.tensor for location in locations(model)}
    return {
        f"{name} after loading": _digest(tensor)
        for name, tensor in kept.items()
        if tensor is not None and _is_whole(tensor)
    }


def _is_whole(tensor: torch.Tensor) -> bool:
    if not isinstance(tensor, BasevLLMParameter):
        return True
    return all(slot.parts == 1 for dim in tensor.dims for slot in dim.slots)


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous()
    if not data.numel():
        return ""
    held = (ctypes.c_char * data.nbytes).from_address(data.data_ptr())
    return hashlib.sha256(held).hexdigest()[:32]
