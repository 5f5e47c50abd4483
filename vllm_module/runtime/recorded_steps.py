"""Steps that only decode, recorded on a CPU for each number of sequences."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from vllm_module.base.messages import describe_error
from vllm_module.kernels.attention.paged_layout import DecodingLayout
from vllm_module.kernels.matmul.products import products_in_use
from vllm_module.kernels.recording import Effects, NotRecordableError, Recording
from vllm_module.layers import AttentionMetadata
from vllm_module.layers.fusion import is_plain
from vllm_module.layers.recurrent import RecurrentLayer
from vllm_module.quantization import QuantizableKVCache
from vllm_module.runtime.kept_by_model import KeptByModel

_log = logging.getLogger(__name__)
_FIRST = 3  # such a step is recorded when it comes for this time
_LEAST_BYTES = 16 << 20  # of the memory of all recordings
_SHARE = 20  # or one part in so many of the weights' bytes
_GAIN = 1.05  # least share of a recording's time that the model takes
_TRIALS = 2  # steps in which a recording may take as long: another process may have disturbed one

Compute = Callable[[torch.Tensor, torch.Tensor, AttentionMetadata], torch.Tensor]


class RecordedSteps:
    """Computes logits of steps with one token of each sequence, by recordings where it has some.

    A step of some number of sequences is recorded when it has come before. The recording is used if
    it gave the bits of the model for the step after, too, in less time; if not in less, steps of
    more sequences are not recorded. Where a model cannot be recorded, or the loops of the extra
    ``cpu`` are not in use, the model computes the step. So it does if it keeps something from step
    to step, besides caches and states: this is looked for before a step is computed again.

    All recordings keep at most a twentieth of the weights' bytes, or 16 MiB. The largest are
    dropped, which gain least.

    Args:
        model: the model, whose layers have their caches and states.
        compute: returns the logits of a step from token ids, positions and metadata.

    Attributes:
        kept: what the model kept when the first step was recorded; ``None`` before.

    """

    def __init__(self, model: nn.Module, compute: Compute) -> None:
        self._model, self._compute = model, compute
        weights = sum(each.nbytes for each in model.parameters())
        self._most_bytes = max(_LEAST_BYTES, weights // _SHARE)
        self._steps: dict[object, _RecordedStep] = {}
        self._most = sys.maxsize  # sequences of a step that may gain
        self._hooks = RemovableHandle.next_id  # as many have been registered in this process
        self.kept: KeptByModel | None = None

    def clear(self) -> None:
        """Drop all recordings: weights or caches may lie elsewhere from now on."""
        self._steps.clear()
        self._most, self.kept = sys.maxsize, None

    def check(self) -> None:
        """Drop all recordings if the model keeps something else than when they were made.

        Call it after the model has computed a step that is not given to :meth:`logits`, if there is
        something that it :attr:`kept`.
        """
        if self._has_recordings() and self._keeps_more():
            _log.debug("recorded steps are dropped: a step changed what the model keeps")
            self.clear()

    def _has_recordings(self) -> bool:
        return any(each.nbytes for each in self._steps.values())

    def _keeps_more(self) -> bool:
        return self.kept is not None and self.kept.has_changed()

    def logits(
        self, ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Return the logits ``[tokens, vocab]`` of a step; the next such step overwrites them.

        Args:
            ids, positions: of each token, ``[tokens]``.
            metadata: of the step, with block tables of all columns.

        """
        if self._hooks != RemovableHandle.next_id:
            self._hooks = RemovableHandle.next_id
            if self._has_recordings() and not all(map(is_plain, self._model.modules())):
                _log.debug("recorded steps are dropped: they would not call a hook")
                self.clear()
        chosen = products_in_use.get()
        if not chosen.pages or len(ids) > self._most:
            logits = self._compute(ids, positions, metadata.laid_out())
            if self.kept is not None:
                self.check()
            return logits
        key = len(ids), metadata.block_tables.shape, chosen, torch.get_num_threads()
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = _RecordedStep(self._model, self._compute, self._keeps_more)
        if step.met == _FIRST - 1 and not self._has_recordings():
            self.kept = KeptByModel(self._model)
        computed = not step.holds
        logits = step.logits(ids, positions, metadata)
        changed = computed and self._has_recordings() and self._keeps_more()
        if changed or not step.repeatable:
            _log.debug("no step is recorded: the model keeps something from step to step")
            self.clear()
            self._most = 0
            return logits
        if step.met == _FIRST:
            self._drop_largest()
        if not step.gains:
            self._most = min(self._most, len(ids) - 1)
        return logits

    def _drop_largest(self) -> None:
        while sum(each.nbytes for each in self._steps.values()) > self._most_bytes:
            max(self._steps.values(), key=lambda each: each.nbytes).give_up("it takes much memory")


