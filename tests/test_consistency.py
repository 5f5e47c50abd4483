"""Which ranks an error names: those outside of the largest set of ranks that are alike."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from vllm_module.build.consistency import demand_alike
from vllm_module.errors import RankError

EVERY = [values for size in (2, 3, 4) for values in product("abc", repeat=size)]


@pytest.mark.parametrize("values", EVERY, ids="".join)
def test_ranks_outside_of_the_majority_are_named(values: tuple[str, ...]) -> None:
    """All values on two to four ranks; where two sets are largest, every rank is named."""
    counts = Counter(values).most_common()
    if len(counts) == 1:
        demand_alike([{"name": value, "same": "x"} for value in values])
        return
    tie = counts[0][1] == counts[1][1]
    named = [rank for rank, value in enumerate(values) if tie or value != counts[0][0]]
    with pytest.raises(RankError) as caught:
        demand_alike([{"name": value, "same": "x"} for value in values])
    assert sorted(caught.value.ranks) == named
    assert caught.value.recoverable
    first, *lines, advice = str(caught.value).split("\n")
    assert first.endswith((" differ:", " differs from the others:", " differ from the others:"))
    assert first.endswith(" differ:") == tie
    (line,) = lines
    assert line.startswith("  name: ")
    assert sum(f"{value} on rank" in line for value in set(values)) == len(counts)
    assert advice == "Give every rank the same checkpoint, configuration and dtype."


@pytest.mark.parametrize("count", [1, 10, 11, 12, 13, 30])
def test_a_long_list_is_cut(count: int) -> None:
    """The message has eleven entries at most, and says how many more there are."""
    one = {f"entry {number}": "a" for number in range(count)}
    with pytest.raises(RankError) as caught:
        demand_alike([one, {}])
    _, *lines, _ = str(caught.value).split("\n")
    shown = [line for line in lines if line.startswith("  entry ")]
    assert len(shown) == min(count, 11)
    assert lines[len(shown) :] == ([f"  and {count - 11} more"] if count > 11 else [])
