"""Seconds of a digest beside memcpy of the same bytes, and how many faults it lets through.

Every ratio is to numpy's copy into memory in use, in the same rounds: of seconds by as many threads
as torch has, each of which copies its part, and of one thread's CPU seconds, in which the time that
other processes take from this one does not count. SHA-256 and plain torch have one thread. Plain
torch does the same sums in int64, element by element, of an eighth of the bytes.

Before anything is timed, the sums of a small tensor are compared with their definition in Python's
integers, and those of boxes with the whole's.

Faults are drawn: what was moved, changed, doubled or missed, and where. A fault counts as missed by
a sum if it leaves it as it was. Only faults that change bits are counted.

    python tests/bench/digest.py [--mib 64] [--faults 1000000] [--out FILE]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from machine import over, rounds, spread
from machine import write as write_results

from vllm_module.kernels.digest import on_cpu
from vllm_module.kernels.digest.compiled import compiled_multiply
from vllm_module.kernels.digest.digest import Digest, digest_box, digest_elements
from vllm_module.kernels.digest.keys import CHUNK_SEEDS, COLUMN_SEEDS, chunk_keys, column_keys

ROWS, COLUMNS = 256, 4096  # of the tensor that faults are made in; of those that are timed, columns


def defined(tensor: torch.Tensor) -> tuple[int, int]:
    """Return both sums of a bfloat16 matrix by their definition; see kernels/digest/digest.py."""

    def odd(seed: int, place: int) -> int:
        x = (seed + (place + 1) * 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return (x ^ (x >> 31)) | 1

    rows, columns = tensor.shape
    sums = []
    for of_columns, of_chunks in zip(COLUMN_SEEDS, CHUNK_SEEDS, strict=True):
        total = 0
        for row in range(rows):
            for column, bits in enumerate(tensor[row].view(torch.int16).tolist()):
                word, chunk = column // 2 % 1024, row * -(-columns // 2048) + column // 2048
                key = odd(of_columns, word) * odd(of_chunks, chunk)
                total += (bits % 65536 + 1) * 65536 ** (column % 2) * key
        sums.append(total % 2**64)
    return sums[0], sums[1]


def check() -> None:
    """Raise unless the digest of a tensor is as defined, however it is cut."""
    tensor = torch.randn(9, 2500).bfloat16()
    whole = digest_box(tensor)
    assert whole.sums == defined(tensor), "the sums are not as defined"
    parts = Digest(tensor.dtype, (9, 2500))
    for rows in (slice(0, 4), slice(4, 9)):
        for columns in (slice(0, 1301), slice(1301, 2500)):
            parts += digest_box(tensor[rows, columns], (rows.start, columns.start), (9, 2500))
    assert parts == whole, "boxes do not add up"


def plain_torch(tensor: torch.Tensor) -> Digest:
    """Return the digest by operations on every element."""
    shape, flat = tuple(tensor.shape), tensor.flatten()
    return digest_elements(torch.arange(len(flat)), flat, shape)


def by_numpy(tensor: torch.Tensor) -> Digest:
    compiled_from, on_cpu._COMPILED = on_cpu._COMPILED, 1 << 62
    try:
        return digest_box(tensor)
    finally:
        on_cpu._COMPILED = compiled_from


def ratios(mib: int, n: int) -> dict[str, object]:
    """Return the seconds of each way over those of memcpy."""
    data = torch.randint(0, 256, (mib << 20,), dtype=torch.uint8)
    memory = memoryview(data.numpy())
    bf16 = data.view(torch.bfloat16).view(-1, COLUMNS)
    fp32 = data.view(torch.float32).view(-1, COLUMNS)
    halves = bf16.split(COLUMNS // 2, 1)
    works: dict[str, Callable[[], object]] = {
        "memcpy": memcpy(data, torch.empty_like(data)),
        "bfloat16, numpy": lambda: by_numpy(bf16),
        "float32, numpy": lambda: by_numpy(fp32),
        "bytes, numpy": lambda: by_numpy(data.view(-1, COLUMNS)),
        "halves of rows, bfloat16, numpy": lambda: [by_numpy(half) for half in halves],
        "transposed, bfloat16, numpy": lambda: by_numpy(bf16.t()),
        "rows of 16 bytes, numpy": lambda: by_numpy(data.view(-1, 16)),
    }
    if compiled_multiply():
        works["bfloat16, numba"] = lambda: digest_box(bf16)
        works["float32, numba"] = lambda: digest_box(fp32)
        works["transposed, bfloat16, numba"] = lambda: digest_box(bf16.t())
    works["SHA-256"] = lambda: hashlib.sha256(memory).digest()
    works["bfloat16, plain torch"] = lambda: plain_torch(bf16[: len(bf16) // 8])
    for work in works.values():
        work()
    threads = torch.get_num_threads()
    found = {f"seconds, {threads} threads": rounds(works, n)}
    torch.set_num_threads(1)
    cpu: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(n):
        for name, work in works.items():
            begin = time.process_time()
            work()
            cpu[name].append(time.process_time() - begin)
    torch.set_num_threads(threads)
    found["CPU seconds, 1 thread"] = cpu
    results: dict[str, object] = {}
    for kind, seconds in found.items():
        plain = "bfloat16, plain torch"
        seconds[plain] = [8 * each for each in seconds[plain]]
        results[kind] = {
            f"{name}, over memcpy": spread(over(seconds, name, "memcpy"))
            for name in works
            if name != "memcpy"
        } | {"memcpy, GB/s": spread([(mib << 20) / 1e9 / each for each in seconds["memcpy"]])}
    return results


def memcpy(data: torch.Tensor, copy: torch.Tensor) -> Callable[[], object]:
    """Return a copy of the data by as many threads as torch has."""

    def copies() -> None:
        parts = [each.chunk(torch.get_num_threads()) for each in (copy, data)]
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(lambda to, of: np.copyto(to.numpy(), of.numpy()), *parts))

    return copies


class Faults:
    """Faults of each kind in one bfloat16 weight, as changes of the bits at some places."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.tensor = (torch.randn(ROWS, COLUMNS) * 0.02).bfloat16()
        self.bits = unsigned(self.tensor).flatten()
        other = unsigned((torch.randn(ROWS, COLUMNS) * 0.02).bfloat16()).flatten()
        self.other = other

    def block(self, rows: int, columns: int) -> torch.Tensor:
        """Return the places of a block of this size, drawn for each fault."""
        row = torch.randint(ROWS - rows + 1, (self.count, 1, 1))
        column = torch.randint(COLUMNS - columns + 1, (self.count, 1, 1))
        row, column = row + torch.arange(rows).view(-1, 1), column + torch.arange(columns)
        return row * COLUMNS + column

    def two(self, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw two different numbers below ``most`` for each fault."""
        one = torch.randint(most, (self.count, 1))
        return one, (one + torch.randint(1, most, (self.count, 1))) % most

    def moved(self, places: torch.Tensor, taken: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Let places have the bits of other places."""
        places, taken = places.flatten(1), taken.flatten(1)
        return places, self.bits[taken] - self.bits[places]

    def swapped(self, one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        one, other = one.flatten(1), other.flatten(1)
        return self.moved(torch.cat([one, other], 1), torch.cat([other, one], 1))

    def changed(
        self, places: torch.Tensor, added: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        old = self.bits[places]
        return places, (old + added) % 2**16 - old

    def kinds(self) -> dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]]:
        return {
            "two elements swapped": lambda: self.swapped(*self.two(ROWS * COLUMNS)),
            "two neighbours swapped": lambda: self.swapped(
                *self.block(1, 2).flatten(1).split(1, 1)
            ),
            "parts of two rows swapped": self.rows_swapped,
            "parts of two columns swapped": self.columns_swapped,
            "two blocks swapped": self.blocks_swapped,
            "block transposed": lambda: self.moved(
                places := self.block(8, 8), places.transpose(1, 2)
            ),
            "row shifted by one": lambda: self.moved(
                places := self.block(1, 64), places.roll(1, 2)
            ),
            "column shifted by one": lambda: self.moved(
                places := self.block(64, 1), places.roll(1, 1)
            ),
            "signs of a block flipped": lambda: self.changed(
                self.block(2, 4).flatten(1), torch.tensor(2**15)
            ),
            "signs in two odd columns flipped": self.odd_signs,
            "one bit flipped": lambda: self.flipped(1),
            "four bits flipped": lambda: self.flipped(4),
            "as much added as taken away": self.balanced,
            "a rectangle whose rows and columns add up": self.rectangle,
            "part of another tensor": self.replaced,
        }

    def rows_swapped(self) -> tuple[torch.Tensor, torch.Tensor]:
        one, other = self.two(ROWS)
        columns = torch.randint(COLUMNS - 64, (self.count, 1)) + torch.arange(64)
        return self.swapped(one * COLUMNS + columns, other * COLUMNS + columns)

    def columns_swapped(self) -> tuple[torch.Tensor, torch.Tensor]:
        one, other = self.two(COLUMNS)
        rows = torch.randint(ROWS - 64, (self.count, 1)) + torch.arange(64)
        return self.swapped(rows * COLUMNS + one, rows * COLUMNS + other)

    def blocks_swapped(self) -> tuple[torch.Tensor, torch.Tensor]:
        one, other = self.two(ROWS // 4 * COLUMNS // 8)
        rows, columns = torch.arange(4).view(-1, 1), torch.arange(8)
        inside = (rows * COLUMNS + columns).flatten()
        starts = (
            at // (COLUMNS // 8) * 4 * COLUMNS + at % (COLUMNS // 8) * 8 for at in (one, other)
        )
        return self.swapped(*(start + inside for start in starts))

    def odd_signs(self) -> tuple[torch.Tensor, torch.Tensor]:
        one, other = self.two(ROWS * COLUMNS // 2)
        return self.changed(2 * torch.cat([one, other], 1) + 1, torch.tensor(2**15))

    def flipped(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = torch.randint(ROWS * COLUMNS - count * 100, (self.count, 1))
        places = start + torch.randint(1, 100, (self.count, count)).cumsum(1)
        old = self.bits[places]
        return places, (old ^ (1 << torch.randint(16, places.shape))) - old

    def balanced(self) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.cat(self.two(ROWS * COLUMNS), 1)
        added = torch.randint(1, 100, (self.count, 1))
        return self.changed(places, torch.cat([added, -added], 1))

    def rectangle(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = torch.cat(self.two(ROWS), 1), torch.cat(self.two(COLUMNS), 1)
        places = (rows.unsqueeze(2) * COLUMNS + columns.unsqueeze(1)).flatten(1)
        added = torch.randint(1, 2**15, (self.count, 1))
        return self.changed(places, added * torch.tensor([1, -1, -1, 1]))

    def replaced(self) -> tuple[torch.Tensor, torch.Tensor]:
        places = self.block(1, 16).flatten(1)
        return places, self.other[places] - self.bits[places]

    def doubled(self, bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Count one box twice, and another one not at all."""
        one, other = (at // 8 * 8 for at in self.two(ROWS * COLUMNS))
        different = (one != other).long()  # where the same box is drawn twice nothing is wrong
        places = torch.cat([box + torch.arange(8) for box in (one, other)], 1)
        added = bits[places] + 1
        added[:, 8:] *= -1
        return places, added * different


def unsigned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16).long() % 2**16


def keys_of_places() -> torch.Tensor:
    """Return the keys of all elements, ``[2, ROWS * COLUMNS]``."""
    column, row = torch.arange(COLUMNS), torch.arange(ROWS).unsqueeze(1)
    keys = column_keys(column.device)[:, column // 2 % 1024] << 16 * (column % 2)
    return (keys.unsqueeze(1) * chunk_keys(row * 2 + column // 2048)).flatten(1)


def collisions(count: int) -> dict[str, object]:
    """Return, for each kind of fault, how many were drawn and how many each sum missed."""
    faults, keys = Faults(2**12), keys_of_places()
    kinds = faults.kinds()
    right = digest_box(faults.tensor)
    drawn = -(-count // (len(kinds) + 2) // faults.count) * faults.count
    ways = dict(kinds)
    ways["one box doubled, another missed"] = lambda: faults.doubled(faults.bits)
    ways["the same in zeros"] = lambda: faults.doubled(torch.zeros_like(faults.bits))
    found: dict[str, object] = {}
    for name, draw in ways.items():
        total, missed, both, same_top = 0, [0, 0], 0, [0, 0]
        for batch in range(drawn // faults.count):
            places, added = draw()
            is_fault = (added != 0).any(1)
            results = (added * keys[:, places]).sum(2)
            if batch == 0 and name in kinds:
                confirm(faults, right, places[0], added[0], results[:, 0])
            zero, results = results[:, is_fault] == 0, results[:, is_fault]
            total += int(is_fault.sum())
            both += int(zero.all(0).sum())
            # A random change leaves the upper 16 bits as they are, or one less, once in 2**15.
            top = results >> 48
            for which in range(2):
                missed[which] += int(zero[which].sum())
                same_top[which] += int(((top[which] == 0) | (top[which] == -1)).sum())
        expected = total / 2**15
        found[name] = {
            "faults": total, "missed by each sum": missed, "missed by both": both,
            "upper 16 bits equal": same_top, "upper 16 bits equal, expected": round(expected, 1),
        }  # fmt: skip
    return found


def confirm(
    faults: Faults, right: Digest, places: torch.Tensor, added: torch.Tensor, change: torch.Tensor
) -> None:
    """Raise unless the digest of a tensor with the fault differs by the change."""
    bits = faults.bits.clone().index_add_(0, places, added)
    wrong = bits.to(torch.int16).view(torch.bfloat16).view(ROWS, COLUMNS)
    difference = digest_box(wrong) - right
    assert difference.sums == tuple(each % 2**64 for each in change.tolist()), "another difference"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--faults", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    check()
    found = collisions(options.faults)
    total = sum(each["faults"] for each in found.values())
    missed = [sum(each["missed by each sum"][which] for each in found.values()) for which in (0, 1)]
    for name, each in found.items():
        print(f"{name}: {json.dumps(each)}")
    print(f"{total} faults, missed by each sum: {missed}", flush=True)
    results = {"ratios": ratios(options.mib, options.rounds), "faults": found}
    print(json.dumps(results["ratios"], indent=1))
    if options.out:
        write_results(options.out, results)


if __name__ == "__main__":
    main()
