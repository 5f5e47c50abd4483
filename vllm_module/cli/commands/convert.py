"""``vllm-module convert``: a checkpoint quantized, or with an adapter merged into it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_module.cli.choices import Quantization
from vllm_module.cli.options import (
    AdapterOption,
    JsonOption,
    ModelOptions,
    OutOption,
    PrecisionOptions,
    Source,
    UsageError,
    check_out,
    model_config,
)
from vllm_module.cli.output import console, plural, print_json, print_text, size, working, writing

if TYPE_CHECKING:
    from vllm_module.config import ModelConfig


def convert(
    source: Source,
    *,
    out: OutOption,
    quantization: Annotated[
        Quantization | None,
        typer.Option(
            "--quantization",
            metavar="SCHEME",
            help="Scheme of the linear layers: fp8_per_tensor (fp8), fp8_per_channel, "
            "fp8_per_block, int8_per_channel_weight_only or int4_per_group.",
            show_default=False,
        ),
    ] = None,
    adapter: AdapterOption = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            "--ignore",
            metavar="LAYER",
            help="A layer that is not quantized, besides lm_head: its name, some components of it, "
            "or re: and a pattern. May be given several times.",
            show_default=False,
        ),
    ] = None,
    group_size: Annotated[
        int,
        typer.Option(
            "--group-size",
            metavar="N",
            help="Inputs that share a scale with int4_per_group; a multiple of 8.",
        ),
    ] = 128,
    model: ModelOptions,
    as_json: JsonOption = False,
) -> None:
    """Quantize a checkpoint, or merge an adapter.

    Quantized tensors are those of loading CKPT with this scheme, under CKPT's names and in the
    layout of compressed-tensors. Layers are quantized one after another on the CPU.

    With --adapter, the new checkpoint is that of PEFT's merge_and_unload(). Tensors are read,
    changed and written one after another.

    JSON keys: out; quantization, and quantized (names of layers), or adapter, and merged (names of
    tensors); skipped (name to rule; they are not written); bytes_read; bytes_written.
    """
    check_out(out)
    if (quantization is None) == (adapter is None):
        raise UsageError("give either --quantization or --adapter: to do both, merge first")
    config = model_config(source, PrecisionOptions(quantization=quantization), model)
    if quantization is None:
        assert adapter is not None
        if ignore or group_size != 128:
            raise UsageError("--ignore and --group-size are for --quantization")
        _merge(config, adapter, out, model.load_format.value, as_json=as_json)
        return
    if group_size < 1 or group_size % 8:
        problem = f"expected a multiple of 8, got {group_size}"
        raise typer.BadParameter(problem, param_hint="--group-size")
    from vllm_module.config import QuantizationConfig

    if ignore or group_size != 128:
        scheme: Any = "fp8_per_tensor" if quantization is Quantization.fp8 else quantization.value
        ignored = ("lm_head", *(ignore or ()))
        try:
            asked = QuantizationConfig(scheme=scheme, ignore=ignored, group_size=group_size)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--quantization") from None
        config = config.model_copy(update={"quantization": asked})
    with working("importing torch") as show:
        # Imported here because usage errors and help need no torch.
        from vllm_module.export.compressed import convert as write_converted

        with writing(out):
            converted = write_converted(
                config,
                out,
                load_format=model.load_format.value,
                on_tensors=lambda nbytes: show(f"wrote {size(nbytes)}"),
            )
    report = converted.report
    if as_json:
        print_json(
            {
                "out": str(out),
                "quantization": quantization.value,
                "quantized": converted.quantized,
                "skipped": report.skipped,
                "bytes_read": converted.read,
                "bytes_written": converted.written,
            }
        )
        return
    layers = plural(len(converted.quantized), "layer")
    nbytes = f"{size(converted.read)} read, {size(converted.written)} written"
    print_text(console(), f"{report}\n{layers} quantized: {nbytes}")


def _merge(
    config: ModelConfig, adapter: Path, out: Path, load_format: str, *, as_json: bool
) -> None:
    with working("importing torch") as show:
        from vllm_module.export.merged import merge

        with writing(out):
            merged = merge(
                config,
                adapter,
                out,
                load_format=load_format,
                on_tensors=lambda nbytes: show(f"wrote {size(nbytes)}"),
            )
    if as_json:
        print_json(
            {
                "out": str(out),
                "adapter": str(adapter),
                "merged": merged.merged,
                "skipped": merged.report.skipped,
                "bytes_read": merged.read,
                "bytes_written": merged.written,
            }
        )
        return
    tensors = plural(len(merged.merged), "tensor")
    nbytes = f"{size(merged.read)} read, {size(merged.written)} written"
    print_text(console(), f"{merged.report}\n{tensors} changed: {nbytes}")
