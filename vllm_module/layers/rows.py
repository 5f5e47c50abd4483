"""Norms and activations that quantize their rows for the linear layer that reads them.

A product in FP8 quantizes its input in a launch of its own. :func:`rows_for` does that in the
launch that computes the input. It calls the module with the :class:`RowScheme` of the reader, and
what is returned then, :class:`QuantizedRows`, may go to the reader only. So it does this only where
all of them are known to run nothing but their own forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from vllm_module.kernels.matmul.scaled_matmul import quantizes_inputs
from vllm_module.layers.activation import GeluAndMul, SiluAndMul
from vllm_module.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm_module.layers.norm import RMSNorm
from vllm_module.layers.plain import is_plain
from vllm_module.quantization.rows import RowScheme

F = TypeVar("F", bound=Callable[..., Any])

# By their forward passes: a subclass that overrides one has to be given tensors.
_WRITERS = {RMSNorm.forward, SiluAndMul.forward, GeluAndMul.forward}
# By the function and not on it: a wrapper, which may read more, copies what is on it.
_DECLARED: MutableMapping[Callable[..., Any], str] = WeakKeyDictionary()
_READERS = {ReplicatedLinear.forward, ColumnParallelLinear.forward, RowParallelLinear.forward}


def read_by(layer: str) -> Callable[[F], F]:
    """Declare, of a ``forward``, that it hands its first argument to ``layer`` and does no more.

    The argument may then be quantized rows. The declaration belongs to the function: a subclass
    that overrides ``forward`` is given tensors, unless it declares the same.

    Args:
        layer: the name of the attribute that holds the linear layer.

    """

    def declare(forward: F) -> F:
        _DECLARED[forward] = layer
        return forward

    return declare


def rows_for(reader: nn.Module, module: nn.Module, *args: torch.Tensor) -> Any:
    """Return ``module(*args)``, whose rows ``reader`` and nothing else reads.

    Where the product of ``reader`` quantizes its input, and ``module`` can quantize what it
    computes, the rows are returned quantized; the bits of the product are the same. This needs a
    device that multiplies FP8, and never happens while a graph is traced or derivatives are
    recorded.

    Args:
        reader: a linear layer, or a module that declares which one reads its input
            (:func:`read_by`).
        module: a norm or an activation.
        args: of the module; the first one has the rows.

    """
    if (
        not quantizes_inputs(args[0])
        or torch.is_grad_enabled()
        or type(module).forward not in _WRITERS
        or not is_plain(module)
        or (rows := _scheme_of(reader)) is None
    ):
        return module(*args)
    return module(*args, rows=rows)


def _scheme_of(reader: nn.Module) -> RowScheme | None:
    """Return how the layer that reads what ``reader`` is given quantizes it, if it does."""
    layer: Any = reader
    if not isinstance(reader, LinearBase):
        name = _DECLARED.get(type(reader).forward)
        if name is None or not is_plain(reader):
            return None
        layer = getattr(reader, name, None)
    known = isinstance(layer, LinearBase) and type(layer).forward in _READERS and is_plain(layer)
    return layer.row_scheme() if known else None
