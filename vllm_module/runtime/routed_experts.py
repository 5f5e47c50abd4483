"""Which experts the tokens of requests went to, so that a trainer can send them there again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from vllm_module.errors import UnsupportedModelError
from vllm_module.layers.fused_moe import FusedMoE
from vllm_module.runtime.sequence import Routed, Sequence
from vllm_module.runtime.transfers import Wait

if TYPE_CHECKING:
    from vllm_module.runtime.step_inputs import Step


class RoutedExperts:
    """Keeps the experts that a model's routers choose, for sequences and for cached pages.

    The layers write their choice into one buffer on the device, in CUDA graphs too. It is copied to
    the host after each step. A token that is computed again keeps the experts of the first time,
    by which the tokens after it were chosen. Those of reused pages are kept by page.

    Args:
        model: this rank's model, whose routers are those of all ranks.
        most_tokens: largest number of tokens of a step.
        wait: waits for the device.

    Make it before CUDA graphs are captured, and call :meth:`allocate` when there is a KV cache.

    Raises ``UnsupportedModelError`` if the model has no experts of ours, or layers that choose
    different numbers of them.

    """

    def __init__(self, model: nn.Module, most_tokens: int, wait: Wait) -> None:
        layers = [each for each in model.modules() if isinstance(each, FusedMoE)]
        counts = {layer.top_k for layer in layers}
        if len(counts) != 1:
            chosen = f"layers that choose {sorted(counts)}" if counts else "no layers of that kind"
            raise UnsupportedModelError(
                "enable_return_routed_experts returns the experts of layers that choose as many "
                f"for each token, and the model has {chosen}: leave it out"
            )
        shape = most_tokens, len(layers), *counts
        device = next(model.parameters()).device
        self._buffer = torch.zeros(shape, dtype=torch.int16, device=device)
        for index, layer in enumerate(layers):
            layer.routed = self._buffer[:, index]
        self._wait = wait
        self.allocate(0, 1)

    def allocate(self, num_pages: int, page_size: int) -> None:
        """Allocate memory for the experts of so many cached pages, in host memory."""
        shape = num_pages, page_size, *self._buffer.shape[1:]
        self._pages: Routed = np.zeros(shape, dtype=np.int16)
        self._page_size = page_size

    def copy(self, tokens: int) -> tuple[torch.Tensor, Any]:
        """Launch the copy of a step's experts to the host; return it, and the event of its end."""
        chosen = self._buffer[:tokens]
        if not chosen.is_cuda:
            return chosen.clone(), None
        chosen = chosen.to("cpu", non_blocking=True)
        return chosen, torch.cuda.current_stream(self._buffer.device).record_event()

    def keep(self, step: Step) -> None:
        """Keep the experts of a step's tokens, which are not counted as computed yet."""
        assert step.routed is not None
        copied, event = step.routed
        if event is not None:
            self._wait(event)
        chosen, row = copied.numpy(), 0
        for sequence, count in step.scheduled:
            start, known = sequence.num_computed, sequence.num_routed
            if sequence.finish_reason is None:
                if known < start:
                    self._keep_before(sequence, known, start)
                new = max(0, sequence.num_routed - start)
                sequence.add_routed(chosen[row + new : row + count])
            row += count

    def keep_pages(self, sequence: Sequence, first: int) -> None:
        """Keep the experts of pages that have been cached for other prompts, from ``first`` on."""
        if first == sequence.num_cached_pages:
            return
        size, routed = self._page_size, sequence.routed_since(first * self._page_size)
        for page in sequence.pages[first : sequence.num_cached_pages]:
            self._pages[page], routed = routed[:size], routed[size:]

    def _keep_before(self, sequence: Sequence, known: int, start: int) -> None:
        """Keep the experts of tokens that were not computed, because pages with them are cached."""
        pages = sequence.pages[: -(-start // self._page_size)]
        of_pages = self._pages[pages].reshape(-1, *self._pages.shape[2:])
        sequence.add_routed(of_pages[known:start])
