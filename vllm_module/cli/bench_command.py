from __future__ import annotations

import math
import random
import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any

import torch
import typer

from vllm_module.cli.options import (
    DeviceOption,
    DType,
    DTypeOption,
    JsonOption,
    QuantizationOption,
    SizeOption,
    Source,
)
from vllm_module.cli.output import CommandError, console, print_json, print_table
from vllm_module.cli.ranks import TIMEOUT, TimeoutOption
from vllm_module.cli.serving import CacheDType, CacheDTypeOption, built_as, serving
from vllm_module.runtime.llm import LLM
from vllm_module.runtime.model_runner import StepInputs
from vllm_module.runtime.sampling_params import SamplingParams


def bench(
    source: Source,
    input_len: Annotated[
        int, typer.Option("--input-len", min=1, metavar="N", help="Tokens of each prompt.")
    ] = 128,
    output_len: Annotated[
        int, typer.Option("--output-len", min=1, metavar="N", help="Tokens made of each prompt.")
    ] = 128,
    num_prompts: Annotated[
        int, typer.Option("--num-prompts", min=1, metavar="N", help="Prompts in all.")
    ] = 32,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, metavar="N", help="Prompts at a time.")
    ] = 8,
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="Of the prompts.")] = 0,
    tp: SizeOption = None,
    dtype: DTypeOption = DType.auto,
    quantization: QuantizationOption = None,
    kv_cache_dtype: CacheDTypeOption = CacheDType.auto,
    device: DeviceOption = "auto",
    timeout: TimeoutOption = TIMEOUT,
    as_json: JsonOption = False,
) -> None:
    """Measure how fast random prompts of one length are served; no tokenizer is needed.

    A prompt is taken in when another is done. Steps that compute prompts count for the rate of
    prompts, with all of their time; those that only decode for that of decoding.

    JSON keys: checkpoint; dtype; device; tensor_parallel_size; input_len; output_len; num_prompts;
    concurrency; seed; torch (its version); threads; seconds; prompt_tokens_per_second and
    decode_tokens_per_second (null without such steps); output_tokens_per_second (over all of the
    time); first_token_seconds and token_seconds (median, p99; null where there is one token);
    peak_pages, of pages; page_size; preemptions.
    """
    with serving(
        source,
        dtype,
        quantization,
        device,
        tp,
        timeout,
        None,
        kv_cache_dtype=kv_cache_dtype.value,
        max_num_seqs=concurrency,
    ) as llm:
        if llm.engine.max_model_len < input_len + output_len:
            raise CommandError(
                f"the model and its cache have room for {llm.engine.max_model_len} tokens of a "
                f"sequence, fewer than {input_len} and {output_len} more"
            )
        draw = random.Random(seed)
        serve(llm, draw, 1, 1, input_len, min(2, output_len))  # memory is touched, code compiled
        run = serve(llm, draw, num_prompts, concurrency, input_len, output_len)
        pool = llm.engine.scheduler.pool
        its_dtype, its_device = built_as(llm)
        results = {
            "checkpoint": str(llm.source.folder),
            "dtype": its_dtype,
            "device": its_device,
            "tensor_parallel_size": llm.executor.size,
            "input_len": input_len,
            "output_len": output_len,
            "num_prompts": num_prompts,
            "concurrency": concurrency,
            "seed": seed,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "seconds": run.seconds,
            "prompt_tokens_per_second": run.prompts.rate,
            "decode_tokens_per_second": run.decoding.rate,
            "output_tokens_per_second": num_prompts * output_len / run.seconds,
            "first_token_seconds": _spread(run.first),
            "token_seconds": _spread(run.each),
            "peak_pages": run.peak_pages,
            "pages": pool.num_pages,
            "page_size": pool.page_size,
            "preemptions": llm.engine.scheduler.preemptions,
        }
    if as_json:
        print_json(results)
    else:
        title = f"{num_prompts} x {input_len} + {output_len} tokens, {concurrency} at a time"
        print_table(console(), (title, ""), _rows(results), right=(1,))


@dataclass
class Work:
    """Tokens that steps of one kind computed, and the seconds of these steps."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float | None:
        """Tokens a second, if there were any."""
        return self.tokens / self.seconds if self.tokens else None


@dataclass
class Run:
    """What serving took; ``first`` and ``each``: seconds to a first token, and for one after it."""

    seconds: float = 0.0
    prompts: Work = field(default_factory=Work)
    decoding: Work = field(default_factory=Work)
    first: list[float] = field(default_factory=list)
    each: list[float] = field(default_factory=list)
    peak_pages: int = 0


def serve(
    llm: LLM,
    draw: random.Random,
    num_prompts: int,
    concurrency: int,
    input_len: int,
    output_len: int,
) -> Run:
    """Serve random prompts, so many at a time, and measure that.

    Raises ``CommandError`` if one ends with an error.
    """
    engine, run = llm.engine, Run()
    pool = engine.scheduler.pool
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    prompts = [draw.choices(range(engine.vocab_size), k=input_len) for _ in range(num_prompts)]
    execute, steps = engine.execute, [StepInputs([], [], [], [], [], [], [], 0, [], [], [])]

    def watched(inputs: StepInputs) -> torch.Tensor:
        steps[0] = inputs
        run.peak_pages = max(run.peak_pages, pool.num_pages - pool.free_pages)
        return execute(inputs)

    engine.execute = watched
    came: dict[str, float] = {}
    start = now = time.perf_counter()
    while prompts or engine.requests:
        while prompts and len(engine.requests) < concurrency:
            request_id = str(len(prompts))
            engine.add(request_id, prompts.pop(), params)
            came[request_id] = now
        before = now
        changed = engine.step()
        now = time.perf_counter()
        counts = [end - begin for begin, end in pairwise(steps[0].starts)]
        work = run.prompts if max(counts) > 1 else run.decoding
        work.seconds += now - before
        work.tokens += sum(n for n in counts if n > 1) or len(counts)
        for request in changed:
            if request.error:
                raise CommandError(request.error)
            made = len(request.sequences[0].output)
            if made == 1:
                run.first.append(now - came[request.request_id])
                came[request.request_id] = now
            elif request.finished:
                run.each.append((now - came[request.request_id]) / (made - 1))
    run.seconds = now - start
    engine.execute = execute
    return run


def _spread(seconds: list[float]) -> dict[str, float] | None:
    """Return the median and the 99th percentile, which is one of them."""
    if not seconds:
        return None
    rank = math.ceil(0.99 * len(seconds)) - 1
    return {"median": statistics.median(seconds), "p99": sorted(seconds)[rank]}


def _rows(results: dict[str, Any]) -> list[tuple[str, str]]:
    def rate(key: str) -> str:
        return "-" if results[key] is None else f"{results[key]:.1f} /s"

    def spread(key: str) -> str:
        if results[key] is None:
            return "-"
        return ", ".join(f"{1e3 * results[key][which]:.1f}" for which in ("median", "p99")) + " ms"

    share = results["peak_pages"] / results["pages"]
    return [
        ("prompt tokens", rate("prompt_tokens_per_second")),
        ("decoded tokens", rate("decode_tokens_per_second")),
        ("output tokens, over all of the time", rate("output_tokens_per_second")),
        ("time to first token: median, 99th", spread("first_token_seconds")),
        ("time per token: median, 99th", spread("token_seconds")),
        (
            "pages of the cache at the most",
            f"{results['peak_pages']} of {results['pages']} ({share:.0%})",
        ),
        ("preemptions", str(results["preemptions"])),
    ]
