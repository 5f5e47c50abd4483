from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from vllm_module.cli.memory import peak_cuda, peak_resident, reset_peaks
from vllm_module.cli.options import (
    DeviceOption,
    DType,
    DTypeOption,
    JsonOption,
    QuantizationOption,
    SizeOption,
    Source,
    model_config,
    torch_device,
)
from vllm_module.cli.output import console, print_json, print_table, size
from vllm_module.cli.progress import load_weights
from vllm_module.cli.ranks import (
    TIMEOUT,
    TimeoutOption,
    find_alike,
    is_first_rank,
    on_every_rank,
    process_group,
    rank_device,
    same,
    tensor_parallel_size,
    under_torchrun,
)
from vllm_module.config import ModelConfig
from vllm_module.consistency import digests
from vllm_module.distributed import tensor_parallel
from vllm_module.model_source import ModelSource
from vllm_module.module import vLLMModule
from vllm_module.report import LoadReport


@dataclass(frozen=True)
class RankLoad:
    """What loading one rank took."""

    rank: int
    bytes_read: int
    seconds: float
    bytes_per_second: float
    resident_before_bytes: int
    peak_resident_bytes: int
    peak_cuda_bytes: int | None

    def row(self) -> tuple[str, ...]:
        """Return the cells of its line."""
        added = max(0, self.peak_resident_bytes - self.resident_before_bytes)
        return (
            str(self.rank),
            size(self.bytes_read),
            f"{self.seconds:.3f} s",
            f"{size(self.bytes_per_second)}/s",
            f"{size(self.peak_resident_bytes)} (+{size(added)})",
            *([] if self.peak_cuda_bytes is None else [size(self.peak_cuda_bytes)]),
        )


def load(
    source: Source,
    tp: SizeOption = None,
    rank: Annotated[
        int | None,
        typer.Option("--rank", min=0, help="Load this rank only; without torchrun.", metavar="R"),
    ] = None,
    dtype: DTypeOption = DType.auto,
    quantization: QuantizationOption = None,
    device: DeviceOption = "auto",
    timeout: TimeoutOption = TIMEOUT,
    as_json: JsonOption = False,
) -> None:
    """Load a checkpoint and report bytes, time and memory.

    Every rank is loaded in this process, one after another; under torchrun, each process loads
    its own.

    JSON keys: checkpoint; dtype; device; tensor_parallel_size; simulated; ranks (rank,
    bytes_read, seconds, bytes_per_second, resident_before_bytes, peak_resident_bytes,
    peak_cuda_bytes or null); report (loaded: parameter to its checkpoint names; skipped: name
    to rule).
    """
    tp_size = tensor_parallel_size(tp)
    if rank is not None and (under_torchrun() or rank >= tp_size):
        why = "torchrun chooses the ranks" if under_torchrun() else f"0 to {tp_size - 1} are there"
        raise typer.BadParameter(f"cannot load rank {rank}: {why}", param_hint="--rank")
    target = rank_device(torch_device(device))
    asked = model_config(source, dtype, quantization)
    if under_torchrun():
        with process_group(target):
            found, report, loads = _load_own_rank(asked, target, timeout)
    else:
        found = ModelSource.find(asked)
        loads = []
        for each in range(tp_size) if rank is None else (rank,):
            with tensor_parallel(rank=each, size=tp_size):
                measured, report = load_rank(found, target, each, shown=True)[:2]
            loads.append(measured)
    if not is_first_rank():
        return
    simulated = not under_torchrun()
    if as_json:
        print_json(
            {
                "checkpoint": str(found.folder),
                "dtype": found.dtype,
                "device": target,
                "tensor_parallel_size": tp_size,
                "simulated": simulated,
                "ranks": loads,
                "report": {"loaded": report.loaded, "skipped": report.skipped},
            }
        )
        return
    out = console()
    if simulated and len(loads) > 1:
        out.print("ranks loaded in this process, one after another; each was dropped after it")
    out.print(str(report))
    cuda = ["peak CUDA"] if target.type == "cuda" else []
    header = ["rank", "read", "time", "rate", "peak resident", *cuda]
    print_table(out, header, [each.row() for each in loads], right=range(6))


def load_rank(
    source: ModelSource, device: torch.device, rank: int, *, shown: bool
) -> tuple[RankLoad, LoadReport, vLLMModule]:
    """Build and load this rank's model, and return what that took and the model."""
    with source.open() as checkpoint:
        model = source.build(device)
        before = reset_peaks(device)
        seconds = load_weights(model, checkpoint, f"rank {rank}", shown=shown)
        nbytes = checkpoint.bytes_read
    assert model.load_report is not None
    peaks = peak_resident(), peak_cuda(device)
    measured = RankLoad(rank, nbytes, seconds, nbytes / seconds, before, *peaks)
    return measured, model.load_report, model


def _load_own_rank(
    asked: ModelConfig, device: torch.device, timeout: float
) -> tuple[ModelSource, LoadReport, list[RankLoad]]:
    found = find_alike(asked, timeout)

    def work() -> tuple[RankLoad, LoadReport, dict[str, str]]:
        measured, report, model = load_rank(found, device, dist.get_rank(), shown=is_first_rank())
        return measured, report, digests(model)

    loads, reports, described = zip(*on_every_rank(work, timeout), strict=True)
    same(described)
    return found, reports[0], list(loads)
