"""``vllm-module convert``: a checkpoint quantized, or with an adapter merged into it."""

from __future__ import annotations

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
    from vllm_module.export.compressed import Converted
    from vllm_module.export.merged import Merged


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
    tensors); skipped (name to rule; they are copied); bytes_read; bytes_written.
    """
    check_out(out)
    if (quantization is None) == (adapter is None):
        raise UsageError(
            "give --quantization SCHEME or --adapter DIR, whichever is to be done"
            if quantization is None
            else "give only one of --quantization and --adapter: to do both, merge the adapter "
            "first, and quantize what that wrote"
        )
    config = model_config(source, PrecisionOptions(quantization=quantization), model)
    if quantization is None and (ignore or group_size != 128):
        raise UsageError("--ignore and --group-size are for --quantization")
    if group_size != 128 and quantization is not Quantization.int4_per_group:
        problem = "it is for --quantization int4_per_group, and another one is asked for"
        raise typer.BadParameter(problem, param_hint="--group-size")
    if group_size < 1 or group_size % 8:
        problem = f"expected a multiple of 8, got {group_size}"
        raise typer.BadParameter(problem, param_hint="--group-size")
    if quantization is not None and (ignore or group_size != 128):
        from vllm_module.config import QuantizationConfig

        scheme: Any = "fp8_per_tensor" if quantization is Quantization.fp8 else quantization.value
        ignored = ("lm_head", *(ignore or ()))
        try:
            asked = QuantizationConfig(scheme=scheme, ignore=ignored, group_size=group_size)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--quantization") from None
        config = config.model_copy(update={"quantization": asked})
    done: Converted | Merged
    what: dict[str, Any]
    with working("importing torch") as show:
        # Imported here because usage errors and help need no torch.
        from vllm_module.export.compressed import convert as write_converted
        from vllm_module.export.merged import merge

        how: Any = {
            "load_format": model.load_format.value,
            "on_tensors": lambda nbytes: show(f"wrote {size(nbytes)}"),
        }
        with writing(out):
            if quantization is not None:
                done = write_converted(config, out, **how)
                what = {"quantization": quantization.value, "quantized": done.quantized}
                count = f"{plural(len(done.quantized), 'layer')} quantized"
            else:
                assert adapter is not None
                done = merge(config, adapter, out, **how)
                what = {"adapter": str(adapter), "merged": done.merged}
                count = f"{plural(len(done.merged), 'tensor')} changed"
    if as_json:
        print_json(
            {
                "out": str(out),
                **what,
                "skipped": done.report.skipped,
                "bytes_read": done.read,
                "bytes_written": done.written,
            }
        )
        return
    nbytes = f"{size(done.read)} read, {size(done.written)} written"
    print_text(console(), f"{done.report}\n{count}: {nbytes}")
