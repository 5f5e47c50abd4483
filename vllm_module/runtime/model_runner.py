"""Running a step on one rank: from its numbers to tensors, hidden states and logits."""

from __future__ import annotations

import gc
from array import array
from bisect import bisect_left
from typing import Any

import torch

from vllm_module.base.messages import shorten
from vllm_module.build.registry import blamed_on
from vllm_module.core.module import vLLMModule
from vllm_module.errors import UnsupportedModelError
from vllm_module.kernels.rows.draw_tokens import draw_tokens
from vllm_module.layers import AttentionMetadata
from vllm_module.layers.lora import AdapterRows
from vllm_module.runtime.pieces import Pieces, captured_sizes
from vllm_module.runtime.sampling.sampler import first_tokens, plain_rows
from vllm_module.runtime.step_inputs import StepInputs
from vllm_module.runtime.transfers import ALIGNMENT, Numbers, pack, unpack, upload

_NOTHING = StepInputs([], [], [], [], [0], [], [], 0, [], 1)  # a step without tokens


class ModelRunner:
    """Runs steps on one rank's model, whose attention layers have a cache.

    The block tables stay on the device. A step's other numbers are copied there in one buffer.

    On a GPU, steps that only decode replay CUDA graphs of the model, its logits and their first
    tokens, which :meth:`capture` records for some batch sizes. The next such step overwrites logits
    and tokens. A batch is padded to the next of these sizes with sequences of no tokens: context 0,
    and cache slot -1, where nothing is stored. Other steps of few tokens replay graphs of the parts
    between attention layers, unless torch.compile fuses those.

    Args:
        model: this rank's model.
        device: the model's device.
        max_num_seqs: largest number of sequences in a step; the rows of the block tables.
        max_pages: largest number of pages of a sequence.
        compiled: True if torch.compile fuses the model's operations.
        adapters: says the layers which rows are whose, in steps with adapters. They replay no
            graph.

    Raises ``UnsupportedModelError`` if the model has no ``compute_logits``, and, from the original
    error, if a model from outside fails.

    """

    def __init__(
        self,
        model: vLLMModule,
        device: torch.device,
        max_num_seqs: int,
        max_pages: int,
        compiled: bool = False,
        adapters: AdapterRows | None = None,
    ) -> None:
        self._adapters = AdapterRows() if adapters is None else adapters
        self._cls = type(model)
        if not callable(getattr(model, "compute_logits", None)):
            raise UnsupportedModelError(
                f"the model {self._cls.__name__} cannot generate: expected a method "
                "compute_logits(hidden), which returns logits [tokens, vocab]"
            )
        self.model: Any = torch.compile(model, dynamic=True) if compiled else model
        self.device = device
        # Each row begins at an aligned address, because a step may get a view of some rows.
        width = -(-max_pages // ALIGNMENT) * ALIGNMENT
        self._tables = torch.zeros(max_num_seqs, width, dtype=torch.int32, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        # Logits of the last graph, which all graphs share.
        self._decoded: torch.Tensor | None = None
        self._firsts: dict[int, torch.Tensor] = {}  # by size, the first token of each row
        self._first = torch.empty(0)  # those of the last graph
        self._sizes: list[int] = []  # of graphs, ascending
        self._pieces: Pieces | None = None
        self._compiled = compiled

    @torch.inference_mode()
    def run(self, inputs: StepInputs, sampled: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the step's tokens and return logits ``[rows, vocab]``.

        Args:
            inputs: the numbers of the step.
            sampled: tokens that ``inputs.input_ids`` index, int64 ``[inputs.num_sampled]``, if that
                is not 0. After a -1, which is no token, results are arbitrary.

        Raises ``UnsupportedModelError`` if the model does not return a row for each token.

        """
        count, size = len(inputs.input_ids), self._graph_size(inputs)
        padded, pieces = size, self._pieces
        if inputs.adapters or self._adapters.groups:
            self._adapters.set(inputs.adapters, inputs.query_start_loc, self.device)
        if size is None and pieces is not None and not inputs.adapters:
            padded = pieces.size_for(count)
        padding = 0 if padded is None else padded - count
        parts = self._parts(inputs, padding, 0 if size is None else padding)
        if size is None:
            views = upload(parts, self.device)
        else:
            packed = pack(parts, self.device)
            views = unpack(self._static[: len(packed)].copy_(packed, non_blocking=True), parts)
        *step, rows, entries, pages = views
        if len(entries):
            self._tables.view(-1).index_copy_(0, entries, pages)
        if sampled is not None:
            ids = step[0]
            torch.clamp(sampled.index_select(0, ids), min=0, out=ids)
        if size is not None:
            self._graphs[size].replay()
            assert self._decoded is not None
            self._first = self._firsts[size]
            logits = self._decoded[:count]
            return logits if inputs.rows == list(range(count)) else logits.index_select(0, rows)
        # True if the step has all tokens of every context.
        fresh = padded is None and inputs.max_query_len > 1 and sum(inputs.context_lens) == count
        metadata = self._metadata(step, inputs, fresh)
        if padded is None:
            hidden = self._forward(step[0], step[1], metadata.laid_out())
        else:
            assert pieces is not None, "they have this size"
            with blamed_on(self._cls):
                hidden = pieces.run(step[0], step[1], metadata)
        if inputs.adapters:
            self._adapters.select(inputs.rows)
        return self._logits(hidden, rows)

    def first_tokens(self, logits: torch.Tensor) -> torch.Tensor:
        """Return each row's first token as the sampler does; a graph has chosen those of its rows.

        Args:
            logits: of the last step, or some of its rows.

        """
        decoded = self._decoded
        if decoded is None or not _shares_memory(logits, decoded):
            return first_tokens(logits)
        row = logits.storage_offset() // decoded.shape[1]
        return self._first[row : row + len(logits)]

    @torch.inference_mode()
    def capture(self, max_num_batched_tokens: int) -> None:
        """Capture the graphs of steps of at most ``max_num_batched_tokens``, in one memory pool.

        Graphs in pieces are captured first, because they are the largest.
        """
        # A new stream: torch's own belongs to the process's first capture, maybe on another device.
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call] # torch has no hints
        pool = torch.cuda.graph_pool_handle()
        if not self._compiled:
            # Weights and tables must be complete for the new stream.
            torch.cuda.synchronize(self.device)
            with torch.cuda.stream(stream):
                self._capture_pieces(captured_sizes(max_num_batched_tokens), pool)
        self._capture_decoding(stream, pool)

    def _capture_pieces(self, sizes: list[int], pool: Any) -> None:
        """Capture graphs of the parts between attention layers, the largest first."""
        self._pieces = Pieces(self.device, sizes)
        # Collecting garbage inside a capture could free memory that must not be freed then.
        gc.collect()
        for size in reversed(sizes):
            step = upload(self._parts(_NOTHING, size, 1), self.device)[:-3]
            self._pieces.capture(size, self._forward, self._metadata(step), pool)

    def _capture_decoding(self, stream: torch.cuda.Stream, pool: Any) -> None:
        """Capture graphs of whole steps that only decode, the largest first."""
        most = len(self._tables)
        sizes = [size for size in (1, 2, 4, *range(8, most, 8)) if size < most]
        # A step that replays a graph has no list longer than these.
        longest = [array("q", range(most + 1)) for _ in self._parts(_NOTHING, most, most)]
        self._static = torch.zeros_like(pack(longest, self.device), device=self.device)
        # Graphs read it, and hold no memory but their pool's.
        self._plain = plain = plain_rows(most, self.device)
        for size in (most, *reversed(sizes)):
            parts = self._parts(_NOTHING, size, size)
            packed = pack(parts, self.device)
            self._static[: len(packed)].copy_(packed)
            step = unpack(self._static, parts)[:-3]
            # The first run compiles kernels and allocates the libraries' workspaces.
            logits = self._decode(step)
            if self._decoded is None:
                self._decoded = torch.empty(logits.shape, dtype=logits.dtype, device=self.device)
            choose = self._decoded[:size], plain[0][:size], plain[1][:size], False, False
            draw_tokens(*choose)
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool, stream):
                self._decoded[:size].copy_(self._decode(step))
                self._firsts[size] = draw_tokens(*choose).view(-1)
            self._graphs[size] = graph
        self._sizes = sorted(self._graphs)

    def _decode(self, step: list[torch.Tensor]) -> torch.Tensor:
        """Return the logits of sequences with one new token each."""
        metadata = self._metadata(step).laid_out()
        return self._logits(self._forward(step[0], step[1], metadata), slice(None))

    def _graph_size(self, inputs: StepInputs) -> int | None:
        """Return the size of the graph to replay; ``None`` for a step without one."""
        if inputs.max_query_len > 1 or not self._sizes or inputs.adapters:
            return None
        if sum(len(pages) for _, _, pages in inputs.new_pages) > self._sizes[-1]:
            return None  # after a fork, or when sequences start over or are swapped in
        return self._sizes[bisect_left(self._sizes, len(inputs.input_ids))]

    def _parts(self, inputs: StepInputs, padding: int, sequences: int) -> list[Numbers]:
        """Return all numbers that the device needs, with ``padding`` tokens that are not stored.

        The first ``sequences`` of these tokens form a sequence of context 0 each.
        """
        width, tokens = self._tables.shape[1], len(inputs.input_ids)
        entries: list[int] = []
        pages: list[int] = []
        for row, first, changed in inputs.new_pages:
            assert first + len(changed) <= width, "a row of the block tables ends here"
            entries += range(row * width + first, row * width + first + len(changed))
            pages += changed
        zeros, none = [0] * padding, [0] * sequences
        return [
            array("q", inputs.input_ids + zeros),
            array("q", inputs.positions + zeros),
            array("q", inputs.slot_mapping + [-1] * padding),
            array("i", inputs.context_lens + none),
            array("i", [*inputs.query_start_loc, *range(tokens + 1, tokens + sequences + 1)]),
            array("q", inputs.table_rows + [-1] * sequences),  # slots of states
            array("q", inputs.table_rows + none),
            array("q", inputs.rows),
            array("q", entries),
            array("i", pages),
        ]

    def _metadata(
        self, step: list[torch.Tensor], inputs: StepInputs | None = None, fresh: bool = False
    ) -> AttentionMetadata:
        """Return the metadata of a step, whose tensors are in the order of :meth:`_parts`.

        The block tables are a view if their rows are adjacent. Without ``inputs``, as in a graph,
        they are a copy with all columns, and each sequence has one new token.
        """
        _, _, slot_mapping, context_lens, query_start_loc, slots, rows = step
        if inputs is None:
            tables, longest = self._tables.index_select(0, rows), 1
        else:
            tables, longest = self._tables[:, : inputs.num_table_pages], inputs.max_query_len
            first, count = inputs.table_rows[0], len(inputs.table_rows)
            adjacent = inputs.table_rows == list(range(first, first + count))
            tables = tables[first : first + count] if adjacent else tables.index_select(0, rows)
        places = slot_mapping, tables, context_lens, query_start_loc
        return AttentionMetadata(*places, longest, fresh=fresh, state_slots=slots)

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Return the hidden states of a step; refuse those that are no rows of tokens."""
        with blamed_on(self._cls):
            hidden: torch.Tensor = self.model(ids, positions, metadata)
        if not isinstance(hidden, torch.Tensor) or hidden.ndim != 2 or len(hidden) != len(ids):
            raise UnsupportedModelError(
                f"{self._cls.__name__}.forward should return hidden states of shape "
                f"({len(ids)}, hidden_size), and returned {described_result(hidden)}"
            )
        return hidden

    def _logits(self, hidden: torch.Tensor, rows: torch.Tensor | slice) -> torch.Tensor:
        with blamed_on(self._cls):
            logits: torch.Tensor = self.model.compute_logits(hidden[rows])
        return logits


def _shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def described_result(value: object) -> str:
    """Return the shape of a tensor, or another value."""
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else shorten(value)
