"""Running a step on one rank: from its numbers to tensors, hidden states and logits."""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_left
from typing import Any

import torch

from vllm_module.build.registry import blamed_on
from vllm_module.core.module import vLLMModule
from vllm_module.distributed import OwnTokens, StagePipe
from vllm_module.errors import UnsupportedModelError
from vllm_module.kernels.rows.draw_tokens import draw_tokens
from vllm_module.layers import AttentionMetadata
from vllm_module.layers.lora_rows import AdapterRows
from vllm_module.layers.placed_experts import PlacedExperts
from vllm_module.runtime.pooling.embedding import described_result
from vllm_module.runtime.recorded_steps import RecordedSteps
from vllm_module.runtime.sampling.sampler import first_tokens, plain_rows
from vllm_module.runtime.step_inputs import StepInputs
from vllm_module.runtime.transfers import ALIGNMENT, Numbers, pack, unpack, upload
from vllm_module.runtime.warm_up import captured_sizes

_log = logging.getLogger(__name__)

_Kind = tuple[bool, bool]  # whether a step has adapters, and whether it only decodes
_PLAIN: _Kind = False, True


class ModelRunner:
    """Runs steps on one rank's model, whose attention layers have a cache.

    The block tables stay on the device. A step's other numbers are copied there in one buffer.

    On a GPU, steps of few tokens replay CUDA graphs, which :meth:`capture` records for some numbers
    of tokens: of the model, and for steps that only decode also of its logits and their first
    tokens. The next step that replays one overwrites its results. Nothing of a layout but the
    numbers of tokens and sequences is part of a graph, so a step is padded to the next of these
    sizes: with tokens whose cache slot is -1, where nothing is stored, and with sequences of
    context 0. Graphs of steps with adapters are captured when the first step of their size comes,
    and replay steps of any adapters: these are in slots, and a row's slot is one of the numbers.

    Args:
        model: this rank's model.
        device: the model's device.
        max_num_seqs: largest number of sequences in a step; the rows of the block tables.
        max_pages: largest number of pages of a sequence.
        compiled: True if torch.compile fuses the model's operations.
        adapters: says the layers which rows are whose, in steps with adapters.
        pipe: connects the model to the stages before and behind it, if it is one of a pipeline.
        own_tokens: the ranks of other engines that compute experts of this step's tokens, too. They
            pad steps to one number of tokens.
        records: whether steps that only decode are recorded, on a CPU.

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
        pipe: StagePipe | None = None,
        own_tokens: OwnTokens | None = None,
        records: bool = False,
    ) -> None:
        self._adapters = AdapterRows() if adapters is None else adapters
        self._pipe, self._own_tokens = pipe, own_tokens
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
        self._graphs: dict[tuple[_Kind, int], torch.cuda.CUDAGraph] = {}  # by number of tokens
        self._sizes: dict[bool, list[int]] = {True: [], False: []}  # ascending
        # Hidden states, or logits, of the last graph of a kind: all of the kind share them.
        self._hidden: torch.Tensor | None = None
        self._decoded: torch.Tensor | None = None
        self._firsts: dict[tuple[_Kind, int], torch.Tensor] = {}  # the first token of each row
        self._without: set[_Kind] = set()  # kinds of steps that could not be captured
        self._first = torch.empty(0)  # those of the last graph
        self._slots = self._adapters.slots  # of a device
        self._layout = 0  # of the slots' memory, in the graphs of steps with adapters
        self._compiled = compiled
        self._recorded = RecordedSteps(model, self._step_logits) if records else None

    def forget_steps(self) -> None:
        """Drop recorded steps, before memory that they read may change its place."""
        if self._recorded is not None:
            self._recorded.clear()

    @torch.inference_mode()
    def run(self, inputs: StepInputs, sampled: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the step's tokens and return logits ``[rows, vocab]``.

        A pipeline stage before the last one passes hidden states on, and returns an empty tensor.

        Args:
            inputs: the numbers of the step.
            sampled: tokens that ``inputs.input_ids`` index, int64 ``[inputs.num_sampled]``, if that
                is not 0. After a -1, which is no token, results are arbitrary.

        Raises ``UnsupportedModelError`` if the model does not return a row for each token.

        """
        count, sequences = len(inputs.input_ids), len(inputs.context_lens)
        decodes = inputs.max_query_len == 1
        if inputs.engines_step is not None:
            decodes = inputs.engines_step[1]
        kind = bool(inputs.adapters), decodes
        size = self._graph_size(inputs, kind)
        if self._slots is None and (inputs.adapters or self._adapters.groups):
            self._adapters.set(inputs.adapters, inputs.query_start_loc, self.device)
        if size is None:
            # A step without tokens has one of padding.
            parts = self._parts(inputs, count or 1, sequences or 1, kind)
            views = upload(parts, self.device)
        else:
            parts = self._parts(inputs, size, self._sequences(size), kind)
            packed = pack(parts, self.device)
            views = unpack(self._static[: len(packed)].copy_(packed, non_blocking=True), parts)
        *step, slots, rows, entries, pages = views
        if len(entries):
            self._tables.view(-1).index_copy_(0, entries, pages)
        if sampled is not None:
            ids = step[0]
            torch.clamp(sampled.index_select(0, ids), min=0, out=ids)
        if size is None:
            if self._slots is not None:
                self._set_slots(kind, slots)
            given = inputs if count else None
            decodes_all = kind == _PLAIN and count and inputs.rows == list(range(count))
            if self._recorded is not None and decodes_all and not self._adapters.groups:
                metadata = self._metadata(step, 1)
                return self._recorded.logits(step[0], step[1], metadata)
            metadata = self._metadata(step, inputs.max_query_len, given)
            hidden = self._forward(step[0], step[1], metadata.laid_out())
        else:
            self._graphs[kind, size].replay()
            if kind[1]:
                assert self._decoded is not None
                self._first = self._firsts[kind, size]
                logits = self._decoded[:count]
                return logits if inputs.rows == list(range(count)) else logits.index_select(0, rows)
            assert self._hidden is not None
            hidden = self._hidden
        if self._slots is not None:
            self._set_slots(kind, slots.index_select(0, rows) if kind[0] else slots)
        elif inputs.adapters:
            self._adapters.select(inputs.rows)
        logits = self._logits(hidden, rows)
        if self._recorded is not None and self._recorded.kept is not None:
            self._recorded.check()
        return logits

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

        Graphs of steps with prompts are captured first, because they are the largest. If one cannot
        be captured, such steps run without graphs, and a log message says why. torch.compile has
        graphs of steps that only decode alone: it would compile a model for each number of tokens.
        """
        # A new stream: torch's own belongs to the process's first capture, maybe on another device.
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._pool, most = torch.cuda.graph_pool_handle(), len(self._tables)
        prompts = [] if self._compiled else captured_sizes(max_num_batched_tokens)
        # A step that replays a graph has no list longer than these.
        self._longest = max(most, *prompts, 1)
        parts = self._parts(StepInputs.nothing(), 1, 1, _PLAIN)
        lists = [array("q", range(self._longest + 1)) for _ in parts]
        self._static = torch.zeros_like(pack(lists, self.device), device=self.device)
        # Graphs read it, and hold no memory but their pool's.
        self._plain = plain_rows(most, self.device)
        if all(self._capture((False, False), size) for size in reversed(prompts)):
            self._sizes[False] = prompts
        decoding = [size for size in (1, 2, 4, *range(8, most, 8)) if size < most] + [most]
        for size in reversed(decoding):
            self._capture(_PLAIN, size)
        self._sizes[True] = decoding

    def _capture(self, kind: _Kind, size: int) -> bool:
        """Capture the graph of so many tokens; return False if such steps have none."""
        adapted, decodes = kind
        parts = self._parts(StepInputs.nothing(), size, self._sequences(size), kind)
        packed = pack(parts, self.device)
        self._static[: len(packed)].copy_(packed)
        *step, slots, _, _, _ = unpack(self._static, parts)
        modules: Any = getattr(self.model, "modules", tuple)()  # a function has none
        layers = [each for each in modules if isinstance(each, PlacedExperts)]
        counts = [(each.counts, each.counts.clone()) for each in layers if each.counts is not None]
        # The first run compiles kernels and allocates the libraries' workspaces.
        if self._own_tokens is not None:
            self._own_tokens.most = size
        self._compute(kind, step, slots)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, self._pool, self._stream):
                self._compute(kind, step, slots)
        except Exception as error:
            if (decodes and not adapted) or self._own_tokens is not None:
                _log.error("enforce_eager=True does without CUDA graphs: a capture failed")
                raise
            what = "decoding" if decodes else "steps with prompts"
            of_adapters = " with adapters" * adapted
            _log.warning("%s%s: no CUDA graphs, because of %s", what, of_adapters, error)
            self._without.add(kind)
            return False
        finally:
            for counted, before in counts:  # no request has these tokens
                counted.copy_(before)
        self._graphs[kind, size] = graph
        return True

    def _compute(self, kind: _Kind, step: list[torch.Tensor], slots: torch.Tensor) -> None:
        """Compute what a graph does."""
        self._set_slots(kind, slots)
        decodes, size = kind[1], len(step[0])
        metadata = self._metadata(step, 1 if decodes else size)
        hidden = self._forward(step[0], step[1], metadata.laid_out())
        if not decodes:
            if self._hidden is None:  # of the largest size, which is the first
                self._hidden = torch.empty_like(hidden)
            self._hidden[:size].copy_(hidden)
            return
        logits = self._logits(hidden, slice(None))
        if self._decoded is None:
            self._decoded = torch.empty_like(logits)
        self._decoded[:size].copy_(logits)
        rows, settings = (each[:size] for each in self._plain)
        first = draw_tokens(self._decoded[:size], rows, settings, False, False)
        self._firsts[kind, size] = first.view(-1)

    def _sequences(self, size: int) -> int:
        """Return the number of sequences in a graph of so many tokens."""
        return min(size, len(self._tables))

    def _set_slots(self, kind: _Kind, slots: torch.Tensor) -> None:
        """Tell the layers the slots of a step's rows."""
        self._adapters.set_slots(slots if kind[0] and self._slots is not None else None)

    def _graph_size(self, inputs: StepInputs, kind: _Kind) -> int | None:
        """Return the number of tokens of the graph to replay; ``None`` for a step without one."""
        sizes, most = self._sizes[kind[1]], len(inputs.input_ids)
        if inputs.engines_step is not None:
            most, _ = inputs.engines_step
        at = bisect_left(sizes, most)
        if self._own_tokens is not None:  # also of engines whose step replays no graph
            self._own_tokens.most = sizes[at] if at < len(sizes) else most
        # Engines that share experts would have to capture at the same time.
        if at == len(sizes) or (kind[0] and self._own_tokens is not None):
            return None
        if sum(len(pages) for _, _, pages in inputs.new_pages) > self._longest:
            return None  # after a fork, or when sequences start over or are swapped in
        size = sizes[at]
        # Graphs have addresses of the slots' memory.
        if kind[0] and self._slots is not None and self._layout != self._slots.layout:
            self._layout = self._slots.layout
            self._without -= {(True, True), (True, False)}
            for key in [each for each in self._graphs if each[0][0]]:
                del self._graphs[key]
                self._firsts.pop(key, None)
        if kind in self._without:
            return None
        if (kind, size) not in self._graphs and not self._capture(kind, size):
            return None
        return size

    def _parts(self, inputs: StepInputs, tokens: int, sequences: int, kind: _Kind) -> list[Numbers]:
        """Return all numbers that the device needs, with padding to so many tokens and sequences.

        Padding is not stored. A padding sequence has one of the padding tokens, if one is left.
        """
        width, count = self._tables.shape[1], len(inputs.input_ids)
        entries: list[int] = []
        pages: list[int] = []
        for row, first, changed in inputs.new_pages:
            assert first + len(changed) <= width, "a row of the block tables ends here"
            entries += range(row * width + first, row * width + first + len(changed))
            pages += changed
        zeros = [0] * (tokens - count)
        none = [0] * (sequences - len(inputs.context_lens))
        ends = [min(count + at, tokens) for at in range(1, len(none) + 1)]
        return [
            array("q", inputs.input_ids + zeros),
            array("q", inputs.positions + zeros),
            array("q", inputs.slot_mapping + [-1] * len(zeros)),
            array("i", inputs.context_lens + none),
            array("i", inputs.query_start_loc + ends),
            array("q", inputs.table_rows + [-1] * len(none)),  # slots of states
            array("q", inputs.table_rows + none),
            array("i", self._slots_of(inputs, tokens) if kind[0] else []),
            array("q", inputs.rows),
            array("q", entries),
            array("i", pages),
        ]

    def _slots_of(self, inputs: StepInputs, tokens: int) -> list[int]:
        """Return the slot of each token's adapter, or -1; nothing on a CPU, which has none."""
        if self._slots is None:
            return []
        slots, starts = [-1] * tokens, inputs.query_start_loc
        of_adapters = self._slots.place(inputs.adapters.values())
        for sequence, adapter in inputs.adapters.items():
            first, end = starts[sequence : sequence + 2]
            slots[first:end] = [of_adapters[adapter]] * (end - first)
        return slots

    def _metadata(
        self, step: list[torch.Tensor], longest: int, inputs: StepInputs | None = None
    ) -> AttentionMetadata:
        """Return the metadata of a step, whose tensors are in the order of :meth:`_parts`.

        The block tables are a view if their rows are adjacent. Without ``inputs``, as in a graph,
        they are a copy with all columns. ``longest`` is the most tokens of one sequence.
        """
        _, _, slot_mapping, context_lens, query_start_loc, slots, rows = step
        if inputs is None:
            tables = self._tables.index_select(0, rows)
        else:
            tables = self._tables[:, : inputs.num_table_pages]
            first, count = inputs.table_rows[0], len(inputs.table_rows)
            adjacent = inputs.table_rows == list(range(first, first + count))
            tables = tables[first : first + count] if adjacent else tables.index_select(0, rows)
        places = slot_mapping, tables, context_lens, query_start_loc
        return AttentionMetadata(*places, longest, state_slots=slots)

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Return the hidden states of a step; refuse those that are no rows of tokens.

        A pipeline stage takes them from the one before, and passes them on, and has none to return.
        """
        pipe = self._pipe
        given = ids if pipe is None or pipe.is_first else pipe.receive(len(ids))
        with blamed_on(self._cls):
            hidden: Any = self.model(given, positions, metadata)
        if pipe is not None and not pipe.is_last:
            pipe.send(hidden)
            return torch.empty(0)
        if not isinstance(hidden, torch.Tensor) or hidden.ndim != 2 or len(hidden) != len(ids):
            raise UnsupportedModelError(
                f"{self._cls.__name__}.forward should return hidden states of shape "
                f"({len(ids)}, hidden_size), and returned {described_result(hidden)}"
            )
        result: torch.Tensor = hidden
        return result

    def _step_logits(
        self, ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Return the logits of all tokens of a step."""
        return self._logits(self._forward(ids, positions, metadata), slice(None))

    def _logits(self, hidden: torch.Tensor, rows: torch.Tensor | slice) -> torch.Tensor:
        if self._pipe is not None and not self._pipe.is_last:
            return hidden
        with blamed_on(self._cls):
            logits: torch.Tensor = self.model.compute_logits(hidden[rows])
        return logits


def _shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
