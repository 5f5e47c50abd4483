"""Over which ranks experts are spread, and whose tokens they compute, for engines side by side."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from vllm_module.base.process_groups import private_group
from vllm_module.distributed import (
    data_parallel,
    expert_parallel,
    expert_parallel_group,
    tensor_parallel,
)


@pytest.mark.parametrize(("engines", "ranks"), [(1, 2), (2, 1), (2, 2), (3, 2), (2, 3)])
def test_each_rank_meets_those_of_its_number(engines: int, ranks: int) -> None:
    """What a rank gathers in each of its groups is written out, as numbers of all ranks.

    Ranks of one engine have the same tokens: to gather them from each would compute them twice.
    """
    store, size = dist.HashStore(), engines * ranks
    numbers = torch.arange(size).view(engines, ranks)

    def group(name: str, rank: int, size: int) -> dist.ProcessGroup:
        own, limit = dist.PrefixStore(name, store), timedelta(seconds=20)
        return private_group(own, rank, size, torch.device("cpu"), limit)

    def met(number: int) -> tuple[list[int], list[int], list[int]]:
        engine, rank = divmod(number, ranks)
        of_engine = group(f"engine {engine}", rank, ranks)
        of_all = group("all", number, size)
        of_number = group(f"rank {rank}", engine, engines)
        with (
            tensor_parallel(group=of_engine) as own,
            data_parallel(ranks=of_all, group=of_number) as tokens,
            expert_parallel(redundant=1),
        ):
            found = expert_parallel_group()
        assert expert_parallel_group() is None
        assert found is not None
        assert found.own_tokens is tokens
        assert found.redundant == 1
        mine = torch.tensor([number])
        gathered = (each.all_gather(mine) for each in (own, found.ranks, tokens.ranks))
        one, all_ranks, others = (each.tolist() for each in gathered)
        return one, all_ranks, others

    with ThreadPoolExecutor(size) as threads:
        for number, found in enumerate(threads.map(met, range(size))):
            engine, rank = divmod(number, ranks)
            assert found == (
                numbers[engine].tolist(), numbers.flatten().tolist(), numbers[:, rank].tolist()
            )  # fmt: skip
