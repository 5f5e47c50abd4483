"""Recordings give what the computation gives for other numbers, or are refused."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vllm_module.kernels.recording import (
    Effects,
    NotRecordableError,
    Recording,
    as_one,
    recording_in_use,
)

COLUMNS = 5


def in_place(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, 1:].copy_(x[:, :-1])
    y.add_(x).mul_(2)
    return y[:, ::2]


def reshaped(x: Tensor) -> Tensor:
    return (x.T.reshape(-1, 2).contiguous().to(torch.float64).flatten() * 2).to(torch.bfloat16)


def into_memory(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape[1], x.shape[1])
    torch.mm(x.T, x, out=out)
    return out.index_select(0, torch.arange(2))


def with_several(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=0)
    return torch.cat([second, first.exp()]) + torch.stack([x[0], x[1]]).sum(0)


def normalized(x: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, (COLUMNS,), None, 1e-6).softmax(-1)


def indexed(x: Tensor) -> Tensor:
    places = x.argsort(0)[:2, 0]
    return x[places] + x[places, 1][:, None]


def sorted_rows(x: Tensor) -> Tensor:
    values, places = x.sort(-1)
    return values * places + x.topk(2, 0).values.sum(0)


def without_elements(x: Tensor) -> Tensor:
    return torch.cat([x[:0], x[2:2].exp(), x, x.new_zeros(0, COLUMNS)])


def in_python(x: Tensor) -> Tensor:
    """Decide by numbers, in an operation that is done as one."""

    def work() -> tuple[Tensor, Tensor]:
        signs = [1 if each > 0 else -1 for each in x[:, 0].tolist()]
        return x * torch.tensor(signs).unsqueeze(1), x[x > 0].sum()

    turned, total = as_one(work)
    return turned.relu() + total


@pytest.mark.parametrize(
    "work", [in_place, reshaped, into_memory, with_several, normalized, sorted_rows, in_python]
)
def test_a_recording_gives_what_the_computation_gives(work: Callable[[Tensor], Tensor]) -> None:
    given = torch.randn(4, COLUMNS)
    recording = Recording([given])
    with torch.inference_mode(), recording.running():
        result = work(given)
    for _ in range(3):
        numbers = torch.randn(4, COLUMNS)
        given.copy_(numbers)
        recording.again()
        assert torch.equal(result, work(numbers))


def test_memory_that_is_made_stays() -> None:
    """Other tensors do not get the memory of results in the middle."""
    given = torch.randn(4, COLUMNS)
    recording = Recording([given])
    with torch.inference_mode(), recording.running():
        result = ((given * 2 + 1).exp() @ given.T).sum(-1)
    assert recording.nbytes >= 4 * (4 * COLUMNS + 4 * 4 + 4)
    expected = result.clone()
    others = [torch.full((4, COLUMNS), float(at)) for at in range(100)]
    recording.again()
    assert torch.equal(result, expected)
    assert all(bool((each == at).all()) for at, each in enumerate(others))


def test_memory_that_one_operation_made_is_counted() -> None:
    """It is no constant, and what is computed from it is computed again."""
    given = torch.randn(4, COLUMNS)
    recording = Recording([given])
    with torch.inference_mode(), recording.running():
        made = recording.one(lambda: given * 2)
        before = recording.nbytes
        result = made + 1
    assert before == made.untyped_storage().nbytes()
    assert not recording.constants
    given.copy_(numbers := torch.randn(4, COLUMNS))
    recording.again()
    assert torch.equal(result, numbers * 2 + 1)


def test_memory_that_was_there_is_not_counted() -> None:
    """Views of a given tensor and of a constant, and what is written in place, take none."""
    given, weight = torch.randn(4, COLUMNS), torch.randn(1000, COLUMNS)
    recording = Recording([given])
    with torch.inference_mode(), recording.running():
        first = weight[:3].T  # a view of the constant
        product = given[:2] @ first
        product.view(-1).add_(1)
        as_one(lambda: product.mul_(2))
        result = product[:, :1].exp()
    assert recording.nbytes == product.nbytes + result.nbytes == 4 * (2 * 3 + 2)


@torch.library.custom_op("recording_test::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "tolist": lambda x: x * x[0].tolist()[0],
    "item": lambda x: x * x[0, 0].item(),
    "float": lambda x: x * float(x[0, 0]),
    "truth": lambda x: x if x[0, 0] > 0 else -x,
    "numpy": lambda x: torch.from_numpy(x.numpy() + 1) * 2,
    "array": lambda x: torch.from_numpy(np.asarray(x) + 1) * 2,
    "equal": lambda x: x * torch.equal(x, x),
    "nonzero": lambda x: x[(x > 0).nonzero()[:, 0]],
    "mask": lambda x: x[x > 0],
    "mask of bytes": lambda x: x[(x > 0).byte()],
    "mask beside numbers": lambda x: x[x[:, 0] > 0, torch.zeros(1, dtype=torch.int64)],
    "random": lambda x: x + torch.rand_like(x),
    "dropout": lambda x: torch.nn.functional.dropout(x),
    "an operation of others": lambda x: torch.ops.recording_test.twice(x),
    "an address": lambda x: x * (x.data_ptr() % 7),
    "another device": lambda x: x.to("meta"),
}


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")  # old, and still torch's
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_done_again_is_refused(what: str) -> None:
    given = torch.rand(4, COLUMNS) + 1
    with (
        pytest.raises(NotRecordableError),
        torch.inference_mode(),
        Recording([given]).running(),
    ):
        REFUSED[what](given)


EFFECTS: dict[str, tuple[Callable[[Tensor, Tensor], Any], bool]] = {
    "a result": (lambda x, kept: x + kept, False),
    "into its own memory": (lambda x, kept: (x * 2).add_(kept)[:1].mul_(3), False),
    "into memory it has made": (lambda x, kept: torch.mul(x, 2, out=torch.empty_like(x)), False),
    "dropout in inference": (lambda x, kept: torch.nn.functional.dropout(x, 0.5, False), False),
    "into what is kept": (lambda x, kept: kept.add_(1), True),
    "into a view of it": (lambda x, kept: kept[0].copy_(x[0]), True),
    "as its result": (lambda x, kept: torch.mul(x, 2, out=kept), True),
    "several": (lambda x, kept: torch._foreach_add_([x * 2, kept], 1), True),
    "random": (lambda x, kept: torch.rand_like(x), True),
    "random, in place": (lambda x, kept: x.clone().normal_(), True),
}


@pytest.mark.parametrize("what", EFFECTS)
def test_effects_are_found_before_a_computation_is_done_again(what: str) -> None:
    work, expected = EFFECTS[what]
    x, kept = torch.randn(2, 4, COLUMNS)
    x, kept = x.clone(), kept.clone()
    for given in ([], [kept]):
        with torch.inference_mode(), Effects(given) as effects:
            work(x, kept)
        # What may be written is no effect; random numbers are.
        assert (effects.found is not None) == (expected and not (given and "random" not in what))


def test_memory_of_no_operation_is_a_constant() -> None:
    given, weight = torch.randn(4, COLUMNS), torch.randn(COLUMNS)
    recordings = [Recording([given]) for _ in range(2)]
    for recording in recordings:
        with torch.inference_mode(), recording.running():
            given * weight
    assert [each.constants.keys() for each in recordings] == [{weight.data_ptr()}] * 2


def test_memory_that_the_host_makes_is_another_one_each_time() -> None:
    """This is how what is computed without torch is found."""
    given = torch.randn(4, COLUMNS)
    recordings = [Recording([given]) for _ in range(2)]
    for recording in recordings:
        with torch.inference_mode(), recording.running():
            given * torch.frombuffer(bytearray(4 * COLUMNS), dtype=torch.float32)
    first, second = (each.constants.keys() for each in recordings)
    assert len(first) == 1
    assert not second <= first


def test_what_is_kept_for_the_next_time_is_another_one_each_time() -> None:
    given, kept = torch.randn(4, COLUMNS), [torch.zeros(4, COLUMNS)]
    recordings = [Recording([given]) for _ in range(2)]
    for recording in recordings:
        with torch.inference_mode(), recording.running():
            kept.append(given + kept[-1])
    first, second = (each.constants.keys() for each in recordings)
    assert not second <= first


def test_calls_that_torch_does_not_see_are_added() -> None:
    given = torch.zeros(3)
    recording = Recording([given])

    def call() -> None:
        given.add_(1)

    with torch.inference_mode(), recording.running():
        running = recording_in_use.get()
        assert running is recording
        running.add(call)
    assert recording_in_use.get() is None
    recording.again()
    assert given.tolist() == [1, 1, 1]


PROCESS = """
import sys
import torch
from vllm_module.kernels.recording import Effects, Recording

x = torch.ones(2, 3)
recording = Recording([x])
with torch.inference_mode(), Effects([]), recording.running():
    y = x.exp() + int(torch.zeros(()))  # an operation, and a number that Python code reads
print("torch._dynamo" in sys.modules, "sympy" in sys.modules)
"""


def test_torchs_compiler_is_not_imported(
    run_with_torch: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """Its import takes longer than all else that an engine does before its first step."""
    own = PROCESS.replace(" + int(torch.zeros(()))", "")
    for program in (PROCESS.replace(", recording.running()", ""), own):
        assert run_with_torch(program).stdout.split() == ["False"] * 2
