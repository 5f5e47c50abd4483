"""``vllm-module plan``: what each rank would read and hold, before anything is read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_module.base.garbage import paused_gc
from vllm_module.cli.choices import CacheDType
from vllm_module.cli.options import (
    AdapterOption,
    AllOption,
    CacheDTypeOption,
    JsonOption,
    ModelOptions,
    PrecisionOptions,
    SimulatedRankOptions,
    Source,
    check_file,
    model_config,
)
from vllm_module.cli.output import (
    CommandError,
    console,
    plural,
    print_json,
    printable_lines,
    working,
    writing,
)

if TYPE_CHECKING:
    from vllm_module.build.model_source import ModelSource
    from vllm_module.cli.model_plan import ModelPlan


@paused_gc()
def plan(
    source: Source,
    *,
    ranks: SimulatedRankOptions,
    expert_parallel_size: Annotated[
        int | None,
        typer.Option(
            "--expert-parallel-size",
            min=1,
            max=4096,
            metavar="N",
            help="Spread whole experts over N ranks, of which each --tp share all other layers.",
        ),
    ] = None,
    pp: Annotated[
        int,
        typer.Option(
            "--pp",
            min=1,
            max=4096,
            metavar="N",
            help="Pipeline stages: parts of the layers, each on as many ranks as --tp says.",
        ),
    ] = 1,
    nodes: Annotated[
        int,
        typer.Option(
            "--nodes",
            min=1,
            max=4096,
            metavar="N",
            help="Hosts that the ranks are spread over in order, as many on each: also tells what "
            "each host reads, keeps and sends.",
        ),
    ] = 1,
    precision: PrecisionOptions,
    model: ModelOptions,
    kv_cache_dtype: CacheDTypeOption = CacheDType.auto,
    context_len: Annotated[
        int | None,
        typer.Option(
            "--context-len",
            min=1,
            metavar="N",
            help="Tokens that the KV cache holds; default: the model's longest sequence.",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="SIZE",
            help="Memory of each rank's device, such as 80GiB, 24GB or a number of bytes: "
            "tells whether weights and KV cache fit.",
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help="Also write a page for a browser: what each rank keeps, drawn by size.",
        ),
    ] = None,
    layout: Annotated[
        Path | None,
        typer.Option(
            "--layout",
            metavar="FILE",
            help="Also write which part of which tensor lies where on which rank, as JSON.",
        ),
    ] = None,
    trainer: Annotated[
        Path | None,
        typer.Option(
            "--source",
            metavar="FILE",
            help="With --layout: write where the tensors of this layout of a trainer lie, in place "
            "of the checkpoint's.",
        ),
    ] = None,
    adapter: AdapterOption = None,
    every: AllOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show what ranks read, and whether it fits.

    A line stands for a tensor of all layers: what each rank keeps of it, and the parameter that it
    fills, if that has another name. Only headers are read. The exit code is 1 if a tensor is
    missing, unexpected, duplicated or misshapen, or if a rank needs more than --memory. With
    --adapter, the modules that it adapts are listed, too, and what it takes of each rank's memory.
    With --pp, there is a plan of each stage, whose ranks are counted from 0. With --nodes, the
    ranks of all stages are counted as an engine counts them, from the last stage to the first.

    JSON keys: checkpoint; model_impl (native or transformers); dtype; tensor_parallel_size;
    expert_parallel_size (1 without experts that are spread); checkpoint_bytes; context_len
    (tokens); memory_bytes (or null); ranks (rank, bytes_read, device_bytes, quantizing_bytes,
    staging_bytes for cpu and cuda, replicated: the share of the parameters that it holds whole,
    kv_cache_bytes for context_len, state_bytes of a sequence, needed_bytes: the peak on the device,
    kv_cache_tokens that fit into the memory, or null; reads: name, file, byte_range in the file,
    bytes, pieces, shape, of, dtype, parameter, slot, quantized, tied_to); skipped (name to rule);
    missing, unexpected, duplicated and misshapen (lists of [name, detail]); with --adapter,
    adapter (path; modules: name, rank, scale, a and b: shapes, bytes; rank_bytes; slot_bytes: for
    each of max_loras on a GPU, at the adapter's largest rank). With --pp above 1:
    pipeline_parallel_size; stages (all keys above, for each stage). With --nodes above 1: hosts
    (host; ranks; stages; bytes_read: each byte once a host; bytes_read_together: each byte once by
    the ranks of a stage; device_bytes; needed_bytes: of one device; kv_cache_bytes;
    kv_cache_tokens, or null; wire: bytes to other hosts for one token, estimated: layers, experts,
    stages).
    """
    memory_bytes = None if memory is None else parse_size(memory)
    if expert_parallel_size is not None and expert_parallel_size % ranks.tp:
        raise typer.BadParameter(
            f"expected a multiple of --tp {ranks.tp}, got {expert_parallel_size}",
            param_hint="--expert-parallel-size",
        )
    html = check_file(html, "--html")
    layout = check_file(layout, "--layout")
    if trainer is not None and layout is None:
        raise typer.BadParameter("it is for --layout FILE", param_hint="--source")
    if pp > 1:
        for given, option in ((html, "--html"), (adapter, "--adapter")):
            if given is not None:
                raise typer.BadParameter("it shows one stage: leave --pp out", param_hint=option)
    ep = expert_parallel_size or (ranks.tp if ranks.enable_expert_parallel else 1)
    if (world := max(ranks.tp, ep) * pp) % nodes:
        of_stages = f" ({pp} stages of {world // pp})" if pp > 1 else ""
        raise typer.BadParameter(
            f"{plural(world, 'rank')}{of_stages} cannot be spread evenly over {nodes} hosts: take "
            "a number of hosts that divides them",
            param_hint="--nodes",
        )
    config = model_config(source, precision, model, ep == ranks.tp > 1)
    with working("importing torch"):
        # Imported here because usage errors and help need no torch.
        from vllm_module.build.model_source import ModelSource
        from vllm_module.cli.host_plan import plan_hosts, print_hosts
        from vllm_module.cli.model_plan import print_plan, print_stages
    # A download draws its own bars.
    model_source = ModelSource.find(config, model.load_format.value)
    with working("reading headers") as show:
        stages = [
            replace(
                plan_ranks(model_source, ranks.tp, ep, kv_cache_dtype, context_len, show, each, pp),
                memory=memory,
                memory_bytes=memory_bytes,
            )
            for each in range(pp)
        ]
    plan, accepted = stages[0], all(each.report.ok for each in stages)
    hosts = plan_hosts(stages, nodes) if nodes > 1 and accepted else []
    if html is not None:
        from vllm_module.cli.pictures.plan_page import plan_page

        with writing(html):
            html.write_text(plan_page(plan, hosts), encoding="utf-8")
    if layout is not None and accepted:
        from vllm_module.layout import layout_json, layout_of_stages, read_layout

        handles = None if trainer is None else read_layout(trainer).handles()
        found = [each.layout if handles is None else each.layout_of(handles) for each in stages]
        whole = found[0] if pp == 1 else layout_of_stages(found)
        with writing(layout):
            layout.write_bytes(layout_json(whole))
    planned = None
    if adapter is not None and plan.report.ok:
        from vllm_module.cli.adapter_plan import plan_adapter, print_adapter

        planned = plan_adapter(model_source, adapter, ranks.tp, ep)
    if as_json:
        tables = [each.as_json() for each in stages]
        shown = tables[0] if pp == 1 else {"pipeline_parallel_size": pp, "stages": tables}
        if planned is not None:
            shown["adapter"] = planned.as_json()
        if nodes > 1:
            shown["hosts"] = [each.as_json() for each in hosts]
        print_json(shown)
    elif pp > 1:
        print_stages(console(), stages, every=every)
    else:
        print_plan(console(), plan, every=every)
        if planned is not None:
            print_adapter(console(), planned, every=every)
    if hosts and not as_json:
        print_hosts(console(), stages, hosts)
    for each in stages:
        each.raise_if_refused()


