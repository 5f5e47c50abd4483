"""``vllm-module load``: load a checkpoint, and report time and memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_module.cli.hosts import HostOptions
from vllm_module.cli.options import (
    AdapterOption,
    DeviceOptions,
    JsonOption,
    ModelOptions,
    PrecisionOptions,
    RankOptions,
    Source,
    check_file,
    model_config,
    torch_device,
)
from vllm_module.cli.output import (
    console,
    plural,
    print_json,
    print_table,
    print_text,
    size,
    working,
    writing,
)
from vllm_module.cli.pictures.plots import check_plot, plot_memory
from vllm_module.cli.ranks import (
    find_alike,
    is_first_rank,
    on_every_rank,
    process_group,
    rank_device,
    same,
    tensor_parallel_size,
    under_torchrun,
)

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from vllm_module.build.model_source import ModelSource
    from vllm_module.cli.pictures.load_trace import RankTrace
    from vllm_module.cli.rank_load import RankLoad
    from vllm_module.config import ModelConfig
    from vllm_module.core.report import LoadReport


def load(
    context: typer.Context,
    source: Source,
    *,
    ranks: RankOptions,
    hosts: HostOptions,
    rank: Annotated[
        int | None,
        typer.Option("--rank", min=0, metavar="R", help="Load only this rank; not with torchrun."),
    ] = None,
    precision: PrecisionOptions,
    model: ModelOptions,
    devices: DeviceOptions,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Write what each thread and module did, and the memory, for ui.perfetto.dev.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw the memory over time: .png, .svg …"),
    ] = None,
    digests: Annotated[
        bool,
        typer.Option(
            "--digests",
            help="Compare what is read by digests: among ranks, and with digests.json.",
        ),
    ] = False,
    adapter: AdapterOption = None,
    as_json: JsonOption = False,
) -> None:
    """Load a checkpoint; report time and memory.

    With --tp, this process loads the ranks one after another. Under torchrun, and with --nnodes,
    each process loads its own rank. --digests refuses weights that differ from the digests.json
    beside them, if there is one, and copies of a part that differ between ranks, by tensor and
    rank. With --adapter, each rank loads its part of the adapter, too, and it is refused as an
    engine would refuse it.

    JSON keys: checkpoint; model_impl (native or transformers); dtype; device;
    tensor_parallel_size; simulated; ranks (rank, load_format or null, bytes_read, seconds,
    bytes_per_second, resident_before_bytes, peak_resident_bytes, peak_cuda_bytes or null,
    replicated: the share of the parameters that it holds whole; adapter: layers, bytes, seconds, or
    null); report (loaded: parameter to its
    checkpoint names; skipped: name to rule; digests: by name, or null without --digests or if only
    one of several ranks was loaded).
    """
    tp_size = tensor_parallel_size(ranks.tp)
    if rank is not None and (under_torchrun() or rank >= tp_size):
        reason = (
            "torchrun chooses the ranks"
            if under_torchrun()
            else f"the ranks are 0 to {tp_size - 1}"
        )
        raise typer.BadParameter(f"cannot load rank {rank}; {reason}", param_hint="--rank")
    if plot is not None:
        check_plot(plot)
    hosts.start(context.find_root().obj, ranks, devices.timeout)
    if is_first_rank():  # which writes them, perhaps on a host that has other folders
        trace = check_file(trace, "--trace")
        plot = check_file(plot, "--plot")
    with working("importing torch") if is_first_rank() else nullcontext():
        asked_device = torch_device(devices.device)
        # Imported here because usage errors and help need no torch.
        from vllm_module.build.model_source import ModelSource
        from vllm_module.cli.implementation import impl_line, impl_of
        from vllm_module.cli.pictures.load_trace import RankTrace, chrome_trace
        from vllm_module.cli.rank_load import load_rank
        from vllm_module.distributed import tensor_parallel

    records = trace is not None or plot is not None
    traces: list[RankTrace] = []
    target = rank_device(asked_device)
    load_format = model.load_format.value
    config = model_config(source, precision, model, ranks.enable_expert_parallel)
    if under_torchrun():
        with process_group(target):
            model_source, reports, loads, traces = _load_own_rank(
                config, load_format, target, devices.timeout, records, digests, adapter
            )
    else:
        model_source = ModelSource.find(config, load_format)
        loads, reports = [], []
        for each in range(tp_size) if rank is None else (rank,):
            traces += [RankTrace(each)] if records else []
            recorded = traces[-1] if records else None
            with tensor_parallel(rank=each, size=tp_size):
                measured, report = load_rank(
                    model_source,
                    target,
                    each,
                    show_progress=True,
                    trace=recorded,
                    keep_digests=digests,
                    adapter=adapter,
                )[:2]
            loads.append(measured)
            reports.append(report)
    together = None
    if digests:
        from vllm_module.build.consistency import demand_digests

        kept = [each.digests for each in reports]
        together = demand_digests(model_source.folder, tp_size, kept)
    report = reports[0]
    if not is_first_rank():
        return
    if trace is not None:
        with writing(trace):
            trace.write_text(json.dumps(chrome_trace(traces)), encoding="utf-8")
    if plot is not None:
        with writing(plot):
            plot_memory(traces, plot)
    simulated = not under_torchrun()
    if as_json:
        print_json(
            {
                "checkpoint": model_source.name,
                "model_impl": impl_of(model_source),
                "dtype": model_source.dtype,
                "device": target,
                "tensor_parallel_size": tp_size,
                "simulated": simulated,
                "ranks": loads,
                "report": {
                    "loaded": report.loaded,
                    "skipped": report.skipped,
                    "digests": None if together is None or rank is not None else together.tensors,
                },
            }
        )
        return
    out = console()
    if simulated and len(loads) > 1:
        print_text(out, "The ranks were loaded one after another in this process.")
    print_text(out, impl_line(model_source, loads))
    print_loads(out, report, loads)
    if together is not None and rank is None:
        print_text(out, f"digest of all tensors: {together.hex}")


def print_loads(out: Console, report: LoadReport, loads: Sequence[RankLoad]) -> None:
    """Print the report, the format of the weights, and a line for each rank."""
    print_text(out, str(report))
    if loads[0].load_format is not None:
        print_text(out, f"format: {loads[0].load_format}")
    cuda = ["peak CUDA"] if any(each.peak_cuda_bytes is not None for each in loads) else []
    header = ["rank", "read", "time", "rate", "peak resident", "(added)", *cuda]
    print_table(out, header, [each.row() for each in loads], right=range(len(header)))
    for each in loads:
        if (adapter := each.adapter) is not None:
            layers, seconds = plural(adapter.layers, "layer"), f"{adapter.seconds:.3f} s"
            line = f"adapter on rank {each.rank}: {layers}, {size(adapter.bytes)}, {seconds}"
            print_text(out, line)


def _load_own_rank(
    config: ModelConfig,
    load_format: str,
    device: torch.device,
    timeout: float,
    records: bool,
    keep_digests: bool,
    adapter: Path | None,
) -> tuple[ModelSource, list[LoadReport], list[RankLoad], list[RankTrace]]:
    """Load this process's rank; return its source, and all ranks' reports and measurements."""
    import torch.distributed as dist

    from vllm_module.build.consistency import digests
    from vllm_module.cli.pictures.load_trace import RankTrace
    from vllm_module.cli.rank_load import load_rank

    source = find_alike(config, load_format, timeout)

    def work() -> tuple[RankLoad, LoadReport, dict[str, str], RankTrace | None]:
        rank, shows = dist.get_rank(), is_first_rank()
        trace = RankTrace(rank) if records else None
        measured, report, model = load_rank(
            source, device, rank, show_progress=shows, trace=trace, keep_digests=keep_digests,
            adapter=adapter,
        )  # fmt: skip
        return measured, report, digests(model), trace

    loads, reports, described, traces = zip(*on_every_rank(work, timeout), strict=True)
    same(described)
    return source, list(reports), list(loads), [trace for trace in traces if trace is not None]
