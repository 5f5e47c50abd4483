"""What is made once is the same for all threads that ask at once, as its address is kept."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from vllm_module.kernels.matmul import code_rows, code_rows_matmul, gguf_blocks, gguf_codebooks
from vllm_module.kernels.once import Once


def test_threads_that_ask_at_once_get_the_same_value() -> None:
    made: list[object] = []
    begin, never = threading.Barrier(4), threading.Event()

    @Once
    def make(number: int) -> object:
        never.wait(0.05)  # the others may run, and would make their own
        made.append(object())
        return made[-1]

    def ask(_: int) -> object:
        begin.wait()
        return make(3)

    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(ask, range(4)))
    assert found == set(made)
    assert len(made) == 1
    assert make(3) is made[0]
    assert make(4) is made[1]
    make.cache_clear()
    assert make(3) is made[2]


def test_none_is_a_value() -> None:
    calls = []
    make = Once(lambda: calls.append(1))
    assert (make(), make(), len(calls)) == (None, None, 1)


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (code_rows._e2m1, ()),
        (code_rows._halves, ()),
        (code_rows._order_of, (64, 4, 4, None)),
        (code_rows_matmul._places, (tuple(range(8)),)),
        (gguf_blocks._kept, ((0.5, 2.0), torch.device("cpu"))),
        (gguf_codebooks._unpacked, ("IQ1_S", torch.device("cpu"))),
    ],
    ids=["e2m1", "halves", "order", "places", "numbers", "codebook"],
)
def test_tensors_whose_addresses_are_kept(make: Once, arguments: tuple) -> None:
    """A thread's own tensor would be freed, and another thread's loop or graph would read it."""
    begin = threading.Barrier(4)

    def ask(_: int) -> torch.Tensor:
        begin.wait()
        return make(*arguments)

    make.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, range(4)))
    assert len({each.data_ptr() for each in found}) == 1
    assert isinstance(make, Once)
