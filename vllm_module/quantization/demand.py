"""Checks of loaded numbers: what breaks a rule is named with its slot."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from vllm_module.errors import WeightReadError
from vllm_module.parameters import BasevLLMParameter

_CHUNK = 1 << 22  # numbers that are checked at a time


def with_slot(name: str, slot: str) -> str:
    """Return what messages call the tensor ``name`` of a slot."""
    return f"{name} (slot {slot!r})" if slot else name


def demand(
    parameter: nn.Parameter,
    valid: Callable[[torch.Tensor], torch.Tensor],
    name: str,
    rule: str,
    numbers: Callable[[torch.Tensor], torch.Tensor] = lambda stored: stored,
) -> None:
    """Raise ``WeightReadError`` with the first number of ``parameter`` that is not valid.

    ``name`` and ``rule`` are for the message. ``numbers`` returns those that some of the rows hold,
    if they are not the numbers that are checked.
    """
    assert isinstance(parameter, BasevLLMParameter)
    # All slots at once, of which there may be many.
    if _first_invalid(parameter.data, valid, numbers) is None:
        return
    for slot in parameter.slots:
        number = _first_invalid(parameter.region(slot), valid, numbers)
        if number is not None:
            tensor = with_slot(name, slot)
            shown = f"{number:g}" if isinstance(number, float) else number
            raise WeightReadError(f"{tensor} has {shown}, and {rule}")


def _first_invalid(
    stored: torch.Tensor,
    valid: Callable[[torch.Tensor], torch.Tensor],
    numbers: Callable[[torch.Tensor], torch.Tensor],
) -> float | None:
    rows = max(1, _CHUNK // max(1, stored[:1].numel()))  # a mask of all would take much memory
    for chunk in torch.split(stored, rows):
        found = numbers(chunk)
        if not bool((mask := valid(found)).all()):
            return found[~mask][0].item()
    return None
