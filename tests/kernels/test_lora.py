"""Products with A and B of several adapters in one launch, against float64 row by row."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_module.kernels.adapters import lora_expand as expanding
from vllm_module.kernels.adapters import lora_shrink as shrinking
from vllm_module.kernels.adapters.lora_expand import lora_expand, lora_expand_triton
from vllm_module.kernels.adapters.lora_shrink import (
    lora_shrink,
    lora_shrink_triton,
    parts_of,
    tile_rows,
)
from vllm_module.kernels.experts.sort_by_expert import sort_by_expert

Run = Callable[..., torch.Tensor]


def inner(tensor: torch.Tensor, last: int = 3) -> torch.Tensor:
    """Return a view of the same numbers within a larger tensor full of NaN."""
    sizes = [size + 2 for size in tensor.shape[:-1]] + [tensor.shape[-1] + last]
    whole = torch.full(sizes, torch.nan, dtype=tensor.dtype)
    view = whole[tuple(slice(1, 1 + size) for size in tensor.shape)]
    return view.copy_(tensor)


def drawn(adapters: list[int], ranks: list[list[int]], sizes: list[int], inputs: int, dtype):
    """Return x, A, B, scales and y; ranks and scales of each slot, a slice at a time."""
    torch.manual_seed(len(adapters) + inputs + sum(sizes))
    most = max(1, *[rank for slot in ranks for rank in slot])
    a = torch.zeros(len(ranks), len(sizes) * most, inputs)
    b, scale = torch.zeros(len(ranks), sum(sizes), most), torch.zeros(len(ranks), len(sizes))
    for slot, of_slices in enumerate(ranks):
        for index, (rank, size) in enumerate(zip(of_slices, sizes, strict=True)):
            first = sum(sizes[:index])
            a[slot, index * most : index * most + rank] = torch.randn(rank, inputs)
            b[slot, first : first + size, :rank] = torch.randn(size, rank)
            scale[slot, index] = (slot + 2 * index + 1) / 4 if rank else 0
    x, y = torch.randn(len(adapters), inputs), torch.randn(len(adapters), sum(sizes))
    a, b, x, y = (inner(each.to(dtype)) for each in (a, b, x, y))
    return x, a, b, scale, y


def row_by_row(x, a, b, scale, y, adapters, sizes, dtype) -> torch.Tensor:
    """Return what each row alone gives; in float64, or with the roundings of ``dtype``."""
    x, a, b, y = (each.to(dtype) for each in (x, a, b, y))
    most, y = b.shape[2], y.clone()
    for row, slot in enumerate(adapters):
        first = 0
        for index, size in enumerate(sizes):
            if slot >= 0:
                low = a[slot, index * most : (index + 1) * most] @ x[row]
                added = float(scale[slot, index]) * (b[slot, first : first + size] @ low)
                y[row, first : first + size] += added
            first += size
    return y


def ours(x, a, b, scale, y, adapters, sizes) -> torch.Tensor:
    """Run the operators."""
    indices = torch.tensor(adapters, dtype=torch.int32).view(-1, 1)
    rows, offsets = sort_by_expert(indices, 0, len(a))
    ends = torch.tensor(sizes).cumsum(0).int()
    lora_expand(lora_shrink(x, a, rows, offsets), b, scale, ends, rows, offsets, y)
    return y


@pytest.fixture(params=["reference", "kernel"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return the operators' plain torch, or the kernels that Triton interprets."""
    if request.param == "kernel":
        monkeypatch.setattr(shrinking, "_lora_shrink", lora_shrink_triton)
        monkeypatch.setattr(expanding, "_lora_expand", lora_expand_triton)
    return ours


def interpreted(*arguments) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shrinking, "_lora_shrink", lora_shrink_triton)
        patch.setattr(expanding, "_lora_expand", lora_expand_triton)
        return ours(*arguments)


