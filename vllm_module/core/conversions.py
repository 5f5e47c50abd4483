"""Conversions of a checkpoint's tensor into what its module keeps, such as FP8 and scales."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from vllm_module.weights import Destination, Weight


class Conversion(Protocol):
    """Converts one tensor of a module while it is read; ``vLLMModule.conversions`` declares it.

    Attributes:
        dtype: of the checkpoint's tensor. Other floating-point dtypes of 16 bits and more are
            accepted too.
        makes: names of the module's parameters that are computed from the tensor, such as its
            scales. No checkpoint stores them.

    """

    dtype: torch.dtype
    makes: Sequence[str]

    def jobs(
        self, module: Any, weight: Weight, slot: str | None
    ) -> Iterator[tuple[Weight, Destination]]:
        """Yield each piece of ``weight`` that this rank keeps, and the sink that converts it."""

    def restored(self, module: Any) -> torch.Tensor:
        """Convert back: return the tensor that is nearest to the one the checkpoint stored."""

    def error_bound(self, stored: torch.Tensor) -> torch.Tensor:
        """Return, for each number of a whole slot ``stored``, the largest error of ``restored``."""
