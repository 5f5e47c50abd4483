"""Which adapters leave memory, beside a dictionary in the order of use."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_module.runtime import resharding
from vllm_module.runtime.served_adapter import AdapterMemory, LoadedAdapter, ServedAdapter
from vllm_module.runtime.started import adapter_memory


class Ranks:
    """What an executor does with adapters, of ranks that have them by number."""

    def __init__(self, most: int | None) -> None:
        self.worker = SimpleNamespace(config=SimpleNamespace(max_cpu_loras=most))
        self.held = set[int]()

    def load_adapter(self, number: int, path: str, again: bool) -> list[LoadedAdapter]:
        assert number not in self.held
        self.held.add(number)
        return [LoadedAdapter(1, 8, (("adapter_config.json", 1, 1, 1),))]

    def drop_adapter(self, number: int) -> None:
        self.held.remove(number)

    def check_adapter_used(self, number: int) -> None:
        """All layers are used."""


class Least:
    """The adapters in memory, the one that was used longest ago first; updated ones do not count.

    One that runs stays. So does one that was read just now.
    """

    def __init__(self, most: int | None) -> None:
        self.most, self.order, self.updated = most, OrderedDict[int, None](), set[int]()

    def use(self, numbers: list[int]) -> None:
        for number in numbers:
            if number in self.order:
                self.order.move_to_end(number)

    def load(self, number: int, running: set[int]) -> None:
        self.order[number] = None
        if self.most is None:
            return
        counted = [each for each in self.order if each not in self.updated]
        idle = [each for each in counted if each not in {*running, number}]
        for each in idle[: max(0, len(counted) - self.most)]:
            del self.order[each]


steps = st.lists(
    st.tuples(
        st.sampled_from(["use", "use", "load", "load", "drop", "update", "other ranks"]),
        st.integers(0, 5),
        st.sets(st.integers(0, 5), max_size=2),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(most=st.sampled_from([1, 2, 3, None]), drawn=steps)
def test_the_one_that_was_used_longest_ago_leaves(most: int | None, drawn: list[Any]) -> None:
    """Also after other ranks have read those in memory, who know the order of use as well."""
    ranks: Any = Ranks(most)
    memory: AdapterMemory = adapter_memory(ranks)
    expected = Least(most)
    adapters = [ServedAdapter(f"a{n}", n, f"/a{n}") for n in range(6)]
    engine: Any = SimpleNamespace(adapters={each.name: each for each in adapters})
    for what, number, running in drawn:
        adapter = adapters[number]
        if what == "use" and adapter.in_memory:  # one at a time: of one step, none is later
            memory.use([adapter])
            expected.use([number])
        elif what == "load" and not adapter.in_memory and not adapter.updates:
            memory.load(adapter, [adapters[each] for each in running])
            expected.load(number, running)
        elif what == "drop":
            memory.drop(adapter)
            expected.order.pop(number, None)
            adapter.updates = 0
            expected.updated.discard(number)
        elif what == "update" and adapter.in_memory:
            adapter.updates += 1
            expected.updated.add(number)
        elif what == "other ranks" and not any(each.updates for each in adapters):
            ranks = Ranks(most)
            memory = resharding._with_adapters(engine, ranks)
            before, expected.order = expected.order, OrderedDict()
            for each in before:
                expected.load(each, set())
        assert {each.number for each in adapters if each.in_memory} == set(expected.order)
        assert ranks.held == set(expected.order)
