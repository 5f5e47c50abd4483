"""Which ranks an error names: those outside of the largest set of ranks that are alike."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from itertools import product

import pytest
import torch

from vllm_module.build.consistency import demand_alike, demand_same_tensors, digests
from vllm_module.core.module import vLLMModule
from vllm_module.distributed import expert_parallel, tensor_parallel
from vllm_module.errors import RankError
from vllm_module.layers import FusedMoE, QKVParallelLinear, RMSNorm, RowParallelLinear
from vllm_module.testing import random_weights

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


WITH_GAPS = [values for size in (2, 3, 4) for values in product(["a", "b", None], repeat=size)]


@pytest.mark.parametrize("values", WITH_GAPS, ids=lambda values: "".join(v or "-" for v in values))
def test_what_some_ranks_keep_only_a_part_of_is_not_compared(
    values: tuple[str | None, ...],
) -> None:
    """A tensor is compared if every rank keeps all of it, whichever rank does not."""
    ranks = [{"same": "x"} | ({} if value is None else {"name": value}) for value in values]
    if None in values or len(set(values)) == 1:
        demand_same_tensors(ranks)
        return
    with pytest.raises(RankError, match="  name: "):
        demand_same_tensors(ranks)


class Several(vLLMModule):
    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(8)
        self.qkv = QKVParallelLinear(8, 2, 4, 1)
        self.experts = FusedMoE(4, 2, 8, 16, bias=True)
        self.one = RowParallelLinear(16, 8)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("spread", [False, True], ids=["cut experts", "spread experts"])
def test_what_a_rank_keeps_whole_is_compared(size: int, spread: bool) -> None:
    """A tensor has a digest if it has the shape that it has on one rank, and a NaN changes it."""
    shapes = {name: each.shape for name, each in Several().named_parameters()}
    weights = random_weights(Several().expected_weights())
    for rank in range(size):
        with tensor_parallel(rank=rank, size=size), expert_parallel() if spread else nullcontext():
            module = Several()
        module.load_weights(weights)
        own = dict(module.named_parameters())
        whole = {name for name, each in own.items() if each.shape == shapes[name]}
        assert {"norm.weight", "one.bias"} <= whole
        assert (whole == own.keys()) == (size == 1)
        found = digests(module)
        assert found.keys() == {f"{name} after loading" for name in whole}
        for name in whole:
            before = own[name].data.clone()
            own[name].data.view(-1)[-1] = torch.nan
            changed = {each for each, digest in digests(module).items() if digest != found[each]}
            assert changed == {f"{name} after loading"}
            own[name].data.copy_(before)
