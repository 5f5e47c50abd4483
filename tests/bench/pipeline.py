"""What two pipeline stages serve beside one, and how long a stage waits: with simulated times.

    python tests/bench/pipeline.py [--requests 32] [--tokens 24] [--rounds 3] [--out FILE]

The model is tiny. A hook sleeps in each forward pass: a stage for a time for each token of its
step, or for a time whatever its step has, as where a step reads all weights once. The whole model
sleeps twice as long. One engine is one rank, the other has two stages. Tokens are compared first.

The bubble is the share of the time in which a stage does not sleep. Its bound is that of the same
steps without any other work: a stage waits only for the first step of all.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from checkpoints import plausible, write_qwen3
from machine import machine, over, spread, write
from stepping import unchanged

from vllm_module import LLM, SamplingParams
from vllm_module.runtime.metrics import StepStats

SHAPE = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "num_hidden_layers": 2, "vocab_size": 64,
}  # fmt: skip
# Seconds of a stage: for a step, and for each of its tokens.
TIMES = {"for each token": (0.0, 0.01), "for each step": (0.15, 0.0)}
PROMPT = 2  # tokens


def slow_down(worker: Any, step: float, token: float) -> None:
    """Have each forward pass of this rank's model sleep; replaces what it slept before."""
    if (before := getattr(worker, "_simulated", None)) is not None:
        before.remove()

    def sleep(module: Any, inputs: tuple[Any, ...]) -> None:
        del module
        time.sleep(step + token * len(inputs[1]))

    worker._simulated = worker.model.register_forward_pre_hook(sleep)


def serve(llm: LLM, requests: int, count: int) -> tuple[float, list[int], list[list[int]]]:
    """Return the seconds, the number of tokens of each step, and the requests' tokens."""
    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    begin = time.perf_counter()
    made = [
        engine.add(str(number), [(number * 5 + at) % 60 for at in range(PROMPT)], params)
        for number in range(requests)
    ]
    stats: list[StepStats] = []
    for _ in engine.serve(made, unchanged, on_step=stats.append):
        pass
    seconds = time.perf_counter() - begin
    sizes = [sum(each.counts) for each in stats]
    return seconds, sizes, [list(each.sequences[0].output) for each in made]


def measure(engines: dict[int, LLM], requests: int, count: int, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (step, token) in TIMES.items():
        rates: dict[str, list[float]] = {"one": [], "two": []}
        bubbles, bounds = [], []
        for _ in range(rounds):
            of_engines = []
            for stages, llm in engines.items():
                times = step * 2 / stages, token * 2 / stages
                llm.collective_rpc(slow_down, args=times)
                seconds, sizes, tokens = serve(llm, requests, count)
                of_engines.append(tokens)
                rates["one" if stages == 1 else "two"].append(requests * count / seconds)
            assert of_engines[0] == of_engines[1], "stages gave other tokens"
            busy = [step + token * size for size in sizes]  # of two stages
            bubbles.append(1 - sum(busy) / seconds)
            bounds.append(1 - sum(busy) / (sum(busy) + busy[0]))
        found[name] = {
            "tokens_per_second": rates,
            "over_twice_one": spread([each / 2 for each in over(rates, "two", "one")]),
            "bubble": spread(bubbles),
            "bound": spread(bounds),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    with tempfile.TemporaryDirectory() as directory:
        folder = str(write_qwen3(Path(directory) / "model", values=plausible, **SHAPE))
        load = functools.partial(
            LLM, folder, dtype="float32", device="cpu", skip_tokenizer_init=True,
            kv_cache_memory_bytes=1 << 24, max_model_len=64, enable_prefix_caching=False,
        )  # fmt: skip
        with load() as one, load(pipeline_parallel_size=2) as two:
            result = measure({1: one, 2: two}, given.requests, given.tokens, given.rounds)
    for name, each in result.items():
        ratio, bubble, bound = each["over_twice_one"], each["bubble"], each["bound"]
        print(f"time {name}: two stages serve {ratio['median']:.2f} of twice one's tokens a second "
              f"({ratio['least']:.2f} to {ratio['greatest']:.2f}); a stage waits "
              f"{bubble['median']:.1%} of the time, at least {bound['median']:.1%}")  # fmt: skip
    if given.out:
        write(given.out, result)


if __name__ == "__main__":
    main()