CASES = {
    "q, k and v": ([0, 0, 1, -1, 2, 1, 1], [[8, 8, 4], [0, 5, 16], [1, 0, 0]], [40, 9, 9], 50),
    "one of rank 1": ([0] * 3, [[1]], [17], 16),
    "a large rank": ([1, -1, 0], [[70], [3]], [33], 40),
    "parts of the input": ([0, 1, -1, 1], [[4, 4], [4, 4]], [7, 20], 1100),
    "a slot that no row has": ([2, 2, -1, 0], [[4], [4], [4], [2]], [130], 33),
    # As of experts: a kernel reads the offsets of 1,024 groups at a time.
    "many groups": ([1023, 0, 2047, -1, 1024, 1022, 2048, 2049, 1023], [[2]] * 2050, [9], 16),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_each_row_meets_its_adapter(run: Run, as_accurate, case: str, dtype: torch.dtype) -> None:
    """Rows have what their adapter adds, as exactly as torch; rows of the base keep their bits.

    All tensors are parts of larger ones full of NaN.
    """
    adapters, ranks, sizes, inputs = CASES[case]
    given = drawn(adapters, ranks, sizes, inputs, dtype)
    before = given[-1].clone()
    exact = row_by_row(*given, adapters, sizes, torch.float64)
    low = row_by_row(*given, adapters, sizes, dtype)
    found = run(*given, adapters, sizes)
    as_accurate(found, exact, low)
    for row, slot in enumerate(adapters):
        first = 0
        for index, size in enumerate(sizes):
            part = slice(first, first + size)
            if slot < 0 or not ranks[slot][index]:
                assert torch.equal(found[row, part], before[row, part]), "nothing is added here"
            else:
                assert not torch.equal(found[row, part], before[row, part])
            first += size


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_any_adapters_ranks_and_sizes(as_accurate, data) -> None:
    """Random shapes, and any distribution of rows over slots."""
    slots, slices = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    adapters = data.draw(st.lists(st.integers(-1, slots - 1), min_size=1, max_size=40))
    ranks = [[data.draw(st.integers(0, 20)) for _ in range(slices)] for _ in range(slots)]
    sizes = [data.draw(st.integers(1, 70)) for _ in range(slices)]
    inputs = data.draw(st.sampled_from([1, 16, 31, 130, 520]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16]))
    at_a_time = data.draw(st.sampled_from([2, 4, 1024]))
    given = drawn(adapters, ranks, sizes, inputs, dtype)
    exact = row_by_row(*given, adapters, sizes, torch.float64)
    low = row_by_row(*given, adapters, sizes, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shrinking, "_MOST_OFFSETS", at_a_time)
        found = interpreted(*given, adapters, sizes)
    as_accurate(found, exact, low)


def test_a_row_does_not_depend_on_the_others() -> None:
    """With as many places and groups, a row has the same bits among any others."""
    sizes, ranks = [24, 8], [[4, 4], [8, 2]]
    given = drawn([0, 1] * 10, ranks, sizes, 600, torch.float16)
    whole = interpreted(*given[:-1], given[-1].clone(), [0, 1] * 10, sizes)
    for row in (0, 1, 19):
        alone = [-1] * 20
        alone[row] = row % 2
        one = interpreted(*given[:-1], given[-1].clone(), alone, sizes)
        assert torch.equal(one[row], whole[row])


def test_tiles_of_many_rows_and_bfloat16(as_accurate) -> None:
    """Prompts have tiles of 64 rows; numbers of 16 bits are widened first."""
    adapters = [0] * 70 + [-1] * 3 + [1] * 50
    assert (tile_rows(len(adapters), 2), tile_rows(40, 2)) == (64, 16)
    given = drawn(adapters, [[4], [9]], [20], 48, torch.bfloat16)
    exact = row_by_row(*given, adapters, [20], torch.float64)
    low = row_by_row(*given, adapters, [20], torch.bfloat16)
    as_accurate(interpreted(*given, adapters, [20]), exact, low)


def test_rows_of_x_and_of_y_may_be_others() -> None:
    """As of experts: places read some rows of x, and write others of y."""
    x, a, b, scale, y = drawn([0, 0, 1, 1], [[3], [2]], [10], 12, torch.float32)
    read, write = (torch.tensor(rows).int() for rows in ([3, 3, 0], [1, 0, 2]))
    offsets, ends = torch.tensor([0, 2, 3]).int(), torch.tensor([10]).int()
    expected = y.clone()
    for place, group in enumerate((0, 0, 1)):
        added = b[group] @ (a[group] @ x[read[place]])
        expected[write[place]] += scale[group] * added
    low = lora_shrink_triton(x, a, read, offsets, 2)
    lora_expand_triton(low, b, scale, ends, write, offsets, y)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


def test_what_has_no_adapter_is_not_written(run: Run) -> None:
    """Beside an infinite input, slices without an adapter and rows of the base stay as they are."""
    x, a, b, scale, y = drawn([0, -1], [[0, 2]], [4, 3], 8, torch.float32)
    x[:] = torch.inf
    y[:] = -0.0
    found = run(x, a, b, scale, y, [0, -1], [4, 3])
    for part in (found[0, :4], found[1]):
        assert torch.equal(part, torch.zeros_like(part))
        assert part.signbit().all()


