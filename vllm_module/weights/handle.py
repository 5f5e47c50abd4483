"""Handles of tensors that are not read yet, and reading them into destinations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import NoReturn, Protocol, TypeAlias

import torch

from vllm_module.base.messages import printable, printable_name
from vllm_module.errors import MisshapenWeightError, WeightReadError
from vllm_module.weights.cut_rows import ByteRun
from vllm_module.weights.readable import Readable
from vllm_module.weights.region import Region


class Handle(Protocol):
    """A tensor that is not read yet; its shape is known, and it can be narrowed before reading."""

    @property
    def shape(self) -> torch.Size:
        """The shape after narrowing."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stored elements."""

    def narrow(self, dim: int, start: int, length: int) -> Handle:
        """Keep ``length`` entries of ``dim`` from ``start`` on, as ``torch.narrow`` does."""

    def read_into(self, destination: torch.Tensor) -> None:
        """Read into ``destination``: the same shape; any strides, dtype and device."""

    def read(self) -> torch.Tensor:
        """Read into a new tensor in host memory."""


# A tensor in memory serves as its own handle: it has a shape, a dtype and narrow.
Weight: TypeAlias = Handle | torch.Tensor
# What is loaded or sent: weights by name, or pairs one after another.
Pairs: TypeAlias = Mapping[str, Weight] | Iterable[tuple[str, Weight]]


