"""What it costs to load an engine from an engine, and the engine that it is loaded from.

    python tests/bench/replica.py [--rounds 5] [--ranks 1] [--start] [--out FILE]

A process of one thread loads a checkpoint of the 58M shape of ``engine.py``, from its folder and
from an engine that serves it, in turns: its seconds, and the tokens a second of that engine, which
generates with one thread meanwhile. So the processors do as much in both. Bits are compared first.
An engine of several ranks is loaded from by its first rank alone, too. ``--start``: each load is
that of an engine that starts, from its process to its first token.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from checkpoints import plausible, write_qwen3
from engine import SHAPES
from machine import machine, over, spread, write

from vllm_module import LLM, SamplingParams

LOADER = """
import hashlib, sys, time, torch
torch.set_num_threads(1)
from vllm_module import DeviceConfig, ModelConfig, get_model

def load(model):
    begin = time.perf_counter()
    built = get_model(model_config=ModelConfig(model=model, dtype="float32"),
                      device_config=DeviceConfig(device="cpu"))
    return time.perf_counter() - begin, built

from vllm_module.weights.stores import ranks
described = ranks._RANKS

for line in sys.stdin:
    way, model = line.split()
    ranks._RANKS = "none.json" if way == "first" else described
    seconds, built = load(model)
    digest = hashlib.sha256()
    for tensor in built.parameters():
        digest.update(tensor.detach().numpy())
    print(seconds, digest.hexdigest(), flush=True)
"""


START = """
import hashlib, sys, time
begin = time.perf_counter()
import torch
torch.set_num_threads(1)
from vllm_module import LLM, SamplingParams

llm = LLM(sys.argv[1], dtype="float32", max_model_len=64, max_num_seqs=8,
          kv_cache_memory_bytes=1 << 27, skip_tokenizer_init=True)
prompt = {"prompt_token_ids": [1, 2, 3]}
llm.generate([prompt], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
seconds, digest = time.perf_counter() - begin, hashlib.sha256()
for tensor in llm.executor.worker.model.parameters():
    digest.update(tensor.detach().numpy())
print(seconds, digest.hexdigest())
"""


class Starter:
    """Starts an engine in a process of its own for each load."""

    def __init__(self, token: str) -> None:
        self._environment = os.environ | {
            "VLLM_MODULE_REPLICA_TOKEN": token, "OMP_NUM_THREADS": "1"
        }  # fmt: skip

    def load(self, way: str, model: str) -> tuple[float, str]:
        """Return the seconds until the first token, and the digest of what was loaded."""
        del way
        printed = subprocess.check_output(
            [sys.executable, "-c", START, model], text=True, env=self._environment
        )
        seconds, digest = printed.splitlines()[-1].split()
        return float(seconds), digest

    def close(self) -> None:
        """Nothing is left."""


class Loader:
    """A process that loads what it is told to."""

    def __init__(self, token: str) -> None:
        environment = os.environ | {"VLLM_MODULE_REPLICA_TOKEN": token, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", LOADER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env=environment,
        )  # fmt: skip

    def load(self, way: str, model: str) -> tuple[float, str]:
        """Return the seconds of a load, and the digest of what was loaded."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(way, model, file=self._process.stdin, flush=True)
        seconds, digest = self._process.stdout.readline().split()
        return float(seconds), digest

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Busy:
    """An engine that generates in a thread of its own; tokens are counted."""

    def __init__(self, llm: LLM, requests: int) -> None:
        draw = random.Random(0)
        self._prompts = [[draw.randrange(2, 32000) for _ in range(8)] for _ in range(requests)]
        self._llm, self.tokens, self._ends = llm, 0, False
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
        while not self._ends:
            self._llm.generate(self._prompts, params, use_tqdm=False)
            self.tokens += 16 * len(self._prompts)

    def close(self) -> None:
        self._ends = True
        self._thread.join()


def measure(
    llm: LLM, ways: dict[str, str], loader: Loader | Starter, rounds: int
) -> dict[str, Any]:
    """Return seconds of loads and tokens a second meanwhile, by way and round."""
    busy = Busy(llm, 8)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    try:
        digests = {loader.load(name, model)[1] for name, model in ways.items()}
        assert len(digests) == 1, "the loads differ"
        for _ in range(rounds):
            for name, model in ways.items():
                begin, before = time.perf_counter(), busy.tokens
                while time.perf_counter() - begin < 6:
                    seconds[name].append(loader.load(name, model)[0])
                rates[name].append((busy.tokens - before) / (time.perf_counter() - begin))
    finally:
        busy.close()
        loader.close()
    return {
        "seconds": {name: statistics.median(each) for name, each in seconds.items()},
        "tokens_per_second": rates,
        "tokens_over_those_beside_a_folder": spread(over(rates, "replica", "folder")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--start", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    with tempfile.TemporaryDirectory() as directory:
        folder = write_qwen3(Path(directory) / "base", values=plausible, **SHAPES["58M"])
        with (
            LLM(str(folder), dtype="float32", max_model_len=64, max_num_seqs=8,
                kv_cache_memory_bytes=1 << 27, skip_tokenizer_init=True,
                tensor_parallel_size=given.ranks) as llm,
            llm.serve_weights() as server,
        ):  # fmt: skip
            ways = {"folder": str(folder), "replica": server.url}
            if given.ranks > 1:
                ways["first"] = server.url
            loader = (Starter if given.start else Loader)(server.token)
            result = measure(llm, ways, loader, given.rounds)
    for name, each in result["seconds"].items():
        rates = result["tokens_per_second"][name]
        print(f"load from {name}: {each:.2f} s; tokens/s meanwhile {statistics.median(rates):.0f}")
    ratio = result["tokens_over_those_beside_a_folder"]
    print(f"over those beside a folder: {ratio['median']:.2f} "
          f"({ratio['least']:.2f} to {ratio['greatest']:.2f})")  # fmt: skip
    if given.out:
        write(given.out, result)


if __name__ == "__main__":
    main()
