"""What a load asks of one tensor, whether it is a parameter that cuts its shard or any other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import Any, TypeGuard

import torch
from torch import nn

from vllm_module.parameters import BasevLLMParameter

_WHOLE = {"": ()}  # the one slot of a tensor that is not fused


def is_typed(tensor: torch.Tensor) -> TypeGuard[BasevLLMParameter]:
    """Tell whether a tensor cuts out its own shard."""
    # isinstance with a Parameter class runs Python code, which costs a load of many names time.
    return issubclass(type(tensor), BasevLLMParameter)


def slots_of(tensor: torch.Tensor) -> Collection[str]:
    """Return the names of the slots of ``tensor``; a tensor that is not fused has one, ``""``."""
    return tensor.slots if is_typed(tensor) else _WHOLE


def kind_of(tensor: torch.Tensor) -> Hashable:
    """Return what the pieces of a tensor depend on."""
    values = (each if isinstance(each, Hashable) else id(each) for each in vars(tensor).values())
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, *values


def expected_shape(tensor: torch.Tensor, slot: str | None) -> list[int]:
    """Return the shape of ``slot`` in a checkpoint; ``None`` means all slots as one tensor."""
    return list(tensor.checkpoint_shape(slot) if is_typed(tensor) else tensor.shape)


def without_casts(
    convert: Callable[[torch.Tensor], torch.Tensor], kept: Collection[torch.Tensor | None]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what ``nn.Module._apply`` is called with, but ``kept`` tensors are only moved.

    So ``model.half()`` and ``model.to(dtype)`` leave their dtype as it is.
    """

    def converted(tensor: torch.Tensor) -> torch.Tensor:
        new = convert(tensor)
        return tensor.to(new.device) if tensor in kept and new.dtype != tensor.dtype else new

    return converted


def materialized(tensor: torch.Tensor, device: torch.device) -> Any:
    """Return a tensor of the same class, shape and strides with new memory on ``device``."""
    if torch.is_inference_mode_enabled():  # a tensor made in it could not be written to outside
        with torch.inference_mode(False):
            return materialized(tensor, device)
    if is_typed(tensor):
        return tensor.materialize_on(device)
    # Not empty_like: for a meta tensor it runs Python code and imports sympy, half a second.
    real = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(real, requires_grad=tensor.requires_grad)
    return real
