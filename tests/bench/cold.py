"""Bytes and seconds of loading one rank's shard from a cold disk, and the same from the page cache.

Each round evicts the files before each cold figure, in one process: a sequential read of as many
bytes as the shard's OS pages have, which gives the disk's rate, then our load, then safetensors'
own ``get_slice`` and ``copy_`` into tensors of the same sizes. Then the files are read in order to
fill the page cache, and the warm figures are taken beside a memcpy of the bytes kept. A figure is
printed only if all parameters have the bits that safetensors gives, and if the files were evicted.

    python tests/bench/cold.py [--layers 28] [--rounds 5] [--out tests/bench/results/cold.json]
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from checkpoints import evict_pages, read_pages, write_qwen3
from machine import clock, spread, write
from safetensors import safe_open

from vllm_module import ModelConfig, tensor_parallel
from vllm_module.build.model_source import build_model, read_config
from vllm_module.weights import Checkpoint, open_checkpoint

BY_COLUMNS = ("o_proj.weight", "down_proj.weight")
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def bytes_from_disk() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def read_in_order(folder: Path, nbytes: int) -> None:
    """Read this many bytes of the files from their beginnings on, 4 MiB at a time."""
    buffer = bytearray(4 << 20)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while nbytes > 0 and (count := file.readinto(buffer)):
                nbytes -= count


def names_by_file(folder: Path) -> dict[str, list[str]]:
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    names: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        names.setdefault(file, []).append(name)
    return names


def bounds(name: str, shape: list[int], rank: int, size: int) -> tuple[slice, ...]:
    """Return the part of a tensor that a rank keeps, as an index."""
    if len(shape) == 1:
        return (slice(None),)
    dim = 1 if name.endswith(BY_COLUMNS) else 0
    length = shape[dim] // size
    part = slice(rank * length, (rank + 1) * length)
    return (slice(None), part) if dim else (part,)


def touched_bytes(checkpoint: Checkpoint, rank: int, size: int) -> int:
    """Count the bytes of the OS pages that a rank's shard touches, from the headers alone."""
    pages: dict[Path, set[int]] = {}
    for name, path, entry in checkpoint.headers():
        (*_, part) = bounds(name, list(entry.shape), rank, size)
        row = entry.dtype.itemsize * entry.shape[-1]
        rows, first, last = 1, 0, (entry.end - entry.begin)
        if name.endswith(BY_COLUMNS):
            rows = entry.shape[0]
            first, last = (bound * entry.dtype.itemsize for bound in (part.start, part.stop))
        elif len(entry.shape) > 1:
            first, last = part.start * row, part.stop * row
        touched = pages.setdefault(path, set())
        for index in range(rows):
            begin, end = (entry.begin + index * row + edge for edge in (first, last))
            touched.update(range(begin // mmap.PAGESIZE, (end - 1) // mmap.PAGESIZE + 1))
    return sum(map(len, pages.values())) * mmap.PAGESIZE


def bare_slices(
    folder: Path, rank: int, size: int, targets: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Read a rank's shard with ``get_slice``; copy it into ``targets`` where they have the name."""
    for path, names in names_by_file(folder).items():
        with safe_open(folder / path, "pt") as file:
            for name in names:
                stored = file.get_slice(name)
                part = stored[bounds(name, stored.get_shape(), rank, size)]
                if name not in targets:
                    targets[name] = torch.empty(part.shape, dtype=part.dtype)
                targets[name].copy_(part)
    return targets


def places(
    state: dict[str, torch.Tensor], targets: dict[str, torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each part of a model's parameters beside the tensor of ``targets`` with its bits."""
    for name, parameter in state.items():
        if name == "lm_head.weight":  # tied
            continue
        fused = next((fused for fused in FUSED if f".{fused}." in name), None)
        parts = [name.replace(fused, part) for part in FUSED[fused]] if fused else [name]
        begin = 0
        for part in parts:
            target = targets[part]
            yield parameter[begin : begin + len(target)], target
            begin += len(target)


def measure(folder: Path, rank: int, size: int, rounds: int) -> dict[str, Any]:
    config = read_config(folder, ModelConfig(model=str(folder)))
    with tensor_parallel(rank=rank, size=size):
        model = build_model(config, torch.bfloat16, torch.device("cpu"))
    targets: dict[str, torch.Tensor] = {}
    figures: dict[str, list[float]] = {}

    def note(name: str, work: Callable[[], object], *, cold: bool = False) -> None:
        if cold:
            evict_pages(folder)
        before = bytes_from_disk()
        figures.setdefault(f"{name} seconds", []).append(clock(work))
        if cold:
            figures.setdefault(f"{name} bytes", []).append(bytes_from_disk() - before)

    with open_checkpoint(folder) as checkpoint:
        touched = touched_bytes(checkpoint, rank, size)
        model.load_weights(checkpoint)
        bare_slices(folder, rank, size, targets)
        pairs = list(places(model.state_dict(), targets))
        kept = sum(target.nbytes for _, target in pairs)

        def check() -> None:
            assert all(torch.equal(part, target) for part, target in pairs), "wrong bits"

        def memcpy() -> None:
            for part, target in pairs:
                target.copy_(part)

        for _ in range(rounds):
            note("disk", lambda: read_in_order(folder, touched), cold=True)
            note("cold", lambda: model.load_weights(checkpoint), cold=True)
            check()
            note("cold slices", lambda: bare_slices(folder, rank, size, targets), cold=True)
            check()
            read_pages(folder)
            for _ in range(3):
                note("memcpy", memcpy)
                note("warm", lambda: model.load_weights(checkpoint))
                note("warm slices", lambda: bare_slices(folder, rank, size, targets))
            check()
    evicted = min(figures["disk bytes"]) > 0.9 * touched and min(figures["cold bytes"]) > 0.9 * kept
    assert evicted, "the page cache kept the files, or this file system counts no bytes from a disk"
    return {"kept": kept, "touched": touched, **figures}


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """Return each ratio's spread over the rounds."""

    def ratio(one: str, other: str | float) -> dict[str, float]:
        below = result[other] if isinstance(other, str) else [other] * len(result[one])
        return spread([a / b for a, b in zip(result[one], below, strict=True)])

    return {
        "cold bytes / kept": ratio("cold bytes", result["kept"]),
        "cold bytes / kept, bare slices": ratio("cold slices bytes", result["kept"]),
        "touched / kept": spread([result["touched"] / result["kept"]]),
        "cold seconds / disk": ratio("cold seconds", "disk seconds"),
        "cold seconds / disk, bare slices": ratio("cold slices seconds", "disk seconds"),
        "warm seconds / memcpy": ratio("warm seconds", "memcpy seconds"),
        "warm seconds / memcpy, bare slices": ratio("warm slices seconds", "memcpy seconds"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", nargs="+", default=["3/8", "1/2", "0/1"], metavar="RANK/SIZE")
    parser.add_argument("--folder", type=Path, help="of the checkpoint, on the disk to measure")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = write_qwen3(
            Path(temporary), files=3, num_hidden_layers=options.layers, tie_word_embeddings=True
        )
        for name in options.ranks:
            rank, size = map(int, name.split("/"))
            result = measure(folder, rank, size, options.rounds)
            results[name] = result | {"summary": summary(result)}
            rate = result["touched"] / statistics.median(result["disk seconds"])
            print(
                f"rank {rank} of {size}: keeps {result['kept'] / 1e6:.0f} MB, touches OS pages of "
                f"{result['touched'] / 1e6:.0f} MB; the disk reads {rate / 1e6:.0f} MB/s in order"
            )
            for what, each in results[name]["summary"].items():
                print(f"  {what:36} {each['median']:6.2f}  "
                      f"({each['least']:.2f} to {each['greatest']:.2f})")  # fmt: skip
    if options.out:
        write(options.out, results)


if __name__ == "__main__":
    main()
