"""One rank's part of a step: tensors of its tokens, the model, logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vllm_module.errors import UnsupportedModelError
from vllm_module.layers import AttentionMetadata
from vllm_module.messages import shorten
from vllm_module.module import vLLMModule
from vllm_module.registry import blamed_on
from vllm_module.runtime.scheduler import Step


@dataclass
class StepInputs:
    """What a rank needs to compute a step, as plain numbers that one message carries to all ranks.

    Attributes:
        input_ids, positions: of the step's tokens, one sequence after another.
        slot_mapping: the cache slot of each token: its page * page size + its place on the page.
        block_tables: the pages of each sequence; -1 for a page that the sliding window has passed.
        context_lens: each sequence's tokens up to the end of this step.
        query_start_loc: where each sequence's tokens start, and where the last one's end.
        rows: the indices of the tokens whose logits are returned.
        max_query_len: the most tokens of a sequence in this step.
        swapped_out, copied, swapped_in: as in :class:`~vllm_module.runtime.scheduler.Step`.

    """

    input_ids: list[int]
    positions: list[int]
    slot_mapping: list[int]
    block_tables: list[list[int]]
    context_lens: list[int]
    query_start_loc: list[int]
    rows: list[int]
    max_query_len: int
    swapped_out: list[tuple[int, int]]
    copied: list[tuple[int, int]]
    swapped_in: list[tuple[int, int]]


def step_inputs(step: Step, page_size: int) -> StepInputs:
    """Lay out the tokens that ``step`` computes.

    ``rows`` has first the prompt tokens that give missing prompt logprobs, and then the last token
    of each sequence that has no tokens left after this step.
    """
    ids: list[int] = []
    positions: list[int] = []
    slot_mapping: list[int] = []
    block_tables, context_lens, query_start_loc = [], [], [0]
    prompt_rows: list[int] = []
    last_rows: list[int] = []
    longest = 0
    for sequence, count in step.scheduled:
        pages, start = sequence.pages, sequence.num_computed
        end = start + count
        if count == 1:  # decoding: most sequences of most steps
            ids.append(sequence.tokens[start])
            positions.append(start)
            slot_mapping.append(pages[start // page_size] * page_size + start % page_size)
        else:
            ids += sequence.tokens[start:end]
            positions += range(start, end)
            slot_mapping += [
                pages[position // page_size] * page_size + position % page_size
                for position in range(start, end)
            ]
        block_tables.append(pages)
        context_lens.append(end)
        query_start_loc.append(len(ids))
        longest = max(longest, count)
        wanted = sequence.prompt_logprob_positions(count)
        prompt_rows += [len(ids) - end + position for position in wanted]
        if end == len(sequence.tokens):
            last_rows.append(len(ids) - 1)
    return StepInputs(
        ids,
        positions,
        slot_mapping,
        block_tables,
        context_lens,
        query_start_loc,
        prompt_rows + last_rows,
        longest,
        step.swapped_out,
        step.copied,
        step.swapped_in,
    )


class ModelRunner:
    """Runs steps on one rank's model, whose attention layers have a cache.

    On a GPU, steps that only decode replay CUDA graphs, which :meth:`capture` records for some
    batch sizes. A batch is padded to the next of these sizes with sequences of no tokens: context
    0, and cache slot -1, where nothing is stored.

    Args:
        model: this rank's.
        device: of the model.
        compiled: whether torch.compile fuses the model's operations.

    Raises ``UnsupportedModelError`` if the model has no ``compute_logits``, and, from the original
    error, where a model from outside fails.

    """

    def __init__(self, model: vLLMModule, device: torch.device, compiled: bool = False) -> None:
        self._cls = type(model)
        if not callable(getattr(model, "compute_logits", None)):
            raise UnsupportedModelError(
                f"the model {self._cls.__name__} cannot generate: expected a method "
                "compute_logits(hidden), which returns logits [tokens, vocab]"
            )
        self.model: Any = torch.compile(model, dynamic=True) if compiled else model
        self.device = device
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    @torch.inference_mode()
    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Compute the step's tokens and return logits ``[rows, vocab]``.

        Raises ``RuntimeError`` if the model does not return a row for each token.
        """
        rows = self._tensor(inputs.rows, torch.int64)
        count = len(inputs.input_ids)
        if self._graphs and inputs.max_query_len == 1 and count <= max(self._graphs):
            hidden = self._replay(inputs, min(size for size in self._graphs if size >= count))
        else:
            metadata = AttentionMetadata(
                slot_mapping=self._tensor(inputs.slot_mapping, torch.int64),
                block_tables=self._tensor(_padded(inputs.block_tables), torch.int32),
                context_lens=self._tensor(inputs.context_lens, torch.int32),
                query_start_loc=self._tensor(inputs.query_start_loc, torch.int32),
                max_query_len=inputs.max_query_len,
            ).laid_out()
            ids = self._tensor(inputs.input_ids, torch.int64)
            hidden = self._forward(ids, self._tensor(inputs.positions, torch.int64), metadata)
            if not isinstance(hidden, torch.Tensor) or hidden.ndim != 2 or len(hidden) != count:
                raise UnsupportedModelError(
                    f"{self._cls.__name__}.forward should return hidden states of shape "
                    f"({count}, hidden_size), and returned {described_result(hidden)}"
                )
        return self._logits(hidden, rows)

    @torch.inference_mode()
    def largest_steps(self, tokens: int, max_num_seqs: int, max_pages: int) -> None:
        """Run the steps that need most memory: ``tokens`` of one sequence, and one token of many.

        Nothing is stored in the cache, and only its first page is read.
        """
        ids = torch.zeros(max(tokens, max_num_seqs), dtype=torch.int64, device=self.device)
        hidden = self._forward(ids[:tokens], torch.arange(tokens, device=self.device))
        self._logits(hidden, slice(max_num_seqs))
        del hidden
        ones = torch.ones(max_num_seqs, dtype=torch.int32, device=self.device)
        metadata = AttentionMetadata(
            slot_mapping=torch.full((max_num_seqs,), -1, dtype=torch.int64, device=self.device),
            block_tables=ones.new_zeros(max_num_seqs, max_pages),
            context_lens=ones,
            query_start_loc=torch.arange(max_num_seqs + 1, dtype=torch.int32, device=self.device),
            max_query_len=1,
        )
        ids = ids[:max_num_seqs]
        self._logits(self._forward(ids, ids, metadata), slice(None))

    @torch.inference_mode()
    def capture(self, max_num_seqs: int, max_pages: int) -> None:
        """Capture graphs of steps that only decode, the largest first, in one memory pool."""
        sizes = [1, 2, 4, *range(8, max_num_seqs + 1, 8)]
        sizes = [size for size in sizes if size <= max_num_seqs]
        most, device = sizes[-1], self.device
        self._ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._slot_mapping = torch.full((most,), -1, dtype=torch.int64, device=device)
        self._block_tables = torch.full((most, max_pages), -1, dtype=torch.int32, device=device)
        self._context_lens = torch.zeros(most, dtype=torch.int32, device=device)
        self._query_start_loc = torch.arange(most + 1, dtype=torch.int32, device=device)
        # torch's own stream is that of the first capture in the process, maybe on another device.
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch has no hints
        pool = None
        for size in reversed(sizes):
            metadata = AttentionMetadata(
                slot_mapping=self._slot_mapping[:size],
                block_tables=self._block_tables[:size],
                context_lens=self._context_lens[:size],
                query_start_loc=self._query_start_loc[: size + 1],
                max_query_len=1,
            )
            arguments = self._ids[:size], self._positions[:size], metadata
            self._forward(*arguments)  # compiles kernels and allocates the libraries' workspaces
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool, stream):
                hidden = self._forward(*arguments)
            pool = pool or graph.pool()
            self._graphs[size] = graph, hidden

    def _forward(self, *arguments: torch.Tensor | AttentionMetadata) -> torch.Tensor:
        with blamed_on(self._cls):
            hidden: torch.Tensor = self.model(*arguments)
        return hidden

    def _logits(self, hidden: torch.Tensor, rows: torch.Tensor | slice) -> torch.Tensor:
        with blamed_on(self._cls):
            logits: torch.Tensor = self.model.compute_logits(hidden[rows])
        return logits

    def _replay(self, inputs: StepInputs, size: int) -> torch.Tensor:
        """Run a step that only decodes by the graph of ``size`` sequences."""
        count = len(inputs.input_ids)
        for static, values, padding in (
            (self._ids, inputs.input_ids, 0),
            (self._positions, inputs.positions, 0),
            (self._slot_mapping, inputs.slot_mapping, -1),
            (self._context_lens, inputs.context_lens, 0),
        ):
            padded = values + [padding] * (size - count)
            static[:size].copy_(torch.tensor(padded, dtype=static.dtype), non_blocking=True)
        tables = torch.tensor(_padded(inputs.block_tables), dtype=torch.int32)
        self._block_tables[:count, : tables.shape[1]].copy_(tables, non_blocking=True)
        graph, hidden = self._graphs[size]
        graph.replay()
        return hidden

    def _tensor(self, values: list[int] | list[list[int]], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


def _padded(block_tables: list[list[int]]) -> list[list[int]]:
    """Return the tables with one length, padded by -1."""
    width = max(map(len, block_tables))
    return [pages + [-1] * (width - len(pages)) for pages in block_tables]


def described_result(value: object) -> str:
    """Return the shape of a tensor, or another value."""
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else shorten(value)
