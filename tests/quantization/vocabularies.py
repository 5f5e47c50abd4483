"""A tied vocabulary, the schemes that can hold it, and their formulas, for two test files.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_module import QuantizationConfig, vLLMModule
from vllm_module.layers import ParallelLMHead, VocabParallelEmbedding
from vllm_module.quantization import Rules, online_rules

IDS = torch.arange(2, 14)
TOKENS, FEATURES = 150, 256  # no multiple of the padding, and a whole block of every type
CHANNEL, INT4 = "int8_per_channel_weight_only", "int4_per_group"


class Vocabulary(vLLMModule):
    """An embedding and a head, tied or not."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(TOKENS, FEATURES)
        self.lm_head = ParallelLMHead(TOKENS, FEATURES)
        if tied:
            self.lm_head.tie_weights(self.embed_tokens)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.embed_tokens(ids)
        return rows, self.lm_head(rows)


def asking(**overrides: Any) -> Rules:
    return online_rules(QuantizationConfig(scheme=CHANNEL, group_size=32, overrides=overrides))


def table(seed: int = 0) -> torch.Tensor:
    return torch.randn(TOKENS, FEATURES, generator=torch.Generator().manual_seed(seed))


# Formulas of the schemes, written out.
def int8(rows: torch.Tensor) -> torch.Tensor:
    scale = rows.abs().amax(1, keepdim=True) / 127
    return (rows / scale).round().clamp(-128, 127) * scale


def int4(rows: torch.Tensor) -> torch.Tensor:
    groups = rows.view(len(rows), -1, 32)
    scale = groups.abs().amax(-1, keepdim=True) / 7.5
    return ((groups / scale).round().clamp(-8, 7) * scale).view(rows.shape)


def fp8(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (rows / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def per_tensor(rows: torch.Tensor) -> torch.Tensor:
    return fp8(rows, rows.abs().max() / 448)


def per_channel(rows: torch.Tensor) -> torch.Tensor:
    return fp8(rows, rows.abs().amax(1, keepdim=True) / 448)


def per_block(rows: torch.Tensor) -> torch.Tensor:
    values = torch.zeros_like(rows)
    for top in range(0, len(rows), 128):
        for left in range(0, rows.shape[1], 128):
            at = slice(top, top + 128), slice(left, left + 128)
            values[at] = fp8(rows[at], rows[at].abs().max() / 448)
    return values


FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    CHANNEL: int8,
    INT4: int4,
    "fp8_per_channel": per_channel,
    "fp8_per_tensor": per_tensor,
    "fp8_per_block": per_block,
}