def test_offsets_beyond_32_bits() -> None:
    """A slot that starts more than 2**31 elements into A and B is found; strides are that large."""
    slots, far = 5, 2**29
    assert (slots - 1) * far >= 2**31
    # Of the system's, which gives memory to what is touched alone.
    memory = torch.frombuffer(mmap.mmap(-1, 2 * slots * far), dtype=torch.float16)
    a = memory.as_strided((slots, 2, 16), (far, 16, 1))
    b = memory.as_strided((slots, 8, 2), (far, 2, 1), 64)
    a[4], b[4] = torch.randn(2, 16).half(), torch.randn(8, 2).half()
    x, y = torch.randn(1, 16).half(), torch.zeros(1, 8).half()
    scale = torch.ones(slots, 1)
    found = interpreted(x, a, b, scale, y, [4], [8])
    torch.testing.assert_close(found[0], b[4] @ (a[4] @ x[0]), rtol=2e-3, atol=2e-3)


def test_launches_depend_on_shapes_alone() -> None:
    """Tiles and parts are chosen by the numbers of places, groups and features."""
    assert [parts_of(32, 8, inputs) for inputs in (255, 512, 1024, 4096, 8192)] == [1, 2, 4, 8, 8]
    assert parts_of(8192, 8, 4096) == 2
    assert parts_of(100_000, 8, 4096) == 1


def test_bad_input() -> None:
    """Shapes and dtypes that do not fit, and outputs that share memory, are refused by name."""
    x, a, b, scale, y = drawn([0, 1], [[2], [2]], [6], 8, torch.float32)
    rows, offsets = torch.arange(2).int(), torch.tensor([0, 1, 2]).int()
    ends, low = torch.tensor([6]).int(), lora_shrink(x, a, rows, offsets)
    good = {"low": low, "b": b, "scale": scale, "ends": ends, "rows": rows, "offsets": offsets}
    with pytest.raises(ValueError, match=r"a must have the shape \[any, any, 8\]"):
        lora_shrink(x, a[..., :7], rows, offsets)
    with pytest.raises(ValueError, match=r"a must be torch.float32, got torch.float16"):
        lora_shrink(x, a.half(), rows, offsets)
    with pytest.raises(ValueError, match=r"rows must be torch.int32, got torch.int64"):
        lora_shrink(x, a, rows.long(), offsets)
    wrong = {
        "low": (low[..., :1], r"low must have the shape \[any, 2, 2\]"),
        "scale": (scale[:1], r"scale must have the shape \[2, 1\]"),
        "offsets": (offsets[:2], r"offsets must have the shape \[3\]"),
        "ends": (ends.long(), "ends must be torch.int32"),
        "y": (y[:, :5], r"y must have the shape \[any, 6\]"),
    }
    for name, (value, message) in wrong.items():
        with pytest.raises(ValueError, match=message):
            lora_expand(**{**good, "y": y, name: value})
    with pytest.raises(ValueError, match=r"y is written, .* share memory"):
        lora_expand(**good, y=torch.zeros(1, 6).expand(2, 6))


def test_nothing_is_a_product_of_zeros() -> None:
    """No rows, no ranks, no features and no slots are no exceptions."""
    for places, slots, rank, inputs in ((0, 2, 2, 4), (3, 0, 2, 4), (3, 2, 0, 4), (3, 2, 2, 0)):
        x, a = torch.ones(places, inputs), torch.ones(slots, rank, inputs)
        b, scale, y = torch.ones(slots, 5, rank), torch.ones(slots, 1), torch.ones(places, 5)
        adapters = [slots - 1] * places
        for call in (ours, interpreted):
            assert torch.equal(call(x, a, b, scale, y, adapters, [5]), torch.ones(places, 5))


def test_the_operators_are_ones() -> None:
    """They have schemas and fakes, and work with torch.compile."""
    adapters = [0, 1, 1]  # memory of rows in no group would be compared
    x, a, b, scale, y = drawn(adapters, [[2, 1], [1, 2]], [3, 4], 520, torch.float32)
    rows, offsets = sort_by_expert(torch.tensor(adapters).int().view(-1, 1), 0, 2)
    ends = torch.tensor([3, 7]).int()
    low = lora_shrink(x, a, rows, offsets)
    assert low.shape == (2, 3, 4)
    torch.library.opcheck(torch.ops.vllm_module.lora_shrink.default, (x, a, rows, offsets, 2))
    torch.library.opcheck(
        torch.ops.vllm_module.lora_expand.default, (low, b, scale, ends, rows, offsets, y)
    )
