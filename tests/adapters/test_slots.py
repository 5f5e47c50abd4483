"""Slots of adapters, beside the products of each adapter alone, in any order of steps."""

from __future__ import annotations

import random
import runpy
import weakref
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module.adapters import attach, detach, slot_bytes
from vllm_module.distributed import run_ranks
from vllm_module.errors import UnsupportedModelError
from vllm_module.layers.linear import LinearBase
from vllm_module.layers.lora import LayerAdapters
from vllm_module.layers.lora_rows import AdapterRows, Places
from vllm_module.layers.lora_slots import AdapterSlots, SlotMemory, SlotRows
from vllm_module.layers.low_rank import LowRank, LowRankPart

support = runpy.run_path(str(Path(__file__).with_name("support.py")))
SIZES, INPUTS = (6, 3, 9), 10
ENDS = (6, 9, 18)


def drawn(generator: torch.Generator, ranks: list[int]) -> LowRank:
    """Return A and B of a fused layer; slots of rank 0 are absent."""
    parts, first, of_rank = [], 0, 0
    for number, (size, rank) in enumerate(zip(SIZES, ranks, strict=True)):
        if rank:
            where = slice(of_rank, of_rank + rank), slice(first, first + size)
            parts.append(LowRankPart(*where, 0.5 + number))
        first, of_rank = first + size, of_rank + rank
    a = torch.randn(of_rank, INPUTS, generator=generator)
    b = torch.full((sum(SIZES), max(ranks)), torch.nan)  # of padding, nothing is used
    for part in parts:
        size = part.rank.stop - part.rank.start
        b[part.output, :size] = torch.randn(len(b[part.output]), size, generator=generator)
    return LowRank(a, b, tuple(parts), ENDS)


def alone(weights: LowRank, x: torch.Tensor) -> torch.Tensor:
    """Write out what an adapter adds to rows."""
    added = torch.zeros(len(x), sum(SIZES))
    for rank, output, scale in weights.parts:
        size = rank.stop - rank.start
        added[:, output] = scale * (x @ weights.a[rank].t() @ weights.b[output, :size].t())
    return added


class Layers:
    """Two layers, the second of which only some adapters adapt, and a model of what they add."""

    def __init__(self, slots: int) -> None:
        self.rows = AdapterRows(AdapterSlots(slots, torch.device("cpu")))
        self.layers = [LayerAdapters(self.rows) for _ in range(2)]
        self.held: dict[int, list[LowRank | None]] = {}
        self.generator = torch.Generator().manual_seed(0)

    @property
    def slots(self) -> AdapterSlots:
        assert self.rows.slots is not None
        return self.rows.slots

    def load(self, number: int, *ranks: list[int] | None) -> None:
        self.held[number] = [each and drawn(self.generator, each) for each in ranks]
        for layer, weights in zip(self.layers, self.held[number], strict=True):
            if weights is not None:
                layer.attach(number, weights)

    def unload(self, number: int) -> None:
        for layer in self.layers:
            layer.forget(number)
        self.slots.forget(number)
        del self.held[number]

    def update(self, number: int) -> None:
        for weights in self.held[number]:
            if weights is not None:
                weights.a.normal_(generator=self.generator)
        self.slots.refill(number)

    def step(self, adapters: list[int]) -> None:
        """Compare a step of one row for each adapter, -1 for the base."""
        of_adapters = self.slots.place({*adapters} - {-1})
        slots = [of_adapters.get(number, -1) for number in adapters]
        self.rows.set_slots(torch.tensor(slots, dtype=torch.int32))
        x = torch.randn(len(adapters), INPUTS, generator=self.generator)
        y = torch.randn(len(adapters), sum(SIZES), generator=self.generator)
        for at, layer in enumerate(self.layers):
            if layer.memory is None:
                continue
            found = layer.add(x, y.clone())
            for row, number in enumerate(adapters):
                weights = self.held[number][at] if number >= 0 else None
                if weights is None:
                    assert torch.equal(found[row], y[row]), "nothing is added"
                else:
                    want = y[row] + alone(weights, x[row : row + 1])[0]
                    torch.testing.assert_close(found[row], want, rtol=1e-4, atol=1e-4)


