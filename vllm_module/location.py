"""Where tensors live in the tree, and how a checkpoint stores them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch
from torch import nn

from vllm_module.parameters import BasevLLMParameter
from vllm_module.weights import Destination, Weight


class Conversion(Protocol):
    """What turns a checkpoint's tensor into what its module keeps of it, as it arrives.

    Attributes:
        dtype: of the checkpoint's tensor; other floating-point dtypes of 16 bits and more will do.
        makes: the module's other parameters that are made of it, which no checkpoint stores.

    """

    dtype: torch.dtype
    makes: Sequence[str]

    def jobs(
        self, module: Any, weight: Weight, slot: str | None
    ) -> Iterator[tuple[Weight, Destination]]:
        """Yield parts of what this rank keeps of ``weight``, and what makes something of them."""

    def restored(self, module: Any) -> torch.Tensor:
        """Return what the module keeps, turned back: as near as can be to what was stored."""

    def error_bound(self, stored: torch.Tensor) -> torch.Tensor:
        """Return how far each number of ``stored``, a whole slot, may be from what is restored."""


class Owner(Protocol):
    """The module that answers for a tensor: its own, or one of a plain module below it."""

    _device: torch.device
    _filled: set[tuple[str, str]]  # what was ever filled: (local name, slot)
    _tied: set[str]  # local names of tensors that are held elsewhere too, as far as is known
    conversions: Mapping[str, Conversion]

    @property
    def _processes_early(self) -> bool: ...
    def _locations(self) -> Iterator[Location]: ...
    def _is_filled(self) -> bool: ...
    def process_weights_after_loading(self) -> None: ...  # noqa: D102


class Location(NamedTuple):
    """Where a tensor lives: ``holder.attr``, at ``path`` in the tree; ``local`` to its owner."""

    path: str
    holder: nn.Module
    attr: str
    owner: Owner
    local: str

    @property
    def tensor(self) -> torch.Tensor | None:
        """The parameter or persistent buffer that is there now, if a checkpoint stores it."""
        holder, attr = self.holder, self.attr
        if self._conversions and self.is_made:
            return None
        parameter = holder._parameters.get(attr)
        if parameter is not None or attr in holder._non_persistent_buffers_set:
            return parameter
        return holder._buffers.get(attr)

    @property
    def is_made(self) -> bool:
        """Whether a conversion makes this tensor of another one."""
        return any(self.attr in conversion.makes for conversion in self._conversions.values())

    @property
    def conversion(self) -> Conversion | None:
        """What converts the checkpoint's tensor; ``None`` where it is kept as it is."""
        return self._conversions.get(self.attr)

    @property
    def _conversions(self) -> Mapping[str, Conversion]:
        # A plain module below its owner has none.
        owner: object = self.owner
        return self.owner.conversions if owner is self.holder else _NOTHING

    @property
    def prefix(self) -> str:
        """The path of the owner; empty, or ends with a dot."""
        return self.path[: -len(self.local)]

    def stored_name(self, slot: str) -> str:
        """Return the name by which a checkpoint stores ``slot`` of this tensor."""
        above, _, attr = self.path.rpartition(".")
        beside = attr in getattr(self.holder, "stored_beside", ())
        if not slot and not beside:
            return self.path
        above = above.rpartition(".")[0]
        name = f"{slot}.{attr}" if slot else attr
        return f"{above}.{name}" if above else name

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype that the tensor has in a checkpoint, up to conversions among wide floats."""
        conversion, tensor = self.conversion, self.tensor
        assert tensor is not None
        return tensor.dtype if conversion is None else conversion.dtype


_NOTHING: dict[str, Conversion] = {}


_ONE_SLOT = ("",)


def is_typed(tensor: torch.Tensor) -> TypeGuard[BasevLLMParameter]:
    """Tell whether a tensor cuts out its own shard."""
    # isinstance with a Parameter class runs in Python, which shows at ten thousands of names.
    return issubclass(type(tensor), BasevLLMParameter)


def slots_of(tensor: torch.Tensor) -> tuple[str, ...]:
    """Return the names of the parts of ``tensor`` that must be filled, each exactly once."""
    return tensor.slots if is_typed(tensor) else _ONE_SLOT


def materialized(tensor: torch.Tensor, device: torch.device) -> Any:
    """Return a tensor like ``tensor``, of its own class, with memory on ``device`` or on meta."""
    if torch.is_inference_mode_enabled():  # nobody could write to its tensors outside of it
        with torch.inference_mode(False):
            return materialized(tensor, device)
    if is_typed(tensor):
        return tensor.materialize_on(device)
    # Not empty_like: of a meta tensor it runs in Python and imports half a second of sympy.
    real = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(real, requires_grad=tensor.requires_grad)
    return real


def expected_shape(tensor: torch.Tensor, slot: str | None) -> list[int]:
    """Return the shape that a checkpoint has ``slot`` in; of all slots together for ``None``."""
    if is_typed(tensor):
        return list(tensor.checkpoint_shape(slot))
    return list(tensor.shape)


def expected_weights(locations: Iterable[Location]) -> dict[str, torch.Tensor]:
    """Return what a checkpoint holds for ``locations``, as meta tensors; a tied tensor once."""
    expected: dict[str, torch.Tensor] = {}
    seen = set()
    for location in locations:
        tensor = location.tensor
        assert tensor is not None
        for slot in slots_of(tensor) if id(tensor) not in seen else ():
            name = location.stored_name(slot)
            shape = expected_shape(tensor, slot)
            expected[name] = torch.empty(shape, dtype=location.stored_dtype, device="meta")
        seen.add(id(tensor))
    return expected
