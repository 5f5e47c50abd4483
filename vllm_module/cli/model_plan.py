"""The plan of all ranks: one table of tensors, one of memory, and whether it fits."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from rich.console import Console

from vllm_module.build.model_source import ModelSource
from vllm_module.cli.implementation import impl_line, impl_of
from vllm_module.cli.output import CommandError, print_table, print_text, size
from vllm_module.cli.rank_plan import RankPlan
from vllm_module.cli.tensor_plan import dtype_name, rank_list, tensor_rows
from vllm_module.core.report import LoadReport
from vllm_module.layout import Layout
from vllm_module.runtime.planned_layout import planned_layout
from vllm_module.weights.region import Region

_MOST_COLUMNS = 4  # of one table


@dataclass(frozen=True)
class ModelPlan:
    """The plans of all ranks, and what they are compared with.

    ``nbytes`` are those of the checkpoint, ``tokens`` those that the KV cache holds, and ``memory``
    is what the user wrote for ``memory_bytes`` of each rank's device. ``tp_size`` ranks share a
    layer, and ``ep_size`` ranks the experts of one.
    """

    source: ModelSource
    nbytes: int
    ranks: list[RankPlan]
    tokens: int
    cache_dtype: torch.dtype
    tp_size: int
    ep_size: int
    memory: str | None = None
    memory_bytes: int | None = None
    stage: tuple[int, int] = (0, 1)  # its number, and that of all stages

    @cached_property
    def layout(self) -> Layout:
        """Which part of which tensor lies where; raises as :meth:`LoadPlan.layout` does."""
        return self.ranks[0].load.layout(len(self.ranks))

    def layout_of(self, source: Mapping[str, Region]) -> Layout:
        """Return which part of which tensor of a source lies where."""
        return planned_layout(self.ranks[0].load.module, ranks=len(self.ranks), source=source)

    @property
    def report(self) -> LoadReport:
        """What would happen to every name; it is the same on all ranks."""
        return self.ranks[0].report

    def raise_if_refused(self) -> None:
        """Raise one error that names every problem of the load, or the ranks that are too large."""
        self.report.raise_if_refused(self.source.config.architectures[0], touched=False)
        if refusal := self.too_large():
            raise CommandError(refusal)

    def too_large(self) -> str | None:
        """Say which ranks need more memory than there is; ``None`` if all fit."""
        if self.memory_bytes is None:
            return None
        lines = []
        for ranks in _alike(self.ranks, self._needs):
            needed = ranks[0].needed_bytes(self.tokens)
            if needed > self.memory_bytes:
                verb = "needs" if len(ranks) == 1 else "need"
                lines.append(f"{_which(ranks)} {verb} {size(needed)}: {self._needs(ranks[0])}")
        if not lines:
            return None
        stage, stages = self.stage
        of_stage = f" of stage {stage}" if stages > 1 else ""
        have = f"this does not fit: each rank{of_stage} has "
        have += f"{self.memory} ({size(self.memory_bytes)})"
        advice = "Take more ranks (--tp or --pp), --quantization, or a smaller --context-len."
        return "\n".join([have, *lines, advice])

    def _needs(self, rank: RankPlan) -> str:
        kv_cache = rank.kv_cache_bytes(self.tokens)
        parts = [f"{size(rank.device_bytes)} for weights"]
        if rank.quantizing_bytes > kv_cache + rank.state_bytes:
            return f"{parts[0]}, {size(rank.quantizing_bytes)} for what is being quantized"
        if rank.kv_page_bytes:
            tokens = f"{self.tokens:,} token{'' if self.tokens == 1 else 's'}"
            parts.append(f"{size(kv_cache)} for the KV cache of {tokens}")
        if rank.state_bytes:
            parts.append(f"{size(rank.state_bytes)} for the state of a sequence")
        return ", ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints; the reads of a rank are an iterator."""
        ranks = [
            {
                "rank": rank.rank,
                "reads": (read._asdict() for read in rank.reads()),
                "bytes_read": rank.bytes_read,
                "device_bytes": rank.device_bytes,
                "staging_bytes": rank.staging_bytes,
                "quantizing_bytes": rank.quantizing_bytes,
                "replicated": rank.replicated,
                "kv_page_bytes": rank.kv_page_bytes,
                "state_bytes": rank.state_bytes,
                "kv_cache_bytes": rank.kv_cache_bytes(self.tokens),
                "needed_bytes": rank.needed_bytes(self.tokens),
                "kv_cache_tokens": None
                if self.memory_bytes is None or not rank.kv_page_bytes
                else rank.kv_cache_tokens(self.memory_bytes),
            }
            for rank in self.ranks
        ]
        problems = ("skipped", "missing", "unexpected", "duplicated", "misshapen")
        return {
            "checkpoint": self.source.name,
            "model_impl": impl_of(self.source),
            "dtype": self.source.dtype,
            "tensor_parallel_size": self.tp_size,
            "expert_parallel_size": self.ep_size,
            "checkpoint_bytes": self.nbytes,
            "context_len": self.tokens,
            "memory_bytes": self.memory_bytes,
            "ranks": ranks,
            **{kind: getattr(self.report, kind) for kind in problems},
        }


