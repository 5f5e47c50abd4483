"""Writing a checkpoint with a LoRA adapter merged into it, as PEFT's ``merge_and_unload`` does.

Each tensor is read, what A and B make of it is added in PEFT's arithmetic, and it is written: the
whole model is never in memory. Which A and B belong to which tensor is what a load of both into one
model says.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import nn

from vllm_module.adapters import Adapter, open_adapter
from vllm_module.adapters.adapter import Adaptable, LoRALayer, refuse_infinite
from vllm_module.base.messages import printable_name
from vllm_module.build.model_source import ModelSource
from vllm_module.config import ModelConfig
from vllm_module.core.fill import Fill, same_bits
from vllm_module.core.plan import LoadPlan
from vllm_module.core.report import LoadReport
from vllm_module.errors import UnsupportedModelError, WeightReadError
from vllm_module.export.folder import copy_small_files, new_folder, write_json
from vllm_module.export.safetensors_writer import SafetensorsWriter, Stored
from vllm_module.export.units import FILE_BYTES, CopiedTensor, WrittenUnit, opened, write_units
from vllm_module.hf_config import read_entries
from vllm_module.parameters import BasevLLMParameter
from vllm_module.weights import Weight

_SERVE = "serve the adapter beside its base instead (lora_request)"


class Merged(NamedTuple):
    """The result of :func:`merge`.

    Attributes:
        report: report of the base's load; skipped names are not written.
        merged: names of the tensors that the adapter has changed.
        read, written: bytes of tensors of the base, and of the new checkpoint.

    """

    report: LoadReport
    merged: tuple[str, ...]
    read: int
    written: int


def merge(
    config: ModelConfig,
    adapter: str | Path,
    out: str | Path,
    *,
    load_format: str = "auto",
    file_bytes: int = FILE_BYTES,
    on_tensors: Callable[[int], object] = lambda nbytes: None,
) -> Merged:
    """Write the checkpoint of PEFT's ``merge_and_unload``, of a base and the folder ``adapter``.

    Tensors keep the base's dtypes and names. Host memory holds one tensor, and what is added to it.
    ``on_tensors`` is called with the bytes of tensors written so far.

    Raises:
        ValueError: ``out`` exists and is no empty folder, or a quantization is requested.
        UnsupportedModelError: the base is quantized, or the merged model would not compute what the
            adapter computes beside its base.
        WeightLoadError: the base or the adapter is refused, or a sum is no number of its dtype.

    """
    if config.quantization is not None:
        raise ValueError("merge an adapter in full precision, and quantize the result")
    source = ModelSource.find(config, load_format)
    with opened(source, "merge into") as checkpoint, open_adapter(adapter) as (settings, weights):
        stored = dict(checkpoint)
        model = source.build(torch.device("cpu"), len(stored))
        plan = model.plan_weights(stored)
        plan.report.raise_if_refused(type(model).__name__, touched=False, folder=source.folder)
        changes = _changes(plan, Adapter(model, settings), weights)
        for fill in plan.fills:
            own = stored.get(fill.name)
            if own is None or (fill.name in changes and own is not fill.weight):
                raise UnsupportedModelError(
                    f"{type(model).__name__} loads something else than {printable_name(fill.name)} "
                    f"as it is stored, so nothing can be added to that: {_SERVE}"
                )
        names = list(dict.fromkeys(fill.name for fill in plan.fills))
        units: list[WrittenUnit] = [
            _Sum(name, stored[name], changes[name])
            if name in changes
            else CopiedTensor(name, stored[name])
            for name in names
        ]
        with new_folder(Path(os.path.expanduser(out))) as folder:
            copy_small_files(source.folder, folder)
            entries = read_entries(source.folder, config.hf_overrides)
            write_json(folder / "config.json", entries)
            written = write_units(folder, units, file_bytes, on_tensors)
        return Merged(plan.report, tuple(changes), checkpoint.bytes_read, written)


class _LowRank(NamedTuple):
    """A and B of one tensor of the adapter's file, or of all experts.

    Attributes:
        name: of the module, or of the parameter.
        a, b: ``[rank, input]`` and ``[output, rank]``, of experts behind a dimension of them.
        scale: factor of B A.
        is_embedding: A has a column for each token.
        is_parameter: the settings name the parameter, not its module.

    """

    name: str
    a: Weight
    b: Weight
    scale: float
    is_embedding: bool
    is_parameter: bool

    @property
    def rounds(self) -> bool:
        """Whether PEFT rounds the product to the dtype of the weight before it adds it."""
        return self.is_embedding or self.is_parameter


class _Change(NamedTuple):
    """What is added to one tensor.

    Attributes:
        low_rank: of which A and B.
        transposed: the tensor is ``[input, output]``.
        expert: the only expert of A and B that the tensor has; ``None`` for all that there are.
        rows: of B, if not all.

    """

    low_rank: _LowRank
    transposed: bool
    expert: int | None = None
    rows: tuple[int, int] | None = None

    def add_to(self, weight: torch.Tensor) -> None:
        """Add in place, by the operations of PEFT: in another order, some bits would differ."""
        a, b = _read(self.low_rank.a), _read(self.low_rank.b)
        if self.expert is not None:
            a, b = a[self.expert], b[self.expert]
        if self.rows is not None:
            b = b[slice(*self.rows)]
        a, b = _wide(a), _wide(b)
        parts = zip(weight, a, b, strict=True) if a.dim() == 3 else [(weight, a, b)]
        for part, one, other in parts:  # each expert by itself, to hold little
            product = other @ one
            product = (product.t() if self.transposed else product) * self.low_rank.scale
            part += product.to(part.dtype) if self.low_rank.rounds else product


class _Sum(NamedTuple):
    """A tensor that is written with what the adapter adds to it."""

    name: str
    weight: Weight
    change: _Change

    @property
    def tensors(self) -> dict[str, Stored]:
        return CopiedTensor(self.name, self.weight).tensors

    def write(self, file: SafetensorsWriter) -> None:
        weight = self.weight
        values = weight.clone() if isinstance(weight, torch.Tensor) else weight.read()
        self.change.add_to(values)
        if not values.isfinite().all():
            raise WeightReadError(
                f"{self.name} has a NaN or an infinite number once the adapter is added in "
                f"{values.dtype}: {_SERVE}"
            )
        file.write(self.name, values)


def _read(weight: Weight) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else weight.read()


def _wide(values: torch.Tensor) -> torch.Tensor:
    """Return numbers of 16 bits as float32, which PEFT multiplies in."""
    return values.float() if values.dtype.itemsize < 4 else values


def _changes(plan: LoadPlan, adapter: Adapter, weights: dict[str, Weight]) -> dict[str, _Change]:
    """Return what is added to which of the base's tensors, by name.

    All of the adapter is checked: names, shapes, numbers, and copies of the base's tensors.
    """
    fills = {(fill.location.tensor, fill.slot): fill for fill in plan.fills}

    def is_base(copy: Fill) -> bool:
        fill = fills.get((copy.location.tensor, copy.slot))
        return fill is not None and same_bits(copy.weight, fill.weight, fill.weight.dtype)

    low_ranks = _low_ranks(adapter, adapter.plan(adapter.without_copies(weights, is_base)))
    _refuse_shared(plan, low_ranks)
    changes: dict[str, _Change] = {}
    used: set[str] = set()
    for fill in plan.fills:
        layer, slot = fill.location.node.module, fill.slot or ""
        of_layer = low_ranks.get(layer)
        if of_layer is None or fill.location.attr != "weight":
            continue
        found = of_layer.get(slot) or of_layer.get("")
        if found is None:
            continue
        base = cast(BasevLLMParameter, fill.location.tensor)
        change = _Change(found, base.transposed or found.is_embedding)
        if slot and slot not in of_layer:  # A and B are of all experts, and this is one's
            change = change._replace(expert=base.slots[slot][0], rows=_rows(base, slot))
        changes[fill.name] = change
        used.add(found.name)
    for of_layer in low_ranks.values():
        for found in of_layer.values():
            if found.name not in used:
                raise UnsupportedModelError(
                    f"{found.name} has an A and a B, and the base stores it in one tensor with "
                    f"others, which PEFT does not merge: {_SERVE}"
                )
    return changes


def _rows(base: BasevLLMParameter, slot: str) -> tuple[int, int]:
    """Return the rows of a slot of an expert in B, where all slots are one after the other."""
    output, index = base.dims[1], base.slots[slot][1] or 0
    start = output.starts[index]
    return start, start + output.slots[index].size


def _low_ranks(adapter: Adapter, plan: LoadPlan) -> dict[nn.Module, dict[str, _LowRank]]:
    """Return the A and B of each layer of the base, by slot; those of all slots under ``""``."""
    found: dict[tuple[LoRALayer, str], dict[str, Weight]] = {}
    for fill in plan.fills:
        layer = cast(LoRALayer, fill.location.node.module)
        if fill.slot not in layer.absent:
            refuse_infinite(fill.name, _read(fill.weight))
            found.setdefault((layer, fill.slot or ""), {})[fill.location.attr] = fill.weight
    low_ranks: dict[nn.Module, dict[str, _LowRank]] = {}
    for (layer, slot), pair in found.items():
        name = layer.modules_of[slot]
        is_parameter = layer.is_parameter or adapter.config.targets_parameter(f"{name}.weight")
        a = pair["lora_A"]
        scale = adapter.config.scale(name, a.shape[-2])
        made = _LowRank(name, a, pair["lora_B"], scale, layer.is_embedding, is_parameter)
        low_ranks.setdefault(layer.base[0], {})[slot] = made
    return low_ranks


def _refuse_shared(plan: LoadPlan, adapted: dict[nn.Module, dict[str, _LowRank]]) -> None:
    """Refuse an adapter of one of several layers that have one weight: merging would change all."""
    holders = Counter(
        parameter for module in plan.module.modules() for parameter in module._parameters.values()
    )
    for path, module in plan.module.named_modules():
        if module in adapted and holders[cast(Adaptable, module).weight] > 1:
            raise UnsupportedModelError(
                f"{path} has an adapter, and shares its weight with another layer "
                "(tie_word_embeddings), which a merge would change as well, and the adapter does "
                f"not: {_SERVE}"
            )
