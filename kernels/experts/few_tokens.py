"""Routing of a few tokens on a CPU, in compiled loops (the extra ``cpu``).

In plain torch, to choose experts, to sort rows and to combine them are some forty operations of a
few numbers each. The loops are used where attention is computed in loops, too
(:class:`~vllm_module.kernels.matmul.products.Products`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from vllm_module.kernels.experts.compiled_routing import (
    compiled_choice,
    compiled_combination,
    compiled_order,
)
from vllm_module.kernels.matmul.products import products_in_use
from vllm_module.kernels.matmul.torch_threads import bits_of, in_threads

_MOST = 1 << 17  # numbers; torch computes more of them as fast, and in several threads
_PER_THREAD = 1 << 14  # numbers, below which a second thread begins too late
_DTYPES = torch.float32, torch.bfloat16


def takes_few_tokens(x: torch.Tensor) -> bool:
    """Return whether the loops were chosen and take logits, numbers of experts, or rows of them."""
    return (
        not torch.compiler.is_compiling()
        and products_in_use.get().pages
        and x.is_cpu
        and 0 < x.numel() <= _MOST
        and (x.dtype in _DTYPES or x.dtype == torch.int32)
        and torch.is_inference_mode_enabled()
    )


def choose_few(
    logits: torch.Tensor,
    top_k: int,
    scoring_func: str,
    renormalize: bool,
    correction_bias: torch.Tensor | None,
    groups: int,
    topk_group: int,
    routed_scaling_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and experts.

    Arguments and results are those of :func:`~vllm_module.kernels.experts.topk_routing`.
    """
    logits, (tokens, experts) = logits.contiguous(), logits.shape
    bias = None if correction_bias is None else correction_bias.contiguous()
    weights = logits.new_empty(tokens, top_k, dtype=torch.float32)
    chosen = logits.new_empty(tokens, top_k, dtype=torch.int32)
    numbers = (
        tokens, experts, top_k, scoring_func == "sigmoid", renormalize, groups, topk_group,
        bits_of(routed_scaling_factor), logits.data_ptr(), logits.dtype == torch.bfloat16,
        0 if bias is None else bias.data_ptr(), weights.data_ptr(), chosen.data_ptr(),
    )  # fmt: skip
    _choice()(numbers)
    return weights, chosen


def sort_few(experts: torch.Tensor, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the order and offsets of :func:`~vllm_module.kernels.experts.sort_by_expert`."""
    experts = experts.contiguous()
    order, offsets = experts.new_empty(experts.numel()), experts.new_empty(count + 1)
    places = experts.data_ptr(), order.data_ptr(), offsets.data_ptr()
    _order()((experts.numel(), first, count, *places))
    return order, offsets


def combine_few(
    y: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the sums of :func:`~vllm_module.kernels.experts.combine_experts`."""
    y = y if y.stride(1) == 1 else y.contiguous()
    order, offsets, weights = order.contiguous(), offsets.contiguous(), weights.contiguous()
    (tokens, top_k), features = weights.shape, y.shape[1]
    out = y.new_empty(tokens, features)
    numbers = (
        tokens, top_k, features, y.data_ptr(), y.dtype == torch.bfloat16, order.data_ptr(),
        offsets.data_ptr() + offsets.itemsize * (len(offsets) - 1), weights.data_ptr(),
        out.data_ptr(), y.stride(0) * y.itemsize,
    )  # fmt: skip
    _combination(max(1, min(torch.get_num_threads(), y.numel() // _PER_THREAD)))(numbers)
    return out


@functools.cache
def _choice() -> Callable[..., None]:
    return in_threads(compiled_choice(), 1)


@functools.cache
def _order() -> Callable[..., None]:
    return in_threads(compiled_order(), 1)


@functools.cache
def _combination(threads: int) -> Callable[..., None]:
    return in_threads(compiled_combination(), threads)
