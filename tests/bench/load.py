"""A warm load of a 1.2 GB checkpoint over memcpy of the bytes kept, beside other loaders.

The files are in the page cache, and each loader has loaded into its parameters once before. One
process runs all loaders in turns. A ratio is of the seconds in one round. A load opens the files,
reads and copies. memcpy is one torch copy_ a tensor between warm buffers, by one thread or by all,
whichever takes less. transformers makes a new model each time. A figure is printed only if all
loaders have the same parameters, bit for bit, after the last round.

    python tests/bench/load.py [--layers 28] [--rounds 9] [--out tests/bench/results/load.json]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checkpoints import read_pages, write_qwen3
from loaders import VLLM, Loader, Ours, Safetensors, Transformers, check
from machine import by_one_thread, over, rounds, spread, write

RANKS = ((0, 1), (3, 8))


class Memcpy:
    """One copy_ for each tensor, between buffers of their sizes."""

    def __init__(self, sizes: list[int]) -> None:
        self.sources = [torch.ones(size, dtype=torch.uint8) for size in sizes]
        self.targets = [torch.zeros(size, dtype=torch.uint8) for size in sizes]

    def copy(self) -> None:
        for target, source in zip(self.targets, self.sources, strict=True):
            target.copy_(source)


def measure(folder: Path, rank: int, size: int, n: int) -> dict[str, Any]:
    """Time all loaders of one rank in turns, after one load each; then check what they loaded."""
    ours, bare = Ours(folder, rank, size), Safetensors(folder, rank, size)
    loaders: dict[str, Loader] = {"vllm-module": ours}
    if size == 1:
        loaders |= {"safe_open + copy_": bare, "transformers": Transformers(folder)}
    else:
        loaders |= {"get_slice + copy_": bare}
    if not VLLM.missing:
        loaders["vLLM"] = VLLM(folder, rank, size)
    for loader in loaders.values():
        loader.load()
        for tensor in loader.tensors.values():
            tensor.zero_()  # only the timed loads write what is checked
    memcpy = Memcpy([tensor.nbytes for tensor in ours.tensors.values()])
    memcpy.copy()
    alone = partial(by_one_thread, memcpy.copy)
    copies = {"memcpy": memcpy.copy, "memcpy, one thread": alone}
    seconds = rounds({name: loader.load for name, loader in loaders.items()} | copies, n)
    kept = sum(tensor.nbytes for tensor in bare.tensors.values())
    assert ours.bytes_read == kept, f"read {ours.bytes_read} bytes, kept {kept}"
    for loader in loaders.values():
        check(loader, bare.tensors)
    both = zip(*(seconds[name] for name in copies), strict=True)
    timed = seconds | {"limit": [min(each) for each in both]}
    return {
        "rank": rank,
        "size": size,
        "bytes_kept": kept,
        "parameters": len(ours.tensors),
        "seconds": seconds,
        "over_memcpy": {name: spread(over(timed, name, "limit")) for name in loaders},
    }


def versions() -> dict[str, str]:
    """Return the versions of the other loaders' packages, as far as they are installed."""
    packages = ("safetensors", "transformers") + ("vllm",) * (not VLLM.missing)
    return {name: importlib.metadata.version(name) for name in packages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if VLLM.missing:
        print("vllm: not installed, left out")
    results: dict[str, Any] = {"peers": versions()}
    with tempfile.TemporaryDirectory() as temporary:
        changes = {"num_hidden_layers": options.layers, "tie_word_embeddings": True}
        folder = write_qwen3(Path(temporary), files=3, **changes)
        read_pages(folder)
        for rank, size in RANKS:
            result = measure(folder, rank, size, options.rounds)
            results[f"TP {size}, rank {rank}"] = result
            print(f"TP {size}, rank {rank}: a warm load over memcpy of the "
                  f"{result['bytes_kept'] / 1e6:.0f} MB kept, {options.rounds} rounds; "
                  f"{result['parameters']} parameters are equal")  # fmt: skip
            for name, each in result["over_memcpy"].items():
                print(f"  {name:20} {each['median']:5.2f} "
                      f"({each['least']:.2f} to {each['greatest']:.2f})")  # fmt: skip
    if options.out:
        write(options.out, results)


if __name__ == "__main__":
    main()
