"""Sources for tests: they record how they are read, or fail midway."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from vllm_module.weights import Weight, read_into

Fault = BaseException | Callable[[], object]


def failing_stream(
    weights: Mapping[str, Weight], after: int, fault: Fault
) -> Iterator[tuple[str, Weight]]:
    """Yield the first ``after`` pairs of ``weights``, then fail.

    ``fault`` is an exception to raise, or a function to call. The function may raise, wait or end
    the process; if it returns, the stream continues.
    """
    for index, pair in enumerate(weights.items()):
        if index == after:
            _trigger(fault)
        yield pair
    if after >= len(weights):
        _trigger(fault)


def failing_reads(
    weights: Mapping[str, torch.Tensor], names: Iterable[str], fault: Fault
) -> dict[str, Weight]:
    """Return ``weights`` as handles; those in ``names`` fail when they are read.

    ``fault`` is as for :func:`failing_stream`. Reading attributes or narrowing does not fail.
    """
    failing = set(names)
    if unknown := failing - weights.keys():
        raise ValueError(f"no weights are called {', '.join(sorted(unknown))}")
    return {
        name: FailingHandle(tensor, fault) if name in failing else tensor
        for name, tensor in weights.items()
    }


def _trigger(fault: Fault) -> None:
    if isinstance(fault, BaseException):
        raise fault
    fault()


class FailingHandle:
    """A handle of a tensor in memory that fails when it is read."""

    def __init__(self, tensor: torch.Tensor, fault: Fault) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self._tensor = tensor
        self._fault = fault

    def narrow(self, dim: int, start: int, length: int) -> FailingHandle:
        """Return a handle of a part, which also fails when it is read."""
        return FailingHandle(self._tensor.narrow(dim, start, length), self._fault)

    def read_into(self, destination: torch.Tensor) -> None:
        """Fail, then read."""
        _trigger(self._fault)
        read_into(self._tensor, destination)

    def read(self) -> torch.Tensor:
        """Fail, then read into a new tensor."""
        _trigger(self._fault)
        return self._tensor.clone()


@dataclass
class Watch:
    """A record of the reads of a source.

    Attributes:
        reads: for each read, the tensor's name, the part's start in each dimension, and its shape.
        given_out: True once every name has been given out.
        routed: True if every name had been given out at every read.

    """

    reads: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    routed: bool = True
    given_out: bool = False


class WatchedSource(Mapping[str, Weight]):
    """Handles of tensors in memory that record every read in ``watch``."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.watch = Watch()
        self._tensors = tensors

    def __getitem__(self, name: str) -> Weight:
        tensor = self._tensors[name]
        return WatchedHandle(tensor, name, (0,) * tensor.dim(), self.watch)

    def __iter__(self) -> Iterator[str]:
        yield from self._tensors
        self.watch.given_out = True

    def __len__(self) -> int:
        return len(self._tensors)


class WatchedHandle:
    """A handle of a tensor in memory that records its reads in ``watch``."""

    def __init__(
        self, tensor: torch.Tensor, name: str, start: tuple[int, ...], watch: Watch
    ) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.start = start  # start of the handle in each dimension of the tensor
        self._tensor, self._name, self._watch = tensor, name, watch

    def narrow(self, dim: int, start: int, length: int) -> WatchedHandle:
        """Return a handle of a part of the tensor."""
        begin = list(self.start)
        begin[dim] += start
        part = self._tensor.narrow(dim, start, length)
        return WatchedHandle(part, self._name, tuple(begin), self._watch)

    def view(self, shape: torch.Size) -> WatchedHandle:
        """Return a handle of the whole tensor, with another shape."""
        return WatchedHandle(self._tensor.view(shape), self._name, (0,) * len(shape), self._watch)

    def read_into(self, destination: torch.Tensor) -> None:
        """Read, and record the read."""
        self._watch.routed &= self._watch.given_out
        self._watch.reads.append((self._name, self.start, tuple(self.shape)))
        read_into(self._tensor, destination)

    def read(self) -> torch.Tensor:
        """Read into a new tensor, and record the read."""
        destination = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(destination)
        return destination


class WatchedStream:
    """A stream of names and tensors that makes each tensor on demand and keeps none.

    ``most_held`` is the largest number of its tensors that were alive when the next was requested.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._remaining = iter(tensors.items())
        self._given: list[weakref.ref[torch.Tensor]] = []
        self.most_held = 0

    def __iter__(self) -> WatchedStream:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        self._given = [given for given in self._given if given() is not None]
        self.most_held = max(self.most_held, len(self._given))
        name, tensor = next(self._remaining)
        fresh = tensor.clone()
        self._given.append(weakref.ref(fresh))
        return name, fresh
