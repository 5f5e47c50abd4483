"""Load one rank and measure its time and its peak memory."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_module.adapters import Adapter, check_base, open_adapter
from vllm_module.build.held import load_from
from vllm_module.build.loader import progress
from vllm_module.build.model_source import ModelSource, number_of_tensors
from vllm_module.cli.output import console, size
from vllm_module.cli.pictures.load_trace import RankTrace
from vllm_module.core.module import vLLMModule
from vllm_module.core.plan import LoadPlan
from vllm_module.core.report import LoadReport
from vllm_module.wrapped.model import replicated_share

_PROCESS = Path("/proc/self")


@dataclass(frozen=True)
class AdapterLoad:
    """The layers of one rank that an adapter adds to, the bytes of A and B, and the seconds."""

    layers: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class RankLoad:
    """The time and memory that loading one rank took; "resident" is the memory of the process.

    ``load_format`` is that of the weights, ``None`` for those of a registered source.
    ``replicated`` is the share of the parameters' elements that the rank holds whole.
    """

    rank: int
    load_format: str | None
    bytes_read: int
    seconds: float
    bytes_per_second: float
    resident_before_bytes: int
    peak_resident_bytes: int
    peak_cuda_bytes: int | None
    replicated: float
    adapter: AdapterLoad | None = None

    def row(self) -> tuple[str, ...]:
        """Return the cells of this rank's line in a table."""
        added = max(0, self.peak_resident_bytes - self.resident_before_bytes)
        return (
            str(self.rank),
            size(self.bytes_read),
            f"{self.seconds:.3f} s",
            f"{size(self.bytes_per_second)}/s",
            size(self.peak_resident_bytes),
            f"(+{size(added)})",
            *([] if self.peak_cuda_bytes is None else [size(self.peak_cuda_bytes)]),
        )


def load_rank(
    source: ModelSource,
    device: torch.device,
    rank: int,
    *,
    show_progress: bool,
    trace: RankTrace | None = None,
    keep_digests: bool = False,
    adapter: Path | None = None,
) -> tuple[RankLoad, LoadReport, vLLMModule]:
    """Build and load this rank's model; return the measurements, the report and the model.

    ``show_progress`` draws a bar on standard error if standard error is a terminal. ``trace``
    records the load. The report has digests if it is to ``keep_digests``. An ``adapter`` of the
    model is loaded after it, from this folder.
    """
    err = console(stderr=True)
    with source.open() as checkpoint:
        model = source.build(device, number_of_tensors(checkpoint))
        model.keep_digests = keep_digests
        before = _reset_peaks(device)
        show_progress &= err.is_terminal
        recorded = None
        planned: Callable[[LoadPlan], None] | None = None
        with ExitStack() as stack:
            if show_progress:
                planned = stack.enter_context(progress(checkpoint, f"rank {rank}", err))
            if trace is not None:
                recorded = stack.enter_context(trace.recording(model, checkpoint, device))
            start = time.perf_counter()
            load_from(model, checkpoint, recorded, planned)
            seconds = time.perf_counter() - start
        nbytes = checkpoint.bytes_read
    assert model.load_report is not None
    cuda = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    rate, peak = nbytes / seconds, _peak_resident()
    load_format = checkpoint.load_format
    replicated = replicated_share(model)
    measured = RankLoad(
        rank, load_format, nbytes, seconds, rate, before, peak, cuda, replicated,
        None if adapter is None else _load_adapter(model, source, adapter),
    )  # fmt: skip
    return measured, model.load_report, model


def _load_adapter(model: vLLMModule, source: ModelSource, path: Path) -> AdapterLoad:
    start = time.perf_counter()
    with open_adapter(path) as (config, weights):
        check_base(config, source.source.folder, source.config)
        adapter = Adapter(model, config)
        adapter.load(weights)
    seconds = time.perf_counter() - start
    nbytes = sum(each.nbytes for each in adapter.parameters())
    return AdapterLoad(len([*adapter.layers()]), nbytes, seconds)


def _reset_peaks(device: torch.device) -> int:
    """Reset the measured peaks and return the resident bytes now.

    Only Linux can reset the peak of a process. Elsewhere the peak is that of its whole life.
    """
    with suppress(OSError):
        (_PROCESS / "clear_refs").write_text("5")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    return _read_status("VmRSS") or _peak_resident()


def _peak_resident() -> int:
    if peak := _read_status("VmHWM"):
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _read_status(field: str) -> int:
    """Return the bytes in a field of ``/proc/self/status``; 0 if there is no such field."""
    with suppress(OSError):
        for line in (_PROCESS / "status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return 0
