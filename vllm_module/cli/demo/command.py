"""``vllm-module demo``: train a small checkpoint, load it, generate text, refuse damage."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_module.cli.output import console, plural, size
from vllm_module.cli.serving import check_text

if TYPE_CHECKING:
    from vllm_module.cli.demo.transcript import Transcript


def demo(
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", metavar="CKPT", help="Use this folder or hub id instead."),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option("--keep", metavar="DIR", help="Keep the small checkpoint in this folder."),
    ] = None,
) -> None:
    """Show and check everything on a small model.

    Trains and saves the checkpoint; plans, loads and runs it at tensor-parallel sizes 1, 2 and 4;
    then damages it. It takes less than a minute and needs no network and no GPU. The exit code is
    1 if a check fails.
    """
    if checkpoint and keep:
        raise typer.BadParameter(
            "--keep is only for the demo's own checkpoint", param_hint="--keep"
        )
    if keep:
        check_text(str(keep), "--keep")  # libraries that write the files take no other names
    # Imported here because usage errors and help need no torch.
    import torch

    from vllm_module.build.model_source import ModelSource
    from vllm_module.cli.demo.checkpoint import PARAGRAPH, PROMPT
    from vllm_module.cli.demo.damage import refuse_damaged
    from vllm_module.cli.demo.steps import Text, compare_texts, load_sizes, show_plan
    from vllm_module.cli.demo.transcript import Transcript
    from vllm_module.config import ModelConfig

    start = time.perf_counter()
    transcript = Transcript(console())
    transcript.out.print("vllm-module: the module tree loads itself", style="bold")
    with _folder(keep) as folder, _threads(torch.get_num_threads() if checkpoint else 1):
        if checkpoint is None:
            _make_checkpoint(transcript, folder)
        # In float32, the order of a sum does not change a token.
        source = ModelSource.find(ModelConfig(model=checkpoint or str(folder), dtype="float32"))
        sizes = show_plan(transcript, source)
        if checkpoint is None:
            text, expected = Text.generate(source, PROMPT, max_tokens=200), PARAGRAPH
        else:
            text, expected = Text.generate(source, "The capital of France is", max_tokens=24), None
        results = load_sizes(transcript, source, sizes, text)
        compare_texts(transcript, source, results, text, expected)
        refuse_damaged(transcript, source)
    took = time.perf_counter() - start
    transcript.out.print(f"\nAll checks passed in {took:.0f} s.", style="bold")
    if keep:
        transcript.out.print(f'Now try: vllm-module generate {keep} --tp 2 --prompt "{PROMPT}"')


def _make_checkpoint(transcript: Transcript, folder: Path) -> None:
    from vllm_module.cli.demo.checkpoint import write_checkpoint
    from vllm_module.weights import open_checkpoint

    transcript.title("Train a small Qwen3 on one paragraph and save it in Hugging Face layout")
    losses: list[float] = []
    start = time.perf_counter()
    write_checkpoint(folder, losses.append)
    took = time.perf_counter() - start
    transcript.line(
        f"{len(losses)} training steps in {took:.1f} s: loss {losses[0]:.1f} to {losses[-1]:.2f}"
    )
    with open_checkpoint(folder) as checkpoint:
        count, files = plural(len(checkpoint), "tensor"), len(checkpoint.files)
        transcript.ok(f"{count} in {files} .safetensors files, {size(checkpoint.nbytes)}")


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Compute with ``count`` threads: small matrices are faster with one."""
    import torch

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
