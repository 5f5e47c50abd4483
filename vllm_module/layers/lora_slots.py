"""LoRA adapters on a device: a fixed number of slots, whose memory stays where it is.

Each layer has memory for the A and B of as many adapters as one step may have, padded to one rank.
An adapter is in host memory, and is copied into a slot when a step first needs it. A step then
differs from another in the slots of its rows only, which are numbers in memory, so a CUDA graph
replays any of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from typing import NamedTuple

import torch

from vllm_module.kernels.adapters.lora_expand import lora_expand
from vllm_module.kernels.adapters.lora_shrink import lora_shrink
from vllm_module.kernels.experts.sort_by_expert import sort_by_expert
from vllm_module.kernels.operators import next_power_of_2
from vllm_module.layers.low_rank import LowRank

_LEAST_RANK = 16  # of a tile


def padded_rank(rank: int) -> int:
    """Return the rank that slots have for adapters of ranks up to ``rank``."""
    return max(_LEAST_RANK, next_power_of_2(rank))


class SlotRows(NamedTuple):
    """Rows of a step in the order of their slots.

    Attributes:
        rows: int32 ``[rows]``; those of the base come last.
        offsets: int32 ``[groups + 1]``; the first row of each group. A group is a slot, or one head
            or expert of a slot.
        slot_offsets: the same of slots, ``[slots + 1]``.

    """

    rows: torch.Tensor
    offsets: torch.Tensor
    slot_offsets: torch.Tensor

    @classmethod
    def of(cls, slots: torch.Tensor, count: int, each: int = 1) -> SlotRows:
        """Sort rows by group, on the device.

        Args:
            slots: int32 ``[rows]``: slot times ``each`` plus the number within it; -1 for none.
            count: how many slots there are.
            each: groups of a slot.

        """
        rows, offsets = sort_by_expert(slots.unsqueeze(1), 0, count * each)
        return cls(rows, offsets, offsets[::each].contiguous())


class SlotMemory:
    """A and B of one layer, for the adapters in all slots.

    Args:
        count: number of slots.
        weights: what each adapter adds to the layer, by its number; those that do not adapt it
            lack.
        like: one of them.
        ends: where the slices of the layer's output end.
        rank: largest rank of a slice.
        device: where the memory is; ``weights`` are in host memory, or there.

    Attributes:
        a: ``[slots, slices * rank, input]``; of experts ``[slots, experts, …]``.
        b: ``[slots, output, rank]``, or ``[slots, experts, output, rank]``.
        scale: float32 ``[slots, slices]``; 0 where an adapter adds nothing.
        ends: int32 ``[slices]``.

    """

    def __init__(
        self,
        count: int,
        weights: Mapping[int, LowRank],
        like: LowRank,
        ends: Collection[int],
        rank: int,
        device: torch.device,
    ) -> None:
        self.weights = weights
        self.rank = padded_rank(rank)
        self.slices = [*pairwise([0, *ends])]
        *experts, _, inputs = like.a.shape
        shape = count, *experts, len(ends) * self.rank, inputs
        self.a = like.a.new_zeros(shape, device=device)
        self.b = like.b.new_zeros(count, *like.b.shape[:-1], self.rank, device=device)
        self.scale = self.a.new_zeros(count, len(ends), dtype=torch.float32)
        self.ends = torch.tensor([*ends], dtype=torch.int32, device=self.a.device)

    def fits(self, weights: LowRank) -> bool:
        """Return whether an adapter has a place in each slot."""
        return weights.rank <= self.rank and {*weights.ends} <= {end for _, end in self.slices}

    def fill(self, slot: int, number: int) -> None:
        """Copy an adapter into a slot; what it does not have adds nothing."""
        weights = self.weights.get(number)
        self.scale[slot].zero_()
        if weights is None:
            return
        self.a[slot].zero_()
        self.b[slot].zero_()
        for part in weights.parts:
            size = part.rank.stop - part.rank.start
            for index, (start, end) in enumerate(self.slices):
                if part.output.start <= start and end <= part.output.stop:
                    ranks = slice(index * self.rank, index * self.rank + size)
                    self.a[slot, ..., ranks, :] = weights.a[..., part.rank, :]
                    self.b[slot, ..., start:end, :size] = weights.b[..., start:end, :size]
                    self.scale[slot, index].fill_(part.scale)

    def add(self, x: torch.Tensor, y: torch.Tensor, rows: SlotRows) -> None:
        """Add to ``y [rows, output]``, in place, what is computed of ``x [rows, input]``."""
        low = lora_shrink(x, self.a, rows.rows, rows.offsets)
        lora_expand(low, self.b, self.scale, self.ends, rows.rows, rows.offsets, y)

    def add_columns(self, tokens: torch.Tensor, slots: torch.Tensor, y: torch.Tensor) -> None:
        """Add to embeddings ``y [rows, features]`` of ``tokens [rows]``, whose slots are given."""
        rows = SlotRows.of(slots, len(self.a))
        order = rows.rows.long()
        low = self.a[slots[order].clamp(min=0), :, tokens[order]].float().unsqueeze(0)
        lora_expand(low, self.b, self.scale, self.ends, rows.rows, rows.offsets, y)

    def add_experts(
        self,
        x: torch.Tensor,
        sources: torch.Tensor | None,
        slots: torch.Tensor,
        offsets: torch.Tensor,
        y: torch.Tensor,
    ) -> None:
        """Add to ``y``, as :meth:`LayerAdapters.add_experts` does; ``slots`` are its rows'."""
        count, experts = self.a.shape[:2]
        row = torch.arange(len(y), dtype=torch.int32, device=y.device)
        expert = torch.searchsorted(offsets[1:], row, right=True)
        group = torch.where((slots >= 0) & (expert < experts), slots * experts + expert, -1)
        rows = SlotRows.of(group.int(), count, experts)
        taken = rows.rows if sources is None else sources.index_select(0, rows.rows).int()
        low = lora_shrink(x, self.a.flatten(0, 1), taken, rows.offsets)
        scale = self.scale.repeat_interleave(experts, 0)
        b = self.b.flatten(0, 1)
        lora_expand(low, b, scale, self.ends, rows.rows, rows.offsets, y)

    def add_heads(
        self, x: torch.Tensor, y: torch.Tensor, rows: SlotRows, features: slice, back: bool
    ) -> None:
        """Add to products of heads.

        Args:
            x: ``[num_heads, rows, latent]``, or with ``back`` features instead of latents.
            y: ``[num_heads, rows, …]``, contiguous, of the other kind.
            rows: a group is a slot and a head.
            features: those of a head, in the layer's output.
            back: multiply by ``A^T B^T`` in place of ``B A``.

        """
        heads, count = len(x), len(self.a)
        b = self.b.view(count, heads, -1, self.rank)[:, :, features].flatten(0, 1)
        given, flat = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        ends = self.ends.new_full((1,), flat.shape[1])
        if back:
            low = lora_shrink(given, b.transpose(1, 2), rows.rows, rows.offsets)
            a = self.a.transpose(1, 2)
            lora_expand(low, a, self.scale, ends, rows.rows, rows.slot_offsets, flat)
        else:
            low = lora_shrink(given, self.a, rows.rows, rows.slot_offsets)
            scale = self.scale.repeat_interleave(heads, 0)
            lora_expand(low, b, scale, ends, rows.rows, rows.offsets, flat)


