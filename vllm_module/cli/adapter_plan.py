"""The plan of a LoRA adapter: what each module gets, and the memory that each rank needs for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from rich.console import Console

from vllm_module.adapters import Adapter, AdapterConfig, check_base, open_adapter, slot_bytes
from vllm_module.adapters.adapter import LoRALayer
from vllm_module.adapters.copies import without_copies
from vllm_module.base.messages import printable
from vllm_module.build.model_source import ModelSource
from vllm_module.cli.output import by_number, grouped, plural, print_table, print_text, shape, size
from vllm_module.core.plan import LoadPlan
from vllm_module.core.report import fold
from vllm_module.distributed import expert_parallel, tensor_parallel


class AdaptedModule(NamedTuple):
    """A module of the base, or a parameter of its experts, and its A and B as they are stored."""

    name: str
    rank: int
    scale: float
    a: tuple[int, ...]
    b: tuple[int, ...]
    bytes: int


class AdapterPlan(NamedTuple):
    """What an adapter's modules get, and the bytes of A and B on each rank, padding counted.

    ``slot_bytes`` are those that a GPU keeps for each of ``max_loras``, with the adapter's largest
    rank as ``max_lora_rank``.
    """

    path: Path
    config: AdapterConfig
    modules: list[AdaptedModule]
    rank_bytes: list[int]
    slot_bytes: int

    @property
    def rank(self) -> int:
        """The largest rank of a module."""
        return max((each.rank for each in self.modules), default=1)

    def as_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints of it."""
        return {
            "path": str(self.path),
            "modules": [each._asdict() for each in self.modules],
            "rank_bytes": self.rank_bytes,
            "slot_bytes": self.slot_bytes,
        }


def plan_adapter(source: ModelSource, path: Path, tp_size: int, ep_size: int) -> AdapterPlan:
    """Plan the load of an adapter on each rank; no tensor is read but those of packed experts.

    Raises as a load does for names, shapes and settings; copies of the base's tensors and numbers
    are not looked at.
    """
    experts = expert_parallel(rank=0, size=ep_size) if ep_size > tp_size else nullcontext()
    with tensor_parallel(rank=0, size=tp_size), experts:
        model = source.build(torch.device("cpu"))
    with open_adapter(path) as (config, weights):
        check_base(config, source.source.folder, source.config)
        adapter = Adapter(model, config)
        plan = adapter.plan(without_copies(model, weights, lambda _: True))
        of_ranks = [plan.of_rank(rank).module for rank in range(max(tp_size, ep_size))]
        rank_bytes = [sum(each.nbytes for each in module.parameters()) for module in of_ranks]
        modules = sorted(_modules(plan), key=lambda each: by_number(each.name))
    found = AdapterPlan(path, config, modules, rank_bytes, 0)
    return found._replace(slot_bytes=slot_bytes(model, 1, found.rank))


def _modules(plan: LoadPlan) -> Iterator[AdaptedModule]:
    pairs: dict[tuple[LoRALayer, str], dict[str, Any]] = {}
    for fill in plan.fills:
        layer, slot = cast(LoRALayer, fill.location.node.module), fill.slot or ""
        if slot not in layer.absent:
            pairs.setdefault((layer, slot), {})[fill.location.attr] = fill.weight
    for (layer, slot), pair in pairs.items():
        a, b = pair["lora_A"], pair["lora_B"]
        name, rank = layer.modules_of[slot], a.shape[-2]
        nbytes = sum(each.shape.numel() * each.dtype.itemsize for each in (a, b))
        scale = layer.scale(slot, rank)
        yield AdaptedModule(name, rank, scale, tuple(a.shape), tuple(b.shape), nbytes)


def settings_line(config: AdapterConfig) -> str:
    """Return the settings of an adapter that say what it is, in a line."""
    entries = {name: getattr(config, name) for name in type(config).model_fields}
    hidden = ("peft_type", "peft_version", "base_model_name_or_path", "base_digest")
    shown = {
        name: sorted(value) if isinstance(value, frozenset) else value
        for name, value in entries.items()
        if value and name not in hidden
    }
    return printable(", ".join(f"{name}={_short(value)}" for name, value in shown.items()))


def _short(value: Any) -> str:
    if isinstance(value, dict):
        value = [f"{key}:{of_key}" for key, of_key in value.items()]
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def print_adapter(out: Console, plan: AdapterPlan, *, every: bool) -> None:
    """Print a line for each module, or for the modules of all layers, and the memory."""
    out.print()
    print_text(out, f"LoRA adapter in {printable(plan.path)}", "bold")
    print_text(out, settings_line(plan.config))
    out.print()
    groups = (
        [[each] for each in plan.modules]
        if every
        else grouped(plan.modules, lambda each: each.name, lambda each: each[1:])
    )
    rows = [
        (
            ", ".join(fold(each.name for each in group)),
            str(group[0].rank),
            f"{group[0].scale:.4g}",
            shape(group[0].a),
            shape(group[0].b),
            size(sum(each.bytes for each in group)),
        )
        for group in groups
    ]
    print_table(out, ("module", "rank", "scale", "A", "B", "bytes"), rows, right=(1, 2, 5))
    out.print()
    least, most = min(plan.rank_bytes), max(plan.rank_bytes)
    each = size(most) if least == most else f"{size(least)} to {size(most)}"
    print_text(out, f"{plural(len(plan.modules), 'module')}; in memory, {each} on each rank")
    print_text(
        out,
        f"on a GPU, {size(plan.slot_bytes)} on each rank for each of max_loras, with max_lora_rank="
        f"{plan.rank}",
    )
