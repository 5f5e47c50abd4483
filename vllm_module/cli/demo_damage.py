"""The demo's last step: what is damaged is refused, and does not run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from vllm_module.cli.demo_checks import CPU
from vllm_module.cli.demo_steps import Story
from vllm_module.cli.output import CommandError
from vllm_module.errors import ModelNotReadyError, WeightLoadError
from vllm_module.model_source import ModelSource
from vllm_module.weights import Weight, open_checkpoint

_MOST_LINES = 3


def refuse_damaged(story: Story, source: ModelSource) -> None:
    """Load with a tensor renamed, run the model all the same, and open a file cut short."""
    story.title("Damaged checkpoints are refused")
    model = source.build(CPU)
    with source.open() as checkpoint:
        weights: dict[str, Weight] = dict(checkpoint.items())
        projections = [name for name in weights if name.endswith(".q_proj.weight")]
        names = projections or list(weights)
        name = names[len(names) // 2]
        above, _, attr = name.rpartition(".")
        weights[f"{above}_old.{attr}"] = weights.pop(name)
        story.line(f"{name} renamed to {above}_old.{attr}:")
        message = _refusal(lambda: model.load_weights(weights.items()))
        story.quote(message, hang="  ")
        if checkpoint.bytes_read:
            raise CommandError("bytes were read for a checkpoint that was refused by its names")
        story.ok("refused before a byte was read, with both names in one report")
        file = checkpoint.files[-1]

    token = torch.tensor([0])
    story.line("asked to run all the same:")
    lines = _refusal(lambda: model(token, token)).splitlines()
    story.quote("\n".join(lines[:_MOST_LINES]), hang="  ")
    more = len(lines) - _MOST_LINES
    story.ok(f"the model does not run{f' ({more} more lines name the rest)' if more > 0 else ''}")

    with tempfile.TemporaryDirectory(prefix="vllm-module-demo-") as folder:
        cut = Path(folder, "model.safetensors")
        _cut_short(file, cut)
        story.line(f"the last kilobyte of {file.name} cut off:")
        message = _refusal(lambda: open_checkpoint(cut)).replace(f"{folder}{os.sep}", "")
        story.quote(message, hang="  ")
    story.ok("refused by its header, before any tensor is looked at")


def _refusal(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except (WeightLoadError, ModelNotReadyError) as error:
        return str(error)
    raise CommandError("a damaged checkpoint was taken for a good one")


def _cut_short(source: Path, target: Path) -> None:
    """Copy the header and leave a hole for the tensors: gigabytes need no copying."""
    with source.open("rb") as file, target.open("wb") as copy:
        length = file.read(8)
        copy.write(length)
        copy.write(file.read(int.from_bytes(length, "little")))
        copy.truncate(max(source.stat().st_size - 1024, copy.tell()))
