from __future__ import annotations

from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from vllm_module.cli.options import (
    DType,
    DTypeOption,
    JsonOption,
    QuantizationOption,
    SizeOption,
    Source,
    model_config,
)
from vllm_module.cli.output import console, print_json, print_table, size
from vllm_module.cli.rank_plan import RankPlan, Read, fold_reads, plan_rank
from vllm_module.model_source import ModelSource

HEADER = ("checkpoint tensor", "shape kept", "of", "bytes of the tensor", "goes to", "slot")


def plan(
    source: Source,
    tp: SizeOption = 1,
    dtype: DTypeOption = DType.auto,
    quantization: QuantizationOption = None,
    every: Annotated[
        bool, typer.Option("--all", help="List each tensor; else layers are folded into one line.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what each rank will read and where it goes.

    Headers are read, and no weights.

    Exit code 1 if anything is missing, unexpected, duplicated or misshapen.

    JSON keys: checkpoint; dtype; tensor_parallel_size; checkpoint_bytes; ranks (rank,
    bytes_read, device_bytes, quantizing_bytes, staging_bytes for cpu and cuda; reads: name, file,
    byte_range in the file, bytes, pieces, shape, of, parameter, slot); skipped (name to rule);
    missing, unexpected, duplicated and misshapen (lists of [name, detail]).
    """
    assert tp is not None
    found = ModelSource.find(model_config(source, dtype, quantization))
    with found.open() as checkpoint:
        ranks = [plan_rank(found, checkpoint, rank, tp) for rank in range(tp)]
        nbytes = checkpoint.nbytes
    report = ranks[0].report
    if as_json:
        problems: dict[str, Any] = {
            kind: getattr(report, kind)
            for kind in ("skipped", "missing", "unexpected", "duplicated", "misshapen")
        }
        print_json(
            {
                "checkpoint": str(found.folder),
                "dtype": found.dtype,
                "tensor_parallel_size": tp,
                "checkpoint_bytes": nbytes,
                "ranks": [rank.as_json() for rank in ranks],
                **problems,
            }
        )
    else:
        out = console()
        for rank in ranks:
            out.print(f"rank {rank.rank} of {tp}", style="bold")
            print_reads(out, rank.reads, every=every)
            out.print()
        print_totals(out, ranks, nbytes, found.dtype)
        for line in str(report).splitlines()[1:] if report.ok else ():
            out.print(line)
    for rank in ranks:
        rank.report.raise_if_refused(found.config.architectures[0], touched=False)


def print_reads(out: Console, reads: list[Read], *, every: bool = False) -> None:
    """Print a line for each read, layers folded into one unless ``every``."""
    print_table(out, HEADER, [read.row() for read in (reads if every else fold_reads(reads))])


def print_totals(out: Console, ranks: list[RankPlan], nbytes: int, dtype: torch.dtype) -> None:
    """Print what each rank reads and the memory it takes."""
    extra = ["quantizing"] if any(rank.quantizing_bytes for rank in ranks) else []
    print_table(
        out,
        (
            "rank",
            "reads",
            "of checkpoint",
            "device memory",
            *extra,
            "host, to CPU",
            "host, to CUDA",
        ),
        [
            (
                str(rank.rank),
                size(rank.bytes_read),
                f"{rank.bytes_read / max(nbytes, 1):.1%}",
                size(rank.device_bytes),
                *([size(rank.quantizing_bytes)] if extra else []),
                *map(size, rank.staging_bytes.values()),
            )
            for rank in ranks
        ],
        right=range(7),
    )
    name = str(dtype).removeprefix("torch.")
    out.print(
        f"memory at its peak: on the device, parameters in {name} and buffers"
        f"{', and tensors being quantized' if extra else ''}; on the host, "
        "tensors on their way to another dtype or device"
    )
