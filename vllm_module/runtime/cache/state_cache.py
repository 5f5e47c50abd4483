"""The memory of recurrent layers' states, and copying them."""

from __future__ import annotations

import math

import torch

from vllm_module.core.module import vLLMModule
from vllm_module.layers import RecurrentLayer
from vllm_module.runtime.step_inputs import Moves


def state_layers(model: vLLMModule) -> list[RecurrentLayer]:
    """Return the recurrent layers of ``model``, which keep a state of each sequence."""
    return [module for module in model.modules() if isinstance(module, RecurrentLayer)]


def state_bytes(model: vLLMModule, dtype: torch.dtype) -> int:
    """Return the bytes of one sequence's state in all layers on this rank.

    ``dtype`` is the model's, which is used for states that declare none.
    """
    return sum(
        math.prod(shape) * (layer.state_dtypes[name] or dtype).itemsize
        for layer in state_layers(model)
        for name, shape in layer.state_shapes.items()
    )


def copy_bytes(model: vLLMModule, dtype: torch.dtype) -> int:
    """Return the bytes that :meth:`StateCache.move` allocates for each state in one copy."""
    return max(
        math.prod(shape) * (layer.state_dtypes[name] or dtype).itemsize
        for layer in state_layers(model)
        for name, shape in layer.state_shapes.items()
    )


class StateCache:
    """Memory for the states of sequences, on the device and in host memory.

    Which sequence has which slot is the scheduler's choice. Layers whose states have one name,
    shape and dtype share one tensor. A slot is never cleared: a sequence starts from zeros,
    whatever its slot holds. So on a CPU, a slot's memory is first used by the first sequence in it.

    Args:
        model: the model, whose recurrent layers get views of the memory; :meth:`close` removes
            them.
        slots: number of slots on the device.
        device: the device of the states.
        dtype: the model's, which is used for states that declare none.
        host_slots: number of slots in host memory, for sequences that are swapped out.

    Raises:
        RuntimeError: the layers already have states.
        ValueError: memory for that many slots cannot be allocated.

    """

    def __init__(
        self,
        model: vLLMModule,
        slots: int,
        device: torch.device,
        dtype: torch.dtype,
        host_slots: int = 0,
    ) -> None:
        self._layers = state_layers(model)
        if any(layer.states is not None for layer in self._layers):
            raise RuntimeError("the model's layers have states already: close that cache first")
        alike: dict[tuple[str, tuple[int, ...], torch.dtype], list[RecurrentLayer]] = {}
        for layer in self._layers:
            for name, shape in layer.state_shapes.items():
                key = name, tuple(shape), layer.state_dtypes[name] or dtype
                alike.setdefault(key, []).append(layer)
        self._states: list[torch.Tensor] = []  # [layers, slots, *shape]
        self._host: list[torch.Tensor] = []
        views: dict[RecurrentLayer, dict[str, torch.Tensor]] = {each: {} for each in self._layers}
        pinned = device.type == "cuda" and host_slots > 0
        for (name, shape, kind), layers in alike.items():
            count = len(layers)
            try:
                states = torch.empty(count, slots, *shape, dtype=kind, device=device)
                shape = count, host_slots, *shape
                host = torch.empty(shape, dtype=kind, device="cpu", pin_memory=pinned)
            except RuntimeError as error:  # raised by torch's allocators
                size = state_bytes(model, dtype)
                raise ValueError(
                    f"there is no memory for {slots} states of sequences on {device} and "
                    f"{host_slots} in host memory, of {size} bytes each: lower max_num_seqs or "
                    "swap_space, or leave out enable_prefix_caching, which takes as many again"
                ) from error
            for layer, view in zip(layers, states, strict=True):
                views[layer][name] = view
            self._states.append(states)
            self._host.append(host)
        for layer in self._layers:
            layer.states = views[layer]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(states.nbytes for states in self._states)

    def move(self, moves: Moves) -> None:
        """Copy states between slots: to the host, on the device, and then from the host.

        All states copied on the device are read before any is written, layer by layer. This needs
        memory for the states that are read.
        """
        if moves.copied and self._states:
            device = self._states[0].device
            sources, targets = torch.tensor(moves.copied, device=device).t().contiguous()
        for states, host in zip(self._states, self._host, strict=True):
            for source, target in moves.swapped_out:
                for kept, state in zip(host[:, target], states[:, source], strict=True):
                    kept.copy_(state, non_blocking=True)
            for layer in states if moves.copied else ():
                layer.index_copy_(0, targets, layer.index_select(0, sources))
            for source, target in moves.swapped_in:
                for state, kept in zip(states[:, target], host[:, source], strict=True):
                    state.copy_(kept, non_blocking=True)

    def close(self) -> None:
        """Remove the states from the model's layers and release their memory."""
        for layer in self._layers:
            layer.states = None
        self._states, self._host = [], []