class _RecordedStep:
    """A step of one number of sequences.

    Attributes:
        met: how often it has come.
        gains: False once a recording took as long as the model.
        repeatable: False once the model kept something from this step for later ones.
        holds: True once the recording gave the model's bits for another step.

    """

    def __init__(self, model: nn.Module, compute: Compute, keeps_more: Callable[[], bool]) -> None:
        self.met, self.gains, self.repeatable, self.holds = 0, True, True, False
        self._model, self._compute, self._keeps_more = model, compute, keeps_more
        self._given: list[torch.Tensor] = []  # what the recording reads of a step
        self._logits = torch.empty(0)  # what it writes
        self._recording: Recording | None = None
        self._slow = 0  # steps in which the recording took as long as the model

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the recording keeps."""
        return 0 if self._recording is None else self._recording.nbytes

    def logits(
        self, ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        self.met += 1
        if self._recording is not None:
            for own, given in zip(self._given, _numbers(ids, positions, metadata), strict=True):
                own.copy_(given)
            if self.holds:
                self._recording.again()
                return self._logits
        elif self.met != _FIRST:
            return self._compute(ids, positions, metadata.laid_out())
        states = _States(self._model, metadata)
        effects = Effects([*_caches(self._model), *states.tensors])
        before, begin = states.copied(), time.perf_counter()
        with nullcontext() if self._recording is not None else effects:
            expected = self._compute(ids, positions, metadata.laid_out())
        seconds, after = time.perf_counter() - begin, states.copied()
        if effects.found is not None or self._keeps_more():
            self.repeatable = False
            self.give_up(f"{effects.found or 'Python code'} would have another effect again")
            return expected
        try:
            states.put(before)
            if self._recording is not None:
                begin = time.perf_counter()
                self._recording.again()
                self.holds = seconds > _GAIN * (time.perf_counter() - begin)
                self._slow += not self.holds
                self.gains = self._slow < _TRIALS
                if not self.gains:
                    raise NotRecordableError("the model takes as little time")
            else:
                self._record(_numbers(ids, positions, metadata), metadata.query_start_loc, states)
            ours, theirs = (each.view(torch.uint8) for each in (self._logits, expected))
            if not torch.equal(ours, theirs):
                raise NotRecordableError("it gave other bits than the model")
        except Exception as error:  # the model has just computed this step
            self.give_up(describe_error(error))
        states.put(after)
        return expected

    def give_up(self, reason: str) -> None:
        """Let the model compute such steps."""
        self._recording, self._given, self._logits = None, [], torch.empty(0)
        self.holds = False
        _log.debug("steps of so many sequences are not recorded: %s", reason)

    def _record(
        self, numbers: tuple[torch.Tensor, ...], starts: torch.Tensor, states: _States
    ) -> None:
        modules = list(self._model.modules())
        if not all(map(is_plain, modules)):
            raise NotRecordableError("a hook would not be called")
        self._given = [each.clone() for each in numbers]
        ids, positions, slots, tables, contexts, *others = self._given
        starts = starts.clone()
        self._metadata = AttentionMetadata(
            slots, tables, contexts, starts, 1, state_slots=others[0] if others else None
        )
        object.__setattr__(self._metadata, "layout", DecodingLayout(tables, contexts))
        caches = _caches(self._model)
        given = [*self._model.parameters(), *self._model.buffers(), *caches, *states.tensors]
        recordings: list[Recording] = []  # memory of the first is kept until the second has its own
        before = states.copied()
        for _ in range(2):
            states.put(before)
            recordings.append(Recording([*given, *self._given, starts]))
            with recordings[-1].running():
                self._logits = self._compute(ids, positions, self._metadata)
        first, second = recordings
        if not second.constants.keys() <= first.constants.keys():
            raise NotRecordableError("it reads memory that no operation has made")
        self._recording = second


class _States:
    """The states of a step's sequences, which a step that is computed again must find as before.

    Attributes:
        tensors: the states of all sequences, of each layer.

    """

    def __init__(self, model: nn.Module, metadata: AttentionMetadata) -> None:
        layers = [each for each in model.modules() if isinstance(each, RecurrentLayer)]
        self.tensors = [state for each in layers for state in (each.states or {}).values()]
        self._slots = metadata.state_slots if self.tensors else None

    def copied(self) -> list[torch.Tensor]:
        if self._slots is None:
            return []
        return [each.index_select(0, self._slots) for each in self.tensors]

    def put(self, copies: list[torch.Tensor]) -> None:
        for each, copied in zip(self.tensors, copies, strict=True):
            assert self._slots is not None
            each.index_copy_(0, self._slots, copied)


def _caches(model: nn.Module) -> list[torch.Tensor]:
    kept = [each.kv_cache for each in model.modules() if isinstance(each, QuantizableKVCache)]
    return [cache for each in kept if each is not None for cache in each]


def _numbers(
    ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a step whose numbers differ from those of the next one."""
    places = metadata.slot_mapping, metadata.block_tables, metadata.context_lens
    slots = () if metadata.state_slots is None else (metadata.state_slots,)
    return ids, positions, *places, *slots