def steps_in_any_order() -> None:
    """Serve eight adapters in three slots, while they are loaded, unloaded and updated."""
    layers, draw, number = Layers(3), random.Random(0), 0
    for _ in range(150):
        what = draw.random()
        if len(layers.held) < 8 and what < 0.3:
            first, second = ([draw.choice([0, 1, 3, 16, 17]) for _ in SIZES] for _ in range(2))
            first[draw.randrange(3)] = 2
            layers.load(number, first, second if any(second) else None)
            number += 1
        elif layers.held and what < 0.4:
            layers.unload(draw.choice([*layers.held]))
        elif layers.held and what < 0.5:
            layers.update(draw.choice([*layers.held]))
        else:
            some = draw.sample([*layers.held], min(len(layers.held), 3))
            layers.step([draw.choice([-1, *some]) for _ in range(draw.randint(1, 9))])
    assert number > 10


def test_any_order_of_loads_updates_and_steps() -> None:
    """Each row has what its adapter adds, whatever was in its slot before."""
    steps_in_any_order()


FILL = SlotMemory.fill


def fill_once(self: SlotMemory, slot: int, number: int) -> None:
    if not self.scale[slot].any():
        FILL(self, slot, number)


def fill_padding(self: SlotMemory, slot: int, number: int) -> None:
    """The ranks that an adapter does not have are those of the one before."""
    before = self.a[slot].clone(), self.b[slot].clone()
    FILL(self, slot, number)
    for now, then in zip((self.a[slot], self.b[slot]), before, strict=True):
        now += then * (now == 0)


def fill_from_above(self: SlotMemory, slot: int, number: int) -> None:
    """The first slice is where the last one should be."""
    FILL(self, slot, number)
    self.scale[slot] = self.scale[slot].roll(1)


FAULTS: dict[str, tuple[type, str, Any]] = {
    "stale after eviction": (SlotMemory, "fill", fill_once),
    "padding of ranks": (SlotMemory, "fill", fill_padding),
    "scales of other slices": (SlotMemory, "fill", fill_from_above),
    "not updated": (AdapterSlots, "refill", lambda *_: None),
    "unloaded and still there": (
        AdapterSlots,
        "place",
        lambda self, needed: dict.fromkeys(needed, 0),
    ),
    "too small": (SlotMemory, "fits", lambda *_: True),
    "the next slot": (SlotRows, "of", classmethod(lambda cls, slots, *n: ROWS_OF(slots + 1, *n))),
    "rows of the base": (
        SlotRows,
        "of",
        classmethod(lambda cls, slots, *n: ROWS_OF(slots.abs(), *n)),
    ),
}
ROWS_OF = SlotRows.of


