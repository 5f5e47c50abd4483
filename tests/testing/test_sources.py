"""Sources that record how they are read: where each part lies in its tensor."""

from __future__ import annotations

import itertools

import pytest
import torch

from vllm_module.testing.sources import WatchedSource, failing_stream


@pytest.mark.parametrize("dims", [(0, 0, 0), (0, 1, 0), (1, 0, 1), (1, 1, 1), (0, 1, 1)])
def test_parts_of_parts_are_recorded_where_they_lie(dims: tuple[int, ...]) -> None:
    """What a handle reads is what torch has at the recorded place, however often it is narrowed."""
    tensor = torch.arange(7 * 8).view(7, 8)
    for starts in itertools.product(range(3), repeat=3):
        source = WatchedSource({"x": tensor})
        handle, expected = source["x"], tensor
        for dim, start in zip(dims, starts, strict=True):
            length = expected.shape[dim] - start
            handle, expected = (
                handle.narrow(dim, start, length),
                expected.narrow(dim, start, length),
            )
        assert torch.equal(handle.read(), expected)
        ((name, begins, sizes),) = source.watch.reads
        place = tuple(slice(at, at + size) for at, size in zip(begins, sizes, strict=True))
        assert name == "x"
        assert torch.equal(tensor[place], expected)


@pytest.mark.parametrize("early", [0, 1, 2])
def test_a_read_before_all_names_are_routed_is_not_forgotten(early: int) -> None:
    """One read of a tensor whose source still has names tells, whatever is read afterwards."""
    source = WatchedSource({str(number): torch.zeros(2) for number in range(3)})
    for read, handle in enumerate(source.values(), 1):
        if read <= early:
            handle.read()
    for handle in source.values():
        handle.read()
    assert source.watch.routed == (early == 0)
    assert len(source.watch.reads) == early + 3


@pytest.mark.parametrize("after", range(5))
def test_a_stream_fails_once(after: int) -> None:
    """It does so after as many pairs as are asked for, or at its end."""
    tensors = {str(index): torch.zeros(1) for index in range(3)}
    calls: list[int] = []
    given = []
    for name, _ in failing_stream(tensors, after, lambda: calls.append(len(given))):
        given.append(name)
    assert given == [*tensors]
    assert calls == [min(after, 3)]
