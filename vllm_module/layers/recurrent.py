from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from vllm_module.layers.attention import AttentionMetadata
from vllm_module.module import vLLMModule


class RecurrentLayer(vLLMModule):
    """Base of the layers that keep tensors of a fixed size for each sequence: its *state*.

    A subclass sets ``state_shapes`` and ``state_dtypes`` in ``__init__``, with the same names.

    Attributes:
        state_shapes: the shape of each tensor of one sequence on this rank, by name.
        state_dtypes: the dtype of each; ``None`` for that of the model.
        states: the tensors of all sequences, ``[slots, *shape]`` each; set by the runtime.

    """

    state_shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    state_dtypes: Mapping[str, torch.dtype | None] = MappingProxyType({})

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[str, torch.Tensor] | None = None

    def kept(
        self, metadata: AttentionMetadata | None
    ) -> tuple[
        dict[str, torch.Tensor] | dict[str, None],
        tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, int],
    ]:
        """Return the states by name, and where the step's sequences are, for a kernel.

        The second part is ``state_slots``, ``query_start_loc``, ``context_lens`` and
        ``max_query_len``. Without ``metadata`` nothing is kept, and each part is ``None``.

        Raises ``RuntimeError`` if the runtime has not set ``states``, or the metadata's
        ``state_slots``.
        """
        if metadata is None:
            return dict.fromkeys(self.state_shapes), (None, None, None, 0)
        if self.states is None or metadata.state_slots is None:
            missing = "states" if self.states is None else "state_slots in the metadata"
            raise RuntimeError(
                f"{type(self).__name__} with metadata needs {missing}, and that is not set"
            )
        return self.states, (
            metadata.state_slots,
            metadata.query_start_loc,
            metadata.context_lens,
            metadata.max_query_len,
        )
