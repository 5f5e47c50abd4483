"""LoRA (arXiv:2106.09685): what adapters add to a product, each to the rows of its requests.

An adapter adds ``scale * B (A x)`` to the product ``W x`` of a layer, with ``A [rank, input]`` cut
like the layer's input and ``B [output, rank]`` cut like its output. So each rank adds what it has
before partial products are summed, and no further exchange is needed. A fused layer has an A and a
B for each slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import torch
from torch.nn.utils.rnn import pad_sequence

Rows: TypeAlias = slice | torch.Tensor


class LowRankPart(NamedTuple):
    """The A and B of one slot, as ranges of the tensors of all slots.

    Attributes:
        rank: rows of A.
        output: rows of B, and features of the layer's product.
        scale: factor of B A.

    """

    rank: slice
    output: slice
    scale: float


class LowRank(NamedTuple):
    """What one adapter adds to one layer of this rank.

    Attributes:
        a: ``[ranks, input]``, of all slots one after the other; of experts, ``[experts, …]``.
        b: ``[output, rank]``, or ``[experts, output, rank]``.
        parts: where each slot's are.

    """

    a: torch.Tensor
    b: torch.Tensor
    parts: tuple[LowRankPart, ...]

    def add(self, x: torch.Tensor, y: torch.Tensor, expert: int | None = None) -> None:
        """Add to ``y [rows, output]``, in place, what the adapter computes of ``x [rows, input]``.

        ``expert`` is the number of the rows' expert among this rank's.
        """
        a, b = (self.a, self.b) if expert is None else (self.a[expert], self.b[expert])
        self._add_product(torch.mm(x, a.t()), b, y)

    def add_columns(self, tokens: torch.Tensor, y: torch.Tensor) -> None:
        """Add to ``y [rows, features]`` what an embedding's adapter has for ``tokens [rows]``."""
        self._add_product(self.a.index_select(1, tokens).t(), self.b, y)

    def _add_product(self, low: torch.Tensor, b: torch.Tensor, y: torch.Tensor) -> None:
        for rank, output, scale in self.parts:
            size = rank.stop - rank.start
            y[:, output].addmm_(low[:, rank], b[output, :size].t(), alpha=scale)


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
        inverse = torch.full((count,), len(rows))
        inverse[rows[held]] = torch.arange(len(rows))[held]
        return cls(rows.clamp_(min=0).to(device), inverse.to(device))


class StackedLowRank(NamedTuple):
    """Several adapters of one layer, side by side: one product for all of them.

    Attributes:
        key: of which adapters, and which updates of them, this was made.
        a: ``[adapters, ranks, input]``, the slots one after the other, each of its largest rank.
        scale: factors of B A, ``[adapters, 1, ranks]``; 0 where an adapter has a smaller rank.
        parts: for each slot its ranks, its range of the output, and ``[adapters, rank, output]``.

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
        scale = like.new_zeros(count, 1, ends[-1])
        parts = []
        for ((start, stop), of_slot), (first, end) in zip(slots, pairwise(ends), strict=True):
            b = like.new_zeros(count, end - first, stop - start)
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
        low = torch.bmm(given, self.a.transpose(1, 2)).mul_(self.scale)
        for ranks, output, b in self.parts:
            added = y.new_empty(count * most + 1, b.shape[2])
            torch.bmm(low[:, :, ranks], b, out=added[:-1].view(count, most, -1))
            added[-1] = 0  # of rows of the base
            y[:, output] += added.index_select(0, places.inverse)


class AdapterRows:
    """Which rows of a step belong to the requests of which adapter.

    Attributes:
        groups: each adapter of the step, by its number, with its rows; none for the base model.
        places: rows in the order of their adapters; ``None`` for one adapter, and where most rows
            are one adapter's.
        updates: how often an adapter of the model has been updated.

    """

    def __init__(self) -> None:
        self.updates = 0
        self.places: Places | None = None
        self.groups: list[tuple[int, Rows]] = []
        self._numbers = torch.empty(0, dtype=torch.int64)  # adapter of each row, on the host
        self._of_row: torch.Tensor | None = None  # and on the device, once it is asked for

    def set(self, adapters: Mapping[int, int], starts: list[int], device: torch.device) -> None:
        """Set them for a step.

        Args:
            adapters: by index of a sequence, the number of its adapter, if it has one.
            starts: the first row of each sequence, and the end of the last one's.
            device: of the rows.

        """
        numbers = torch.full((starts[-1],), -1)
        for sequence, adapter in adapters.items():
            numbers[starts[sequence] : starts[sequence + 1]] = adapter
        self._set(numbers, device)

    def set_all(self, adapter: int | None, count: int, device: torch.device) -> None:
        """Set all of ``count`` rows to one adapter, or to none."""
        self._set(torch.full((count,), -1 if adapter is None else adapter), device)

    def select(self, rows: list[int]) -> None:
        """Go on with some rows of the step, such as those whose logits are computed."""
        if self.groups:
            self._set(self._numbers[rows], self._device)

    def _set(self, numbers: torch.Tensor, device: torch.device) -> None:
        self._numbers, self._device, self._of_row = numbers, device, None
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
        if self._of_row is None:
            self._of_row = self._numbers.to(self._device)
        return self._of_row[tokens]

    def check(self, rows: int) -> None:
        """Raise ``RuntimeError`` if a layer is not given a row for each token of the step."""
        if rows != len(self._numbers):
            raise RuntimeError(
                f"a layer with an adapter is given {rows} rows, and {len(self._numbers)} tokens: "
                "adapters are for layers that compute a row for each token"
            )


class LayerAdapters:
    """The adapters of one layer.

    Attributes:
        rows: of the step; all layers of a model share it.
        weights: what each adapter adds, by its number; those that do not adapt the layer lack.
        used: numbers of adapters that a step has added something of.

    """

    _together: StackedLowRank | None = None

    def __init__(self, rows: AdapterRows) -> None:
        self.rows = rows
        self.weights: dict[int, LowRank] = {}
        self.used: set[int] = set()

    def forget(self, number: int) -> None:
        """Free what belongs to an adapter."""
        self.weights.pop(number, None)
        self.used.discard(number)
        self._together = None

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return ``y [..., output]`` with what adapters add for ``x [..., input]``."""
        if not self.rows.groups:
            return y
        x, flat = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
        self.rows.check(len(x))
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
        if not self.rows.groups:
            return y
        tokens, flat = tokens.reshape(-1), y.reshape(-1, y.shape[-1])
        self.rows.check(len(tokens))
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
        if not self.rows.groups:
            return y
        if tokens is None:
            raise RuntimeError(
                "experts with adapters are called without the token of each row: give tokens="
            )
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
        self.used.update([each for each, _, _ in found])
        return found
