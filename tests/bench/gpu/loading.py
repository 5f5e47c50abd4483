"""Job: loads onto the device over pinned copies of as many bytes, beside safetensors' own."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import load_device
import torch
from checkpoints import write_qwen3

from gpu.attempt import attempt
from gpu.device import Gpu
from gpu.models import shape
from gpu.worker import Emit

MODEL, ROUNDS = "Llama-8B, 4 layers", 4
# 1.4 GB: less measures Python, and more takes a minute to write and to check.
FEWER = {"vocab_size": 32000, "num_hidden_layers": 2}


def main(emit: Emit, device: Gpu) -> None:
    emit(facts=device.facts())
    with tempfile.TemporaryDirectory() as directory:
        attempt(emit, {"name": f"loads of {MODEL}"}, partial(figures, device, Path(directory)))


def figures(device: Gpu, directory: Path) -> dict[str, Any]:
    # What has just been written is in the page cache.
    folder = write_qwen3(directory, files=3, **shape(MODEL, device.dry) | FEWER)
    rounds = 2 if device.dry else ROUNDS
    return load_device.measure(folder, torch.device(device.name), rounds)
