"""Weights without a file: each value is computed from the tensor's name and the element's index.

So a tensor has the same values whole and in parts, on every rank and every device. Values keep a
model's activations finite; they mean nothing.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import torch

from vllm_module.base.messages import printable_name
from vllm_module.weights.handle import Weight, check_destination, copy_weight, narrowed

_MOST = 1 << 18  # elements computed at once, so that their integers stay in a CPU's cache
_WEIGHT = 0.02 * math.sqrt(3)  # uniform values up to this have a standard deviation of 0.02
# Eight-bit values times a scale are about as large as weights that are not quantized.
_EIGHT_BIT, _SCALE = 8.0, 2.0**-9
_SCALE_NAME = re.compile(r"(.*[._])?(scale|scales|scale_inv|scale_2|absmax|scales?_and_zeros?)")

_GOLDEN = -7046029254386353131  # 2**64 over the golden ratio, as a signed integer


class _Values(NamedTuple):
    """Formula of a tensor's values: ``of`` takes ``offset`` + element index * ``factor``."""

    of: Callable[[torch.Tensor], torch.Tensor]
    factor: int = 1
    offset: int = 0


class DummyWeights(dict[str, Weight]):
    """Dummy tensors by name, computed for the shape and dtype of each tensor in ``expected``.

    A tensor of ``expected`` that is not on meta keeps the values that it has there.

    Floats are uniform with a standard deviation of 0.02: around 1 in a one-dimensional ``weight``
    (a norm's), around 0 elsewhere. Scales, recognized by name, are between 2**-9 and 2**-8, because
    eight-bit values have a larger range. Integers are random bits; int64 counts along the last
    dimension, as position ids do.
    """

    load_format = "dummy"

    def __init__(self, expected: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in expected.items():
            self[name] = tensor if not tensor.is_meta else _handle(name, tensor)


class DummyHandle:
    """A tensor, or a region of one, whose values are computed when it is read.

    ``shape`` and ``dtype`` are those of the region.
    """

    __slots__ = ("_first", "_strides", "_values", "dtype", "name", "shape")

    def __init__(
        self,
        name: str,
        dtype: torch.dtype,
        shape: torch.Size,
        values: _Values,
        strides: tuple[int, ...] | None = None,
        first: int = 0,
    ) -> None:
        self.name, self.dtype, self.shape, self._values = name, dtype, torch.Size(shape), values
        if strides is None:
            strides = tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1] if shape else ()
        self._strides, self._first = strides, first  # both in elements of the whole tensor

    def narrow(self, dim: int, start: int, length: int) -> DummyHandle:
        """Keep ``length`` entries of ``dim`` from ``start`` on, as ``torch.narrow`` does.

        A dimension that does not exist is an IndexError, a range outside of it a ValueError.
        """
        dim, start, shape = narrowed(self, dim, start, length)
        first = self._first + start * self._strides[dim]
        return DummyHandle(self.name, self.dtype, shape, self._values, self._strides, first)

    def read_into(self, destination: torch.Tensor) -> None:
        """Compute the values into ``destination``: the same shape; any strides, dtype and device.

        They are computed on its device. Raises as the function ``read_into`` does.
        """
        check_destination(self.shape, destination, self)
        for part, region in self._parts(destination):
            copy_weight(part._computed(destination.device), region, self)

    def read(self) -> torch.Tensor:
        """Compute the values in host memory."""
        destination = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.read_into(destination)
        return destination

    def __repr__(self) -> str:
        return f"{printable_name(self.name)} ({self.dtype}, shape {list(self.shape)}, dummy values)"

    def _parts(self, destination: torch.Tensor) -> Iterator[tuple[DummyHandle, torch.Tensor]]:
        """Yield regions of at most _MOST elements, and their destinations."""
        if self.shape.numel() <= _MOST:
            yield self, destination
            return
        dim = next(dim for dim, size in enumerate(self.shape) if size > 1)
        size = self.shape[dim]
        step = max(1, _MOST * size // self.shape.numel())
        for start in range(0, size, step):
            length = min(step, size - start)
            part = self.narrow(dim, start, length)
            yield from part._parts(destination.narrow(dim, start, length))

    def _computed(self, device: torch.device) -> torch.Tensor:
        of, factor, offset = self._values
        first = _wrapped(offset + self._first * factor)
        integers = torch.full((), first, dtype=torch.int64, device=device)
        for size, stride in zip(self.shape, self._strides, strict=True):
            steps = torch.arange(size, device=device) * _wrapped(stride * factor)
            integers = integers.unsqueeze(-1) + steps
        values = of(integers)
        return values if values.dtype == self.dtype else values.to(self.dtype)


def _handle(name: str, meta: torch.Tensor) -> DummyHandle:
    return DummyHandle(name, meta.dtype, meta.shape, _values(name, meta))


def _values(name: str, meta: torch.Tensor) -> _Values:
    """Return the formula of a tensor's values, chosen by its dtype and name."""
    dtype, is_scale = meta.dtype, _SCALE_NAME.fullmatch(name) is not None
    if dtype == torch.int64:
        return _Values(partial(torch.remainder, other=max([1, *meta.shape[-1:]])))
    around = float(meta.dim() == 1 and name.endswith("weight"))
    return _Values(_of_bits(dtype, is_scale, around), _GOLDEN, _seed(name))


def _of_bits(
    dtype: torch.dtype, is_scale: bool, around: float
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function from mixed integers to values of ``dtype`` or of a dtype cast to it."""
    if dtype == torch.float8_e8m0fnu or (dtype == torch.uint8 and is_scale):
        # Exponents of two: 2**-9 to 2**-2. MXFP4 stores them as bytes.
        return lambda integers: ((_bits(integers) & 7) + 118).to(torch.uint8).view(dtype)
    if dtype == torch.bool:
        return lambda integers: (_bits(integers) & 1).to(torch.bool)
    if not (dtype.is_floating_point or dtype.is_complex):
        return _bits
    if is_scale:
        return lambda integers: _uniform(integers).abs_().add_(1).mul_(_SCALE)
    most = _EIGHT_BIT if dtype.itemsize == 1 else _WEIGHT
    return lambda integers: _uniform(integers).mul_(most).add_(around)


def _seed(name: str) -> int:
    """Return a signed 64-bit hash of the name."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _wrapped(integer: int) -> int:
    """Return the integer modulo 2**64, as a signed one."""
    return (integer + 2**63) % 2**64 - 2**63


def _bits(integers: torch.Tensor) -> torch.Tensor:
    """Hash integers: mix the upper half of each, a multiple of 2**64 over the golden ratio.

    Two rounds of multiplying and shifting; products wrap around, on every device.
    """
    bits = (integers >> 32).to(torch.int32)
    for factor, shift in ((0x7FEB352D, 15), (-0x7B935975, 16)):
        bits.mul_(factor)
        mask = (1 << (32 - shift)) - 1  # the right shift of a signed integer repeats the sign
        bits.bitwise_xor_((bits >> shift).bitwise_and_(mask))
    return bits


def _uniform(integers: torch.Tensor) -> torch.Tensor:
    """Return floats from -1 to 1."""
    return _bits(integers).to(torch.float32).mul_(2.0**-31)
