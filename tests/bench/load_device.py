"""Warm loads onto a GPU over pinned copies of the bytes read, beside safetensors' own.

The files are in the page cache. One process runs all loads in turns, each of which has loaded once
before. The limit is a copy of as many bytes as a load reads, in pieces of 16 MiB out of one pinned
buffer, in the same round. A figure is printed only if the parameters are what the files store: cast
where the load casts, and within the scheme's bound where it quantizes. On a CPU (``--device cpu``)
the limit is not pinned, and its ratios say nothing of a GPU.

    python tests/bench/load_device.py [--device cuda] [--layers 28] [--rounds 9] [--out FILE]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpoints import read_pages, write_qwen3
from loaders import Safetensors, Tensors, fused
from machine import over, rounds, spread, write
from safetensors.torch import load_file

from vllm_module import ModelConfig
from vllm_module.build.model_source import build_model, read_config
from vllm_module.quantization import rules_for
from vllm_module.weights import PIECE_BYTES, open_checkpoint

# By name, the dtype of the parameters and how they are quantized; the files store bfloat16.
LOADS = {
    "as stored": (torch.bfloat16, None),
    "cast to float16": (torch.float16, None),
    "to FP8 per channel": (torch.bfloat16, "fp8_per_channel"),
}


class Onto:
    """Our load onto ``device``."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype, how: Any) -> None:
        config = read_config(folder, ModelConfig(model=str(folder)))
        self.model = build_model(config, dtype, device, rules_for(how, None))
        self.folder, self.bytes_read = folder, 0

    def load(self) -> None:
        with open_checkpoint(self.folder) as checkpoint:
            self.model.load_weights(checkpoint)
            self.bytes_read = checkpoint.bytes_read

    def check(self, stored: Tensors) -> None:
        expected = fused(stored)
        for path, module in self.model.named_modules():
            for name, parameter in module.named_parameters(path, recurse=False):
                conversion = getattr(module, "conversions", {}).get(name.rpartition(".")[2])
                if name not in expected:
                    continue  # a scale, which the weight is checked with
                got = parameter if conversion is None else conversion.restored(module)
                want = expected[name].to(got.device, got.dtype)  # a device compares sooner
                got = got[: len(want)]  # zeros may pad a vocabulary
                if conversion is None:
                    assert torch.equal(got, want), f"{name} differs"
                else:
                    assert ((got - want).abs() <= conversion.error_bound(want)).all(), name


def limit(nbytes: int, device: torch.device) -> Callable[[], None]:
    pinned = torch.ones(PIECE_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.zeros(PIECE_BYTES, dtype=torch.uint8, device=device)

    def copy() -> None:
        for first in range(0, nbytes, PIECE_BYTES):
            count = min(PIECE_BYTES, nbytes - first)
            target[:count].copy_(pinned[:count], non_blocking=True)
        synchronize(device)

    return copy


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(folder: Path, device: torch.device, n: int) -> dict[str, Any]:
    loads = {name: Onto(folder, device, *how) for name, how in LOADS.items()}

    def library() -> None:
        for file in sorted(folder.glob("*.safetensors")):
            load_file(file, device=str(device))
        synchronize(device)

    works: dict[str, Callable[[], object]] = {name: load.load for name, load in loads.items()}
    works["safetensors' load_file"] = library
    for work in works.values():
        work()
    nbytes = loads["as stored"].bytes_read
    copy = limit(nbytes, device)
    copy()
    seconds = rounds(works | {"limit": copy}, n)
    bare = Safetensors(folder)
    bare.load()
    for load in loads.values():
        load.check(bare.tensors)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "bytes_read": nbytes,
        "seconds": seconds,
        "limit_bytes_per_second": nbytes / min(seconds["limit"]),
        "over_limit": {name: spread(over(seconds, name, "limit")) for name in works},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        changes = {"num_hidden_layers": options.layers, "tie_word_embeddings": True}
        folder = write_qwen3(Path(temporary), files=3, **changes)
        read_pages(folder)
        result = measure(folder, torch.device(options.device), options.rounds)
    rate = result["limit_bytes_per_second"] / 1e9
    print(f"{result['device']}: {result['bytes_read'] / 1e6:.0f} MB; copies take {rate:.1f} GB/s")
    for name, each in result["over_limit"].items():
        print(f"  {name:24} {each['median']:5.2f} ({each['least']:.2f} to {each['greatest']:.2f})")
    if options.out:
        write(options.out, result)


if __name__ == "__main__":
    main()
