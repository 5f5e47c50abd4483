"""Which rows of a step belong to which LoRA adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch.nn.utils.rnn import pad_sequence

from vllm_module.layers.lora_slots import AdapterSlots, SlotRows

Rows: TypeAlias = slice | torch.Tensor


class Places(NamedTuple):
    """Rows of a step, in the order of their adapters, each of which has as many places.

    Attributes:
        rows: the row at each place, ``[adapters * most]``; any row where an adapter has fewer.
        inverse: the place of each row; one behind the last for rows of the base.

    """

    rows: torch.Tensor
    inverse: torch.Tensor

    @classmethod
    def of(cls, rows_of: Sequence[torch.Tensor], count: int, device: torch.device) -> Places:
        """Return those of ``count`` rows, from the rows of each adapter."""
        rows = pad_sequence([*rows_of], batch_first=True, padding_value=-1).view(-1)
        held = rows >= 0
        inverse = rows.new_full((count,), len(rows))
        inverse[rows[held]] = held.nonzero().view(-1)
        return cls(rows.clamp_(min=0).to(device), inverse.to(device))


class AdapterRows:
    """Which rows of a step belong to the requests of which adapter.

    Attributes:
        groups: each adapter of the step, by its number, with its rows; none for the base model.
        places: rows in the order of their adapters; ``None`` for one adapter, and where most rows
            are one adapter's.
        updates: how often an adapter of the model has been updated.
        slots: on a device, which adapter is in which slot; then the two above are empty.
        row_slots: int32 ``[rows]``: the slot of each row, or -1; ``None`` in steps of the base.

    Args:
        slots: the same.

    """

    def __init__(self, slots: AdapterSlots | None = None) -> None:
        self.updates, self.slots = 0, slots
        self.row_slots: torch.Tensor | None = None
        self._slot_rows: dict[int, SlotRows] = {}
        self.places: Places | None = None
        self.groups: list[tuple[int, Rows]] = []
        self._numbers = torch.empty(0, dtype=torch.int64)  # adapter of each row, on the host
        self._row_adapters: torch.Tensor | None = None  # and on the device, once it is asked for

    def set(self, adapters: Mapping[int, int], starts: list[int], device: torch.device) -> None:
        """Set them for a step.

        Args:
            adapters: by index of a sequence, the number of its adapter, if it has one.
            starts: the first row of each sequence, and the end of the last one's.
            device: of the rows.

        """
        numbers = torch.full((starts[-1],), -1, device="cpu")
        for sequence, adapter in adapters.items():
            numbers[starts[sequence] : starts[sequence + 1]] = adapter
        self._set(numbers, device)

    @property
    def any(self) -> bool:
        """True if the step has rows of an adapter, or replays with any that it has."""
        return bool(self.groups) or self.row_slots is not None

    def set_slots(self, slots: torch.Tensor | None) -> None:
        """Set the slots of a step's rows, int32 ``[rows]`` on the device; ``None`` for the base."""
        self.row_slots = slots
        self._slot_rows.clear()

    def by_slot(self, heads: int = 1) -> SlotRows:
        """Return the rows of all heads, one head after another, by slot and head.

        They are sorted once for all layers of a step.
        """
        assert self.slots is not None
        assert self.row_slots is not None
        if heads not in self._slot_rows:
            slots = self.row_slots
            if heads > 1:
                head = torch.arange(heads, dtype=torch.int32, device=slots.device)
                each = slots * heads + head.unsqueeze(1)
                slots = torch.where(slots < 0, -1, each).view(-1).int()
            self._slot_rows[heads] = SlotRows.of(slots, self.slots.count, heads)
        return self._slot_rows[heads]

    def select(self, rows: list[int]) -> None:
        """Go on with some rows of the step, such as those whose logits are computed."""
        if self.groups:
            self._set(self._numbers[rows], self._device)

    def _set(self, numbers: torch.Tensor, device: torch.device) -> None:
        self._numbers, self._device, self._row_adapters = numbers, device, None
        self.groups, self.places = [], None
        rows_of = {
            adapter: (numbers == adapter).nonzero().view(-1)
            for adapter in sorted({*numbers.tolist()} - {-1})
        }
        for adapter, rows in rows_of.items():
            first, end = int(rows[0]), int(rows[-1]) + 1
            whole = end - first == len(rows)
            self.groups.append((adapter, slice(first, end) if whole else rows.to(device)))
        counts = [len(rows) for rows in rows_of.values()]
        if len(counts) > 1 and max(counts) * len(counts) <= 2 * sum(counts):
            self.places = Places.of([*rows_of.values()], len(numbers), device)

    def of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the adapter, or -1, of each of these rows of the step."""
        if self._row_adapters is None:
            self._row_adapters = self._numbers.to(self._device)
        return self._row_adapters[tokens]

    def check(self, rows: int) -> None:
        """Raise ``RuntimeError`` if a layer is not given a row for each token of the step."""
        tokens = len(self._numbers if self.row_slots is None else self.row_slots)
        if rows != tokens:
            raise RuntimeError(
                f"a layer with an adapter is given {rows} rows, and {tokens} tokens: "
                "adapters are for layers that compute a row for each token"
            )
