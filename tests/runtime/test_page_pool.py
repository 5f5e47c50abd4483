"""Pages and saved states beside lists that are searched from their start."""

from __future__ import annotations

import random

import pytest

from vllm_module.runtime.cache.page_pool import ROOT, PagePool
from vllm_module.runtime.cache.saved_states import SavedStates

SIZE = 2


class Listed:
    """The rules of a pool, over lists of (text, salt): which page holds it, and what is evicted."""

    def __init__(self, count: int) -> None:
        self.references = dict.fromkeys(range(count), 0)
        self.free = list(range(count))  # in the order of allocation
        self.indexed: set[int] = set()  # cached pages to which no text leads any more
        self.first: dict[tuple[tuple[int, ...], str | None], int] = {}  # the page that is found

    def allocate(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        for page in taken:
            self.references[page] = 1
            gone = next((text for text, each in self.first.items() if each == page), None)
            if gone is not None:  # and so is every longer text, whose pages wait to be evicted
                for tokens, salt in list(self.first):
                    if salt == gone[1] and tokens[: len(gone[0])] == gone[0]:
                        self.indexed.add(self.first.pop((tokens, salt)))
            self.indexed.discard(page)
        return taken

    def share(self, pages: list[int]) -> None:
        for page in pages:
            self.references[page] += 1
            self.free = [each for each in self.free if each != page]

    def release(self, pages: list[int]) -> None:
        for page in pages:
            self.references[page] -= 1
            if not self.references[page]:
                self.free.append(page)

    def found(self, tokens: list[int], limit: int, salt: str | None) -> list[int]:
        pages: list[int] = []
        while len(pages) < limit:
            text = tuple(tokens[: (len(pages) + 1) * SIZE]), salt
            if text not in self.first:
                break
            pages.append(self.first[text])
        return pages


@pytest.mark.parametrize("seed", range(8))
def test_the_pool_is_lists_that_are_searched(seed: int) -> None:
    """The same pages are given, found and evicted, in the same order, whatever is called."""
    rng = random.Random(seed)
    count = rng.choice([6, 11])
    pool, listed = PagePool(count, SIZE), Listed(count)
    evicted: list[int] = []
    pool.evicted = evicted.append
    ended_by: dict[int, int] = {}  # the prefix that ends with a page
    held: list[list[int]] = []
    for _ in range(400):
        tokens, salt = rng.choices([1, 2], k=6), rng.choice([None, None, "a", "b"])
        limit = rng.randrange(4)
        reused = pool.find_cached(tokens, limit, salt)
        assert [page for page, _ in reused] == listed.found(tokens, limit, salt)
        kind = rng.randrange(3)
        if kind == 0 and held:
            pages = held.pop(rng.randrange(len(held)))
            pages = pages[:: rng.choice([1, -1])]
            pool.free(pages)
            listed.release(pages)
        elif kind == 1 and reused:
            pages = [page for page, _ in reused]
            pool.share(pages)
            listed.share(pages)
            held.append(pages)
        else:
            asked = rng.randrange(1, 4)
            if asked > len(listed.free):
                with pytest.raises(RuntimeError, match=f"{asked} pages are needed and "):
                    pool.allocate(asked)
                continue
            cached = {*listed.first.values(), *listed.indexed}
            gone = [page for page in listed.free[:asked] if page in cached]
            del evicted[:]
            pages = pool.allocate(asked)
            assert pages == listed.allocate(asked)
            assert evicted == [ended_by[page] for page in gone]
            held.append(pages)
            prefix = ROOT
            for index, page in enumerate(pages):
                own = tokens[index * SIZE : (index + 1) * SIZE]
                text = tuple(tokens[: (index + 1) * SIZE]), salt
                known = listed.first.get(text)
                longer = pool.cache(page, prefix, own, None if index else salt)
                if known is None:
                    listed.first[text] = page
                    ended_by[page] = longer
                else:
                    assert longer == ended_by[known]
                prefix = longer
        assert pool.free_pages == len(listed.free)
        assert [pool.reference_count(page) for page in range(count)] == [
            *listed.references.values()
        ]
    if seed == 0:
        pool.evict_all()
        assert not pool.find_cached([1, 1], 1)
        assert pool.free_pages == len(listed.free)


def test_pages_for_tokens_are_rounded_up() -> None:
    assert [PagePool(1, 3).pages_for(tokens) for tokens in range(8)] == [0, 1, 1, 1, 2, 2, 2, 3]


@pytest.mark.parametrize("seed", range(6))
def test_saved_states_are_a_list_in_the_order_of_use(seed: int) -> None:
    """The state used least recently gives its slot; what is saved is copied in the next step."""
    rng = random.Random(seed)
    first, count = 4, 3
    saved = SavedStates(first, count)
    slots: dict[int, int] = {}
    order: list[int] = []  # prefixes, the least recently used first
    waiting: dict[int, int] = {}
    for _ in range(300):
        prefix = rng.randrange(1, 8)
        kind = rng.randrange(4)
        if kind == 0 and prefix in slots:
            assert saved.use(prefix) == slots[prefix]
            order.remove(prefix)
            order.append(prefix)
        elif kind == 1 and len(waiting) < first:
            row = rng.randrange(first)
            saved.save(prefix, row)
            waiting[prefix] = row
        elif kind == 2:
            saved.forget(prefix)
            waiting.pop(prefix, None)
            if slots.pop(prefix, None) is not None:
                order.remove(prefix)
        else:
            pairs = saved.copies()
            expected = []
            for each in waiting:
                if each in slots:
                    order.remove(each)
                else:
                    if len(slots) == count:
                        slots.pop(order.pop(0))
                    slots[each] = -1
                    expected.append(each)
                order.append(each)
            assert [row for row, _ in pairs] == [waiting[each] for each in expected]
            for each, (_, slot) in zip(expected, pairs, strict=True):
                if each in slots:  # one saved in the same step may have taken its slot already
                    slots[each] = slot
            waiting.clear()
            taken = [slots[each] for each in slots]
            assert len(set(taken)) == len(taken)
            assert all(first <= slot < first + count for slot in taken)
        assert saved.waiting == bool(waiting)
        assert len(saved) == len(slots)
        assert {each for each in range(1, 8) if each in saved} == set(slots)
    saved.forget_all()
    assert (len(saved), saved.waiting) == (0, False)
