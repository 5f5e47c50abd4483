from __future__ import annotations

import time
from contextlib import nullcontext

from vllm_module.cli.output import console
from vllm_module.loader import progress
from vllm_module.module import vLLMModule
from vllm_module.weights import Checkpoint


def load_weights(model: vLLMModule, checkpoint: Checkpoint, label: str, *, shown: bool) -> float:
    """Load ``model`` and return the seconds it took.

    If ``shown``, a bar with bytes and rate is drawn on standard error where that is a terminal.
    """
    err = console(stderr=True)
    bar = progress(model, checkpoint, label, err) if shown and err.is_terminal else nullcontext()
    with bar:
        start = time.perf_counter()
        model.load_weights(checkpoint.items())
        return time.perf_counter() - start
