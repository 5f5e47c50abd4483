"""The digest of a tensor: two sums over its elements, whose parts can be computed anywhere.

An element adds ``(bits + 1) * key`` to each of two sums modulo 2**64. ``bits`` are its bits as an
unsigned integer, and its key depends on its place in the tensor only: see
:mod:`vllm_module.kernels.digest.keys`. An element of 8 bits is a byte of a word, and is multiplied
by the word's key times 1, 256, 65536 or 2**24; one of 64 bits is two words, and 1 is added to the
first. A complex number is two elements. So the sums of disjoint boxes add up to those of the
tensor, and an element that is missing or counted twice changes them, even if it is zero.

This is multilinear hashing (Carter and Wegman: Universal Classes of Hash Functions, 1979; Lemire
and Kaser: Strongly Universal String Hashing is Fast, 2014), once over the words of a chunk and once
over chunks. For random keys, two tensors that differ have an equal sum with a probability of 2**-27
at most, and two equal sums with 2**-54 at most. A change within one word always changes both.
Somebody who knows the keys can construct a collision: this finds mistakes, not attacks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from vllm_module.kernels.digest.boxes import as_integers, check_box, matrices
from vllm_module.kernels.digest.digest_matrix import digest_matrix
from vllm_module.kernels.digest.keys import CHUNK, CHUNK_BYTES, WORD, chunk_keys, column_keys

_PIECE = 2**14  # elements by index at once, few enough for torch not to wait for other threads


@dataclass(frozen=True)
class Digest:
    """Two sums over elements of a tensor, and the dtype and shape of the whole tensor.

    ``+`` adds the sums of other elements of the same tensor, and ``-`` takes elements away.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    sums: tuple[int, int] = (0, 0)

    def __add__(self, other: Digest) -> Digest:
        """Return the digest of the elements of both."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            raise ValueError(
                f"digests of a tensor of {self.dtype} {list(self.shape)} and of another one of "
                f"{other.dtype} {list(other.shape)} do not add up"
            )
        first, second = (
            (mine + theirs) % 2**64 for mine, theirs in zip(self.sums, other.sums, strict=True)
        )
        return replace(self, sums=(first, second))

    def __sub__(self, other: Digest) -> Digest:
        """Return the digest without the elements of ``other``."""
        return self + replace(other, sums=(-other.sums[0], -other.sums[1]))

    @property
    def hex(self) -> str:
        """The sums, with the dtype and shape in them, as 32 hexadecimal digits."""
        kind = f"{self.dtype} {list(self.shape)}".encode()
        added = hashlib.blake2b(kind, digest_size=16).digest()
        words = added[:8], added[8:]
        return "".join(
            f"{(total + int.from_bytes(word, 'little')) % 2**64:016x}"
            for total, word in zip(self.sums, words, strict=True)
        )


def digest_box(
    tensor: torch.Tensor, starts: Sequence[int] | None = None, shape: Sequence[int] | None = None
) -> Digest:
    """Return the digest of a box of a tensor; digests of disjoint boxes add up to the tensor's.

    Args:
        tensor: the elements of the box, of any dtype and strides. On CUDA, a Triton kernel adds
            them up; on other devices but the CPU, they are copied to the CPU.
        starts: where the box starts in the whole tensor, one index a dimension; by default 0.
        shape: of the whole tensor; by default that of the box.

    Raises:
        ValueError: the box is not within the tensor, or has no values (meta, sparse).

    """
    shape = tuple(tensor.shape if shape is None else shape)
    starts = (0,) * tensor.dim() if starts is None else starts
    check_box(tensor, starts, shape)
    empty = Digest(tensor.dtype, shape)
    if not tensor.numel():
        return empty
    sums = box_sums(tensor.detach(), starts, shape).tolist()
    return replace(empty, sums=(sums[0] % 2**64, sums[1] % 2**64))


def box_sums(tensor: torch.Tensor, starts: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """Return the two sums of a box that is not empty: int64 ``[2]``, on its device."""
    tensor = tensor if tensor.is_cuda else tensor.cpu()
    parts = [digest_matrix(one) for one in matrices(tensor, starts, shape)]
    return torch.stack(parts).sum(0)


def digest_elements(indices: torch.Tensor, values: torch.Tensor, shape: Sequence[int]) -> Digest:
    """Return the digest of single elements, which a sparse update adds and takes away.

    ``digest + digest_elements(i, new, shape) - digest_elements(i, old, shape)`` is the digest after
    the update. The time depends on the number of elements, not on the size of the tensor.

    Args:
        indices: places of the elements in the flattened tensor, int64 ``[n]``.
        values: the elements, ``[n]``, on the device of the indices.
        shape: of the whole tensor.

    Raises:
        ValueError: an index is not within the tensor, or there are not as many as values.

    """
    shape, size = tuple(shape), torch.Size(shape).numel()
    if indices.dtype != torch.int64 or indices.dim() != 1 or indices.shape != values.shape:
        raise ValueError(
            "indices must be int64, one for each value, got "
            f"{indices.dtype} {list(indices.shape)} for values of {list(values.shape)}"
        )
    total = Digest(values.dtype, shape)
    if not len(indices):
        return total
    least, most = (int(each) for each in indices.aminmax())
    if least < 0 or most >= size:
        raise ValueError(
            f"indices must be from 0 to {size - 1} for a tensor of {list(shape)}, "
            f"got {least if least < 0 else most}"
        )
    for places, part in zip(indices.split(_PIECE), values.detach().split(_PIECE), strict=True):
        sums = _add_elements(places, part, shape).tolist()
        total += replace(total, sums=(sums[0], sums[1]))
    return total


def _add_elements(
    indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...]
) -> torch.Tensor:
    bits, columns = as_integers(values), shape[-1] if shape else 1
    if values.is_complex():
        columns *= 2
        indices = (2 * indices.unsqueeze(1) + torch.arange(2, device=indices.device)).flatten()
    itemsize = bits.dtype.itemsize
    offsets = indices % columns * itemsize
    chunks = -(-columns * itemsize // CHUNK_BYTES)
    keys = column_keys(indices.device)
    words = offsets // WORD % CHUNK
    low = bits.long() & (2 ** (8 * min(itemsize, WORD)) - 1)
    total = (low + 1) * (keys[:, words] << 8 * (offsets % WORD))
    if itemsize > WORD:
        total += ((bits >> 32) & (2**32 - 1)) * keys[:, words + 1]
    numbers = indices // columns * chunks + offsets // CHUNK_BYTES
    return (total * chunk_keys(numbers)).sum(1)
