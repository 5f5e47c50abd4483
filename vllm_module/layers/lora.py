"""LoRA (arXiv:2106.09685): what adapters add to a product, each to the rows of its requests.

An adapter adds ``scale * B (A x)`` to the product ``W x`` of a layer, with ``A [rank, input]`` cut
like the layer's input and ``B [output, rank]`` cut like its output. So each rank adds what it has
before partial products are summed, and no further exchange is needed. A fused layer has an A and a
B for each slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from vllm_module.layers.lora_rows import AdapterRows, Places, Rows
from vllm_module.layers.lora_slots import SlotMemory
from vllm_module.layers.low_rank import LowRank, LowRankPart


class StackedLowRank(NamedTuple):
    """Several adapters of one layer, side by side: one product for all of them.

    Attributes:
        key: of which adapters, and which updates of them, this was made.
        a: ``[adapters, ranks, input]``, the slots one after the other, each of its largest rank.
        scale: factors of B A, ``[adapters, 1, ranks]``; 0 where an adapter has a smaller rank.
        parts: for each slot its ranks, its range of the output, and ``[adapters, rank, output]``.
            These and the factors are float32 at least, so products with B are scaled and added
            before they are rounded, as where an adapter is alone.

    """

    key: tuple[int, ...]
    a: torch.Tensor
    scale: torch.Tensor
    parts: tuple[tuple[slice, slice, torch.Tensor], ...]

    @classmethod
    def of(cls, adapters: Sequence[LowRank], key: tuple[int, ...]) -> StackedLowRank:
        """Copy the A and B of adapters."""
        of_slots: dict[tuple[int, int], dict[int, LowRankPart]] = {}
        for index, weights in enumerate(adapters):
            for part in weights.parts:
                of_slots.setdefault((part.output.start, part.output.stop), {})[index] = part
        slots, ends = list(of_slots.items()), [0]
        for _, of_slot in slots:
            most = max(part.rank.stop - part.rank.start for part in of_slot.values())
            ends.append(ends[-1] + most)
        like, count = adapters[0].a, len(adapters)
        a = like.new_zeros(count, ends[-1], like.shape[1])
        exact = torch.promote_types(like.dtype, torch.float32)
        scale = like.new_zeros(count, 1, ends[-1], dtype=exact)
        parts = []
        for ((start, stop), of_slot), (first, end) in zip(slots, pairwise(ends), strict=True):
            b = scale.new_zeros(count, end - first, stop - start)
            for index, (rank, output, factor) in of_slot.items():
                size = rank.stop - rank.start
                a[index, first : first + size] = adapters[index].a[rank]
                b[index, :size] = adapters[index].b[output, :size].t()
                scale[index, :, first : first + size] = factor
            parts.append((slice(first, end), slice(start, stop), b))
        return cls(key, a, scale, tuple(parts))

    def add(self, x: torch.Tensor, y: torch.Tensor, places: Places) -> None:
        """Add to ``y [rows, output]``, in place, what is computed of ``x [rows, input]``."""
        count, most = len(self.a), len(places.rows) // len(self.a)
        given = x.index_select(0, places.rows).view(count, most, -1)
        low = torch.bmm(given, self.a.transpose(1, 2)) * self.scale
        for ranks, output, b in self.parts:
            added = low.new_empty(count * most + 1, b.shape[2])
            torch.bmm(low[:, :, ranks], b, out=added[:-1].view(count, most, -1))
            added[-1] = 0  # of rows of the base
            y[:, output] += added.index_select(0, places.inverse)


class LayerAdapters:
    """The adapters of one layer.

    Attributes:
        rows: of the step; all layers of a model share it.
        weights: what each adapter adds, by its number; those that do not adapt the layer lack.
        memory: on a device, the A and B of the adapters in slots.

    """

    memory: SlotMemory | None = None
    _together: StackedLowRank | None = None

    def __init__(self, rows: AdapterRows) -> None:
        self.rows = rows
        self.weights: dict[int, LowRank] = {}
        self._used: set[int] = set()
        self._used_slots = False

    def attach(self, number: int, weights: LowRank) -> None:
        """Add what an adapter adds."""
        if self.rows.slots is not None:
            self.memory = self.rows.slots.memory_for(self.memory, self.weights, weights)
        self.weights[number] = weights

    def forget(self, number: int) -> None:
        """Free what belongs to an adapter."""
        self.weights.pop(number, None)
        self._used.discard(number)
        self._together = None

    @property
    def is_needed(self) -> bool:
        """True if an adapter adapts the layer, or graphs use its memory."""
        return bool(self.weights) or self.memory is not None

    def has_used(self, number: int) -> bool:
        """Return whether a step has added something of an adapter; of slots, that of any."""
        return self._used_slots or number in self._used

    def row_slots(self) -> tuple[SlotMemory, torch.Tensor] | None:
        """Return the memory of slots and the slots of the step's rows; ``None`` on a CPU."""
        if self.rows.row_slots is None:
            return None
        assert self.memory is not None
        self._used_slots = True
        return self.memory, self.rows.row_slots

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return ``y [..., output]`` with what adapters add for ``x [..., input]``."""
        if not self.rows.any:
            return y
        x, flat = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
        self.rows.check(len(x))
        if (row_slots := self.row_slots()) is not None:
            row_slots[0].add(x, flat, self.rows.by_slot())
            return flat.view(y.shape)
        present, places = self.present(), self.rows.places
        if places is not None and len(present) == len(self.rows.groups):
            key = (self.rows.updates, *[number for number, _, _ in present])
            if self._together is None or self._together.key != key:
                self._together = StackedLowRank.of([weights for _, weights, _ in present], key)
            self._together.add(x, flat, places)
            return flat.view(y.shape)
        for _, weights, rows in present:
            part = flat[rows]
            weights.add(x[rows], part)
            if isinstance(rows, torch.Tensor):
                flat.index_copy_(0, rows, part)
        return flat.view(y.shape)

    def add_embedded(
        self, tokens: torch.Tensor, elsewhere: torch.Tensor | None, y: torch.Tensor
    ) -> torch.Tensor:
        """Return embeddings ``y [..., features]`` with what adapters add for ``tokens [...]``.

        Nothing is added to tokens that are ``elsewhere``: on another rank.
        """
        if not self.rows.any:
            return y
        tokens, flat = tokens.reshape(-1), y.reshape(-1, y.shape[-1])
        self.rows.check(len(tokens))
        if (row_slots := self.row_slots()) is not None:
            memory, slots = row_slots
            if elsewhere is not None:
                slots = slots.masked_fill(elsewhere.reshape(-1), -1)
            memory.add_columns(tokens, slots, flat)
            return flat.view(y.shape)
        for _, weights, rows in self.present():
            part = flat[rows]
            added = torch.zeros_like(part)
            weights.add_columns(tokens[rows], added)
            if elsewhere is not None:
                added.masked_fill_(elsewhere.reshape(-1)[rows].unsqueeze(-1), 0)
            flat[rows] = part + added
        return flat.view(y.shape)

    def add_experts(
        self,
        x: torch.Tensor,
        sources: torch.Tensor | None,
        tokens: torch.Tensor | None,
        offsets: torch.Tensor,
        y: torch.Tensor,
    ) -> torch.Tensor:
        """Return the experts' products ``y [rows, output]`` with what adapters add to them.

        Args:
            x: what the experts are given, ``[..., input]``.
            sources: the row of ``x`` for each row of ``y``; by default the same.
            tokens: the token of the step for each row of ``y``.
            offsets: the first row of each of this rank's experts, and the end of the last one's.
            y: rows in the order of their experts.

        """
        if not self.rows.any:
            return y
        if tokens is None:
            raise RuntimeError(
                "experts with adapters are called without the token of each row: give tokens="
            )
        if (row_slots := self.row_slots()) is not None:
            memory, slots = row_slots
            memory.add_experts(x, sources, slots[tokens], offsets, y)
            return y
        adapters = self.rows.of(tokens)
        for number, weights, _ in self.present():
            chosen = (adapters == number).nonzero().view(-1)
            edges = torch.searchsorted(chosen, offsets.to(chosen.dtype)).tolist()
            for expert, (first, end) in enumerate(pairwise(edges)):
                if first == end:
                    continue
                rows = chosen[first:end]
                part = y[rows]
                weights.add(x[rows if sources is None else sources[rows]], part, expert)
                y.index_copy_(0, rows, part)
        return y

    def present(self) -> list[tuple[int, LowRank, Rows]]:
        """Return the adapters of the step that adapt this layer, each with its rows."""
        weights = self.weights
        found = [(each, weights[each], rows) for each, rows in self.rows.groups if each in weights]
        self._used.update([each for each, _, _ in found])
        return found
