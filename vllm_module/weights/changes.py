"""Some elements of a checkpoint tensor: what a trainer sends if most of them have not changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch

from vllm_module.errors import WeightReadError
from vllm_module.weights.region import Region, whole

if TYPE_CHECKING:
    from vllm_module.kernels.digest.digest import Digest

_PIECE = 1 << 22  # elements that are compared at a time
_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Changes:
    """The elements of a tensor that have changed; ``update_weights`` takes it for the tensor.

    Like a handle, it can be narrowed to what a rank keeps. All of ``indices`` stay then.

    Args:
        indices: places of the elements in the flattened tensor, int64 ``[n]``, ascending.
        values: the elements, ``[n]``, of the dtype that the model holds the tensor in.
        shape: of the whole tensor.

    """

    __slots__ = ("indices", "region", "values")

    def __init__(
        self, indices: torch.Tensor, values: torch.Tensor, shape: Sequence[int] | torch.Size
    ) -> None:
        self.indices, self.values = indices, values
        sizes = torch.Size(shape)
        self.region = Region("", sizes, whole(sizes), values.dtype, sizes)

    @property
    def shape(self) -> torch.Size:
        """The shape after narrowing; before that, the whole tensor's."""
        return self.region.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of indices and values."""
        return self.indices.nbytes + self.values.nbytes

    def narrow(self, dim: int, start: int, length: int) -> Changes:
        """Keep ``length`` entries of ``dim`` from ``start`` on, as ``torch.narrow`` does."""
        return self._of(self.region.narrow(dim, start, length))

    def view(self, shape: torch.Size) -> Changes:
        """Count the elements of the whole tensor in another shape."""
        return self._of(Region("", shape, whole(shape), self.dtype, shape))

    def _of(self, region: Region) -> Changes:
        other = object.__new__(Changes)
        other.indices, other.values, other.region = self.indices, self.values, region
        return other

    def read_into(self, destination: object) -> NoReturn:
        """Raise ``WeightReadError``: the other elements are not here."""
        raise WeightReadError(
            f"only {len(self.indices)} elements of a tensor of {list(self.region.sizes)} were "
            "sent, where all are needed: send the tensor whole"
        )

    def read(self) -> NoReturn:
        """Raise ``WeightReadError``, as :meth:`read_into` does."""
        self.read_into(None)

    def problem(self) -> str | None:
        """Return what is wrong with the indices or values; ``None`` if nothing is."""
        indices, values = self.indices, self.values
        for tensor in (indices, values):
            if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_meta:
                return "expected indices and values as plain tensors with data"
        if indices.dtype != torch.int64 or indices.dim() != 1 or indices.shape != values.shape:
            return (
                "expected indices of int64 [n] and as many values, got "
                f"{indices.dtype} {list(indices.shape)} and values of {list(values.shape)}"
            )
        if not len(indices):
            return None
        size = self.region.sizes.numel()
        least, most = (int(each) for each in indices.aminmax())
        if least < 0 or most >= size:
            wrong = least if least < 0 else most
            return f"expected indices from 0 to {size - 1}, got {wrong}"
        steps = indices.diff()
        if bool((steps <= 0).any()):
            at = int((steps <= 0).nonzero()[0])
            first, second = indices[at : at + 2].tolist()
            how = "twice" if first == second else f"before {second}"
            return f"expected indices in ascending order and each once, got {first} {how}"
        return None

    def digest(self) -> Digest:
        """Return the sums of these elements in the digest of the new tensor."""
        from vllm_module.kernels.digest.digest import digest_elements  # loads need no kernels

        return digest_elements(self.indices, self.values, self.region.sizes)

    def digest_after(self, digest: Digest, old: torch.Tensor) -> Digest:
        """Return the digest of the new tensor, from the one of the ``old`` tensor.

        It takes time by the number of elements that have changed.
        """
        from vllm_module.kernels.digest.digest import digest_elements  # loads need no kernels

        before = old.detach().reshape(-1)[self.indices]
        return digest + self.digest() - digest_elements(self.indices, before, self.region.sizes)


def find_changes(old: torch.Tensor, new: torch.Tensor) -> Changes:
    """Return the elements of ``new`` whose bits are others than in ``old``.

    So -0.0 and 0.0 differ, and a NaN is the same as itself. Raises ``ValueError`` for tensors of
    different shapes, dtypes or devices.
    """
    kinds = [(tuple(each.shape), each.dtype, each.device) for each in (old, new)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"expected two tensors of one shape, dtype and device, got {kinds}")
    values = new.detach().reshape(-1)
    before, after = _bits(old), _bits(new)
    found = [torch.empty(0, dtype=torch.int64, device=new.device)]
    for first in range(0, len(after), _PIECE):
        differ = before[first : first + _PIECE] != after[first : first + _PIECE]
        found.append(differ.nonzero().squeeze(1) + first)
    indices = torch.cat(found)
    return Changes(indices, values[indices], new.shape)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of each element as an integer."""
    flat = tensor.detach().reshape(-1)
    return flat.view(_OF_SIZE[flat.itemsize])
