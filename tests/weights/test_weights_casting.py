"""A cast that would lose a value is refused; every other cast gives what torch gives."""

from __future__ import annotations

import pytest
import torch

from vllm_module.errors import MisshapenWeightError, WeightReadError
from vllm_module.weights import read_into


@pytest.mark.parametrize(
    ("value", "source", "target"),
    [
        (65520.0, torch.float32, torch.float16),
        (-65536.0, torch.bfloat16, torch.float16),
        (3.4e38, torch.float32, torch.bfloat16),
        (1e39, torch.float64, torch.float32),
        (470.0, torch.float32, torch.float8_e4m3fn),
        (1024.0, torch.float8_e5m2, torch.float8_e4m3fn),
        (65536, torch.int32, torch.float16),
        (2**31, torch.int64, torch.int32),
        (-1, torch.int8, torch.uint8),
        (-1, torch.int64, torch.uint32),
    ],
)
def test_a_value_out_of_range_is_refused_and_nothing_copied(value, source, target) -> None:
    as_read = torch.float64 if isinstance(value, float) else torch.int64
    weight = torch.tensor([0, value, 1], dtype=as_read).to(source)
    destination = torch.zeros(3, dtype=target)
    with pytest.raises(WeightReadError, match="1 finite values beyond the range"):
        read_into(weight, destination)
    assert destination.double().count_nonzero() == 0


@pytest.mark.parametrize(
    ("value", "source", "target"),
    [
        (65519.0, torch.float32, torch.float16),
        (3.3961e38, torch.float32, torch.bfloat16),
        (460.0, torch.float32, torch.float8_e4m3fn),
        (2**31 - 1, torch.int64, torch.int32),
        (1, torch.bool, torch.int8),
        (7, torch.uint32, torch.int16),
        (-3, torch.int32, torch.float32),
        (1.5, torch.float8_e5m2, torch.bfloat16),
    ],
)
def test_a_value_in_range_is_rounded_as_torch_does(value, source, target) -> None:
    weight = torch.tensor([value]).to(source)
    destination = torch.zeros(1, dtype=target)
    read_into(weight, destination)
    assert torch.equal(destination.double(), weight.to(target).double())
    assert destination.double().isfinite().all()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_the_checkpoints_own_infinities_and_nans_stay(value: float) -> None:
    destination = torch.zeros(2, dtype=torch.float16)
    read_into(torch.tensor([value, 1.0]), destination)
    assert torch.equal(destination, torch.tensor([value, 1.0]).half()) or value != value
    with pytest.raises(WeightReadError, match="1 finite values"):
        read_into(torch.tensor([value, 1e6]), destination)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.float32, torch.int32),
        (torch.int32, torch.bool),
        (torch.bfloat16, torch.uint8),
        (torch.complex64, torch.float32),
    ],
)
def test_a_dtype_of_another_kind_is_refused(source, target) -> None:
    with pytest.raises(MisshapenWeightError, match="would cut its values"):
        read_into(torch.zeros(3, dtype=source), torch.zeros(3, dtype=target))


def test_shapes_do_not_broadcast_and_meta_swallows_nothing() -> None:
    with pytest.raises(MisshapenWeightError, match=r"\[1\], its destination \[4\]"):
        read_into(torch.zeros(1), torch.zeros(4))
    with pytest.raises(MisshapenWeightError, match="meta"):
        read_into(torch.zeros(4), torch.zeros(4, device="meta"))


def test_a_weight_that_requires_grad_leaves_no_graph() -> None:
    destination = torch.zeros(2)
    read_into(torch.nn.Parameter(torch.ones(2)), destination)
    assert destination.tolist() == [1, 1]
    assert not destination.requires_grad


def test_empty_tensors_are_copied() -> None:
    read_into(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.float16))
