from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer

from vllm_module.cli.demo_checkpoint import PARAGRAPH, PROMPT, write_checkpoint
from vllm_module.cli.demo_damage import refuse_damaged
from vllm_module.cli.demo_steps import Prompt, Story, compare_texts, load_sizes, show_plan
from vllm_module.cli.output import console, plural, size
from vllm_module.config import ModelConfig
from vllm_module.model_source import ModelSource
from vllm_module.weights import open_checkpoint


def demo(
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", metavar="CKPT", help="Your own folder or hub id instead."),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option("--keep", metavar="DIR", help="Keep the small checkpoint in this new folder."),
    ] = None,
) -> None:
    """See all of it on a small checkpoint, in seconds.

    Makes the checkpoint, plans, loads and runs it at several tensor-parallel sizes, and damages
    it. Needs no network and no GPU. What it says is checked: exit code 1 if anything differs.
    """
    if checkpoint and keep:
        raise typer.BadParameter("--keep is for the demo's own checkpoint", param_hint="--keep")
    start = time.perf_counter()
    story = Story(console())
    story.out.print("vllm-module: the module tree loads itself", style="bold")
    with _folder(keep) as folder, _threads(torch.get_num_threads() if checkpoint else 1):
        if checkpoint is None:
            _make_checkpoint(story, folder)
        # In float32, so that no order of summing changes a token.
        source = ModelSource.find(ModelConfig(model=checkpoint or str(folder), dtype="float32"))
        if checkpoint is None:
            prompt = Prompt.encode(source, PROMPT, most=200, expected=PARAGRAPH)
        else:
            prompt = Prompt.encode(source, "The capital of France is", most=24)
        sizes = show_plan(story, source)
        visits = load_sizes(story, source, sizes, prompt)
        compare_texts(story, source, visits, prompt)
        refuse_damaged(story, source)
    took = time.perf_counter() - start
    story.out.print(f"\nAll of this was checked, in {took:.0f} s.", style="bold")
    if keep:
        story.out.print(f'Now try: vllm-module generate {keep} --tp 2 --prompt "{PROMPT}"')


def _make_checkpoint(story: Story, folder: Path) -> None:
    story.title("A small Qwen3 learns a paragraph by heart, and is saved in Hugging Face layout")
    losses: list[float] = []
    start = time.perf_counter()
    write_checkpoint(folder, losses.append)
    took = time.perf_counter() - start
    story.line(
        f"{len(losses)} steps of training in {took:.1f} s: loss {losses[0]:.1f} to {losses[-1]:.2f}"
    )
    with open_checkpoint(folder) as checkpoint:
        count, files = plural(len(checkpoint), "tensor"), len(checkpoint.files)
        story.ok(f"{count} in {files} .safetensors files, {size(checkpoint.nbytes)}")


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Compute with so many threads: small matrices are faster with one, and sum up the same."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="vllm-module-demo-") as folder:
            yield Path(folder)
        return
    keep.mkdir(parents=True, exist_ok=True)
    if any(keep.iterdir()):
        raise typer.BadParameter(f"{keep} is not empty", param_hint="--keep")
    yield keep
