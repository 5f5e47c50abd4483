"""The demo's last step: a damaged checkpoint is refused, and its model does not run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from vllm_module.build.model_source import ModelSource
from vllm_module.cli.demo.checks import CPU
from vllm_module.cli.demo.transcript import Transcript
from vllm_module.cli.output import CommandError
from vllm_module.errors import ModelNotReadyError, WeightLoadError
from vllm_module.weights import Weight, open_checkpoint

_MAX_LINES = 3


def refuse_damaged(transcript: Transcript, source: ModelSource) -> None:
    """Load with one tensor renamed, run that model, and open a file that was cut short."""
    transcript.title("Damaged checkpoints are refused")
    model = source.build(CPU)
    with source.open() as checkpoint:
        weights: dict[str, Weight] = dict(checkpoint.items())
        projections = [name for name in weights if name.endswith(".q_proj.weight")]
        names = projections or list(weights)
        name = names[len(names) // 2]
        module, _, attribute = name.rpartition(".")
        other_name = f"{module}_old.{attribute}"
        weights[other_name] = weights.pop(name)
        transcript.line(f"load with {name}\n     renamed to {other_name}:")
        message = _refusal(lambda: model.load_weights(weights.items()))
        transcript.quote(message, indent="  ")
        if checkpoint.bytes_read:
            raise CommandError("weights were read of a checkpoint that was refused by its names")
        transcript.ok("refused before any weights were read; one report has both names")
        file = checkpoint.files[-1]

    token = torch.tensor([0])
    transcript.line("run that model nevertheless:")
    lines = _refusal(lambda: model(token, token)).splitlines()
    transcript.quote("\n".join(lines[:_MAX_LINES]), indent="  ")
    more = len(lines) - _MAX_LINES
    transcript.ok("refused" + (f"; {more} more lines name other parameters" if more > 0 else ""))

    with tempfile.TemporaryDirectory(prefix="vllm-module-demo-") as folder:
        cut = Path(folder, "model.safetensors")
        _copy_cut_short(file, cut)
        transcript.line(f"open {file.name} without its last kilobyte:")
        message = _refusal(lambda: open_checkpoint(cut)).replace(f"{folder}{os.sep}", "")
        transcript.quote(message, indent="  ")
    transcript.ok("refused by the file's header, before any tensor was read")


def _refusal(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except (WeightLoadError, ModelNotReadyError) as error:
        return str(error)
    raise CommandError("a damaged checkpoint was not refused")


def _copy_cut_short(source: Path, target: Path) -> None:
    """Copy the header and leave a hole for the tensors, which may be gigabytes."""
    with source.open("rb") as file, target.open("wb") as copy:
        length = file.read(8)
        copy.write(length)
        copy.write(file.read(int.from_bytes(length, "little")))
        copy.truncate(max(source.stat().st_size - 1024, copy.tell()))
