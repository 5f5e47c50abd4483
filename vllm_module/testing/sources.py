"""Sources that watch how they are read, or fail on the way."""

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

    ``fault`` is an exception to raise or a function to call, which may raise, wait, or end the
    process; if it returns, the stream goes on.
    """
    for index, pair in enumerate(weights.items()):
        if index == after:
            _happen(fault)
        yield pair
    if after >= len(weights):
        _happen(fault)


def failing_reads(
    weights: Mapping[str, torch.Tensor], names: Iterable[str], fault: Fault
) -> dict[str, Weight]:
    """Return handles of ``weights``, of which those in ``names`` fail when they are read.

    ``fault`` is as for :func:`failing_stream`. What is only looked at or narrowed does not fail.
    """
    failing = set(names)
    if unknown := failing - weights.keys():
        raise ValueError(f"no weights are called {', '.join(sorted(unknown))}")
    return {
        name: FailingHandle(tensor, fault) if name in failing else tensor
        for name, tensor in weights.items()
    }


def _happen(fault: Fault) -> None:
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
        """Keep a part; it fails like the whole."""
        return FailingHandle(self._tensor.narrow(dim, start, length), self._fault)

    def read_into(self, destination: torch.Tensor) -> None:
        """Fail, then read."""
        _happen(self._fault)
        read_into(self._tensor, destination)

    def read(self) -> torch.Tensor:
        """Fail, then read into a new tensor."""
        _happen(self._fault)
        return self._tensor.clone()


@dataclass
class Watch:
    """What is seen of a source while it is loaded.

    Attributes:
        reads: for each part that was read, the tensor's name, where the part begins in each
            dimension, and its shape.
        given_out: whether every name has been given out.
        routed: whether that was so at every read.

    """

    reads: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    routed: bool = True
    given_out: bool = False


class WatchedSource(Mapping[str, Weight]):
    """Handles of tensors in memory that enter every read in ``watch``."""

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
    """A handle of a tensor in memory that enters its reads in ``watch``."""

    def __init__(
        self, tensor: torch.Tensor, name: str, start: tuple[int, ...], watch: Watch
    ) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.start = start  # of the part, in each dimension of the tensor
        self._tensor, self._name, self._watch = tensor, name, watch

    def narrow(self, dim: int, start: int, length: int) -> WatchedHandle:
        """Keep a part."""
        begin = list(self.start)
        begin[dim] += start
        part = self._tensor.narrow(dim, start, length)
        return WatchedHandle(part, self._name, tuple(begin), self._watch)

    def read_into(self, destination: torch.Tensor) -> None:
        """Read, and enter it."""
        self._watch.routed &= self._watch.given_out
        self._watch.reads.append((self._name, self.start, tuple(self.shape)))
        read_into(self._tensor, destination)

    def read(self) -> torch.Tensor:
        """Read into a new tensor, and enter it."""
        destination = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(destination)
        return destination


class WatchedStream:
    """Pairs of name and tensor, each made when it is asked for and held by nobody here.

    ``most_held`` is how many of them were still alive, at most, when the next one was asked for.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._left = iter(tensors.items())
        self._given: list[weakref.ref[torch.Tensor]] = []
        self.most_held = 0

    def __iter__(self) -> WatchedStream:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        self._given = [given for given in self._given if given() is not None]
        self.most_held = max(self.most_held, len(self._given))
        name, tensor = next(self._left)
        fresh = tensor.clone()
        self._given.append(weakref.ref(fresh))
        return name, fresh