class TensorHandle:
    """A tensor in memory with the interface of a handle; ``name`` is for messages."""

    __slots__ = ("name", "tensor")

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name, self.tensor = name, tensor

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor."""
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        return self.tensor.dtype

    def narrow(self, dim: int, start: int, length: int) -> TensorHandle:
        """Keep ``length`` entries of ``dim`` from ``start`` on, as ``torch.narrow`` does."""
        return TensorHandle(self.name, self.tensor.narrow(dim, start, length))

    def read_into(self, destination: torch.Tensor) -> None:
        """Copy to ``destination``: the same shape; any strides, dtype and device."""
        check_destination(self.shape, destination, self)
        copy_weight(self.tensor, destination, self)

    def read(self) -> torch.Tensor:
        """Return the tensor."""
        return self.tensor

    def __repr__(self) -> str:
        return f"{self.name}: a tensor in memory"


class Sink(Protocol):
    """A destination that converts a weight instead of copying it."""

    @property
    def device(self) -> torch.device:
        """Device of the result; a weight that is not read yet may be read there first."""

    def receive(self, weight: Weight) -> None:
        """Read the whole of ``weight`` and keep the result of the conversion."""


Destination: TypeAlias = Sink | torch.Tensor


def read_into(weight: Weight, destination: Destination) -> None:
    """Fill ``destination`` with ``weight``: read a handle, copy a tensor in memory.

    Raises MisshapenWeightError for another shape, a destination on the meta device, or a dtype of
    another kind (floats into integers). Raises WeightReadError if bytes cannot be read, or if a
    finite value is beyond the range of the destination's dtype.
    """
    if not isinstance(destination, torch.Tensor):
        destination.receive(weight)
    elif isinstance(weight, torch.Tensor):
        check_destination(weight.shape, destination, "a tensor in memory")
        copy_weight(weight, destination, "a tensor in memory")
    else:
        weight.read_into(destination)


def read_together(jobs: Iterable[tuple[Weight, Destination]]) -> None:
    """Fill each destination as ``read_into`` does; runs of one file are read in one call."""
    runs: dict[Readable, list[tuple[ByteRun, int]]] = {}
    for weight, destination in jobs:
        if (
            isinstance(weight, FileHandle)
            and isinstance(destination, torch.Tensor)
            and weight.is_read_directly(destination)
        ):
            runs.setdefault(weight.file_bytes, []).extend(weight.runs_to(destination.data_ptr()))
        else:
            read_into(weight, destination)
    for file_bytes, placed in runs.items():
        file_bytes.read_runs(placed)


class FileHandle:
    """A tensor of a file, or a region of one.

    ``shape`` and ``dtype`` are those of the region; ``name`` is the whole tensor's.
    """

    __slots__ = ("_cut", "_offset", "_strides", "dtype", "file_bytes", "name", "shape", "whole")

    def __init__(
        self,
        file_bytes: Readable,
        name: str,
        dtype: torch.dtype,
        shape: torch.Size,
        strides: tuple[int, ...],
        offset: int,
        cut: bool = False,
        whole: FileHandle | None = None,
    ) -> None:
        self.file_bytes = file_bytes
        self.name = name
        self.dtype = dtype
        self.shape = shape
        self._strides = strides  # bytes
        self._offset = offset  # offset in the file of the region's first element
        self._cut = cut  # True if the region is less than a stored tensor
        self.whole = whole  # the handle that this one was narrowed from

    @property
    def file(self) -> Path:
        """The file that holds the tensor."""
        return self.file_bytes.path

    @property
    def nbytes(self) -> int:
        """Bytes of the region."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def byte_range(self) -> tuple[int, int]:
        """Offsets in the file of the region's first byte and of the byte after its last one."""
        if self.nbytes == 0:
            return self._offset, self._offset
        last = sum((n - 1) * stride for n, stride in zip(self.shape, self._strides, strict=True))
        return self._offset, self._offset + last + self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """True if the region's bytes follow each other in the file without gaps."""
        begin, end = self.byte_range
        return end - begin == self.nbytes

    def runs(self) -> Iterator[ByteRun]:
        """Yield the region's bytes as runs, in the order of its elements; a matrix is one run."""
        if self.nbytes == 0:
            return
        length, count, stride = self.dtype.itemsize, 1, 0
        outer: list[tuple[int, int]] = []  # size and stride of the dimensions outside one run
        for size, step in zip(reversed(self.shape), reversed(self._strides), strict=True):
            if size == 1:
                continue
            if count == 1 and step == length:
                length *= size
            elif count == 1:
                count, stride = size, step
            elif not outer and step == stride * count:
                count *= size
            else:
                outer.insert(0, (size, step))
        for offsets in product(*[range(0, size * step, step) for size, step in outer]):
            yield ByteRun(self._offset + sum(offsets), length, stride, count, self._cut)

    def runs_to(self, address: int) -> Iterator[tuple[ByteRun, int]]:
        """Yield each run with its address in a contiguous destination at ``address``."""
        for run in self.runs():
            yield run, address
            address += run.nbytes

    def narrow(self, dim: int, start: int, length: int) -> FileHandle:
        """Keep ``length`` entries of ``dim`` from ``start`` on, as ``torch.narrow`` does.

        A dimension that does not exist is an IndexError, a range outside of it a ValueError.
        """
        dim, start, shape = narrowed(self, dim, start, length)
        offset = self._offset + start * self._strides[dim]
        cut = self._cut or length < self.shape[dim]
        return FileHandle(
            self.file_bytes, self.name, self.dtype, shape, self._strides, offset, cut,
            self.whole or self,
        )  # fmt: skip

    @property
    def region(self) -> Region:
        """The box of its tensor that this handle stands for."""
        tensor = self.whole or self
        left, starts = self._offset - tensor._offset, [0] * len(self.shape)
        # A dimension of one entry has any stride, and says nothing of the offset. Nor does that of
        # a region without elements, which may be the tensor's end.
        dims = [dim for dim, size in enumerate(tensor.shape) if size > 1 and self.nbytes]
        for dim in sorted(dims, key=self._strides.__getitem__, reverse=True):
            starts[dim], left = divmod(left, self._strides[dim])
        box = tuple(zip(starts, self.shape, strict=True))
        return Region(self.name, tensor.shape, box, self.dtype, self.shape)

    def view(self, shape: torch.Size) -> FileHandle:
        """Return a handle of the same elements, in the same order, with another shape.

        Raises ``ValueError`` if the number of elements differs, or if the region is not contiguous
        in the file.
        """
        strides = _strides(self.shape, self.dtype.itemsize)
        sizes = zip(self.shape, self._strides, strides, strict=True)
        in_order = all(size == 1 or one == other for size, one, other in sizes)
        if shape.numel() != self.shape.numel() or not in_order:
            raise ValueError(f"{self}: {list(shape)} is no view of it")
        strides = _strides(shape, self.dtype.itemsize)
        return FileHandle(
            self.file_bytes, self.name, self.dtype, shape, strides, self._offset, self._cut
        )

    def is_read_directly(self, destination: torch.Tensor) -> bool:
        """Return whether the file's bytes are read straight into ``destination``.

        This needs a contiguous destination in host memory, of the same dtype, and not bool, whose
        bytes must be checked first. Raises as the function ``read_into`` does if the shapes differ.
        """
        check_destination(self.shape, destination, self)
        direct = destination.dtype == self.dtype != torch.bool
        return direct and destination.is_cpu and destination.is_contiguous()

    def read_into(self, destination: torch.Tensor) -> None:
        """Read into ``destination``: the same shape; any strides, dtype and device.

        Where ``is_read_directly`` says no, the region is first read into new host memory. Raises as
        the function ``read_into`` does; a byte that is no bool is a WeightReadError too.
        """
        if self.is_read_directly(destination):
            self.file_bytes.read_runs(self.runs_to(destination.data_ptr()))
            return
        pinned = destination.is_cuda
        staged = torch.empty(self.shape, dtype=self.dtype, device="cpu", pin_memory=pinned)
        self.file_bytes.read_runs(self.runs_to(staged.data_ptr()))
        # torch's operations disagree on the truth of a bool stored as another byte.
        if self.dtype == torch.bool and bool((staged.view(torch.uint8) > 1).any()):
            raise WeightReadError(
                f"{self} holds bytes other than 0 and 1, which are no bools; the file is damaged, "
                "or was written wrongly: download it again"
            )
        copy_weight(staged, destination, self)

    def read(self) -> torch.Tensor:
        """Read into a new tensor in host memory."""
        destination = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.read_into(destination)
        return destination

    def __repr__(self) -> str:
        name, file = printable_name(self.name), printable(self.file)
        return f"{name} ({self.dtype}, shape {list(self.shape)}, in {file})"

    def __getattr__(self, attribute: str) -> NoReturn:
        advice = "; call .read() first" if hasattr(torch.Tensor, attribute) else ""
        raise AttributeError(
            f"a weight that is not read yet has no attribute {attribute!r}{advice}"
        )


