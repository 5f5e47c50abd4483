"""The engine against transformers' generate: the same model, prompts and tokens, in one run.

    python tests/bench/engine.py [--shapes 3M 58M 0.6B] [--out tests/bench/results/engine.json]

Refuses to print a number unless both give the same tokens. Also measures what a step of 64
sequences costs without the model (scheduling, laying out, choosing tokens), the products of
``kernels/linear.py`` beside torch's, and memory over a soak of 10,000 requests. Qwen3-0.6B's shape
takes some 10 minutes and 8 GB.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from checkpoints import plausible, write_qwen3
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from vllm_module import LLM, SamplingParams
from vllm_module.kernels.linear import linear
from vllm_module.runtime.engine import Engine
from vllm_module.runtime.model_runner import ModelRunner, StepInputs
from vllm_module.runtime.page_pool import PagePool
from vllm_module.runtime.scheduler import Scheduler

SHAPES: dict[str, dict[str, Any]] = {
    "3M": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 6,
        "vocab_size": 8000,
        "torch_dtype": "float32",
    },
    "58M": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_hidden_layers": 8,
        "vocab_size": 32000,
        "torch_dtype": "float32",
    },
    "0.6B": {"num_hidden_layers": 28, "tie_word_embeddings": True, "torch_dtype": "float32"},
}
ROUNDS = 3
LONG = 60.0  # seconds, from which on one round has to do
ALIKE = 0.9  # of the requests, all tokens: in float32 a near tie may fall either way


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


@torch.inference_mode()
def theirs(model: Any, prompts: list[list[int]], counts: list[int]) -> list[list[int]]:
    """Generate by transformers: one batch, padded on the left, as long as its longest output."""
    longest, count = max(map(len, prompts)), max(counts)
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    output = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        cache_implementation="static",
        disable_compile=True,
        pad_token_id=0,
    )
    new = output[:, longest:].tolist()
    return [tokens[:n] for tokens, n in zip(new, counts, strict=True)]


def ours(llm: LLM, prompts: list[list[int]], counts: list[int]) -> list[list[int]]:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in counts]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def compare(
    llm: LLM, model: Any, prompts: list[list[int]], counts: list[int]
) -> dict[str, float | int | list[float]]:
    """Time both in turns and return medians, after checking that they give the same tokens."""
    once, expected = timed(lambda: theirs(model, prompts, counts))
    got = ours(llm, prompts, counts)
    alike = sum(a == b for a, b in zip(expected, got, strict=True)) / len(prompts)
    first = sum(a[:4] == b[:4] for a, b in zip(expected, got, strict=True)) / len(prompts)
    if alike < ALIKE or first < 1:
        raise SystemExit(f"only {alike:.0%} of the requests give the same tokens: no figures")
    seconds: dict[str, list[float]] = {"ours": [], "transformers": []}
    for _ in range(ROUNDS if once < LONG else 1):
        llm.engine.scheduler.reset_prefix_cache()  # no prompt is cached
        seconds["ours"].append(timed(lambda: ours(llm, prompts, counts))[0])
        seconds["transformers"].append(timed(lambda: theirs(model, prompts, counts))[0])
    tokens = sum(counts)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    return {
        "requests": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "new_tokens": tokens,
        "same_tokens": alike,
        "tokens_per_second": tokens / medians["ours"],
        "transformers_tokens_per_second": tokens / medians["transformers"],
        "ratio": medians["transformers"] / medians["ours"],
        "seconds": seconds["ours"],
        "transformers_seconds": seconds["transformers"],
    }


def products(rows: int, columns: int, out: int) -> dict[str, float]:
    """Return the seconds of a product of ``kernels/linear.py`` and of torch's own, in turns."""
    x, weight = torch.randn(rows, columns), torch.randn(out, columns)
    ways = {"linear": linear, "torch": F.linear}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with torch.inference_mode():
        for _ in range(50):
            for name, way in ways.items():
                seconds[name].append(timed(partial(way, x, weight))[0])
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    return medians | {"ratio": medians["torch"] / medians["linear"]}


def overhead(sequences: int, vocab: int) -> dict[str, float]:
    """Return microseconds a step without a model: its logits are there already."""
    logits = torch.randn(sequences, vocab)
    runner = ModelRunner(_Nothing(logits), torch.device("cpu"))  # type: ignore[arg-type]

    def execute(inputs: StepInputs) -> torch.Tensor:
        return runner.run(inputs)

    scheduler = Scheduler(PagePool(20 * sequences, 16), PagePool(0, 16), sequences, 1 << 20)
    engine = Engine(execute, scheduler, vocab, 4096)
    for index in range(sequences):
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        engine.add(str(index), [index % 7] * (50 + index), params)
    for _ in range(10):
        engine.step()
    steps = [timed(engine.step)[0] for _ in range(180)]
    return {"median": statistics.median(steps) * 1e6, "least": min(steps) * 1e6}


