"""Time and bytes of ranks that load together, beside the same ranks each by itself.

Every rank is a process, and a round ends with the last of them. "disk" is a checkpoint in local
files that the page cache has lost: bytes are those that the kernel read from the disk for all
ranks. "store" is a source whose handles transfer 40 MB/s in each process, and for a cut inside of
rows all bytes from the first to the last; its limit is the model's bytes divided among the ranks.
Each rank compares its parameters with those of the other way of loading, bit by bit, in the first
round.

    python tests/bench/cooperative.py [--sizes 4 8] [--rounds 5] [--layers 12]
        [--out tests/bench/results/cooperative.json]
"""

from __future__ import annotations

import argparse
import importlib
import os
import runpy
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoints import write_qwen3
from machine import machine, over, spread, write

from vllm_module import LoadConfig, ModelConfig, get_model, register_source
from vllm_module.weights import open_checkpoint
from vllm_module.weights.handle import FileHandle

support = runpy.run_path(str(Path(__file__).parents[1] / "support.py"))
importlib.import_module("vllm_module.models.qwen3")  # once, for all forks
RATE = 40e6  # bytes a second of one connection
WAYS = {"each by itself": False, "together": True}


class Connection:
    """What the handles of one process transfer through."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._free = 0.0  # when the transfers that were asked for are over
        self._lock = threading.Lock()

    def transfer(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes
            self._free = max(self._free, time.perf_counter()) + nbytes / RATE
            end = self._free
        time.sleep(max(0.0, end - time.perf_counter()))


connection = Connection()


@dataclass(frozen=True)
class StoredHandle:
    """A tensor in the store, or a region of one."""

    handle: FileHandle

    @property
    def shape(self) -> torch.Size:
        return self.handle.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.handle.dtype

    def narrow(self, dim: int, start: int, length: int) -> StoredHandle:
        return StoredHandle(self.handle.narrow(dim, start, length))

    def read_into(self, destination: torch.Tensor) -> None:
        begin, end = self.handle.byte_range
        connection.transfer(end - begin)
        self.handle.read_into(destination)

    def read(self) -> torch.Tensor:
        begin, end = self.handle.byte_range
        connection.transfer(end - begin)
        return self.handle.read()


class Store:
    def __init__(self, url: str) -> None:
        self.folder = Path(url.partition("://")[2])

    def weights(self) -> Iterator[tuple[str, StoredHandle]]:
        for name, handle in open_checkpoint(self.folder).items():
            yield name, StoredHandle(handle)


def evict(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bytes_from_disk() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes:")).split()[1])


def rank_of(folder: Path, size: int, rounds: int, rank: int, out: Path) -> None:
    """Run one rank; the first writes what all of them measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    measured: dict[str, dict[str, list[list[float]]]] = {}
    for place, prefix in (("disk", ""), ("store", "store://")):
        rows = measured[place] = {way: [] for way in WAYS}
        for number in range(-1, rounds):
            ways, states = list(WAYS), []
            for way in ways if number % 2 else ways[::-1]:
                dist.barrier()
                if rank == 0 and place == "disk":
                    evict(folder)
                dist.barrier()
                before = bytes_from_disk() if place == "disk" else connection.nbytes
                config = LoadConfig(cooperative=WAYS[way])
                begin = time.perf_counter()
                model = get_model(
                    model_config=ModelConfig(model=f"{prefix}{folder}"), load_config=config
                )
                seconds = time.perf_counter() - begin
                after = bytes_from_disk() if place == "disk" else connection.nbytes
                own = torch.tensor([seconds, after - before], dtype=torch.float64)
                ranks = [torch.empty_like(own) for _ in range(size)]
                dist.all_gather(ranks, own)
                every = torch.stack(ranks)
                if number >= 0:
                    rows[way].append([every[:, 0].max().item(), every[:, 1].sum().item()])
                else:
                    states.append(model.state_dict())
                del model
            if number < 0:
                one, other = states
                assert one.keys() == other.keys()
                assert all(torch.equal(one[name], other[name]) for name in one)
    if rank == 0:
        torch.save(measured, out)
    dist.barrier()
    dist.destroy_process_group()


def summary(rows: dict[str, list[list[float]]], nbytes: int) -> dict[str, Any]:
    """Return seconds, bytes over the model's, and the ratio of the ways round by round."""
    seconds = {way: [row[0] for row in of_way] for way, of_way in rows.items()}
    result: dict[str, Any] = {
        way: {
            "seconds": spread(seconds[way]),
            "read over model": spread([row[1] / nbytes for row in of_way]),
        }
        for way, of_way in rows.items()
    }
    return result | {"faster together": spread(over(seconds, *WAYS))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    register_source("store", Store)
    results: dict[str, Any] = {}
    print(machine()["processor"])
    print(f"{'':24} {'seconds':>22} {'read over model':>18}")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as temporary:  # /tmp may be memory
        folder = Path(temporary) / "model"
        write_qwen3(folder, num_hidden_layers=options.layers, vocab_size=40_000)
        nbytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        for size in options.sizes:
            out = Path(temporary) / "measured.pt"
            pids = support["fork_ranks"](
                size,
                lambda rank, size=size, out=out: rank_of(folder, size, options.rounds, rank, out),
                port=support["free_port"](),
            )
            codes = support["exit_codes"](pids)
            assert codes == [0] * size, f"ranks ended with {codes}"
            for place, rows in torch.load(out).items():
                result = summary(rows, nbytes)
                if place == "store":
                    result["limit"] = nbytes / size / RATE
                results[f"{place}, {size} ranks"] = result
                for way in WAYS:
                    time_, read = result[way]["seconds"], result[way]["read over model"]
                    print(
                        f"{place}, {size} ranks, {way:14} {time_['median']:6.2f} "
                        f"({time_['least']:5.2f} to {time_['greatest']:5.2f}) "
                        f"{read['median']:8.3f} (to {read['greatest']:.3f})"
                    )
                ratio, limit = result["faster together"], result.get("limit")
                print(
                    f"  together {ratio['median']:.2f} times as fast "
                    f"({ratio['least']:.2f} to {ratio['greatest']:.2f})"
                    + (f"; the limit is {limit:.2f} s" if limit else "")
                )
    if options.out:
        write(options.out, results)


if __name__ == "__main__":
    main()
