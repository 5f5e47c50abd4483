"""``vllm-module inspect``: the tensors of a checkpoint, from its headers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from vllm_module.base.garbage import paused_gc
from vllm_module.base.messages import printable
from vllm_module.cli.options import AllOption, JsonOption, WeightOptions
from vllm_module.cli.output import (
    by_number,
    console,
    grouped,
    plural,
    print_json,
    print_table,
    print_text,
    shape,
    size,
    working,
)
from vllm_module.cli.stored_weights import StoredSource, find_weights
from vllm_module.core.report import fold
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError

if TYPE_CHECKING:
    from vllm_module.weights.pairs import OpenWeights

_SHOWN = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "tie_word_embeddings",
    "quantization",
)
# What quantization_config says of a format, without the settings of layers.
_OF_QUANTIZATION = ("quant_method", "format", "quant_algo", "packing_format")


@dataclass(frozen=True)
class ListedTensor:
    """A tensor as its file's header describes it; a registered source names no file."""

    name: str
    dtype: str
    shape: list[int]
    bytes: int
    file: str | None
    byte_range: tuple[int, int] | None


@paused_gc()
def inspect(
    source: StoredSource,
    *,
    weights: WeightOptions,
    every: AllOption = False,
    as_json: JsonOption = False,
) -> None:
    """List the tensors of a checkpoint. Only headers are read.

    Of a sharded state, the tensors of rank 0 are listed.

    JSON keys: checkpoint; load_format (or null); ranks (of a sharded state, or null); architecture
    (supported, or null where only plan and load find out; model_impl: native, transformers or null;
    refused: why, if it is known; and entries of config.json; null if there is no config.json);
    adapter (base, settings, refused; null if there is no adapter_config.json);
    tensors (name, dtype, shape, bytes, file and byte_range in the file, or null); files and dtypes
    (tensors and bytes of each); total (tensors, elements, bytes).
    """
    found, path = find_weights(source, weights)
    from vllm_module.weights.source import open_weights

    with working("reading headers"):
        with open_weights(found) as checkpoint:
            architecture = _architecture(found.folder, getattr(checkpoint, "config", None))
            adapter = None if architecture is not None else _adapter(found.folder)
            tensors, taken = _tensors(checkpoint), checkpoint.load_format
        elements = sum(math.prod(tensor.shape) for tensor in tensors)
        of_ranks = getattr(getattr(checkpoint, "manifest", None), "tensor_parallel_size", None)
    total = {"tensors": len(tensors), "elements": elements, "bytes": sum(t.bytes for t in tensors)}
    by_file, by_dtype = _totals(tensors, "file"), _totals(tensors, "dtype")
    if as_json:
        print_json(
            {
                "checkpoint": str(path),
                "load_format": taken,
                "ranks": of_ranks,
                "architecture": architecture,
                "adapter": adapter,
                "tensors": tensors,
                "files": by_file,
                "dtypes": by_dtype,
                "total": total,
            }
        )
        return
    out = console()
    if adapter is not None:
        base = printable(adapter["base"] or "a base without a name")
        print_text(out, f"LoRA adapter of {base}", "bold")
        print_text(out, adapter["refused"] or adapter["settings"], indent="")
        out.print()
    else:
        _print_architecture(out, architecture)
    rows = [[t] for t in tensors] if every else grouped(tensors, lambda t: t.name, _dtype_and_shape)
    print_table(
        out,
        ("tensor", "shape", "dtype", "bytes", "file"),
        [_row(group) for group in rows],
        right=(3,),
    )
    for title, totals in (("file", by_file), ("dtype", by_dtype)):
        if not totals:
            continue
        out.print()
        print_table(
            out,
            ("tensors", "bytes", title),
            [(str(of["tensors"]), size(of["bytes"]), key) for key, of in totals.items()],
            right=(0, 1),
        )
    count, nbytes = plural(total["tensors"], "tensor"), size(total["bytes"])
    out.print()
    in_format = "" if taken is None else f", in the format {taken}"
    whose = "" if of_ranks is None else f" of rank 0 of {of_ranks}"
    print_text(out, f"total{whose}: {count}, {total['elements']:,} elements, {nbytes}{in_format}")


