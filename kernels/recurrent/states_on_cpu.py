"""Steps of sequences with one new token each on a CPU, in compiled loops (the extra ``cpu``).

A step of a state is some thirty operations of torch, each of which takes longer to begin than the
numbers of a token take. The loops are used where attention is computed in loops, too
(:class:`~vllm_module.kernels.matmul.products.Products`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from vllm_module.kernels.matmul.products import products_in_use
from vllm_module.kernels.matmul.torch_threads import bits_of, in_threads
from vllm_module.kernels.recurrent.compiled_states import (
    compiled_convolution,
    compiled_delta_rule,
    compiled_scan,
)
from vllm_module.kernels.recurrent.recurrent_state import single_tokens

_NARROW = {torch.float32: 0, torch.bfloat16: 1}  # what the loops read and write


def takes_states(
    x: torch.Tensor,
    state: torch.Tensor | None,
    state_slots: torch.Tensor | None,
    max_query_len: int,
    *others: torch.Tensor,
) -> bool:
    """Return whether the loops were chosen, and take ``x``, ``others`` of its dtype, and states."""
    return (
        not torch.compiler.is_compiling()
        and products_in_use.get().pages
        and state is not None
        and state_slots is not None
        and x.is_cpu
        and x.numel() > 0
        and single_tokens(x, state_slots, max_query_len)
        and torch.is_inference_mode_enabled()
        and x.dtype in _NARROW
        and state.dtype in _NARROW
        and all(each.dtype == x.dtype for each in others)
        and all(each.stride(-1) == 1 for each in (x, *others))
        and state[:1].is_contiguous()
        and state_slots.is_contiguous()
    )


def scan_states(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state: torch.Tensor,
    state_slots: torch.Tensor,
    context_lens: torch.Tensor,
    dt_min: float,
    dt_max: float,
) -> torch.Tensor:
    """Compute one token of each sequence, and write its state.

    Arguments are those of :func:`~vllm_module.kernels.recurrent.mamba2_scan.mamba2_scan`.
    """
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    contexts, vectors = context_lens.int().contiguous(), [_wide(each) for each in (d, dt_bias)]
    a = a.contiguous()
    numbers = (
        *(*x.shape, b.shape[1], b.shape[2]),
        *(x.data_ptr(), *x.stride()[:2], dt.data_ptr(), dt.stride(0), a.data_ptr()),
        *(b.data_ptr(), *b.stride()[:2], c.data_ptr(), *c.stride()[:2]),
        *(0 if each is None else each.data_ptr() for each in vectors),
        *(state.data_ptr(), state.stride(0), state_slots.data_ptr(), contexts.data_ptr()),
        *(y.data_ptr(), bits_of(dt_min), bits_of(dt_max), _NARROW[x.dtype], _NARROW[state.dtype]),
    )
    _scan(torch.get_num_threads())(numbers, a, *vectors, contexts)
    return y


def replace_in_states(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    state_slots: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    epsilon: float,
) -> torch.Tensor:
    """Compute one token of each sequence by the gated delta rule, and write its state.

    Arguments are those of :func:`~vllm_module.kernels.recurrent.gated_delta_rule.gated_delta_rule`,
    and what is added to the squares of lengths, negative if nothing is divided by them.
    """
    y = torch.empty_like(v, memory_format=torch.contiguous_format)
    g, contexts = g.contiguous(), context_lens.int().contiguous()
    numbers = (
        *(*v.shape[:2], q.shape[1], q.shape[2], v.shape[2]),
        *(number for each in (q, k, v) for number in (each.data_ptr(), *each.stride()[:2])),
        *(g.data_ptr(), beta.data_ptr(), beta.stride(0), state.data_ptr(), state.stride(0)),
        *(state_slots.data_ptr(), contexts.data_ptr(), y.data_ptr()),
        *(bits_of(scale), bits_of(epsilon), _NARROW[v.dtype], _NARROW[state.dtype]),
    )
    _delta_rule(torch.get_num_threads())(numbers, g, contexts)
    return y


def convolve_states(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    state_slots: torch.Tensor,
    context_lens: torch.Tensor,
    silu: bool,
) -> torch.Tensor:
    """Convolve one token of each sequence, and write its state.

    Arguments are those of :func:`~vllm_module.kernels.recurrent.causal_conv1d.causal_conv1d`.
    """
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    bias, contexts = _wide(bias), context_lens.int().contiguous()
    weight = weight.float().contiguous()
    numbers = (
        *(*x.shape, weight.shape[1], x.data_ptr(), x.stride(0), weight.data_ptr()),
        *(0 if bias is None else bias.data_ptr(), state.data_ptr(), state.stride(0)),
        *(state_slots.data_ptr(), contexts.data_ptr(), y.data_ptr(), silu),
        *(_NARROW[x.dtype], _NARROW[state.dtype]),
    )
    _convolution(torch.get_num_threads())(numbers, weight, bias, contexts)
    return y


def _wide(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.float().contiguous()


@functools.cache
def _scan(threads: int) -> Callable[..., None]:
    return in_threads(compiled_scan(), threads)


@functools.cache
def _delta_rule(threads: int) -> Callable[..., None]:
    return in_threads(compiled_delta_rule(), threads)


@functools.cache
def _convolution(threads: int) -> Callable[..., None]:
    return in_threads(compiled_convolution(), threads)