def print_plan(out: Console, plan: ModelPlan, *, every: bool = False) -> None:
    """Print one table of tensors, and one of the ranks' memory."""
    source, report = plan.source, plan.report
    ranks = "1 rank" if len(plan.ranks) == 1 else f"{len(plan.ranks)} ranks"
    name = source.config.architectures[0]
    head = f"{name}, {size(plan.nbytes)} in {dtype_name(source.dtype)}, on {ranks}"
    print_text(out, head, "bold")
    print_text(out, impl_line(source, plan.ranks))
    out.print()
    header, rows = tensor_rows(plan.ranks[0].plans, every=every)
    print_table(out, header, rows, right=[header.index("per rank")])
    columns = memory_columns(plan)
    groups = _alike(plan.ranks, lambda each: tuple(columns[each.rank].values()))
    titled = [(_title(ranks, len(plan.ranks)), columns[ranks[0].rank]) for ranks in groups]
    print_columns(out, "memory", titled)
    lines = str(report).splitlines()[1:] if report.ok else []
    if plan.stage[1] > 1 and not every:
        lines = [line for line in lines if not line.startswith(" ")]
    if plan.memory is not None and plan.too_large() is None:
        lines.append(f"fits into {plan.memory}; activations and CUDA graphs are not counted")
    if lines:
        out.print()
        print_text(out, "\n".join(lines))


def print_columns(
    out: Console, what: str, columns: Sequence[tuple[str, Mapping[str, str]]]
) -> None:
    """Print tables of some columns each: their titles, and what they show by the lines' labels."""
    for start in range(0, len(columns), _MOST_COLUMNS):
        shown = columns[start : start + _MOST_COLUMNS]
        rows = [[label, *(lines[label] for _, lines in shown)] for label in shown[0][1]]
        header = [what, *(title for title, _ in shown)]
        out.print()
        print_table(out, header, rows, right=range(1, len(header)))


def print_stages(out: Console, stages: Sequence[ModelPlan], *, every: bool = False) -> None:
    """Print the plan of each pipeline stage, whose skipped names are counted."""
    for plan in stages:
        stage, count = plan.stage
        if stage:
            out.print()
        print_text(out, f"stage {stage} of {count}", "bold")
        print_plan(out, plan, every=every)


def memory_columns(plan: ModelPlan) -> list[dict[str, str]]:
    """Return the table of memory: for each rank, what it shows by the labels of its lines."""
    tokens, memory, first = plan.tokens, plan.memory_bytes, plan.ranks[0]
    quantizes = any(each.kept.quantized for each in first.plans)
    has_peak = any(rank.quantizing_bytes for rank in plan.ranks)
    kept = f"{'quantized or ' if quantizes else ''}in {dtype_name(plan.source.dtype)}"
    peak = "not quantized yet" if quantizes else "cast or put in order on a GPU"
    columns = []
    for rank in plan.ranks:
        column = {
            "read from the checkpoint": size(rank.bytes_read),
            "share of the checkpoint": f"{rank.bytes_read / max(plan.nbytes, 1):.1%}",
            f"weights and buffers, {kept}": size(rank.device_bytes),
        }
        if has_peak:
            column[f"{peak}, at the peak"] = size(rank.quantizing_bytes)
        if first.kv_page_bytes:  # an encoder has none
            label = f"KV cache of {tokens:,} tokens, in {dtype_name(plan.cache_dtype)}"
            column[label] = size(rank.kv_cache_bytes(tokens))
        if first.state_bytes:
            column["state of a sequence, whatever its length"] = size(rank.state_bytes)
        if memory is not None:
            column[f"left of {plan.memory}"] = _signed(memory - rank.needed_bytes(tokens))
            if first.kv_page_bytes:
                column["tokens of KV cache that fit"] = f"{rank.kv_cache_tokens(memory):,}"
        for kind, where in (("cpu", "the CPU"), ("cuda", "a GPU")):
            label = f"host memory to load onto {where}, at the peak"
            column[label] = size(rank.staging_bytes[kind])
        columns.append(column)
    return columns


def _title(ranks: list[RankPlan], count: int) -> str:
    if len(ranks) == count:
        return "each rank" if count > 1 else "rank 0"
    return _which(ranks)


def _which(ranks: list[RankPlan]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {rank_list([each.rank for each in ranks])}"


def _alike(ranks: Sequence[RankPlan], key: Callable[[RankPlan], Hashable]) -> list[list[RankPlan]]:
    """Group the ranks of equal ``key``."""
    groups: dict[Hashable, list[RankPlan]] = {}
    for each in ranks:
        groups.setdefault(key(each), []).append(each)
    return list(groups.values())


def _signed(nbytes: int) -> str:
    return size(nbytes) if nbytes >= 0 else f"-{size(-nbytes)}"
