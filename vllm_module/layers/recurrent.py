"""What layers with recurrent state share: where it is kept, decays, and the convolution before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from vllm_module.core.module import vLLMModule
from vllm_module.core.tensors import without_casts
from vllm_module.distributed import tensor_parallel_group
from vllm_module.errors import UnsupportedModelError, WeightLoadError
from vllm_module.kernels.recurrent.causal_conv1d import causal_conv1d
from vllm_module.layers.attention import AttentionMetadata
from vllm_module.parameters import BasevLLMParameter, ColumnvLLMParameter, Common, Dim

# state_slots, query_start_loc, context_lens and max_query_len of AttentionMetadata.
Places = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, int]
NOWHERE: Places = None, None, None, 0


class RecurrentLayer(vLLMModule):
    """Base of the layers that keep tensors of a fixed size for each sequence: its *state*.

    A subclass sets ``state_shapes`` and ``state_dtypes`` in ``__init__``, with the same names.

    Attributes:
        state_shapes: the shape of each tensor of one sequence on this rank, by name.
        state_dtypes: the dtype of each; ``None`` for that of the model.
        states: the tensors of all sequences, ``[slots, *shape]`` each; set by the runtime.
        ran_without_metadata: set once the layer has states and is called without metadata.

    """

    state_shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    state_dtypes: Mapping[str, torch.dtype | None] = MappingProxyType({})

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[str, torch.Tensor] | None = None
        self.ran_without_metadata = False

    def kept(
        self, metadata: AttentionMetadata | None
    ) -> tuple[Mapping[str, torch.Tensor | None], Places]:
        """Return the states by name, and where the step's sequences are, for a kernel.

        The second part is ``state_slots``, ``query_start_loc``, ``context_lens`` and
        ``max_query_len``. Without ``metadata`` nothing is kept, and each part is ``None``.

        Raises ``RuntimeError`` if the runtime has not set ``states``, or the metadata's
        ``state_slots``.
        """
        if metadata is None:
            if self.states is not None:
                self.ran_without_metadata = True
            return dict.fromkeys(self.state_shapes), NOWHERE
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

    def over_sequences(
        self,
        function: Callable[..., torch.Tensor],
        metadata: AttentionMetadata | None,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        """Return ``function(*tensors, metadata)``; torch.compile leaves it as it is."""
        if metadata is not None and torch.compiler.is_compiling():  # as in Attention.forward
            function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return function(*tensors, metadata)


class DecayingLayer(RecurrentLayer):
    """Base of the layers with a recurrence in which the state of each head decays.

    In a step of length ``t`` the state of a head is multiplied by ``exp(t A)``. What decides ``t``
    and ``A`` is float32 in a model of any dtype, because errors add up over the steps.

    Args:
        heads: the heads with a decay of their own.

    Attributes:
        A_log: of the checkpoint, ``[heads]``.
        dt_bias: added before a step's softplus, ``[heads]``.
        A: ``-exp(A_log)``, computed when ``A_log`` is loaded.

    """

    def __init__(self, heads: Dim) -> None:
        super().__init__()
        self.tp_group = group = tensor_parallel_group()
        self.A_log, self.dt_bias = (
            ColumnvLLMParameter(heads, tp_rank=group.rank, tp_size=group.size, dtype=torch.float32)
            for _ in range(2)
        )
        decay = torch.zeros(self.A_log.shape, dtype=torch.float32)
        self.register_buffer("A", decay, persistent=False)
        self.A: torch.Tensor

    def process_weights_after_loading(self) -> None:
        self.A.copy_(self._decay())
        if not bool((self.A_log.isfinite() & self.A.isfinite()).all()):
            wrong = self.A_log[~(self.A_log.isfinite() & self.A.isfinite())]
            raise WeightLoadError(
                f"A_log has {len(wrong)} of {len(self.A_log)} values on this rank, such as "
                f"{wrong[0].item()}, with no finite exp(A_log): expected logarithms of decays"
            )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Move the layer's own tensors, but never cast them; those of its children are cast."""
        own = {*self._parameters.values(), *self._buffers.values()}
        # PyTorch gives _apply no types.
        return super()._apply(without_casts(fn, own), recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Compute ``A`` from the ``A_log`` of a state dict, which does not have it."""
        super()._load_from_state_dict(*args, **kwargs)
        if not self.A_log.is_meta:
            with torch.no_grad():
                self.process_weights_after_loading()

    def decay(self) -> torch.Tensor:
        """Return ``A``, or where ``A_log`` is trained, as a function of it."""
        # Without autograd too: an optimizer may have written to it.
        return self._decay() if self.A_log.requires_grad else self.A

    def _decay(self) -> torch.Tensor:
        return -torch.exp(self.A_log.float())


class CausalConv1d(vLLMModule):
    """The weights of a convolution of each channel with its last inputs.

    Args:
        channels: those of a checkpoint, with slots; each is a convolution of its own if it has a
            name that a checkpoint may use.
        width: the inputs of an output, 2 to 8.
        bias: whether there is one.
        silu: whether SiLU comes after it.

    Attributes:
        state_shape: of one sequence's last inputs, ``[channels, width - 1]``.

    Raises ``UnsupportedModelError`` for another width.

    """

    def __init__(self, channels: Dim, width: int, bias: bool, silu: bool = True) -> None:
        super().__init__()
        self.silu = silu
        if not 2 <= width <= 8:
            raise UnsupportedModelError(
                f"the convolution before the recurrence has a kernel of {width}: expected 2 to 8"
            )
        self.shard_names = channels.names
        group = tensor_parallel_group()
        place: Common = {
            "experts": None,
            "tp_rank": group.rank,
            "tp_size": group.size,
            "dtype": torch.get_default_dtype(),
        }
        self.weight = BasevLLMParameter(channels, Dim.whole(1), Dim.whole(width), **place)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = ColumnvLLMParameter(channels, **place)
        self.state_shape = len(self.weight), width - 1

    def forward(
        self, x: torch.Tensor, state: torch.Tensor | None = None, places: Places = NOWHERE
    ) -> torch.Tensor:
        """Map ``x [tokens, channels]``; ``state`` is read and written, ``[slots, *state_shape]``.

        ``places`` are as of :meth:`RecurrentLayer.kept`.
        """
        return causal_conv1d(x, self.weight.squeeze(1), self.bias, state, *places, self.silu)


def layer_kind(config: Any, layer: int) -> str:
    """Return ``"full_attention"`` or ``"linear_attention"``: what decoder layer ``layer`` has.

    ``layer_types`` decides where the configuration has it. If not, each
    ``full_attention_interval``-th layer has full attention.

    Raises ``UnsupportedModelError`` if ``layer_types`` lacks the layer or has an unknown type.
    """
    types = config.layer_types
    if types is None:
        linear = (layer + 1) % config.full_attention_interval
        return "linear_attention" if linear else "full_attention"
    kind = types[layer] if layer < len(types) else None
    if kind not in ("full_attention", "linear_attention"):
        wrong = f"[{layer}] is {kind!r}" if layer < len(types) else f" has {len(types)} entries"
        raise UnsupportedModelError(
            f"layer_types{wrong}: expected full_attention or linear_attention for each of the "
            f"{config.num_hidden_layers} layers"
        )
    return kind
