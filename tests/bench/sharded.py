"""Seconds and bytes of loading one rank from a sharded state, beside the load of the original.

The original is cut for rank 3 of 8; the sharded state has what that rank holds in files of its own.
Both fill one model, whose memory is there. Warm figures are beside a memcpy of the bytes kept in
the same round, by one thread or by all, whichever takes less; cold ones count the bytes that the
system read from the disk, after evicting the files. A figure is printed only if all parameters
have the bits of the ordinary load.

    python tests/bench/sharded.py [--layers 28] [--rounds 5] [--out FILE]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpoints import evict_pages, read_pages, write_qwen3
from cold import bytes_from_disk
from machine import by_one_thread, clock, spread, write

from vllm_module import ModelConfig, tensor_parallel
from vllm_module.build.held import load_from
from vllm_module.build.model_source import ModelSource
from vllm_module.core.module import vLLMModule
from vllm_module.export.sharded_state import shard

RANK, SIZE = 3, 8


def measure(folder: Path, state: Path, rounds: int) -> dict[str, Any]:
    figures: dict[str, list[float]] = {}
    sources = {
        name: ModelSource.find(ModelConfig(model=str(path)))
        for name, path in (("sharded", state), ("ordinary", folder))
    }
    with tensor_parallel(rank=RANK, size=SIZE):
        model, wanted = _loaded(sources["sharded"]), _loaded(sources["ordinary"])
    pairs = list(zip(model.parameters(), wanted.parameters(), strict=True))
    kept = sum(parameter.nbytes for parameter, _ in pairs)

    def check() -> None:
        assert all(torch.equal(a, b) for a, b in pairs), "wrong bits"
        for a, _ in pairs:  # so that the next load has to write it
            a.data.zero_()

    def memcpy() -> None:
        for a, b in pairs:
            a.data.copy_(b)

    def load(name: str) -> Callable[[], None]:
        def work() -> None:
            with sources[name].open() as checkpoint:
                load_from(model, checkpoint)

        return work

    for _ in range(rounds):
        for name in sources:
            evict_pages(folder)
            evict_pages(state)
            before = bytes_from_disk()
            figures.setdefault(f"cold {name} seconds", []).append(clock(load(name)))
            figures.setdefault(f"cold {name} bytes", []).append(bytes_from_disk() - before)
            check()
        read_pages(folder)
        read_pages(state)
        for _ in range(6):
            least = min(clock(memcpy), clock(lambda: by_one_thread(memcpy)))
            figures.setdefault("memcpy seconds", []).append(least)
            for name in sources:
                figures.setdefault(f"warm {name} seconds", []).append(clock(load(name)))
                check()
    evicted = min(figures["cold sharded bytes"]) > 0.9 * kept
    assert evicted, "the page cache kept the files, or this file system counts no bytes from a disk"
    return {"kept": kept, **figures}


def _loaded(source: ModelSource) -> vLLMModule:
    with source.open() as checkpoint:
        model = source.build(torch.device("cpu"), len(checkpoint))
        load_from(model, checkpoint)
    return model


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """Return each ratio's spread over the rounds."""

    def ratio(one: str, other: str | float) -> dict[str, float]:
        below = result[other] if isinstance(other, str) else [other] * len(result[one])
        return spread([a / b for a, b in zip(result[one], below, strict=True)])

    least = min(result["memcpy seconds"])
    return {
        # Of the fastest runs, for a machine that others use too.
        "warm / memcpy, least of each": spread([min(result["warm sharded seconds"]) / least]),
        "ordinary / memcpy, least of each": spread([min(result["warm ordinary seconds"]) / least]),
        "warm seconds / memcpy": ratio("warm sharded seconds", "memcpy seconds"),
        "warm seconds / memcpy, ordinary": ratio("warm ordinary seconds", "memcpy seconds"),
        "cold bytes / kept": ratio("cold sharded bytes", result["kept"]),
        "cold bytes / kept, ordinary": ratio("cold ordinary bytes", result["kept"]),
        "cold seconds / ordinary": ratio("cold sharded seconds", "cold ordinary seconds"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="of the checkpoints, on the disk to measure")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        original, state = Path(temporary, "original"), Path(temporary, "state")
        original.mkdir()
        folder = write_qwen3(
            original, files=3, num_hidden_layers=options.layers, tie_word_embeddings=True
        )
        shard(ModelConfig(model=str(folder)), SIZE, state)
        result = measure(folder, state, options.rounds)
    result["summary"] = summary(result)
    print(f"rank {RANK} of {SIZE}: keeps {result['kept'] / 1e6:.0f} MB")
    for what, each in result["summary"].items():
        print(f"  {what:34} {each['median']:6.2f}  ({each['least']:.2f} to {each['greatest']:.2f})")
    if options.out:
        write(options.out, result)


if __name__ == "__main__":
    main()