class AdapterSlots:
    """Which adapter is in which slot, of all layers of a model.

    Args:
        count: number of slots: adapters of one step, at most.
        device: where their memory is.
        max_rank: the rank that memory is for; ``None`` to make it larger as adapters need it.

    Attributes:
        layout: changes whenever a layer's memory is another one, which no graph knows.

    """

    def __init__(self, count: int, device: torch.device, max_rank: int | None = None) -> None:
        self.count, self.layout = count, 0
        self._device = device
        self._max_rank = max_rank
        self._slots: dict[int, int] = {}  # by number of an adapter; used longest ago first
        self._memories: list[SlotMemory] = []

    def place(self, adapters: Iterable[int]) -> dict[int, int]:
        """Return the slot of each of these adapters; copy those that have none into one."""
        needed = {*adapters}
        for number in sorted(needed):
            slot = self._slots.pop(number, None)
            if slot is None:
                slot = self._vacant(needed)
                for memory in self._memories:
                    memory.fill(slot, number)
            self._slots[number] = slot
        return {number: self._slots[number] for number in needed}

    def _vacant(self, needed: set[int]) -> int:
        free = {*range(self.count)} - {*self._slots.values()}
        if free:
            return min(free)
        oldest = next((number for number in self._slots if number not in needed), None)
        assert oldest is not None, "a step has at most max_loras adapters"
        return self._slots.pop(oldest)

    def refill(self, adapter: int) -> None:
        """Copy an adapter again, which has been updated, if it is in a slot."""
        if adapter in self._slots:
            for memory in self._memories:
                memory.fill(self._slots[adapter], adapter)

    def forget(self, adapter: int) -> None:
        """Leave the slot of an adapter to others."""
        self._slots.pop(adapter, None)

    def memory_for(
        self, memory: SlotMemory | None, weights: Mapping[int, LowRank], new: LowRank
    ) -> SlotMemory:
        """Return memory of a layer in which an adapter has a place, with all that is in slots.

        Args:
            memory: what the layer has.
            weights: what the adapters add to the layer, by their numbers.
            new: what the adapter adds.

        """
        if memory is not None and memory.fits(new):
            return memory
        ends, rank = {*new.ends}, max(new.rank, self._max_rank or 1)
        if memory is not None:
            ends.update(end for _, end in memory.slices)
            rank = max(rank, memory.rank)
        made = SlotMemory(self.count, weights, new, sorted(ends), rank, self._device)
        for number, slot in self._slots.items():
            made.fill(slot, number)
        # Only now: if there is no memory for the new one, the layer goes on with what it has.
        self._memories = [each for each in self._memories if each is not memory] + [made]
        self.layout += 1
        return made
