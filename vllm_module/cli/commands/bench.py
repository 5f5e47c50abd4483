"""``vllm-module bench``: tokens a second of an engine, on prompts of drawn tokens."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_module.base.messages import printable
from vllm_module.cli.choices import CacheDType
from vllm_module.cli.options import (
    CacheDTypeOption,
    DeviceOptions,
    EngineRankOptions,
    JsonOption,
    ModelOptions,
    PrecisionOptions,
    Source,
    check_file,
)
from vllm_module.cli.output import (
    CommandError,
    announce,
    console,
    plural,
    print_json,
    print_table,
    working,
)
from vllm_module.cli.pictures.plots import check_plot, plot_levels
from vllm_module.cli.ranks import is_first_rank
from vllm_module.cli.serving import serving

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_module.runtime.llm import LLM
    from vllm_module.runtime.metrics import RequestStateStats, StepStats


def bench(
    source: Source,
    *,
    input_len: Annotated[
        int, typer.Option("--input-len", min=1, metavar="N", help="Tokens in each prompt.")
    ] = 128,
    output_len: Annotated[
        int,
        typer.Option(
            "--output-len", min=1, metavar="N", help="Tokens to generate for each prompt."
        ),
    ] = 128,
    num_prompts: Annotated[
        int, typer.Option("--num-prompts", min=1, metavar="N", help="Number of prompts.")
    ] = 32,
    concurrency: Annotated[
        int,
        typer.Option(
            "--concurrency", min=1, metavar="N", help="Prompts that are served at the same time."
        ),
    ] = 8,
    seed: Annotated[
        int, typer.Option("--seed", metavar="S", help="Seed of the random prompts.")
    ] = 0,
    ranks: EngineRankOptions,
    precision: PrecisionOptions,
    model: ModelOptions,
    kv_cache_dtype: CacheDTypeOption = CacheDType.auto,
    devices: DeviceOptions,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            help="Measure 1, 2, 4 … up to --concurrency, and draw throughput and latency.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how fast random prompts are served.

    All prompts have the same length, and no tokenizer is needed. A new prompt starts when another
    is complete. A step that computes any part of a prompt counts as prompt time; a step that only
    decodes counts as decode time.

    JSON keys: checkpoint; dtype; device; tensor_parallel_size; input_len; output_len; num_prompts;
    concurrency; seed; torch (its version); threads; seconds; prompt_tokens_per_second and
    decode_tokens_per_second (null without such steps); output_tokens_per_second (generated tokens
    over all seconds); first_token_seconds and token_seconds (median, p99; null if each prompt
    has only one token generated); peak_pages, of pages; page_size (tokens); preemptions; levels,
    with --plot: all of these for each concurrency.
    """
    if plot is not None:
        check_plot(plot)
    if is_first_rank():
        plot = check_file(plot, "--plot")
    if is_first_rank() and not console(stderr=True).is_terminal:  # which has a bar
        announce(f"loading {printable(source)}")
    with serving(
        source,
        ranks,
        precision,
        model,
        devices,
        kv_cache_dtype=kv_cache_dtype.value,
        max_num_seqs=min(concurrency, num_prompts),
    ) as llm:
        results = measure(llm, input_len, output_len, num_prompts, concurrency, seed)
        if plot is not None:
            lower = [2**power for power in range((concurrency - 1).bit_length())]
            # Another seed for each: the pages of a prompt that was served before are not computed.
            others = [
                measure(llm, input_len, output_len, num_prompts, level, seed + level)
                for level in lower
            ]
            results["levels"] = [*others, dict(results)]
    if plot is not None:
        lengths = f"{num_prompts} prompts of {input_len} + {output_len} tokens"
        plot_levels(results["levels"], f"{Path(results['checkpoint']).name}: {lengths}", plot)
    if as_json:
        print_json(results)
    else:
        print_results(console(), results)


def measure(
    llm: LLM, input_len: int, output_len: int, num_prompts: int, concurrency: int, seed: int
) -> dict[str, Any]:
    """Serve random prompts after a warm-up, and return what ``--json`` prints."""
    import torch

    served = llm.model_config
    if served.max_model_len < input_len + output_len:
        raise CommandError(
            f"the model and its cache hold at most {served.max_model_len} tokens of a "
            f"sequence, fewer than --input-len {input_len} and --output-len {output_len} "
            "together: give smaller numbers"
        )
    generator = random.Random(seed)
    with working("warming up", lines=True):  # allocates and compiles
        serve(llm, generator, 1, 1, input_len, min(2, output_len))
    before = _preemptions(llm)
    with working(f"serving {plural(num_prompts, 'prompt')}", lines=True) as show:
        run = serve(llm, generator, num_prompts, concurrency, input_len, output_len, show)
    return {
        "checkpoint": llm.source.name,
        "dtype": served.dtype,
        "device": served.device,
        "tensor_parallel_size": served.tensor_parallel_size,
        "input_len": input_len,
        "output_len": output_len,
        "num_prompts": num_prompts,
        "concurrency": concurrency,
        "seed": seed,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "seconds": run.seconds,
        "prompt_tokens_per_second": run.prompting.rate,
        "decode_tokens_per_second": run.decoding.rate,
        "output_tokens_per_second": num_prompts * output_len / run.seconds,
        "first_token_seconds": _spread(run.first_token),
        "token_seconds": _spread(run.each_token),
        "peak_pages": run.peak_pages,
        "pages": served.num_gpu_blocks,
        "page_size": served.block_size,
        "preemptions": _preemptions(llm) - before,
    }


