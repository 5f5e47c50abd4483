"""The places of a step's sequences on the pages of a cache, computed once for all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_module.kernels.recording import NotRecordableError

_VIEWED = 1 << 16  # elements of keys from which a view of a sequence takes less time than a copy


@dataclass(frozen=True)
class Alone:
    """A sequence that is computed by itself.

    Attributes:
        rows: the sequence's new tokens among those of the step.
        pages: pages to read; ``None`` if they are consecutive.
        first: first token to read, as an index into ``pages``, or else as a cache slot.
        count: number of tokens to read.

    """

    rows: slice
    pages: torch.Tensor | None
    first: int
    count: int


@dataclass(frozen=True)
class Together:
    """Sequences of one new token each, whose contexts are padded to the longest one.

    Attributes:
        rows: tokens of the sequences among those of the step.
        pages: pages to read, equally many for each sequence, int32 ``[sequences * pages]``; 0 for
            padding.
        distance: distance from the new token to each token of its context, not positive,
            ``[sequences, length]``.
        seen: True for tokens that are attended to, bool ``[sequences, length]``.
        bias: 0 for these tokens and minus infinity for others, ``[sequences, 1, 1, length]``.

    """

    rows: torch.Tensor | slice
    pages: torch.Tensor
    distance: torch.Tensor
    seen: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True)
class SingleTokens:
    """Sequences of one new token each.

    Attributes:
        rows: the sequences' new tokens among those of the step, int64.
        tables: their block tables, int32.
        contexts: their numbers of tokens, int32, contiguous.
        every: whether these are all tokens of the step.

    """

    rows: torch.Tensor
    tables: torch.Tensor
    contexts: torch.Tensor
    every: bool


def kinds(*tensors: torch.Tensor | None) -> tuple[object, ...]:
    """Return the shape, strides and dtype of each tensor."""
    return tuple(None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors)


class PagedLayout:
    """The sequences of a step, as lists and indices that all of its layers share.

    The tensors are those of :func:`~vllm_module.kernels.attention.paged_attention.paged_attention`,
    and the cache slot of each new token. They must not be written afterwards.

    Attributes:
        slot_bounds: the least and the largest cache slot, if ``slot_mapping`` was given.
        checked: the :func:`kinds` of tensors that were found to fit each other and the layout.

    """

    def __init__(
        self,
        block_tables: torch.Tensor,
        context_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        slot_mapping: torch.Tensor | None = None,
    ) -> None:
        self.checked: set[object] = set()
        self.slot_bounds = 0, -1
        if slot_mapping is not None and len(slot_mapping):
            least, most = slot_mapping.aminmax()
            self.slot_bounds = int(least), int(most)
        self._tables = block_tables
        self._context_lens = context_lens.unsqueeze(-1)
        self._contexts: list[int] = context_lens.tolist()
        self._starts: list[int] = query_start_loc.tolist()
        self._parts: dict[object, list[Alone | Together]] = {}
        self._singles: dict[object, SingleTokens | None] = {}

    def parts(
        self,
        cache: torch.Tensor,
        dtype: torch.dtype,
        keys_at_once: int,
        sliding_window: int | None,
        several: bool = False,
    ) -> list[Alone | Together]:
        """Return the sequences with new tokens, those of one token in batches.

        Args:
            cache: ``[pages, page_size, kv_heads, head_size]``.
            dtype: dtype of the biases.
            keys_at_once: largest number of elements of keys in a batch, unless it is one sequence.
            sliding_window: as for
                :func:`~vllm_module.kernels.attention.paged_attention.paged_attention`.
            several: leave out sequences of one new token.

        """
        key = cache.shape, dtype, keys_at_once, sliding_window, several
        if key not in self._parts:
            self._parts[key] = self._divided(*key)
        return self._parts[key]

    def single_tokens(self, cache: torch.Tensor, sliding_window: int | None) -> SingleTokens | None:
        """Return the sequences of one new token, or ``None`` if there are none.

        Raises ``IndexError`` if a page that they read is not in the cache.
        """
        key = cache.shape[:2], sliding_window
        if key not in self._singles:
            self._singles[key] = self._single_tokens(*key)
        return self._singles[key]

    def _single_tokens(self, shape: torch.Size, window: int | None) -> SingleTokens | None:
        pages, page_size = shape
        device = self._tables.device
        starts = torch.tensor(self._starts, device=device)
        contexts = self._context_lens.squeeze(-1)
        (own,) = ((starts.diff() == 1) & (contexts > 0)).nonzero(as_tuple=True)
        if not len(own):
            return None
        tables, contexts = self._tables[own].int(), contexts[own].int()
        first = (contexts - (window or 1 << 30)).clamp(min=0) // page_size
        place = torch.arange(tables.shape[1], device=device)
        read = (place >= first[:, None]) & (place < -(-contexts // page_size)[:, None])
        if bool((((tables < 0) | (tables >= pages)) & read).any()):
            raise IndexError("a page is not in the cache")
        return SingleTokens(starts[own], tables, contexts, len(own) == self._starts[-1])

    def _divided(
        self,
        shape: torch.Size,
        dtype: torch.dtype,
        keys_at_once: int,
        window: int | None,
        several: bool,
    ) -> list[Alone | Together]:
        pages, page_size, kv_heads, head_size = shape
        elements = kv_heads * head_size
        parts: list[Alone | Together] = []
        single: list[int] = []
        for sequence, context in enumerate(self._contexts):
            new = self._starts[sequence + 1] - self._starts[sequence]
            if not new or not context or (several and new == 1):
                continue
            alone = None
            if new > 1 or context * elements >= _VIEWED:
                alone = self._alone(sequence, pages, page_size, window)
            if alone is not None and (new > 1 or alone.pages is None):
                parts.append(alone)
            else:
                single.append(sequence)
        most = keys_at_once // max(1, elements)  # largest number of tokens in a batch
        if max((self._contexts[s] for s in single), default=0) * len(single) > most:
            # Similar lengths in one batch.
            single.sort(key=lambda s: self._contexts[s], reverse=True)
        while single:
            count = max(1, most // self._contexts[single[0]])
            batch = single[:count]
            del single[:count]
            if len(batch) == 1:
                parts.append(self._alone(batch[0], pages, page_size, window))
            else:
                parts.append(self._together(batch, page_size, window, dtype))
        return parts

    def _alone(self, sequence: int, pages: int, page_size: int, window: int | None) -> Alone:
        begin, end = self._starts[sequence : sequence + 2]
        context = self._contexts[sequence]
        first_seen = 0  # pages before the window may belong to another sequence
        if window is not None:
            first_seen = max(0, context - (end - begin) - window + 1)
        read: torch.Tensor | None
        read = self._tables[sequence, first_seen // page_size : -(-context // page_size)]
        listed = read.tolist()
        first, behind = listed[0], listed[0] + len(listed)
        offset = first_seen % page_size
        if first >= 0 and behind <= pages and listed == list(range(first, behind)):
            read, offset = None, offset + first * page_size
        return Alone(slice(begin, end), read, offset, context - first_seen)

    def _together(
        self, sequences: list[int], page_size: int, window: int | None, dtype: torch.dtype
    ) -> Together:
        starts = [self._starts[sequence] for sequence in sequences]
        device = self._tables.device
        rows: torch.Tensor | slice = slice(starts[0], starts[0] + len(starts))
        if starts != list(range(starts[0], starts[0] + len(starts))):
            rows = torch.tensor(starts, device=device)
        tables, contexts = self._tables, self._context_lens
        if sequences != list(range(len(tables))):
            index = torch.tensor(sequences, device=device)
            tables, contexts = tables[index], contexts[index]
        length = max(self._contexts[sequence] for sequence in sequences)
        distance = torch.arange(length, device=device) - (contexts - 1)
        seen = distance <= 0
        page_start = torch.arange(0, length, page_size, device=device)
        read = page_start < contexts
        if window is not None:
            seen &= distance > -window
            read &= page_start > contexts - window - page_size
        # Entries that are not read become page 0, whose tokens get no weight and may hold anything.
        pages = tables[:, : read.shape[1]].masked_fill(~read, 0).flatten()
        bias = torch.zeros((), dtype=dtype, device=device).masked_fill(~seen, -torch.inf)
        return Together(rows, pages, distance, seen, bias[:, None, None])


class DecodingLayout(PagedLayout):
    """The layout of a step with one token of each sequence, whose tensors may be written later.

    Args:
        block_tables, context_lens: as for :class:`PagedLayout`.

    """

    def __init__(self, block_tables: torch.Tensor, context_lens: torch.Tensor) -> None:
        self.checked = set()
        self.slot_bounds = 0, -1
        rows = torch.arange(len(context_lens), device=context_lens.device)
        self._single = SingleTokens(rows, block_tables, context_lens, True)

    def single_tokens(self, cache: torch.Tensor, sliding_window: int | None) -> SingleTokens | None:
        """Return all sequences."""
        return self._single

    def parts(self, *_: object, **__: object) -> list[Alone | Together]:
        """Raise: what is attended to in parts depends on the lengths."""
        raise NotRecordableError("attention reads lengths on the host")
