"""FP8 weights, with rows that norms and activations quantize for the next layer, and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from gpu.device import Gpu
from gpu.small_engines import engine, few, generated, saved
from vllm_module.layers.linear import LinearBase
from vllm_module.quantization import rows
from vllm_module.quantization.rows import QuantizedRows


@contextmanager
def handing_on(allowed: bool) -> Iterator[None]:
    """Let layers hand quantized rows on where they can, or nowhere."""
    if allowed:
        yield
    else:
        with mock.patch.object(rows, "quantizes_inputs", return_value=False):
            yield


@contextmanager
def counting() -> Iterator[list[int]]:
    """Count the products that are given quantized rows."""
    multiply, given = LinearBase._multiply, [0]

    def counted(self: Any, x: Any, bias: Any) -> torch.Tensor:
        given[0] += isinstance(x, QuantizedRows)
        return multiply(self, x, bias)

    with mock.patch.object(LinearBase, "_multiply", counted):
        yield given


def check_rows(test: Callable[..., None], device: Gpu, folder: Path) -> None:
    """Tokens and the bits of their logprobs do not depend on which launch quantizes rows."""
    path = saved(folder, "qwen3")

    def compare(quantization: str) -> dict[str, int]:
        found, counts = [], []
        for allowed in (True, False):
            with (
                handing_on(allowed),
                counting() as given,
                engine(path, device.name, dtype="bfloat16", quantization=quantization) as llm,
            ):
                found.append(generated(llm))
            counts.append(given[0])
        handed, without = counts
        assert not without, f"{without} products were given rows that were not to be handed on"
        assert handed or device.dry, "no product was given quantized rows"
        for (sequence, values), (other, others) in zip(*found, strict=True):
            assert sequence == other, "other tokens"
            assert torch.equal(values, others), (
                f"logprobs differ by {(values - others).abs().max()}"
            )
        return {"handed": handed}

    for name in few(("fp8_per_channel", "fp8_per_block", "fp8_per_tensor"), device):
        test(name, partial(compare, name))