def _strides(shape: torch.Size, itemsize: int) -> tuple[int, ...]:
    """Return the strides, in bytes, of contiguous elements in row-major order."""
    return tuple(itemsize * math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def narrowed(handle: Handle, dim: int, start: int, length: int) -> tuple[int, int, torch.Size]:
    """Return ``dim`` and ``start`` from 0 on, and the shape of ``handle`` after ``narrow``.

    A dimension that does not exist is an IndexError, a range outside of it a ValueError.
    """
    shape = handle.shape
    if not -len(shape) <= dim < len(shape):
        raise IndexError(f"{handle}: dim {dim} is not one of its {len(shape)} dimensions")
    dim %= len(shape)
    start += shape[dim] if start < 0 else 0
    if start < 0 or length < 0 or start + length > shape[dim]:
        raise ValueError(
            f"{handle}: [{start}, {start + length}) is not inside dim {dim} of size {shape[dim]}"
        )
    return dim, start, torch.Size((*shape[:dim], length, *shape[dim + 1 :]))


def check_destination(shape: torch.Size, destination: torch.Tensor, what: object) -> None:
    """Raise for destinations that ``copy_`` would accept: a broadcast shape, the meta device."""
    if shape != destination.shape:
        raise MisshapenWeightError(
            f"{what} has shape {list(shape)}, its destination {list(destination.shape)}; "
            "narrow both to the same region"
        )
    if destination.is_meta:
        raise MisshapenWeightError(
            f"{what} cannot be read into the meta device; materialize the destination first"
        )


def copy_weight(
    source: torch.Tensor, destination: torch.Tensor, what: object, *, non_blocking: bool = False
) -> None:
    """Copy ``source`` into ``destination``, or raise before copying if the cast loses a value.

    ``what`` names the source in messages. The cast runs on the destination's device. With
    ``non_blocking``, a copy out of pinned memory may still run when this returns: do not change the
    memory until it is done.
    """
    source = source.detach() if source.requires_grad else source
    if source.dtype != destination.dtype:
        source = source.to(destination.device, non_blocking=non_blocking)
        _check_cast(source, destination.dtype, what)
    destination.copy_(source, non_blocking=non_blocking)


def _check_cast(source: torch.Tensor, dtype: torch.dtype, what: object) -> None:
    if _kind(source.dtype) > _kind(dtype):
        raise MisshapenWeightError(
            f"{what} is {source.dtype}, its destination {dtype}, which would cut its values; "
            f"make the destination {source.dtype}"
        )
    low, high = _range(dtype)
    source_low, source_high = _range(source.dtype)
    if source.numel() == 0 or (low <= source_low and source_high <= high):
        return
    values = source.detach()
    if source.dtype.itemsize == 1 or not source.dtype.is_signed:
        values = values.double()  # torch cannot reduce float8 and wide unsigned integers
    least, greatest = values.aminmax()
    if low <= least.item() and greatest.item() <= high:
        return
    # NaN and infinities fail the comparison above; they are allowed, as the checkpoint stores them.
    # The comparison below is in float64, because the source's dtype would round the bounds up.
    exact = values.double()
    outside = exact[exact.isfinite() & ((exact < low) | (exact > high))]
    if outside.numel():
        raise WeightReadError(
            f"{what} holds {outside.numel()} finite values beyond the range of {dtype} "
            f"({low:g} to {high:g}), the first {outside[0].item():g}; "
            f"load it as {source.dtype} or another dtype that can hold them"
        )


def _kind(dtype: torch.dtype) -> int:
    """Return the rank of a dtype's kind; a cast to a smaller rank loses values."""
    if dtype.is_complex:
        return 3
    if dtype.is_floating_point:
        return 2
    return 0 if dtype == torch.bool else 1


@cache
def _range(dtype: torch.dtype) -> tuple[float, float]:
    """Return the least and the greatest value that stays finite when rounded to ``dtype``."""
    if dtype == torch.bool:
        return 0, 1
    if not dtype.is_floating_point and not dtype.is_complex:
        integers = torch.iinfo(dtype)
        return integers.min, integers.max
    floats = torch.finfo(dtype)
    # A value up to half a unit in the last place beyond the greatest one still rounds down to it;
    # the tie itself rounds to even, which is up.
    half_ulp = math.ldexp(floats.eps, math.frexp(floats.max)[1] - 2)
    high = math.nextafter(floats.max + half_ulp, 0.0)
    return (0.0 if floats.min >= 0 else -high), high
