"""The memory of the KV cache, and copying its pages."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from vllm_module.core.module import vLLMModule
from vllm_module.kernels.attention.copy_blocks import copy_blocks
from vllm_module.kernels.attention.swap_blocks import swap_blocks
from vllm_module.quantization import QuantizableKVCache
from vllm_module.runtime.step_inputs import Moves

_ALIGNMENT = 64  # bytes, as of torch's own memory


def has_stored_scales(model: vLLMModule) -> bool:
    """Return whether what a model's cache holds depends on scales that are weights."""
    layers = ((each.kv_cache, each.k_scale) for each in attention_layers(model))
    return any(
        scale is not None and cache is not None and cache.itemsize == 1 for cache, scale in layers
    )


def attention_layers(model: vLLMModule) -> list[QuantizableKVCache]:
    """Return the layers of ``model`` that have a KV cache."""
    return [module for module in model.modules() if isinstance(module, QuantizableKVCache)]


def page_bytes(model: vLLMModule, page_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of a page: all layers' cache entries of its tokens on this rank."""
    features = sum(math.prod(layer.token_shape) for layer in attention_layers(model))
    return features * page_size * dtype.itemsize


class KVCache:
    """Memory for pages of keys and values, or latents, on the device and in host memory.

    Which pages are used is counted by :class:`~vllm_module.runtime.cache.page_pool.PagePool`.
    Layers with the same ``token_shape`` share one tensor, so that one kernel launch copies a page
    in all of them.

    Args:
        model: the model, whose attention layers get views of the cache; :meth:`close` removes them.
        num_pages: number of pages on the device.
        page_size: tokens per page.
        device, dtype: the device and dtype of the cache.
        host_pages: number of pages in host memory, for sequences that are swapped out.

    Raises:
        RuntimeError: the layers already have a cache.

    """

    def __init__(
        self,
        model: vLLMModule,
        num_pages: int,
        page_size: int,
        device: torch.device,
        dtype: torch.dtype,
        host_pages: int = 0,
    ) -> None:
        self._layers = attention_layers(model)
        if any(layer.kv_cache is not None for layer in self._layers):
            raise RuntimeError("the model's layers have a KV cache already: close that one first")
        by_shape: dict[tuple[int, int, int], list[QuantizableKVCache]] = {}
        for layer in self._layers:
            by_shape.setdefault(layer.token_shape, []).append(layer)
        self._caches, self._host_caches = [], []
        for (tensors, heads, features), layers in by_shape.items():
            shape = (len(layers), tensors, num_pages, page_size, heads, features)
            cache = _zeros(shape, device, dtype)
            for layer, layer_cache in zip(layers, cache, strict=True):
                layer.kv_cache = layer_cache
            self._caches.append(cache)
            if host_pages:
                shape = (*shape[:2], host_pages, *shape[3:])
                pinned = device.type == "cuda"
                host = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned)
                self._host_caches.append(host)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(cache.nbytes for cache in self._caches)

    def move(self, moves: Moves) -> None:
        """Copy pages: to the host, on the device, then from the host."""
        for cache, host in zip(self._caches, self._host_caches, strict=False):
            if moves.swapped_out:
                swap_blocks(cache, host, torch.tensor(moves.swapped_out, device="cpu"))
        if copied := moves.copied:
            # A page that was copied from may be freed, allocated again and copied to in the same
            # step. Then the order matters, and a single launch has no order.
            ordered = {source for source, _ in copied} & {target for _, target in copied}
            for pairs in [[pair] for pair in copied] if ordered else [copied]:
                for cache in self._caches:
                    copy_blocks(cache, torch.tensor(pairs, device=cache.device))
        for cache, host in zip(self._caches, self._host_caches, strict=False):
            if moves.swapped_in:
                swap_blocks(host, cache, torch.tensor(moves.swapped_in, device="cpu"))

    def close(self) -> None:
        """Remove the cache from the model's layers and release its memory."""
        for layer in self._layers:
            layer.kv_cache = None
        self._caches, self._host_caches = [], []


def _zeros(shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros; in the CPU's memory, the system gives an OS page when it is first written.

    ``torch.zeros`` would write all of it, which takes longer than loading a small model.
    """
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    memory = torch.from_numpy(np.zeros(nbytes + _ALIGNMENT, np.uint8))
    first = -memory.data_ptr() % _ALIGNMENT
    return memory[first : first + nbytes].view(dtype).view(*shape)