def _architecture(
    folder: Path, config: Callable[[], dict[str, Any]] | None
) -> dict[str, Any] | None:
    """Return what config.json, or what stands for it, says; or why it says nothing."""
    # Imported here because help does not read a configuration.
    from vllm_module.build.registry import in_transformers, supported_architectures
    from vllm_module.hf_config import architectures_of, read_entries
    from vllm_module.weights.regular_file import is_there

    if config is None and not is_there(folder / "config.json"):
        return None
    try:
        entries = read_entries(folder, {}) if config is None else config()
        names = architectures_of(entries, folder / "config.json")
    except (CheckpointFormatError, UnsupportedModelError) as error:
        # The tensors are listed all the same.
        return {"error": str(error), "supported": False}
    shown = {key: entries.get(key) for key in _SHOWN}
    shown["quantization"] = _quantization(entries.get("quantization_config"))
    impl, refused = None, None
    supported: bool | None = False
    if not set(supported_architectures()).isdisjoint(names):
        impl, supported = "native", True
    elif in_transformers(names) or _is_code(names, entries):
        from vllm_module.wrapped.refusals import refusal_of

        impl, refused = "transformers", refusal_of(entries)
        supported = None if refused is None else False
    return {
        "architectures": names,
        "supported": supported,
        "model_impl": impl,
        **({} if refused is None else {"refused": refused}),
        **{key: value for key, value in shown.items() if value is not None},
    }


def _adapter(folder: Path) -> dict[str, Any] | None:
    """Return what adapter_config.json says, and why such an adapter is refused, if it is."""
    from vllm_module.adapters.config import CONFIG_FILE, adapter_config
    from vllm_module.cli.adapter_plan import settings_line
    from vllm_module.weights.regular_file import is_there
    from vllm_module.weights.strict_json import read_json

    path = folder / CONFIG_FILE
    if not is_there(path):
        return None
    entries = read_json(path, folder)
    base = entries.get("base_model_name_or_path")
    found = {"base": base if isinstance(base, str) else None, "settings": None, "refused": None}
    try:
        return found | {"settings": settings_line(adapter_config(entries, printable(path)))}
    except (CheckpointFormatError, UnsupportedModelError) as error:
        return found | {"refused": str(error)}  # the tensors are listed all the same


def _quantization(stored: object) -> str | None:
    if not isinstance(stored, Mapping):
        return None
    nested = stored.get("quantization")  # of ModelOpt's own file
    stored = {**nested, **stored} if isinstance(nested, Mapping) else stored
    said = [stored[key] for key in _OF_QUANTIZATION if isinstance(stored.get(key), str)]
    return " ".join(said) or None


def _is_code(names: Sequence[str], entries: Mapping[str, Any]) -> bool:
    """Tell whether code of the checkpoint may define the model, for the transformers library."""
    from vllm_module.build.registry import settled_impl

    return settled_impl(names, "auto", entries.get("auto_map")) == "transformers"


def _print_architecture(out: Console, architecture: dict[str, Any] | None) -> None:
    if architecture is None:
        print_text(out, "no config.json: the architecture is not known")
    elif "error" in architecture:
        print_text(out, architecture["error"])
    else:
        supported = "supported" if architecture["supported"] else "not supported"
        if architecture["supported"] is None:
            supported = "of transformers, not proven to run here: plan and check tell"
        elif "refused" in architecture:
            supported = "not supported: see below"
        names = ", ".join(architecture["architectures"])
        print_text(out, printable(f"{names} ({supported})"), "bold")
        entries = (f"{key}={architecture[key]}" for key in _SHOWN if key in architecture)
        print_text(out, printable(", ".join(entries)), indent="")
        if "refused" in architecture:
            print_text(out, architecture["refused"])
    out.print()


def _tensors(checkpoint: OpenWeights) -> list[ListedTensor]:
    from vllm_module.weights import Checkpoint

    if isinstance(checkpoint, Checkpoint):
        chunked = checkpoint.load_format == "dcp"  # a tensor is in several places of other files
        tensors = [
            ListedTensor(
                name,
                entry.dtype.name,
                list(entry.shape),
                entry.end - entry.begin,
                file.name,
                None if chunked else (entry.begin, entry.end),
            )
            for name, file, entry in checkpoint.headers()
        ]
    else:
        tensors = [
            ListedTensor(
                name,
                str(weight.dtype).removeprefix("torch."),
                list(weight.shape),
                math.prod(weight.shape) * weight.dtype.itemsize,
                None,
                None,
            )
            for name, weight in checkpoint.items()
        ]
    return sorted(tensors, key=lambda tensor: by_number(tensor.name))


def _dtype_and_shape(tensor: ListedTensor) -> tuple[str, tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape)


def _row(group: list[ListedTensor]) -> tuple[str, ...]:
    files = sorted({tensor.file or "" for tensor in group})
    return (
        ", ".join(fold(tensor.name for tensor in group)),
        shape(group[0].shape),
        group[0].dtype,
        size(sum(tensor.bytes for tensor in group)),
        files[0] if len(files) == 1 else f"{len(files)} files",
    )


def _totals(tensors: list[ListedTensor], by: str) -> dict[str, dict[str, int]]:
    count: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for tensor in tensors:
        key = getattr(tensor, by)
        if key is not None:
            count[key] += 1
            nbytes[key] += tensor.bytes
    return {key: {"tensors": count[key], "bytes": nbytes[key]} for key in sorted(count)}
