"""The plan of each rank: what it would read of a checkpoint, and the memory that it needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from vllm_module.assignment import Assignment
from vllm_module.cli.tensor_plan import Kept, KeptPiece, TensorPlan, dtype_name, kept_pieces
from vllm_module.config import EngineConfig
from vllm_module.distributed import expert_parallel, tensor_parallel
from vllm_module.load import paused_gc
from vllm_module.model_source import ModelSource
from vllm_module.plan import LoadPlan
from vllm_module.report import LoadReport
from vllm_module.runtime.kv_cache import page_bytes
from vllm_module.tree import slots_of
from vllm_module.weights import Weight
from vllm_module.weights.handle import SafetensorsHandle

PAGE_SIZE = EngineConfig().block_size  # tokens


class Read(NamedTuple):
    """The shard of a checkpoint tensor that a rank reads, and the parameter and slot it fills.

    ``byte_range`` has positions in the file; a source that is no folder has no files. A shard that
    is not contiguous in the file is read in several ``pieces``. ``quantized`` tells whether it is
    quantized while it is read; ``tied_to`` is the name that fills the same parameter, with which it
    is only compared.
    """

    name: str
    file: str | None
    byte_range: tuple[int, int] | None
    bytes: int
    pieces: int
    shape: tuple[int, ...]
    of: tuple[int, ...]
    dtype: str
    parameter: str
    slot: str | None
    quantized: bool
    tied_to: str | None


@dataclass(frozen=True)
class HeldTensor:
    """A parameter or buffer of a rank, once; ``tied`` are the other paths that hold it too."""

    path: str
    tied: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    nbytes: int
    quantized: bool


@dataclass(frozen=True)
class RankPlan:
    """What a rank reads and the memory that it needs, in bytes.

    ``device_bytes``: parameters and buffers. ``staging_bytes``: host memory, by kind of device.
    ``quantizing_bytes``: the peak of full-precision tensors on the device that are quantized.
    ``kv_page_bytes``: a page of the KV cache, of ``PAGE_SIZE`` tokens.
    ``tensors``: all that ``device_bytes`` counts. ``plans``: of all ranks, in the model's order.
    """

    rank: int
    plans: Sequence[TensorPlan]
    report: LoadReport
    bytes_read: int
    device_bytes: int
    staging_bytes: dict[str, int]
    quantizing_bytes: int
    kv_page_bytes: int
    tensors: list[HeldTensor]

    def reads(self) -> Iterator[Read]:
        """Yield every piece that this rank reads, in the model's order."""
        for plan in self.plans:
            kept, begin = plan.kept, plan.begin
            for piece in kept.pieces[self.rank]:
                yield Read(
                    name=plan.name,
                    file=plan.file,
                    byte_range=None if begin is None else (begin + piece.begin, begin + piece.end),
                    bytes=piece.bytes,
                    pieces=piece.runs,
                    shape=piece.shape,
                    of=kept.of,
                    dtype=kept.dtype,
                    parameter=plan.parameter,
                    slot=plan.slot,
                    quantized=kept.quantized,
                    tied_to=plan.tied_to,
                )

    def kv_cache_bytes(self, tokens: int) -> int:
        """Return the bytes of the pages that hold this many tokens of one sequence."""
        return -(-tokens // PAGE_SIZE) * self.kv_page_bytes

    def needed_bytes(self, tokens: int) -> int:
        """Return the peak on the device; quantizing has ended when the KV cache is allocated."""
        return self.device_bytes + max(self.quantizing_bytes, self.kv_cache_bytes(tokens))

    def kv_cache_tokens(self, memory: int) -> int:
        """Return how many tokens of KV cache fit into ``memory`` bytes beside the parameters."""
        pages = max(0, memory - self.device_bytes) // max(1, self.kv_page_bytes)
        return pages * PAGE_SIZE


def plan_ranks(
    source: ModelSource,
    checkpoint: Mapping[str, Weight],
    tp_size: int,
    ep_size: int = 1,
    cache_dtype: torch.dtype | None = None,
) -> list[RankPlan]:
    """Return the plan of each rank; one model is built for all of them, on the meta device.

    With an ``ep_size``, that many ranks hold whole experts, and each ``tp_size`` of them share all
    other layers. ``cache_dtype``: of the KV cache; the model's unless given.
    """
    experts = expert_parallel(rank=0, size=ep_size) if ep_size > tp_size else nullcontext()
    with tensor_parallel(rank=0, size=tp_size), experts:
        model = source.build(torch.device("cpu"), len(checkpoint))
    page = page_bytes(model, PAGE_SIZE, cache_dtype or source.dtype)
    with paused_gc():
        plan = model.plan_weights(checkpoint)
        groups = plan.alike()
        counts = [len(group) for group in groups]
        plan = plan._replace(assignments=[group[0] for group in groups])
        plans: list[TensorPlan] = []
        pieces: list[list[tuple[KeptPiece, ...]]] = []
        ranks = []
        for rank in range(max(tp_size, ep_size)):
            of_rank = plan.of_rank(rank)
            pieces.append([kept_pieces(each) for each in of_rank.assignments])
            ranks.append(_rank_plan(rank, of_rank, counts, pieces[-1], plans, page))
        plans += _tensor_plans(model, groups, zip(*pieces, strict=True))
    return ranks


def _rank_plan(
    rank: int,
    plan: LoadPlan,
    counts: Sequence[int],
    pieces: Sequence[tuple[KeptPiece, ...]],
    plans: Sequence[TensorPlan],
    kv_page_bytes: int,
) -> RankPlan:
    memory = {device: plan.memory(device, counts) for device in ("cpu", "cuda")}
    nbytes = (sum(piece.bytes for piece in each) for each in pieces)
    return RankPlan(
        rank,
        plans,
        plan.report,
        sum(count * each for count, each in zip(counts, nbytes, strict=True)),
        memory["cpu"].model,
        {device: each.staging for device, each in memory.items()},
        memory["cpu"].quantizing,
        kv_page_bytes,
        _held(_tensors(plan.module)),
    )


def _tensor_plans(
    model: nn.Module,
    groups: Sequence[Sequence[Assignment]],
    pieces: Iterable[tuple[tuple[KeptPiece, ...], ...]],
) -> list[TensorPlan]:
    """Return the plans in the model's order; the files have another.

    ``pieces`` are those of each rank of the first tensor of each group.
    """
    order = {
        (path, slot): (index, at)
        for index, (path, tensor) in enumerate(_tensors(model))
        for at, slot in enumerate((None, *slots_of(tensor)))
    }
    plans = []
    for group, of_ranks in zip(groups, pieces, strict=True):
        weight, location = group[0].weight, group[0].location
        kept = Kept(
            tuple(weight.shape),
            dtype_name(weight.dtype),
            location.conversion is not None,
            of_ranks,
        )
        for each in group:
            # A source of the user's own may have other handles.
            stored = each.weight if isinstance(each.weight, SafetensorsHandle) else None
            plans.append(
                TensorPlan(
                    each.name,
                    kept,
                    each.location.path,
                    each.slot,
                    each.tied_to,
                    None if stored is None else stored.file.name,
                    None if stored is None else stored.byte_range[0],
                )
            )
    return sorted(plans, key=lambda each: order[each.parameter, each.slot])


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return every parameter and buffer, tied ones under each of their names."""
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


def _held(tensors: list[tuple[str, torch.Tensor]]) -> list[HeldTensor]:
    paths: dict[torch.Tensor, list[str]] = {}
    for path, tensor in tensors:
        paths.setdefault(tensor, []).append(path)
    return [
        HeldTensor(
            path=path,
            tied=tuple(tied),
            shape=tuple(tensor.shape),
            dtype=dtype_name(tensor.dtype),
            itemsize=tensor.itemsize,
            nbytes=tensor.nbytes,
            quantized=isinstance(tensor, torch.nn.Parameter)
            and not (tensor.is_floating_point() and tensor.itemsize > 1),
        )
        for tensor, (path, *tied) in paths.items()
    ]