def soak(requests: int) -> dict[str, Any]:
    """Serve ``requests``, a quarter of them cancelled; return the memory this process then has.

    It swaps, preempts and shares prefixes all the time, in a cache of few pages.
    """
    shape = SHAPES["3M"] | {"num_hidden_layers": 2, "vocab_size": 512}
    draw = random.Random(0).randrange
    resident = []
    with tempfile.TemporaryDirectory() as directory:
        folder = write_qwen3(Path(directory), values=plausible, **shape)
        options: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 20, "swap_space": 2**-11}
        with LLM(folder, max_model_len=512, max_num_seqs=32, **options) as llm:
            engine = llm.engine
            for index in range(requests):
                prompt = [draw(2) for _ in range(1 + draw(64))]
                params = SamplingParams(
                    temperature=draw(2), max_tokens=1 + draw(16), n=1 + draw(2), ignore_eos=True
                )
                engine.add(str(index), prompt, params)
                if not draw(4):
                    engine.abort(str(index - draw(20)))
                while len(engine.requests) > 24:
                    engine.step()
                if index % (requests // 10) == requests // 10 - 1:
                    resident.append(resident_bytes())
            while engine.requests:
                engine.step()
            pool, host = engine.scheduler.pool, engine.scheduler.host
            if (pool.free_pages, host.free_pages) != (pool.num_pages, host.num_pages):
                raise SystemExit("pages are held after the last request: no figures")
            preempted = engine.scheduler.preemptions
    return {"requests": requests, "preemptions": preempted, "resident_bytes": resident}


def resident_bytes() -> int:
    """Return what this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class _Nothing:
    """A model that takes no time: its logits are the same every time."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits

    def __call__(self, ids: torch.Tensor, *_: Any) -> torch.Tensor:
        return ids

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits[: len(hidden)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["3M", "58M"])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    generator = random.Random(0)

    results: dict[str, Any] = {}
    for rows, columns, out in ((1, 1024, 6144), (32, 1024, 6144), (512, 1024, 6144)):
        shape = f"{rows}x{columns} by {columns}x{out}"
        figures = products(rows, columns, out)
        results[f"product {shape}"] = figures
        print(f"a float32 product {shape}: {figures['ratio']:.2f} times as fast as torch's")

    def prompt(vocab: int) -> list[int]:
        return [generator.randrange(2, vocab) for _ in range(generator.randrange(8, 257))]

    for size in arguments.shapes:
        shape = {"vocab_size": 151936} | SHAPES[size]
        results[size] = {}
        with tempfile.TemporaryDirectory() as directory:
            folder = write_qwen3(Path(directory), values=plausible, **shape)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            with LLM(folder, dtype="float32", max_model_len=512, max_num_seqs=64) as llm:
                for name, count, least, most in (
                    ("1 request", 1, 32, 32),
                    ("32 requests of 32 new tokens each", 32, 32, 32),
                    ("32 requests of 8 to 128 new tokens", 32, 8, 128),
                ):
                    prompts = [prompt(shape["vocab_size"]) for _ in range(count)]
                    counts = [generator.randint(least, most) for _ in range(count)]
                    result = compare(llm, model, prompts, counts)
                    results[size][name] = result
                    print(
                        f"{size}, {name}: {result['tokens_per_second']:.0f} tokens/s, "
                        f"{result['ratio']:.2f} times transformers', {result['same_tokens']:.0%} "
                        "alike"
                    )
    for vocab in (1000, 32000, 151936):
        figures = overhead(64, vocab)
        results[f"overhead of a step of 64, vocabulary {vocab}"] = figures
        print(f"a step of 64 without the model, vocabulary {vocab}: {figures['median']:.0f} µs")
    figures = soak(10_000)
    results["soak"] = figures
    first, *_, last = (each / 2**20 for each in figures["resident_bytes"])
    print(
        f"soak: {figures['requests']} requests, {figures['preemptions']} preemptions; "
        f"{first:.1f} MiB resident after a tenth of them, {last:.1f} after all"
    )
    if arguments.out:
        about = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
            "shapes": SHAPES,
        }
        arguments.out.write_text(json.dumps(about | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
