"""The plan of each rank: what it would read of a checkpoint, and the memory that it needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from operator import itemgetter, mul
from typing import NamedTuple

import torch
from torch import nn

from vllm_module.build.held import plan_from, plan_of_rank
from vllm_module.build.model_source import ModelSource
from vllm_module.cli.tensor_plan import Kept, KeptPiece, TensorPlan, dtype_name, kept_pieces
from vllm_module.config import EngineConfig
from vllm_module.core.fill import Fill
from vllm_module.core.plan import LoadPlan
from vllm_module.core.report import LoadReport
from vllm_module.core.tensors import is_typed, slots_of
from vllm_module.distributed import expert_parallel, tensor_parallel
from vllm_module.runtime.cache.kv_cache import page_bytes
from vllm_module.runtime.cache.state_cache import state_bytes
from vllm_module.runtime.ranks.wire import TokenMessages
from vllm_module.weights import Weight
from vllm_module.weights.handle import FileHandle
from vllm_module.wrapped.model import replicated_share

PAGE_SIZE = EngineConfig().block_size  # tokens


class RankRead(NamedTuple):
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
    ``kv_page_bytes``: a page of the KV cache, of ``PAGE_SIZE`` tokens. ``state_bytes``: what
    recurrent layers keep of a sequence.
    ``replicated``: the share of the parameters' elements that the rank holds whole.
    ``plans``: of all ranks, in the model's order. ``paths``: the tensors of rank 0, each with its
    names. ``load``: the plan of rank 0, from which those of all ranks come. ``messages``: what
    ranks exchange for a token.
    """

    rank: int
    plans: Sequence[TensorPlan]
    report: LoadReport
    bytes_read: int
    device_bytes: int
    staging_bytes: dict[str, int]
    quantizing_bytes: int
    kv_page_bytes: int
    state_bytes: int
    replicated: float
    paths: Mapping[torch.Tensor, Sequence[str]]
    load: LoadPlan
    messages: TokenMessages

    def reads(self) -> Iterator[RankRead]:
        """Yield every piece that this rank reads, in the model's order."""
        for plan in self.plans:
            kept, begin = plan.kept, plan.begin
            for piece in kept.pieces[self.rank]:
                yield RankRead(
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

    def tensors(self) -> Iterator[HeldTensor]:
        """Yield all that ``device_bytes`` counts."""
        for tensor, (path, *tied) in self.paths.items():
            if is_typed(tensor):
                tensor = tensor.of_rank(self.rank)
            eight_bits = not (tensor.is_floating_point() and tensor.itemsize > 1)
            yield HeldTensor(
                path=path,
                tied=tuple(tied),
                shape=tuple(tensor.shape),
                dtype=dtype_name(tensor.dtype),
                itemsize=tensor.itemsize,
                nbytes=tensor.nbytes,
                quantized=isinstance(tensor, nn.Parameter) and eight_bits,
            )

    def kv_cache_bytes(self, tokens: int) -> int:
        """Return the bytes of the pages that hold this many tokens of one sequence."""
        return -(-tokens // PAGE_SIZE) * self.kv_page_bytes

    def needed_bytes(self, tokens: int) -> int:
        """Return the peak on the device; quantizing has ended when the KV cache is allocated."""
        cached = self.kv_cache_bytes(tokens) + self.state_bytes
        return self.device_bytes + max(self.quantizing_bytes, cached)

    def kv_cache_tokens(self, memory: int) -> int:
        """Return how many tokens of one sequence fit into ``memory`` beside the parameters.

        The rank has layers with a KV cache.
        """
        left = memory - self.device_bytes - self.state_bytes
        return max(0, left) // self.kv_page_bytes * PAGE_SIZE


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
    state = state_bytes(model, source.dtype)
    replicated = replicated_share(model)
    paths: dict[torch.Tensor, list[str]] = {}
    for path, tensor in _tensors(model):
        paths.setdefault(tensor, []).append(path)
    load = plan_from(model, checkpoint)
    messages = TokenMessages.of(model, source.config.hidden_size, source.dtype.itemsize)
    groups = load.alike()
    plan = replace(load, fills=[group[0] for group in groups])
    plans: list[TensorPlan] = []
    kept: list[list[tuple[KeptPiece, ...]]] = []  # by rank and group
    ranks = []
    for rank in range(max(tp_size, ep_size)):
        of_rank = plan_of_rank(plan, rank, checkpoint)
        kept.append([kept_pieces(each) for each in of_rank.fills])
        read = [index for index, pieces in enumerate(kept[-1]) if pieces]
        counts = [len(groups[index]) for index in read]
        nbytes = [sum(piece.bytes for piece in kept[-1][index]) for index in read]
        of_rank = replace(of_rank, fills=[of_rank.fills[each] for each in read])
        memory = {device: of_rank.memory(device, counts) for device in ("cpu", "cuda")}
        ranks.append(
            RankPlan(
                rank,
                plans,
                plan.report,
                sum(map(mul, counts, nbytes)),
                memory["cpu"].model,
                {device: each.staging for device, each in memory.items()},
                max(each.quantizing for each in memory.values()),
                page,
                state,
                replicated,
                paths,
                load,
                messages,
            )
        )
    plans += _tensor_plans(groups, zip(*kept, strict=True), model)
    return ranks


def _tensor_plans(
    groups: Sequence[Sequence[Fill]],
    kept: Iterable[tuple[tuple[KeptPiece, ...], ...]],
    model: nn.Module,
) -> list[TensorPlan]:
    """Return the plan of each tensor, in the model's order; the files have another.

    ``kept`` are the pieces that each rank keeps of the first tensor of each group.
    """
    order = {path: index for index, (path, _) in enumerate(_tensors(model))}
    plans = []
    for group, of_ranks in zip(groups, kept, strict=True):
        weight, slot, location = group[0].weight, group[0].slot, group[0].location
        at = -1 if slot is None else list(slots_of(location.tensor)).index(slot)
        quantized = location.conversion is not None
        own = group[0].held
        of = Kept(tuple(weight.shape), dtype_name(weight.dtype), quantized, of_ranks, own)
        for name, _, weight, location, tied_to, _ in group:
            path, file, begin = location.path, None, None
            if isinstance(weight, FileHandle) and not own:  # a user's own source has others
                file, begin = weight.file.name, weight.byte_range[0]
            plans.append((order[path], at, TensorPlan(name, of, path, slot, tied_to, file, begin)))
    plans.sort(key=itemgetter(0, 1))
    return [plan for _, _, plan in plans]


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return every parameter and buffer, tied ones under each of their names."""
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
