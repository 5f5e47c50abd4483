from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from vllm_module.cli.output import console
from vllm_module.module import vLLMModule
from vllm_module.weights import Checkpoint


def load_weights(model: vLLMModule, checkpoint: Checkpoint, label: str, *, shown: bool) -> float:
    """Load ``model`` and return the seconds it took.

    If ``shown``, a bar with bytes and rate is drawn on standard error where that is a terminal.
    """
    err = console(stderr=True)
    bar = _progress(model, checkpoint, label, err) if shown and err.is_terminal else nullcontext()
    with bar:
        start = time.perf_counter()
        model.load_weights(checkpoint.items())
        return time.perf_counter() - start


@contextmanager
def _progress(
    model: vLLMModule, checkpoint: Checkpoint, label: str, err: Console
) -> Iterator[None]:
    reads = model.plan_weights(checkpoint).reads()
    total = sum(read.source.shape.numel() * read.source.dtype.itemsize for read in reads)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    ended = threading.Event()
    with Progress(*columns, TransferSpeedColumn(), console=err) as bar:
        task = bar.add_task(label, total=total)

        def follow() -> None:
            while not ended.wait(0.1):
                bar.update(task, completed=checkpoint.bytes_read)

        follower = threading.Thread(target=follow, name="progress", daemon=True)
        follower.start()
        try:
            yield
        finally:
            ended.set()
            follower.join()
            bar.update(task, completed=checkpoint.bytes_read)