@pytest.mark.parametrize(("cls", "name", "fault"), FAULTS.values(), ids=FAULTS)
def test_planted_faults_are_found(
    cls: type, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps in any order see each of these mistakes."""
    monkeypatch.setattr(cls, name, fault)
    with pytest.raises((AssertionError, RuntimeError)):
        steps_in_any_order()


def test_memory_stays_until_an_adapter_needs_more() -> None:
    """Loads and unloads write to the same memory, unless a rank is above 16 or a layer is new."""
    layers = Layers(2)
    layers.load(0, [4, 0, 4], None)
    before = layers.slots.layout
    memory = layers.layers[0].memory
    layers.step([0, -1])
    layers.load(1, [0, 16, 0], None)
    layers.step([1, 0, -1])
    layers.unload(0)
    layers.load(2, [3, 0, 0], None)
    layers.step([2, 1])
    assert (layers.slots.layout, layers.layers[0].memory) == (before, memory)
    layers.load(3, [1, 1, 17], None)
    assert layers.slots.layout > before
    layers.step([2, 1])
    layers.step([3, -1, 2])
    before = layers.slots.layout
    layers.load(4, None, [1, 1, 1])
    assert layers.slots.layout > before
    layers.step([4, 3, 4])


def test_without_memory_for_more_a_layer_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter that has no place is not loaded; those before it are computed in all steps."""
    layers = Layers(2)
    layers.load(0, [4, 0, 4], [2, 2, 2])
    layers.load(1, [1, 1, 1], None)
    layers.step([0, 1])
    layout, memory = layers.slots.layout, layers.layers[0].memory

    def none_left(self: SlotMemory, *_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(SlotMemory, "__init__", none_left)
        with pytest.raises(torch.OutOfMemoryError):
            layers.load(2, [17, 0, 0], None)
    layers.unload(2)
    assert (layers.slots.layout, layers.layers[0].memory) == (layout, memory)
    layers.update(1)
    layers.step([0, 1, -1])
    layers.load(3, [3, 3, 3], [1, 1, 1])  # into slots that others had
    layers.step([3, 1])
    layers.step([0, 3])


def test_the_adapter_that_was_used_longest_ago_leaves() -> None:
    """A slot is not taken from an adapter of the same step."""
    slots = AdapterSlots(2, torch.device("cpu"))
    assert slots.place([7, 5]) == {5: 0, 7: 1}
    assert slots.place([5]) == {5: 0}
    assert slots.place([9]) == {9: 1}
    assert slots.place([5]) == {5: 0}
    assert slots.place([7, 5]) == {7: 1, 5: 0}
    slots.forget(5)
    assert slots.place([8, 7]) == {8: 0, 7: 1}


def test_rows_must_be_those_of_the_step() -> None:
    """A layer that is given other rows than the step's tokens is refused."""
    layers = Layers(1)
    layers.load(0, [1, 1, 1], None)
    layers.rows.set_slots(torch.tensor([0, -1], dtype=torch.int32))
    with pytest.raises(RuntimeError, match="is given 3 rows, and 2 tokens"):
        layers.layers[0].add(torch.ones(3, INPUTS), torch.ones(3, sum(SIZES)))


def test_one_adapter_of_the_whole_output_and_one_of_its_parts() -> None:
    """The A of a whole output is that of each part, as where experts are adapted together."""
    layers, generator = Layers(2), torch.Generator().manual_seed(1)
    layers.load(0, [2, 2, 2], None)
    a, b = torch.randn(5, INPUTS, generator=generator), torch.randn(18, 5, generator=generator)
    whole = LowRank(a, b, (LowRankPart(slice(0, 5), slice(0, 18), 2.0),), (18,))
    layers.layers[0].attach(1, whole)
    layers.held[1] = [whole, None]
    layers.step([1, 0, -1, 1])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("family", "rank"), [("phi3", 4), ("qwen3", 20)])
def test_the_bytes_of_slots_are_known_before(
    tmp_path: Path, family: str, rank: int, ranks: int
) -> None:
    """They are those that an adapter of all linear layers has allocated."""
    model = support["small_model"](family, tmp_path / "base")
    support["adapt"](model, tmp_path / "adapter", r=rank, target_modules="all-linear")

    def measured(_: int) -> None:
        base = support["load_base"](tmp_path / "base")
        expected = slot_bytes(base, 3, rank)
        rows = AdapterRows(AdapterSlots(3, torch.device("cpu")))
        attach(support["load_adapter"](base, tmp_path / "adapter"), 0, rows)
        layers = [each.adapters for each in base.modules() if isinstance(each, LinearBase)]
        memory = [each.memory for each in layers if each is not None]
        assert expected == sum(each.a.nbytes + each.b.nbytes for each in memory) > 0

    run_ranks(ranks, measured)


def test_a_rank_above_the_limit_is_refused(tuned: Any) -> None:
    """max_lora_rank is named, and nothing is attached."""
    one = tuned("llama")
    base = support["load_base"](one.base)
    adapter = support["load_adapter"](base, one.adapter)
    rows = AdapterRows(AdapterSlots(2, torch.device("cpu"), 4))
    with pytest.raises(UnsupportedModelError, match=r"the rank 7, and max_lora_rank is 6"):
        attach(adapter, 0, rows, 6)
    linear = [each for each in base.modules() if isinstance(each, LinearBase)]
    assert all(each.adapters is None for each in linear)
    attach(adapter, 0, rows, 7)
    assert any(each.adapters is not None for each in linear)


def test_a_layer_keeps_room_for_adapters_that_have_more() -> None:
    """Memory that is made anew for other ends has the larger rank; of fewer ends it stays."""
    layers, generator = Layers(2), torch.Generator().manual_seed(1)
    a, b = torch.randn(20, INPUTS, generator=generator), torch.randn(18, 20, generator=generator)
    whole = LowRank(a, b, (LowRankPart(slice(0, 20), slice(0, 18), 2.0),), (18,))
    layers.layers[0].attach(1, whole)
    layers.held[1] = [whole, None]
    layers.step([1, -1])
    layers.load(0, [2, 2, 2], None)
    layers.step([1, 0, -1, 1])
    before, memory = layers.slots.layout, layers.layers[0].memory
    layers.layers[0].attach(2, whole)
    layers.held[2] = [whole, None]
    assert (layers.slots.layout, layers.layers[0].memory) == (before, memory)
    layers.step([2, 0])


def test_nothing_of_an_adapter_is_held_once_it_is_forgotten() -> None:
    """On a CPU the A and B that were put side by side are freed with it."""
    layer, generator = LayerAdapters(AdapterRows()), torch.Generator().manual_seed(0)
    for number in (0, 1):
        layer.attach(number, drawn(generator, [2, 2, 2]))
    layer.rows.set({0: 0, 1: 1}, [0, 2, 4], torch.device("cpu"))
    layer.add(torch.ones(4, INPUTS), torch.zeros(4, sum(SIZES)))
    assert layer._together is not None
    held = weakref.ref(layer._together.a)
    layer.forget(0)
    assert held() is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_row_in_a_mixed_batch_is_what_it_is_alone(dtype: torch.dtype) -> None:
    """With a scale that the dtype cannot hold, a row differs by a rounding at most, and rarely.

    Products of other numbers of rows sum in another order. In 16 bits that shows where a sum is
    almost between two numbers: A x, or the result, is one step further then.
    """
    generator, ranks, inputs, outputs, each = (
        torch.Generator().manual_seed(0),
        (4, 24, 64),
        96,
        80,
        9,
    )
    layer, scale = LayerAdapters(AdapterRows()), 20 / 24
    of = []
    for number, rank in enumerate(ranks):
        a = torch.randn(rank, inputs, generator=generator).to(dtype)
        b = torch.randn(outputs, rank, generator=generator).to(dtype)
        part = LowRankPart(slice(0, rank), slice(0, outputs), scale)
        of.append(LowRank(a, b, (part,), (outputs,)))
        layer.attach(number, of[-1])
    count, cpu = len(ranks) * each, torch.device("cpu")
    x = torch.randn(count, inputs, generator=generator).to(dtype)
    y = torch.randn(count, outputs, generator=generator).to(dtype)
    own = [row % len(ranks) for row in range(count)]
    layer.rows.set(dict(enumerate(own)), [*range(count + 1)], cpu)
    assert layer.rows.places is not None
    mixed = layer.add(x, y.clone())
    equal = 0
    for row, number in enumerate(own):
        layer.rows.set({0: number}, [0, 1], cpu)
        (alone,) = layer.add(x[row : row + 1], y[row : row + 1].clone())
        a, b, given = of[number].a.double(), of[number].b.double(), x[row].double()
        sizes = y[row].double().abs() + scale * (b.abs() @ (a.abs() @ given.abs()))
        difference = (mixed[row].double() - alone.double()).abs()
        assert (difference <= 2 * torch.finfo(dtype).eps * sizes).all()
        equal += int((mixed[row] == alone).sum())
        if dtype.itemsize == 2:  # and the sum is the formula's, in which A x is rounded
            want = y[row].double() + 20 / 24 * b @ (a @ given).to(dtype).double()
            torch.testing.assert_close(mixed[row], want.to(dtype), rtol=1e-2, atol=1e-2)
    if dtype.itemsize == 2:
        assert equal >= 0.99 * mixed.numel()


def test_rows_of_no_expert_get_nothing() -> None:
    """Rows of other ranks' experts come last, and belong to no slot's expert."""
    generator = torch.Generator().manual_seed(0)
    held = {}
    for number in range(2):
        a = torch.randn(2, 3, INPUTS, generator=generator)
        b = torch.randn(2, 4, 3, generator=generator)
        held[number] = LowRank(a, b, (LowRankPart(slice(0, 3), slice(0, 4), 2.0),), (4,))
    slots = AdapterSlots(2, torch.device("cpu"))
    memory = slots.memory_for(None, held, held[0])
    at = slots.place(held)
    x, offsets = torch.randn(6, INPUTS, generator=generator), torch.tensor([0, 2, 4])
    for own in range(2):
        y = torch.ones(6, 4)
        of_rows = torch.full((6,), at[own], dtype=torch.int32)
        memory.add_experts(x, None, of_rows, offsets.int(), y)
        for row in range(6):
            want = torch.ones(4)
            if row < 4:
                weights = held[own]
                want += 2.0 * weights.b[row // 2] @ weights.a[row // 2] @ x[row]
            torch.testing.assert_close(y[row], want)


@pytest.mark.parametrize("owners", [*product((-1, 0, 1, 2), repeat=4)], ids=str)
def test_each_row_has_one_place_among_those_of_its_adapter(owners: tuple[int, ...]) -> None:
    """Adapters have unequal numbers of rows, in any order; rows of the base have no place."""
    numbers = sorted({*owners} - {-1})
    if not numbers:
        return
    of = [torch.tensor([row for row, own in enumerate(owners) if own == n]) for n in numbers]
    places = Places.of(of, len(owners), torch.device("cpu"))
    most = max(map(len, of))
    for row, own in enumerate(owners):
        place = int(places.inverse[row])
        if own < 0:
            assert place == len(places.rows)
        else:
            assert (int(places.rows[place]), numbers[place // most]) == (row, own)


def test_experts_add_for_the_rows_of_each_step() -> None:
    """In a second step, other rows than in the first have the adapter."""
    layer, generator = LayerAdapters(AdapterRows()), torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 3, INPUTS, generator=generator), torch.randn(2, 4, 3, generator=generator)
    layer.attach(0, LowRank(a, b, (LowRankPart(slice(0, 3), slice(0, 4), 2.0),), (4,)))
    x, offsets = torch.randn(3, INPUTS, generator=generator), torch.tensor([0, 2, 3])
    tokens = torch.tensor([2, 0, 1])
    for own in (0, 1, 2):
        layer.rows.set({own: 0}, [0, 1, 2, 3], torch.device("cpu"))
        found = layer.add_experts(x, tokens, tokens, offsets, torch.zeros(3, 4))
        for row, token in enumerate(tokens.tolist()):
            expert = int(row >= 2)
            want = (token == own) * 2.0 * b[expert] @ a[expert] @ x[token]
            torch.testing.assert_close(found[row], want)


@pytest.mark.parametrize("on_device", [False, True])
def test_an_adapter_that_fails_at_any_layer_is_attached_to_none(
    tuned: Any, monkeypatch: pytest.MonkeyPatch, on_device: bool
) -> None:
    """Whichever layer has no memory for it, all of them are left with the adapters before it."""
    one = tuned("llama")
    base = support["load_base"](one.base)
    adapter, other = (support["load_adapter"](base, one.adapter) for _ in range(2))
    rows = AdapterRows(AdapterSlots(2, torch.device("cpu")) if on_device else None)
    layers = [layer.base[0] for layer in adapter.layers()]
    attach_one = LayerAdapters.attach
    for before in ([], [1]):
        for number in before:
            attach(other, number, rows)
        for fails in range(len(layers)):
            left = iter(range(fails))

            def attach_some(
                self: LayerAdapters, number: int, weights: LowRank, left: Any = left
            ) -> None:
                if next(left, None) is None:
                    raise torch.OutOfMemoryError("no memory")
                attach_one(self, number, weights)

            with monkeypatch.context() as patched:
                patched.setattr(LayerAdapters, "attach", attach_some)
                with pytest.raises(torch.OutOfMemoryError):
                    attach(adapter, 0, rows)
            held = [list(each.adapters.weights) if each.adapters else [] for each in layers]
            assert held == [before] * len(layers)
    attach(adapter, 0, rows)
    assert all(sorted(each.adapters.weights) == [0, 1] for each in layers)


def test_graphs_keep_their_memory_when_the_last_adapter_leaves(tuned: Any) -> None:
    """A layer without slots loses all that it had; else the next adapter is in the same memory."""
    one = tuned("llama")
    base = support["load_base"](one.base)
    for slots in (AdapterSlots(2, torch.device("cpu")), None):
        adapter, rows = support["load_adapter"](base, one.adapter), AdapterRows(slots)
        layers = [layer.base[0] for layer in adapter.layers()]
        attach(adapter, 0, rows)
        memory, layout = [each.adapters.memory for each in layers], slots and slots.layout
        detach(adapter, 0)
        if slots is None:
            assert [each.adapters for each in layers] == [None] * len(layers)
            continue
        attach(adapter, 1, rows)
        assert [each.adapters.memory for each in layers] == memory
        assert slots.layout == layout
        detach(adapter, 1)
        for each in layers:
            each.adapters = None
