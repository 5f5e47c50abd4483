from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_module.kernels.copy_blocks import copy_blocks
from vllm_module.kernels.swap_blocks import swap_blocks
from vllm_module.layers import Attention
from vllm_module.module import vLLMModule

Pairs = Sequence[tuple[int, int]]


def attention_layers(model: vLLMModule) -> list[Attention]:
    """Return the layers of ``model`` that keep keys and values."""
    return [module for module in model.modules() if isinstance(module, Attention)]


def page_bytes(model: vLLMModule, page_size: int, dtype: torch.dtype) -> int:
    """Return the bytes that a page takes in all layers of this rank, keys and values."""
    features = sum(2 * layer.num_kv_heads * layer.head_size for layer in attention_layers(model))
    return features * page_size * dtype.itemsize


class KVCache:
    """The memory of keys and values, on the device and beside it; which page is whose is elsewhere.

    Layers of one shape share one tensor, so that a page is copied in all of them by one launch.

    Args:
        model: its attention layers get their part of the cache; :meth:`close` takes it back.
        num_pages: pages on the device, host_pages: in host memory, for sequences that wait.
        page_size: tokens a page.
        device, dtype: of the cache.

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
        alike: dict[tuple[int, int], list[Attention]] = {}
        for layer in self._layers:
            alike.setdefault((layer.num_kv_heads, layer.head_size), []).append(layer)
        self._caches, self._host_caches = [], []
        for (heads, size), layers in alike.items():
            shape = (len(layers), 2, num_pages, page_size, heads, size)
            cache = torch.zeros(shape, device=device, dtype=dtype)
            for layer, its in zip(layers, cache, strict=True):
                layer.kv_cache = its
            self._caches.append(cache)
            if host_pages:
                shape = (*shape[:2], host_pages, *shape[3:])
                pinned = device.type == "cuda"
                self._host_caches.append(torch.empty(shape, dtype=dtype, pin_memory=pinned))

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(cache.nbytes for cache in self._caches)

    def move(self, swapped_out: Pairs, copied: Pairs, swapped_in: Pairs) -> None:
        """Copy pages, pairs of from and to: out to the host, on the device, in from the host."""
        for cache, host in zip(self._caches, self._host_caches, strict=False):
            if swapped_out:
                swap_blocks(cache, host, torch.tensor(swapped_out))
        if copied:
            # A page that is copied from, let go and taken again in one step: one after the other.
            again = {source for source, _ in copied} & {target for _, target in copied}
            for pairs in [[pair] for pair in copied] if again else [copied]:
                for cache in self._caches:
                    copy_blocks(cache, torch.tensor(pairs, device=cache.device))
        for cache, host in zip(self._caches, self._host_caches, strict=False):
            if swapped_in:
                swap_blocks(host, cache, torch.tensor(swapped_in))

    def close(self) -> None:
        """Take the cache from the model's layers."""
        for layer in self._layers:
            layer.kv_cache = None
        self._caches, self._host_caches = [], []
