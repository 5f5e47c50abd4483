"""Cutting the read of a large weight into pieces."""

from __future__ import annotations

from typing import TypeAlias

import torch

from vllm_module.weights.chunked_handle import ChunkedHandle
from vllm_module.weights.handle import Destination, Handle

PIECE_BYTES = 16 << 20  # a larger weight is read in pieces of at most this size

Job: TypeAlias = tuple[Handle, Destination]


def nbytes_of(weight: Handle) -> int:
    """Return the number of bytes of a weight that is not read yet."""
    return weight.shape.numel() * weight.dtype.itemsize


def cut(weight: Handle, destination: Destination) -> list[Job]:
    """Cut a weight and its destination into pieces of at most PIECE_BYTES, each of one chunk."""
    if isinstance(weight, ChunkedHandle) and isinstance(destination, torch.Tensor):
        parts = weight.parts(destination) if weight.dtype == destination.dtype else ()
        if pieces := [piece for part in parts for piece in cut(*part)]:
            return pieces
    nbytes = nbytes_of(weight)
    if (
        nbytes <= PIECE_BYTES
        or not isinstance(destination, torch.Tensor)
        or weight.shape != destination.shape  # read_into raises for it
    ):
        return [(weight, destination)]
    dim = next(dim for dim, size in enumerate(weight.shape) if size > 1)
    size = weight.shape[dim]
    step = max(1, size * PIECE_BYTES // nbytes)
    pieces = []
    for start in range(0, size, step):
        length = min(step, size - start)
        target = destination.narrow(dim, start, length)
        pieces += cut(weight.narrow(dim, start, length), target)
    return pieces
