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
        if any(layer.kv_cache is not None for layer in self._layers):
            raise RuntimeError("the model's layers have a KV cache already: close that one first")
        for layer in self._layers:
            shape = (2, num_pages, page_size, layer.num_kv_heads, layer.head_size)
            layer.kv_cache = torch.zeros(shape, device=device, dtype=dtype)
        self._free = list(reversed(range(num_pages)))
        self._pages: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free)

    def append(self, new_tokens: dict[int, int]) -> AttentionMetadata:
        """Make room for each sequence's number of new tokens and say where they go.

        Raises ``RuntimeError``, and takes no page, where fewer are free than that needs.
        """
        needed = {
            sequence: -(-(self._lengths.get(sequence, 0) + count) // self.page_size)
            - len(self._pages.get(sequence, ()))
            for sequence, count in new_tokens.items()
        }
        if sum(needed.values()) > self.free_pages:
            raise RuntimeError(
                f"the KV cache has {self.free_pages} free pages of {self.page_size} tokens, and "
                f"this step needs {sum(needed.values())}: free a sequence, or make the cache larger"
            )
        slots: list[int] = []
        for sequence, count in new_tokens.items():
            pages = self._pages.setdefault(sequence, [])
            pages += [self._free.pop() for _ in range(needed[sequence])]
            length = self._lengths.get(sequence, 0)
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
        return AttentionMetadata(
            slot_mapping=self._tensor(slots, torch.int64),
            block_tables=self._tensor(tables),
            context_lens=self._tensor(lengths),
            query_start_loc=self._tensor(starts),
            max_query_len=max(new_tokens.values()),
        )

    def free(self, sequence: int) -> None:
        """Return the pages of ``sequence``."""
        self._free += self._pages.pop(sequence, [])
        self._lengths.pop(sequence, None)

    def _tensor(
        self, values: list[int] | list[list[int]], dtype: torch.dtype = torch.int32
    ) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def close(self) -> None:
        """Take the cache from the model's layers."""
        for layer in self._layers:
            layer.kv_cache = None
