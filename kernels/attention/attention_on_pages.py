"""Attention of single tokens on a CPU, which reads a cache's pages where they are.

torch's attention takes a tensor of keys, so pages that do not follow each other are copied first.
The loops need the extra ``cpu``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from vllm_module.kernels.attention.compiled_attention import compiled_attention, compiled_rotation
from vllm_module.kernels.attention.paged_layout import SingleTokens
from vllm_module.kernels.matmul.torch_threads import bits_of, in_threads
from vllm_module.kernels.rows.few_rows import compile_few_rows

_CACHED = torch.float32, torch.bfloat16


def takes_pages(query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Return whether :func:`attend_on_pages` takes these tensors, if it was chosen."""
    return (
        query.is_cpu
        and query.dtype in _CACHED
        and k_cache.dtype in _CACHED
        and query.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
        and not torch.compiler.is_compiling()
        and torch.is_inference_mode_enabled()
    )


def attend_on_pages(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    singles: SingleTokens,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention of the only new token of each sequence, in float32.

    Args:
        singles: the sequences, whose pages are in the caches.
        query, k_cache, v_cache, scale, sliding_window, softcap, alibi_slopes, sinks: as for
            :func:`~vllm_module.kernels.attention.paged_attention.paged_attention`.

    Returns:
        ``[tokens, heads, head_size]``, of the dtype of ``query``; zeros for other tokens.

    """
    output = query.new_empty(query.shape) if singles.every else query.new_zeros(query.shape)
    scores = [None if x is None else x.float().contiguous() for x in (alibi_slopes, sinks)]
    _, page_size, kv_heads, head_size = k_cache.shape
    numbers = (
        *(query.data_ptr(), *query.stride()[:2]),
        *(k_cache.data_ptr(), *k_cache.stride()[:3]),
        *(v_cache.data_ptr(), *v_cache.stride()[:3]),
        *(singles.tables.data_ptr(), singles.tables.stride(0), singles.contexts.data_ptr()),
        *(singles.rows.data_ptr(), len(singles.rows), output.data_ptr()),
        *(query.shape[1], kv_heads, head_size, page_size, sliding_window or 0),
        *(0 if x is None else x.data_ptr() for x in scores),
        *(bits_of(scale), bits_of(softcap or 0.0), query.dtype == torch.bfloat16),
    )
    _attention(k_cache.dtype == torch.bfloat16, torch.get_num_threads())(numbers)
    return output


def takes_rotation(cos: torch.Tensor, sin: torch.Tensor, *tensors: torch.Tensor | None) -> bool:
    """Return whether :func:`rotate_on_pages` takes these tensors, if it was chosen.

    All but ``cos`` and ``sin`` are of one dtype.
    """
    first = tensors[0]
    assert first is not None
    return (
        first.is_cpu
        and first.dtype in _CACHED
        and cos.dtype == sin.dtype == torch.float32
        and cos.stride(-1) == sin.stride(-1) == 1
        and all(x is None or (x.dtype == first.dtype and x.stride(-1) == 1) for x in tensors)
    )


def rotate_on_pages(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    is_neox_style: bool,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    weight_offset: float | None,
) -> None:
    """Normalize and rotate heads in place, and store keys and values.

    Arguments are those of :func:`~vllm_module.kernels.attention.rotate_and_cache.rotate_and_cache`.
    """
    slots, pairs = slot_mapping.long(), cos.shape[1]
    tokens, heads, head_size = query.shape
    numbers = (
        *(tokens, query.data_ptr(), *query.stride()[:2], heads),
        *(key.data_ptr(), *key.stride()[:2], value.data_ptr(), *value.stride()[:2], key.shape[1]),
        *(head_size, cos.data_ptr(), cos.stride(0), sin.data_ptr(), sin.stride(0), pairs),
        *((1, pairs) if is_neox_style else (2, 1)),
        *(k_cache.data_ptr(), *k_cache.stride()[:3]),
        *(v_cache.data_ptr(), *v_cache.stride()[:3]),
        *(k_cache.shape[1], slots.data_ptr(), slots.stride(0)),
        *(0 if x is None else x.data_ptr() for x in (q_weight, k_weight)),
        *(bits_of(eps), bits_of(weight_offset or 0.0), weight_offset is None),
        query.dtype == torch.bfloat16,
    )
    _rotation(torch.get_num_threads())(numbers)


@functools.cache
def _attention(bfloat16: bool, threads: int) -> Callable[..., None]:
    return in_threads(compiled_attention(bfloat16), threads)


@functools.cache
def _rotation(threads: int) -> Callable[..., None]:
    return in_threads(compiled_rotation(), threads)


def can_attend_on_pages(dtype: torch.dtype) -> bool:
    """Return whether the loops take a cache of a dtype; compile all that run with them.

    That takes some seconds, once on a machine, and needs numba.
    """
    if dtype not in _CACHED:
        return False
    try:
        _rotation(torch.get_num_threads())
        _attention(dtype == torch.bfloat16, torch.get_num_threads())
        compile_few_rows()
    except ImportError:
        return False
    return True