def plan_ranks(
    source: ModelSource,
    tp_size: int,
    ep_size: int,
    kv_cache_dtype: CacheDType,
    context_len: int | None,
    show: Callable[[str], object],
    stage: int = 0,
    stages: int = 1,
) -> ModelPlan:
    """Plan each rank of a pipeline stage; ``show`` gets a text about the progress."""
    from vllm_module.cli import rank_plan
    from vllm_module.cli.model_plan import ModelPlan
    from vllm_module.distributed import pipeline_parallel
    from vllm_module.runtime.ranks.worker import CACHE_DTYPES
    from vllm_module.runtime.started import MAX_MODEL_LEN
    from vllm_module.weights.sharded_state import ShardedState

    cache_dtype = CACHE_DTYPES.get(kv_cache_dtype.value, source.dtype)
    if stages > 1:
        show(f"planning stage {stage} of {stages}")
    with source.open() as checkpoint, pipeline_parallel(rank=stage, size=stages):
        if stages > 1 and isinstance(checkpoint, ShardedState):
            raise CommandError(f"{source.name} is a sharded state, which has no pipeline stages")
        show(f"planning {plural(max(tp_size, ep_size), 'rank')}")
        ranks = rank_plan.plan_ranks(source, checkpoint, tp_size, ep_size, cache_dtype)
        nbytes = checkpoint.nbytes
    tokens = context_len or source.config.max_model_len or MAX_MODEL_LEN
    place = (stage, stages)
    return ModelPlan(source, nbytes, ranks, tokens, cache_dtype, tp_size, ep_size, stage=place)


_FEWEST = 10**4  # of bytes without a unit: fewer are meant as GB
_UNITS = {"": 1, "b": 1, "bytes": 1}
_UNITS |= {f"{unit}b": 1000**power for power, unit in enumerate("kmgt", 1)}
_UNITS |= {f"{unit}ib": 1024**power for power, unit in enumerate("kmgt", 1)}


def parse_size(text: str) -> int:
    """Return the bytes in a size such as ``80GiB``; raise a usage error for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]*)", text.strip().lower(), re.ASCII)
    nbytes = math.inf if match is None else float(match[1]) * _UNITS.get(match[2], math.inf)
    if not nbytes < 2**63:
        raise typer.BadParameter(
            f"{printable_lines(text)!r} is not a size such as 80GiB, 24GB or 1000000000",
            param_hint="--memory",
        )
    if match is not None and not match[2] and nbytes < _FEWEST:
        raise typer.BadParameter(
            f"{match[1]} without a unit is a number of bytes: write {match[1]}GB or {match[1]}GiB, "
            f"or {match[1]}B if you mean bytes",
            param_hint="--memory",
        )
    return int(nbytes)
