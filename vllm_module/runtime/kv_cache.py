from __future__ import annotations

import torch

from vllm_module.layers import Attention, AttentionMetadata
from vllm_module.module import vLLMModule


class KVCache:
    """Pages of keys and values for every attention layer of a model, handed out to sequences.

    Args:
        model: its attention layers get their part of the cache; :meth:`close` takes it back.
        num_pages: pages in all.
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
    ) -> None:
        self.page_size = page_size
        self.device = device
        self._layers = [module for module in model.modules() if isinstance(module, Attention)]
        for layer in self._layers:
            shape = (2, num_pages, page_size, layer.num_kv_heads, layer.head_size)
            layer.kv_cache = torch.zeros(shape, device=device, dtype=dtype)
        self._free = list(reversed(range(num_pages)))
        self._pages: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}

    def append(self, new_tokens: dict[int, int]) -> AttentionMetadata:
        """Make room for each sequence's number of new tokens and say where they go.

        Raises ``RuntimeError`` when no page is free.
        """
        slots: list[int] = []
        for sequence, count in new_tokens.items():
            pages = self._pages.setdefault(sequence, [])
            length = self._lengths.get(sequence, 0)
            while len(pages) * self.page_size < length + count:
                if not self._free:
                    raise RuntimeError("the KV cache has no free page left")
                pages.append(self._free.pop())
            for position in range(length, length + count):
                page, offset = divmod(position, self.page_size)
                slots.append(pages[page] * self.page_size + offset)
            self._lengths[sequence] = length + count
        most = max(len(self._pages[sequence]) for sequence in new_tokens)
        tables = [self._pages[s] + [0] * (most - len(self._pages[s])) for s in new_tokens]
        starts = [0]
        for count in new_tokens.values():
            starts.append(starts[-1] + count)
        lengths = [self._lengths[sequence] for sequence in new_tokens]
        int32 = {"dtype": torch.int32, "device": self.device}
        return AttentionMetadata(
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=self.device),
            block_tables=torch.tensor(tables, **int32),
            context_lens=torch.tensor(lengths, **int32),
            query_start_loc=torch.tensor(starts, **int32),
        )

    def free(self, sequence: int) -> None:
        """Return the pages of ``sequence``."""
        self._free += self._pages.pop(sequence, [])
        self._lengths.pop(sequence, None)

    def close(self) -> None:
        """Take the cache from the model's layers."""
        for layer in self._layers:
            layer.kv_cache = None
