"""Writing a checkpoint with a LoRA adapter merged into it, as PEFT's ``merge_and_unload`` does.

Each tensor is read, what A and B make of it is added in PEFT's arithmetic, and it is written: the
whole model is never in memory. Which A and B belong to which tensor is what a load of both into one
model says.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from vllm_module.adapters import check_base, open_adapter
from vllm_module.adapters.merging import Addition, additions
from vllm_module.build.model_source import ModelSource
from vllm_module.config import ModelConfig
from vllm_module.core.report import LoadReport
from vllm_module.export.folder import copy_small_files, new_folder, write_json
from vllm_module.export.units import (
    FILE_BYTES,
    CopiedTensor,
    WrittenUnit,
    entries_to_write,
    opened,
    skipped_names,
    write_units,
)
from vllm_module.weights import Weight
from vllm_module.weights.safetensors_writer import SafetensorsWriter, Stored


class Merged(NamedTuple):
    """The result of :func:`merge`.

    Attributes:
        report: report of the base's load; skipped names are copied.
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
        check_base(settings, source.source.folder, source.config)
        stored = dict(checkpoint)
        model = source.build(torch.device("cpu"), len(stored))
        plan = model.plan_weights(stored)
        plan.report.raise_if_refused(type(model).__name__, touched=False, folder=source.folder)
        changes = additions(plan, stored, settings, weights)
        names = list(dict.fromkeys(fill.name for fill in plan.fills))
        names += skipped_names(plan, stored)
        units: list[WrittenUnit] = [
            _Sum(name, stored[name], changes[name])
            if name in changes
            else CopiedTensor(name, stored[name])
            for name in names
        ]
        with new_folder(Path(os.path.expanduser(out))) as folder:
            copy_small_files(source.folder, folder)
            entries = entries_to_write(source, config)
            write_json(folder / "config.json", entries)
            written = write_units(folder, units, file_bytes, on_tensors)
        return Merged(plan.report, tuple(changes), checkpoint.bytes_read, written)


class _Sum(NamedTuple):
    """A tensor that is written with what the adapter adds to it."""

    name: str
    weight: Weight
    addition: Addition

    @property
    def tensors(self) -> dict[str, Stored]:
        return CopiedTensor(self.name, self.weight).tensors

    def write(self, file: SafetensorsWriter) -> None:
        file.write(self.name, self.addition.added_to(self.name, self.weight))
