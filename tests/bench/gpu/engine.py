"""Job: steps of an engine, with a model of a real shape and random weights.

A step's floor is the bytes that it must read, weights and the tokens' keys and values, over the
rate at which the device reads in the same minute. The host gap is the part of a step in which the
device does nothing: the step's time, less the time in which any kernel or copy ran.

A mixed step has the prompt of a new request, of 100 tokens, beside the requests that decode. With
``enforce_eager`` it runs without CUDA graphs.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from machine import spread
from stepping import steps as one_by_one

from gpu import ceilings
from gpu.ceilings import rates
from gpu.device import Gpu
from gpu.models import random_model
from gpu.row_checks import handing_on
from gpu.timing import in_turns
from gpu.worker import Emit
from vllm_module import LLM, SamplingParams

PROMPT, STEPS, PROFILED = 512, 24, 6
NEW_PROMPT, ARRIVING = 100, 8  # of mixed steps; places beside those of the requests that decode


def main(
    emit: Emit,
    device: Gpu,
    model: str,
    options: dict[str, Any],
    requests: list[int],
    rows: bool = True,
    sampling: dict[str, Any] | None = None,
    prompt: int = PROMPT,
) -> None:
    """Measure an engine.

    Args:
        emit, device: as for every job.
        model: a name of :mod:`gpu.models`.
        options: of the engine.
        requests: how many at once, for each measurement.
        rows: whether layers hand quantized rows on.
        sampling: parameters of the requests; greedy if there are none.
        prompt: tokens of a prompt.

    """
    small, what = device.dry, {"model": model, "options": options, "rows": rows}
    longest = max(4096, 2 * PROMPT + prompt)
    sizes: dict[str, Any] = {"max_model_len": longest, "gpu_memory_utilization": 0.6}
    if small:
        sizes = {"max_model_len": 64, "kv_cache_memory_bytes": 1 << 20}
    emit(facts=device.facts())
    limits = ceilings.ceilings(emit, device)
    begin = time.perf_counter()
    with handing_on(rows), LLM(
        random_model(model, device.name, small), dtype="bfloat16", skip_tokenizer_init=True,
        device=device.name, max_num_seqs=max(requests) + ARRIVING,
        enable_prefix_caching=False,
        max_num_batched_tokens=64 if small else 8192, **sizes, **options,
    ) as llm:  # fmt: skip
        emit(**what, name=f"{model}, start", seconds=time.perf_counter() - begin)
        for count in requests:
            parts = [model, *map(str, options), *["rows apart"] * (not rows), *(sampling or ())]
            if prompt != PROMPT:
                parts.append(f"prompts of {prompt}")
            name = ", ".join([*parts, f"{count} requests"])
            length, steps = (6, 3) if small else (prompt, STEPS)
            params = {"temperature": 0} if sampling is None else sampling
            cold = measure(llm, device, count, length, 2, params)
            figures = measure(llm, device, count, length, steps, params)
            figures["cold_first_token"] = cold["first_token"]
            measured = rates(
                in_turns(device, {key: each.work for key, each in limits.items()}), limits
            )
            read = statistics.median(measured["read"]) if "read" in measured else None
            fraction = read and figures["bytes"] / read / figures["step"]["median"]
            emit(**what, name=name, requests=count, **figures, read_rate=read, fraction=fraction,
                 rates={key: spread(each) for key, each in measured.items()},
                 clocks=device.clocks())  # fmt: skip


def measure(
    llm: LLM, device: Gpu, count: int, prompt: int, steps: int, sampling: dict[str, Any]
) -> dict[str, Any]:
    """Serve requests until all decode, time steps, and look at some more with the profiler."""
    engine = llm.engine
    draw = random.Random(count).randrange
    tokens = 2 * (steps + PROFILED) + 12
    lasting = {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
    params = SamplingParams(**sampling, **lasting)
    prompts = [[draw(engine.vocab_size) for _ in range(prompt)] for _ in range(count)]
    requests = [engine.add(str(index), ids, params) for index, ids in enumerate(prompts)]
    served = one_by_one(engine, requests)
    while not all(request.metrics.num_generation_tokens for request in requests):
        next(served)
        for request in requests:
            if request.error is not None:
                raise RuntimeError(request.error)
    first = [request.metrics.first_token_latency for request in requests]
    next(served)
    device.synchronize()
    times = [next(served).seconds for _ in range(steps)]
    contexts = sum(len(s.tokens) for r in engine.requests.values() for s in r.sequences)
    busy, launches = device.busy(lambda: [next(served) for _ in range(PROFILED)])
    arrival = SamplingParams(temperature=0, max_tokens=1)
    new_prompt = min(prompt, NEW_PROMPT)

    def mixed_step() -> float:
        ids = [draw(engine.vocab_size) for _ in range(new_prompt)]
        engine.add(f"new {len(mixed)}", ids, arrival)
        mixed.append(next(served).seconds)
        return mixed[-1]

    mixed: list[float] = []
    # With overlap, a step without the new prompt is launched before each arrival, and the next one
    # has the prompts of two.
    overlapped, engine.async_scheduling = engine.async_scheduling, False
    next(served)  # what was launched before
    mixed_times = [mixed_step() for _ in range(steps)]
    mixed_busy, mixed_launches = device.busy(lambda: [mixed_step() for _ in range(PROFILED)])
    engine.async_scheduling = overlapped
    mixed_step_time = statistics.median(mixed_times)
    served.close()  # which aborts the requests
    step = statistics.median(times)
    return {
        "first_token": spread(first),
        "step": spread(times),
        "tokens_per_second": count * steps / sum(times),
        "busy": None if busy is None else busy / PROFILED,
        "host_gap": None if busy is None else step - busy / PROFILED,
        "launches": len(launches) / PROFILED,
        "kernels": longest(launches),
        "mixed": {
            "step": spread(mixed_times),
            "host_gap": None if mixed_busy is None else mixed_step_time - mixed_busy / PROFILED,
            "launches": len(mixed_launches) / PROFILED,
            "kernels": longest(mixed_launches),
        },
        "bytes": weights_read(llm, count) + contexts * token_bytes(llm),
    }


def longest(launches: list[tuple[str, float]], most: int = 12) -> dict[str, list[float]]:
    """Return how often a step launches a kernel, and its seconds, for those that take longest."""
    sums: dict[str, list[float]] = {}
    for name, seconds in launches:
        count_and_seconds = sums.setdefault(name[:80], [0.0, 0.0])
        count_and_seconds[0] += 1 / PROFILED
        count_and_seconds[1] += seconds / PROFILED
    return dict(sorted(sums.items(), key=lambda each: -each[1][1])[:most])


def weights_read(llm: LLM, tokens: int) -> float:
    """Return the bytes of weights that a step reads: all, but of embeddings a few rows.

    Of experts, those that so many tokens choose if every expert is as likely as any other.
    """
    worker = llm.executor.worker
    named = dict(worker.model.named_parameters())
    tied = "lm_head.weight" not in named
    config = vars(worker.source.config)
    chosen = 1.0
    if config.get("num_experts"):
        missed = 1 - config["num_experts_per_tok"] / config["num_experts"]
        chosen = 1 - missed**tokens
    return sum(
        parameter.nbytes * (chosen if ".experts." in name else 1)
        for name, parameter in named.items()
        if tied or "embed_tokens" not in name
    )


def token_bytes(llm: LLM) -> int:
    """Return the bytes of a token's keys and values."""
    return llm.executor.worker.page_bytes // llm.engine.scheduler.pool.page_size
