"""Models with attention and a recurrent state: the device's engine against that of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from gpu.device import Gpu
from gpu.small_engines import NEW, demand, engine, few, generated, relative, saved, scored

_CLOSE = 1e-3  # how far float32 may be off


def check_hybrids(test: Callable[..., None], device: Gpu, folder: Path) -> None:
    """Tokens that are decoded, and prompts in chunks, have the logprobs of the CPU's engine."""

    def compare(path: Path, dtype: torch.dtype, eager: bool) -> dict[str, float]:
        with engine(path, device.name, dtype=dtype, enforce_eager=eager) as llm:
            found = generated(llm)
            captured = llm.executor.worker.runner._sizes[False]
        if not device.dry:
            assert captured == ([] if eager else [16, 32]), f"graphs of {captured} tokens"
        sequences = [sequence for sequence, _ in found]
        with engine(path, "cpu", dtype=torch.float32) as llm:
            truth, below = scored(llm, sequences)
        allowed, off = _CLOSE, _CLOSE
        if dtype != torch.float32:  # twice what the CPU is off in this dtype
            with engine(path, "cpu", dtype=dtype) as llm:
                low, _ = scored(llm, sequences)
            allowed += 2 * relative(low, truth)
            off += float((low - truth).abs().max())
        error = relative(torch.cat([values for _, values in found]), truth)
        result = demand(error, allowed, "the distance to the CPU's logprobs")
        # Two logprobs are off by twice what the CPU's worst one is, each.
        new = [each[-NEW:] for each in below.split([len(s) - 1 for s in sequences])]
        gap = float(torch.cat(new).max())
        demand(gap, 4 * off, "a chosen token's logprob is below the CPU's greatest by")
        return result | {"gap": gap}

    # In float32, recurrences are computed token by token; in bfloat16, prompts by chunks. Experts
    # that are nearly as good as others are chosen otherwise in bfloat16.
    kinds = [("qwen3_next", torch.float32), ("bamba", torch.float32), ("bamba", torch.bfloat16)]
    for kind, dtype in few(kinds, device):
        path = saved(folder, kind)
        for eager in few((False, True), device):
            name = f"{kind} {str(dtype)[6:]} {'eager' if eager else 'graphs'}"
            test(name, partial(compare, path, dtype, eager))
