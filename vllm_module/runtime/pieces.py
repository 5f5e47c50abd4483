"""CUDA graphs of the parts of a model between its attention layers, for any sequences.

Only attention depends on the sequences of a step: see
:meth:`~vllm_module.layers.AttentionMetadata.attend`. So a graph ends where attention begins, and
the next one begins after it. A step replays them in turn, and calls attention between them. It is
padded to a captured number of tokens, with tokens of no sequence: their keys and values are not
stored, and their attention output is zero.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from vllm_module.layers import AttentionMetadata

_log = logging.getLogger(__name__)

# With more tokens, the device takes longer for a step than the host to launch its kernels.
MOST_TOKENS = 512
# torch's function for alias(), which is not documented.
_ALIAS = "_construct_storage_from_data_pointer"
_LAYOUT = frozenset(each.name for each in fields(AttentionMetadata))

Forward = Callable[[torch.Tensor, torch.Tensor, AttentionMetadata], torch.Tensor]


def captured_sizes(most: int) -> list[int]:
    """Return the numbers of tokens to capture, ascending, for steps of up to ``most`` tokens."""
    most = min(most, MOST_TOKENS)
    return [size for size in (16, 32, *range(64, most, 64)) if size < most] + [most] * (most > 0)


@dataclass
class _Call:
    """The call between two graphs."""

    function: Callable[..., torch.Tensor]
    tensors: list[torch.Tensor]
    others: dict[str, Any]
    output: torch.Tensor  # memory from which the next graph reads the result

    def __call__(self, metadata: AttentionMetadata) -> None:
        self.output.copy_(self.function(*self.tensors, metadata, **self.others))


@dataclass
class _Captured:
    """The graphs of one number of tokens, the calls between them, and the last output."""

    graphs: list[torch.cuda.CUDAGraph] = field(default_factory=list)
    calls: list[_Call] = field(default_factory=list)
    hidden: torch.Tensor | None = None


class Pieces:
    """Graphs of a model, in pieces, for some numbers of tokens.

    Args:
        device: the device of the model.
        sizes: numbers of tokens, ascending; empty for no graphs.

    """

    def __init__(self, device: torch.device, sizes: list[int]) -> None:
        self.sizes = sizes
        most = sizes[-1] if sizes else 0
        self._ids, self._positions = torch.zeros(2, most, dtype=torch.int64, device=device)
        self._captured: dict[int, _Captured] = {}

    def capture(self, size: int, forward: Forward, example: AttentionMetadata, pool: Any) -> None:
        """Capture the graphs of ``size`` tokens on the current stream, after a run without them.

        If the model itself reads the step's metadata, no graphs are captured from now on, and a log
        message says so.

        Args:
            size: one of ``sizes``.
            forward: the model's forward pass.
            example: metadata of a step of ``size`` tokens, none of which is stored.
            pool: the memory pool of all graphs (``torch.cuda.graph_pool_handle``).

        """
        if not self.sizes:
            return
        if not hasattr(torch._C, _ALIAS):
            _log.warning("steps with prompts run without CUDA graphs: this torch has no %s", _ALIAS)
            self.sizes = []
            return
        # The first run compiles kernels and allocates the libraries' workspaces.
        for capturing in (False, True):
            metadata = _CaptureMetadata(example, pool, capturing)
            try:
                metadata.begin()
                hidden = forward(self._ids[:size], self._positions[:size], metadata)
                metadata.end()
            except BaseException as error:
                with suppress(Exception):  # errors of a failed capture would hide its cause
                    metadata.end()
                if metadata.was_read is None or not isinstance(error, Exception):
                    _log.error(
                        "capturing CUDA graphs of a step of %d tokens failed: enforce_eager=True "
                        "does without graphs",
                        size,
                    )
                    raise
            torch.cuda.synchronize(self._ids.device)
            if metadata.was_read is not None:
                _log.warning(
                    "steps with prompts run without CUDA graphs: the model reads %s of the step's "
                    "metadata, and only what metadata.attend() calls should",
                    metadata.was_read,
                )
                self.sizes = []
                self._captured.clear()
                return
        metadata.captured.hidden = hidden
        self._captured[size] = metadata.captured

    def size_for(self, tokens: int) -> int | None:
        """Return the least captured number of tokens that is not below ``tokens``, or None."""
        at = bisect_left(self.sizes, tokens)
        return self.sizes[at] if at < len(self.sizes) else None

    def run(
        self, ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Return the hidden states of a step, which the next step overwrites.

        Args:
            ids, positions: ``[size]``, for a size that was captured.
            metadata: metadata of the step, with cache slots of -1 for its padding.

        """
        captured = self._captured[len(ids)]
        self._ids[: len(ids)].copy_(ids)
        self._positions[: len(ids)].copy_(positions)
        captured.graphs[0].replay()
        for call, graph in zip(captured.calls, captured.graphs[1:], strict=True):
            call(metadata)
            graph.replay()
        assert captured.hidden is not None
        return captured.hidden


class _CaptureMetadata(AttentionMetadata):
    """A stand-in for the metadata of every step, during a capture and the run before it.

    Attributes:
        captured: the graphs so far.
        was_read: name of an attribute that the model has read, or None.

    """

    captured: _Captured
    was_read: str | None
    _example: AttentionMetadata
    _pool: Any
    _capturing: bool
    _open: torch.cuda.CUDAGraph | None

    def __init__(self, example: AttentionMetadata, pool: Any, capturing: bool) -> None:
        vars(self).update(captured=_Captured(), was_read=None, _example=example, _open=None)
        vars(self).update(_pool=pool, _capturing=capturing)

    def __getattribute__(self, name: str) -> Any:
        if name in _LAYOUT:
            vars(self)["was_read"] = name
            raise RuntimeError(
                f"{name} differs from step to step, and a CUDA graph is being captured: only what "
                "metadata.attend() calls may read it"
            )
        return super().__getattribute__(name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def begin(self) -> None:
        if not self._capturing:
            return
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(self._pool)
        vars(self)["_open"] = graph

    def end(self) -> None:
        graph, vars(self)["_open"] = self._open, None
        if graph is not None:
            graph.capture_end()
            self.captured.graphs.append(graph)

    def attend(
        self, function: Callable[..., torch.Tensor], *tensors: torch.Tensor, **others: Any
    ) -> torch.Tensor:
        """End a graph, call the function, and begin another; return the input of that graph."""
        self.end()
        result = function(*tensors, self._example, **others)
        self.begin()
        if not self._capturing:
            return result
        output = torch.empty_like(result)
        shared = [alias(tensor) for tensor in tensors]
        self.captured.calls.append(_Call(function, shared, others, alias(output)))
        return output


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor at the same address that does not keep its memory alive.

    The memory belongs to the graphs, which may reuse it for later results, as a step without graphs
    does. Otherwise every layer of every size would keep its queries, keys and values.
    """
    storage = tensor.untyped_storage()
    same = getattr(torch._C, _ALIAS)(storage.data_ptr(), tensor.device, storage.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(same, tensor.storage_offset(), tensor.size(), tensor.stride())
