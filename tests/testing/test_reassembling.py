"""What the laws reassemble of the ranks' tensors: no element is passed over, whatever it holds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from vllm_module.parameters import BasevLLMParameter, Dim, Slot
from vllm_module.testing.sharding import reassemble

# Dimensions on four ranks, and what each rank holds: numbers of the checkpoint, and 0 for padding.
CASES: dict[str, tuple[tuple[Dim, ...], dict[str, Any], list[Any]]] = {
    "padded": ((Dim.cut(5, 4, padded=8),), {"": [1, 2, 3, 4, 5]}, [[1, 2], [3, 4], [5, 0], [0, 0]]),
    "slots": (
        (Dim((Slot("q", 4, 4), Slot("k", 1, 2, 2))),),
        {"q": [1, 2, 3, 4], "k": [5]},
        [[1, 5], [2, 5], [3, 0], [4, 0]],
    ),
    "rows": (
        (Dim.cut(3, 4, padded=4), Dim.whole(2)),
        {"": [[1, 2], [3, 4], [5, 6]]},
        [[[1, 2]], [[3, 4]], [[5, 6]], [[0, 0]]],
    ),
    "columns": (
        (Dim.whole(1), Dim.cut(3, 2, padded=4)),
        {"": [[1, 2, 3]]},
        [[[1, 2]], [[1, 2]], [[3, 0]], [[3, 0]]],
    ),
}
NUMBERS: dict[torch.dtype, list[float]] = {
    torch.float32: [2.0**-149, 0.25, -0.25, 7, 1e30, math.inf, math.nan],
    torch.bfloat16: [2.0**-133, 0.25, -7, math.nan],
    torch.float8_e4m3fn: [2.0**-9, -0.25, math.nan],
    torch.uint8: [128, 255],
    torch.int64: [2**53, -1],
    torch.bool: [],
}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each element, ``[elements, bytes]``."""
    return tensor.contiguous().view(-1, 1).view(torch.uint8)


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_each_element_of_each_rank_counts(case: str, dtype: torch.dtype) -> None:
    """Another number in padding or in one of two copies is refused, and elsewhere is found."""
    dims, stored, held = CASES[case]
    parameters = [
        BasevLLMParameter(*dims, tp_rank=rank, tp_size=4, dtype=dtype) for rank in range(4)
    ]
    expected = {slot: torch.tensor(numbers).to(dtype) for slot, numbers in stored.items()}
    ranks = [torch.tensor(numbers).to(dtype) for numbers in held]

    def differing() -> int:
        """Return how many elements of the stored tensors are others than those of the table."""
        got = reassemble(parameters, ranks, "it")
        assert got.keys() == expected.keys()
        return sum(
            int((bits(each) != bits(got[name])).any(-1).sum()) for name, each in expected.items()
        )

    assert differing() == 0
    owners = [number for numbers in held for number in torch.tensor(numbers).flatten().tolist()]
    for rank, tensor in enumerate(ranks):
        flat = tensor.view(-1)
        for at, number in enumerate(torch.tensor(held[rank]).flatten().tolist()):
            before = flat[at].clone()
            for other in NUMBERS[dtype] or [not bool(number)]:
                flat[at] = other
                if number and owners.count(number) == 1:
                    assert differing() == 1, (rank, at, other)
                else:
                    with pytest.raises(AssertionError, match=r"padding|is no copy|differs"):
                        reassemble(parameters, ranks, "it")
            flat[at] = before
    assert differing() == 0