def _preemptions(llm: LLM) -> int:
    """Return the number of preemptions since the engine was built."""
    from vllm_module.runtime.metrics import Counter

    counters = {each.name: each.value for each in llm.get_metrics() if isinstance(each, Counter)}
    return counters["vllm:num_preemptions"]


def print_results(out: Console, results: dict[str, Any]) -> None:
    """Print a line for each figure of :func:`measure`."""
    lengths = f"({results['input_len']} + {results['output_len']}) tokens"
    title = f"{results['num_prompts']} x {lengths}, {results['concurrency']} at a time"
    print_table(out, (title, ""), _rows(results), right=(1,))
    if levels := results.get("levels"):
        out.print()
        header = ("at a time", "generated tokens", "first token: median, p99", "later tokens")
        print_table(out, header, map(_level_row, levels), right=range(len(header)))


@dataclass
class Work:
    """The tokens that steps of one kind computed, and the seconds that these steps took."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float | None:
        """Tokens a second; None if there were no tokens."""
        return self.tokens / self.seconds if self.tokens else None


@dataclass
class Measurement:
    """The measurements of one run.

    ``first_token`` and ``each_token`` have an entry a prompt: the seconds until its first token,
    and the mean seconds for each later token.
    """

    seconds: float = 0.0
    prompting: Work = field(default_factory=Work)
    decoding: Work = field(default_factory=Work)
    first_token: list[float] = field(default_factory=list)
    each_token: list[float] = field(default_factory=list)
    peak_pages: int = 0

    def add_step(self, step: StepStats) -> None:
        """Count the tokens, the time and the pages of a step."""
        work = self.prompting if max(step.counts) > 1 else self.decoding
        work.seconds += step.seconds
        work.tokens += sum(n for n in step.counts if n > 1) or len(step.counts)
        self.peak_pages = max(self.peak_pages, step.used_pages)

    def add_prompt(self, stats: RequestStateStats) -> None:
        """Count the times of a prompt that is complete."""
        self.first_token.append(stats.first_token_latency)
        if stats.num_generation_tokens > 1:
            seconds = stats.last_token_ts - stats.first_token_ts
            self.each_token.append(seconds / (stats.num_generation_tokens - 1))


def serve(
    llm: LLM,
    generator: random.Random,
    num_prompts: int,
    concurrency: int,
    input_len: int,
    output_len: int,
    show: Callable[[str], object] = len,
) -> Measurement:
    """Serve random prompts, at most ``concurrency`` at a time, and measure that.

    ``show`` gets a text about the progress after each step. Raises ``CommandError`` if a prompt
    ends with an error.
    """
    from vllm_module.runtime.sampling_params import SamplingParams

    run = Measurement()
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    vocabulary = range(llm.model_config.get_vocab_size())
    prompts = [generator.choices(vocabulary, k=input_len) for _ in range(num_prompts)]

    def show_progress() -> None:
        computed = run.prompting.tokens + run.decoding.tokens
        show(f"{len(run.first_token)} of {num_prompts} prompts complete, {computed:,} tokens")

    def on_step(step: StepStats) -> None:
        run.add_step(step)
        show_progress()

    start = time.perf_counter()
    for _, output in llm.serve(prompts, params, concurrency=concurrency, on_step=on_step):
        if output.error:
            raise CommandError(output.error)
        run.add_prompt(output.metrics)
        show_progress()
    run.seconds = time.perf_counter() - start
    return run


def _spread(seconds: list[float]) -> dict[str, float] | None:
    """Return the median and the 99th percentile by nearest rank; None if there are no values."""
    if not seconds:
        return None
    import statistics

    rank = math.ceil(0.99 * len(seconds)) - 1
    return {"median": statistics.median(seconds), "p99": sorted(seconds)[rank]}


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1f} /s"


def _milliseconds(spread: dict[str, float] | None) -> str:
    if spread is None:
        return "-"
    return ", ".join(f"{1e3 * spread[which]:.1f}" for which in ("median", "p99")) + " ms"


def _level_row(level: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(level["concurrency"]),
        _rate(level["output_tokens_per_second"]),
        _milliseconds(level["first_token_seconds"]),
        _milliseconds(level["token_seconds"]),
    )


def _rows(results: dict[str, Any]) -> list[tuple[str, str]]:
    share = results["peak_pages"] / results["pages"]
    return [
        ("prompt tokens", _rate(results["prompt_tokens_per_second"])),
        ("decoded tokens", _rate(results["decode_tokens_per_second"])),
        ("generated tokens, overall", _rate(results["output_tokens_per_second"])),
        ("time to first token: median, p99", _milliseconds(results["first_token_seconds"])),
        ("time per later token: median, p99", _milliseconds(results["token_seconds"])),
        (
            "KV cache pages, at the peak",
            f"{results['peak_pages']} of {results['pages']} ({share:.0%})",
        ),
        ("preemptions", str(results["preemptions"])),
    ]
