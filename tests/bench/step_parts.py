"""Where a step of 32 requests goes on a CPU, in float32 and with quantized weights.

    python tests/bench/step_parts.py [--requests 32] [--rounds 5]
        [--out tests/bench/results/step_parts.json]

Prints the rows of the table in design/0024: of a step that gives each request a token, the share of
matrix products (the head too), of attention, of the other layers, of sampling, and of what is left:
scheduling and laying out, in Python. Engines take turns, a generation each; hooks on layers measure
and add some microseconds to a layer. The products of float32 are the peer.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from checkpoints import plausible, write_qwen3
from code_rows import QUANTIZED, gguf_of
from engine import SHAPES
from machine import machine, write

from vllm_module import LLM, SamplingParams
from vllm_module.layers import Attention
from vllm_module.quantization import QuantizableLayer
from vllm_module.runtime import engine as engines

PARTS = "products", "attention", "other layers", "sampling", "Python"


class Parts:
    """Seconds of the parts of an engine's steps, by hooks that it adds."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.seconds = llm, defaultdict[str, float](float)
        self._in_head = False  # whose product is not one of the model's forward pass
        model = llm.executor.worker.model
        for module in model.modules():
            if isinstance(module, QuantizableLayer):
                self._measure(module, "products")
            elif isinstance(module, Attention):
                self._measure(module, "attention")
        self._measure(model, "model")

    def _measure(self, module: Any, part: str) -> None:
        began: list[float] = []

        def start(*_: Any) -> None:
            began.append(time.perf_counter())

        def end(*_: Any) -> None:
            spent = time.perf_counter() - began.pop()
            self.seconds[part] += 0.0 if self._in_head else spent

        module.register_forward_pre_hook(start)
        module.register_forward_hook(end)

    def generate(self, requests: int, tokens: int) -> dict[str, float]:
        """Return milliseconds of the parts of a step, with one prompt token a request."""
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        prompts = [{"prompt_token_ids": [2 + at]} for at in range(requests)]
        self.llm.engine.scheduler.reset_prefix_cache()
        self.seconds.clear()
        sample, logits = engines.sample, self.llm.executor.worker.model.compute_logits

        def timed(part: str, work: Any) -> Any:
            def call(*arguments: Any, **options: Any) -> Any:
                start, self._in_head = time.perf_counter(), part == "head"
                try:
                    return work(*arguments, **options)
                finally:
                    self._in_head = False
                    self.seconds[part] += time.perf_counter() - start

            return call

        model = self.llm.executor.worker.model
        engines.sample, model.compute_logits = timed("sampling", sample), timed("head", logits)
        start = time.perf_counter()
        try:
            self.llm.generate(prompts, params, use_tqdm=False)
        finally:
            engines.sample = sample
            del model.compute_logits
        whole, found = time.perf_counter() - start, dict(self.seconds)
        layers = found["model"] - found["products"] - found["attention"]
        left = whole - found["model"] - found["head"] - found["sampling"]
        parts = found["products"] + found["head"], found["attention"], layers, found["sampling"]
        return dict(zip(PARTS, (1e3 * each / tokens for each in (*parts, left)), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    with tempfile.TemporaryDirectory() as temporary:
        plain = write_qwen3(Path(temporary) / "plain", values=plausible, **SHAPES["58M"])
        blocks, measured = gguf_of(plain, Path(temporary)), dict[str, Parts]()
        for name, scheme in {"float32": None, **QUANTIZED}.items():
            source = blocks if name == "Q8_0" else plain
            measured[name] = Parts(LLM(
                source, dtype="float32", max_model_len=64, max_num_seqs=32, quantization=scheme,
                kv_cache_memory_bytes=1 << 27, skip_tokenizer_init=True,
            ))  # fmt: skip
        turns: dict[str, list[dict[str, float]]] = {name: [] for name in measured}
        for turn in range(given.rounds + 1):
            for name, parts in measured.items():
                found = parts.generate(given.requests, given.tokens)
                if turn:  # the first compiles
                    turns[name].append(found)
    print(f"| ms of a step of {given.requests} | {' | '.join(PARTS)} | all | to float32 |")
    print("|---" * (len(PARTS) + 3) + "|")
    results: dict[str, Any] = {"requests": given.requests}
    for name, each in turns.items():
        middle = {part: statistics.median(turn[part] for turn in each) for part in PARTS}
        pairs = zip(each, turns["float32"], strict=True)
        ratio = statistics.median(sum(a.values()) / sum(b.values()) for a, b in pairs)
        whole = statistics.median(sum(turn.values()) for turn in each)
        results[name] = {"milliseconds": middle, "all": whole, "to_float32": ratio}
        cells = " | ".join(f"{middle[part]:.1f}" for part in PARTS)
        print(f"| {name} | {cells} | {whole:.1f} | {ratio:.2f} |")
    if given.out:
        write(given.out, results)


if __name__ == "__main__":
    main()
