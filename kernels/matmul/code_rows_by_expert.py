"""Products of rows, sorted by expert, with the weights of all experts, in one call of the loops.

A call from Python for each expert takes about as long as its product with a few rows, and all
threads wait for each other after it. Here each thread computes its part of the outputs of one
expert after the other. How many rows an expert has is read when the loops run, so a recorded step
(:mod:`~vllm_module.kernels.recording`) needs no Python code for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from vllm_module.kernels.matmul.code_rows import CodeRows
from vllm_module.kernels.matmul.code_rows_matmul import (
    NARROW,
    compiled_loops,
    lasts,
    memory_of,
    takes_code_rows,
    tell,
)
from vllm_module.kernels.matmul.compiled_by_expert import compiled_experts
from vllm_module.kernels.matmul.torch_threads import in_threads

_MOST_TOLD = 1 << 10  # layers of which it is kept what the loops are told


class _Told(NamedTuple):
    """What the loops are told of the weights of all experts.

    Attributes:
        kind: which loops they are.
        each: int64 ``[experts, 26]``, what the loops are told of each one.
        order: the input of each number in the order of rows; ``None`` if that is their order.
        outputs: number of outputs of an expert.

    """

    kind: int
    each: torch.Tensor
    order: torch.Tensor | None
    outputs: int


_told: dict[object, _Told | None] = {}


def multiplied_by_experts(
    x: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    describe: Callable[..., CodeRows | None],
    *weight: Any,
) -> torch.Tensor | None:
    """Return products of rows and the weights of their experts; ``None`` if they are not for loops.

    The number of rows that an expert has on average chooses. What the loops are told of the weights
    is kept by the addresses of their tensors.

    Args:
        x: ``[rows, input]``, bfloat16, float16 or float32, on the CPU.
        offsets: int32 ``[experts + 1]``. Row ``r`` is that of the expert ``e`` with
            ``offsets[e] <= r < offsets[e + 1]``.
        bias: ``[experts, output]``, of the dtype of ``x``, or ``None``.
        describe: a function of :mod:`~vllm_module.kernels.matmul.code_rows`, which describes the
            weight of one expert.
        weight: its arguments; each tensor has a leading dimension of experts, and the first one
            holds the codes or floats.

    Returns:
        ``[rows, output]``, of the dtype of ``x``. Rows from ``offsets[experts]`` on are zeros.

    """
    experts = len(offsets) - 1
    if not experts or not takes_code_rows(x, weight[0], -(-len(x) // experts)):
        return None
    key = describe, *map(memory_of, weight)
    try:  # other threads may drop all at any time
        told = _told[key]
    except KeyError:
        told = _tell(experts, describe, weight)
        if len(_told) >= _MOST_TOLD:
            _told.clear()
        _told[key] = told
    return None if told is None else _product(x, offsets, bias, told)


def _tell(
    experts: int, describe: Callable[..., CodeRows | None], weight: tuple[Any, ...]
) -> _Told | None:
    """Return what the loops are told, if it depends on nothing but where the weights are."""
    each, first = [], None
    for expert in range(experts):
        own = [part[expert] if isinstance(part, torch.Tensor) else part for part in weight]
        described = describe(*own)
        if described is None:
            return None
        told, made = tell(described)
        first = first or told
        if told.order is not first.order or not lasts(described, made, own):
            return None
        x, weights, y, how = (0, 0, 0), told.numbers, (0, 0, 0), (0, 0, 0)
        each.append([told.zero, *x, *weights, *y, *how])
    assert first is not None
    table = torch.tensor(each, dtype=torch.int64, device="cpu")
    return _Told(first.kind, table, first.order, first.outputs)


def _product(
    x: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None, told: _Told
) -> torch.Tensor:
    rows = (x if x.dtype in NARROW else x.float()).contiguous()
    offsets, padded = offsets.contiguous(), -(-told.outputs // 8) * 8
    # The sum with a bias is rounded once.
    y = rows.new_empty(len(rows), padded, dtype=rows.dtype if bias is None else torch.float32)
    bias = None if bias is None else bias.float().contiguous()
    order = 0 if told.order is None else told.order.data_ptr()
    loop = compiled_loops(told.kind, False)
    _by_expert(torch.get_num_threads())(
        (
            loop.address,
            told.each.data_ptr(), len(told.each), offsets.data_ptr(),
            rows.data_ptr(), rows.shape[1], NARROW[rows.dtype],
            y.data_ptr(), len(y), padded, NARROW[y.dtype],
            order, 0 if bias is None else bias.data_ptr(), told.outputs,
        ),
        loop, told.each, told.order, bias,
    )  # fmt: skip
    return (y if padded == told.outputs else y[:, : told.outputs]).to(x.dtype)


@functools.cache
def _by_expert(count: int) -> Callable[..., None]:
    return in_threads(compiled_experts(), count)
