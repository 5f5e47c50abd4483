"""One rank's part of a step: lay out its tokens, run the model, return logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vllm_module.layers import AttentionMetadata
from vllm_module.module import vLLMModule
from vllm_module.runtime.scheduler import Step


@dataclass
class StepInputs:
    """What every rank needs to know of a step, as plain numbers: it travels in one message.

    Attributes:
        input_ids, positions, slots: of the tokens, sequences end to end.
        tables, contexts, starts: of the sequences; where their tokens begin, and the last ends.
        rows: tokens whose logits are wanted.

    """

    input_ids: list[int]
    positions: list[int]
    slots: list[int]
    tables: list[list[int]]
    contexts: list[int]
    starts: list[int]
    rows: list[int]
    max_query_len: int
    swapped_out: list[tuple[int, int]]
    copied: list[tuple[int, int]]
    swapped_in: list[tuple[int, int]]


def step_inputs(step: Step, page_size: int) -> StepInputs:
    """Lay out the tokens that ``step`` computes.

    Rows are the last token of each sequence that this step completes and, before them, all tokens
    of prompts whose logprobs are wanted.
    """
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    tables, contexts, starts = [], [], [0]
    rows: list[int] = []
    last: list[int] = []
    longest = 0
    for sequence, count in step.scheduled:
        pages, first = sequence.pages, sequence.computed
        end = first + count
        if count == 1:  # most of them, most of the time
            ids.append(sequence.tokens[first])
            positions.append(first)
            slots.append(pages[first // page_size] * page_size + first % page_size)
        else:
            ids += sequence.tokens[first:end]
            positions += range(first, end)
            slots += [pages[p // page_size] * page_size + p % page_size for p in range(first, end)]
        tables.append(pages)
        contexts.append(end)
        starts.append(len(ids))
        longest = max(longest, count)
        rows += [len(ids) - end + position for position in sequence.prompt_positions(count)]
        if end == len(sequence.tokens):
            last.append(len(ids) - 1)
    return StepInputs(
        ids,
        positions,
        slots,
        tables,
        contexts,
        starts,
        rows + last,
        longest,
        step.swapped_out,
        step.copied,
        step.swapped_in,
    )


class ModelRunner:
    """Runs steps of one rank's model, whose attention layers have a cache.

    On a GPU, steps that decode replay graphs captured for batches of some sizes: a batch is padded
    to the next of them with sequences of no tokens, which are stored nowhere.

    Args:
        model: this rank's.
        device: where it is.
        compiled: whether torch.compile is to fuse its operations.

    """

    def __init__(self, model: vLLMModule, device: torch.device, compiled: bool = False) -> None:
        self.model: Any = torch.compile(model, dynamic=True) if compiled else model
        self.device = device
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    @torch.inference_mode()
    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Compute the step's tokens and return logits ``[rows, vocab]``."""
        rows = self._tensor(inputs.rows, torch.int64)
        count = len(inputs.input_ids)
        if self._graphs and inputs.max_query_len == 1 and count <= max(self._graphs):
            hidden = self._replay(inputs, min(size for size in self._graphs if size >= count))
        else:
            widest = max(map(len, inputs.tables))
            tables = [pages + [-1] * (widest - len(pages)) for pages in inputs.tables]
            metadata = AttentionMetadata(
                slot_mapping=self._tensor(inputs.slots, torch.int64),
                block_tables=self._tensor(tables, torch.int32),
                context_lens=self._tensor(inputs.contexts, torch.int32),
                query_start_loc=self._tensor(inputs.starts, torch.int32),
                max_query_len=inputs.max_query_len,
            )
            ids = self._tensor(inputs.input_ids, torch.int64)
            hidden = self.model(ids, self._tensor(inputs.positions, torch.int64), metadata)
        logits: torch.Tensor = self.model.compute_logits(hidden[rows])
        return logits

    @torch.inference_mode()
    def largest_steps(self, tokens: int, max_num_seqs: int, max_pages: int) -> None:
        """Run the steps that take most memory: ``tokens`` of one sequence, and one token of many.

        Nothing is stored, and of the cache its first page is all that is read.
        """
        ids = torch.zeros(max(tokens, max_num_seqs), dtype=torch.int64, device=self.device)
        hidden = self.model(ids[:tokens], torch.arange(tokens, device=self.device))
        self.model.compute_logits(hidden[:max_num_seqs])
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
        self.model.compute_logits(self.model(ids, ids, metadata))

    @torch.inference_mode()
    def capture(self, max_num_seqs: int, max_pages: int) -> None:
        """Capture graphs of steps that decode, the largest first, in one pool of memory."""
        sizes = [1, 2, 4, *range(8, max_num_seqs + 1, 8)]
        sizes = [size for size in sizes if size <= max_num_seqs]
        most, device = sizes[-1], self.device
        self._ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._slots = torch.full((most,), -1, dtype=torch.int64, device=device)
        self._tables = torch.full((most, max_pages), -1, dtype=torch.int32, device=device)
        self._contexts = torch.zeros(most, dtype=torch.int32, device=device)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        pool = None
        for size in reversed(sizes):
            metadata = AttentionMetadata(
                slot_mapping=self._slots[:size],
                block_tables=self._tables[:size],
                context_lens=self._contexts[:size],
                query_start_loc=self._starts[: size + 1],
                max_query_len=1,
            )
            arguments = self._ids[:size], self._positions[:size], metadata
            self.model(*arguments)  # kernels are compiled, libraries make their workspaces
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool):
                hidden = self.model(*arguments)
            pool = pool or graph.pool()
            self._graphs[size] = graph, hidden

    def _replay(self, inputs: StepInputs, size: int) -> torch.Tensor:
        """Run a step that decodes by the graph of ``size`` sequences."""
        count = len(inputs.input_ids)
        for static, values, rest in (
            (self._ids, inputs.input_ids, 0),
            (self._positions, inputs.positions, 0),
            (self._slots, inputs.slots, -1),
            (self._contexts, inputs.contexts, 0),
        ):
            padded = values + [rest] * (size - count)
            static[:size].copy_(torch.tensor(padded, dtype=static.dtype), non_blocking=True)
        widest = max(map(len, inputs.tables))
        tables = [pages + [-1] * (widest - len(pages)) for pages in inputs.tables]
        table = torch.tensor(tables, dtype=torch.int32)
        self._tables[:count, :widest].copy_(table, non_blocking=True)
        graph, hidden = self._graphs[size]
        graph.replay()
        return hidden

    def _tensor(self, values: list[int] | list[list[int]], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)
