"""Slots of saved states, beside a list of prefixes in the order of their use."""

from __future__ import annotations

import random

import pytest

from vllm_module.runtime.cache.saved_states import SavedStates

FIRST = 3  # slots before it are rows


@pytest.mark.parametrize("seed", range(20))
def test_the_least_recently_used_state_is_evicted(seed: int) -> None:
    """Drawn calls: to save, also what is saved, use, forget; a slot belongs to one state."""
    chance = random.Random(seed)
    count = chance.choice((2, 3, 5))
    states = SavedStates(FIRST, count)
    order: list[int] = []  # of saved prefixes, the least recently used first
    slots: dict[int, int] = {}
    for _ in range(60):
        rows = {prefix: row for row, prefix in enumerate(chance.sample(range(7), min(2, count)))}
        for prefix, row in rows.items():
            states.save(prefix, row)
            assert (prefix in states) == (prefix in order)
        if chance.random() < 0.3 and (given_up := chance.choice([*rows])) in rows:
            states.forget(given_up)
            del rows[given_up]
            order = [each for each in order if each != given_up]
        assert states.waiting == bool(rows)
        copied = dict(states.copies())
        for prefix, row in rows.items():
            assert (row in copied) == (prefix not in order), "what is saved is not copied again"
            if prefix in order:
                order.remove(prefix)
            else:
                slots[prefix] = copied[row]
                order = order[len(order) == count :]
            order.append(prefix)
        assert {prefix for prefix in range(7) if prefix in states} == set(order)
        held = [slots[prefix] for prefix in order]
        assert len(set(held)) == len(held) == len(states)
        assert set(held) <= set(range(FIRST, FIRST + count))
        if order and chance.random() < 0.5:
            used = chance.choice(order)
            assert states.use(used) == slots[used]
            order.remove(used)
            order.append(used)
    states.forget_all()
    assert (len(states), states.waiting) == (0, False)
