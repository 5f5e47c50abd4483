"""A test of a loaded model: two sequences in one batch, compared with each of them alone.

It finds models that mix sequences, ignore positions, or keep state outside the KV cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from vllm_module.errors import UnsupportedModelError
from vllm_module.layers import AttentionMetadata, RecurrentLayer
from vllm_module.quantization import QuantizableKVCache

_LENGTHS = 7, 5  # tokens of the two sequences, or as many as the model has positions
_FIRST = 4  # tokens of the first sequence that the first step computes, or all but one
_PAGE = 16
_PARTS = "the first of two sequences", "the second of two sequences", "the rest of a sequence"

# Rounding differs with the shape of a matmul, and may send a token to another expert. So the median
# over a part's tokens is compared: the relative distance of the logits.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}


@torch.inference_mode()
def check(model: Any, dtype: torch.dtype, vocab_size: int) -> None:
    """Raise ``UnsupportedModelError`` unless a batch gives the logits of its sequences alone.

    All ranks of a model call it together. No layer may have a KV cache yet, nor states. A model of
    one position has no second step, so its logits need only be finite.
    """
    name = getattr(model, "library_name", type(model).__name__)
    device = next(model.parameters()).device
    limit = getattr(model.config, "max_position_embeddings", None) or max(_LENGTHS)
    sequences = [
        (torch.arange(min(length, limit), device=device) * 7919 + 13 * number + 1) % vocab_size
        for number, length in enumerate(_LENGTHS)
    ]
    alone = [_logits(model, ids, torch.arange(len(ids), device=device), None) for ids in sequences]
    if not all(bool(each.isfinite().all()) for each in alone):
        raise UnsupportedModelError(
            f"{name} computes logits that are not finite: a weight is not, or an "
            f"entry of config.json is wrong, or they need a dtype with a wider range than {dtype}"
        )
    if limit == 1:
        return
    together = _in_steps(model, sequences, device, dtype)
    (first, second), begun = alone, len(together[0])
    # Rotary positions are relative, so they show only in tokens whose keys are from an earlier
    # step.
    expected_parts = first[:begun], second, first[begun:]
    for number, (expected, came) in enumerate(zip(expected_parts, together, strict=True)):
        distance = (came - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-6)
        middle, most = float(distance.median()), _TOLERANCES[dtype]
        if not middle <= most:
            raise UnsupportedModelError(
                f"{name} computes {_PARTS[number]} differently than alone: the "
                "logits of its tokens differ by "
                f"{middle:.2g} of their size, and at most {most:.2g} is rounding in {dtype}. It "
                "may ignore positions, or mix sequences, so that its answers would be wrong"
            )


def _logits(
    model: Any, ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata | None
) -> torch.Tensor:
    logits: torch.Tensor = model.compute_logits(model(ids, positions, metadata))
    return logits.float()


def _in_steps(
    model: Any, sequences: Sequence[torch.Tensor], device: torch.device, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return the logits of each of _PARTS, from one step of both sequences and one of the rest."""
    first, second = sequences
    start = min(_FIRST, len(first) - 1)
    rest = len(first) - start

    def tensor(values: Sequence[Any], kind: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=kind, device=device)

    slots = [range(_PAGE, _PAGE + len(first)), range(2 * _PAGE, 2 * _PAGE + len(second))]
    both = AttentionMetadata(
        tensor([*slots[0][:start], *slots[1]], torch.int64),
        tensor([[1], [2]]),
        tensor([start, len(second)]),
        tensor([0, start, start + len(second)]),
        max(start, len(second)),
        state_slots=tensor([1, 2], torch.int64),
    )
    positions = [torch.arange(len(ids), device=device) for ids in sequences]
    after = AttentionMetadata(
        tensor(slots[0][start:], torch.int64),
        tensor([[1]]),
        tensor([len(first)]),
        tensor([0, rest]),
        rest,
        state_slots=tensor([1], torch.int64),
    )
    with _caches(model, device, dtype):
        begun = _logits(
            model,
            torch.cat([first[:start], second]),
            torch.cat([positions[0][:start], positions[1]]),
            both.laid_out(),
        )
        ended = _logits(model, first[start:], positions[0][start:], after.laid_out())
    return [begun[:start], begun[start:], ended]


@contextmanager
def _caches(model: Any, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Give each attention layer a cache of three pages inside the block, and others states."""
    layers = [each for each in model.modules() if isinstance(each, QuantizableKVCache)]
    recurrent = [each for each in model.modules() if isinstance(each, RecurrentLayer)]
    for layer in layers:
        tensors, heads, features = layer.token_shape
        shape = tensors, 3, _PAGE, heads, features
        layer.kv_cache = torch.zeros(shape, dtype=dtype, device=device)
    for each in recurrent:
        each.states = {
            name: torch.zeros(3, *shape, dtype=each.state_dtypes[name] or dtype, device=device)
            for name, shape in each.state_shapes.items()
        }
    try:
        yield
    finally:
        for layer in layers:
            layer.kv_cache = None
        for each in recurrent:
            each.states = None
