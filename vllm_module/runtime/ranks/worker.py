"""One rank of an engine: its part of the model, its caches, and the operations on them."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from vllm_module.adapters import slot_bytes
from vllm_module.build.consistency import describe
from vllm_module.build.loader import find_and_load
from vllm_module.build.model_source import ModelSource
from vllm_module.config import DeviceConfig, EngineConfig, LoadConfig, ModelConfig
from vllm_module.distributed import (
    OwnTokens,
    PipelineStage,
    StagePipe,
    pipeline_parallel,
    surrounding_stage,
    tensor_parallel,
    tensor_parallel_group,
)
from vllm_module.errors import UnsupportedModelError
from vllm_module.layers import RecurrentLayer
from vllm_module.layers.lora_rows import AdapterRows
from vllm_module.quantization import QuantizableKVCache
from vllm_module.runtime.cache.kv_cache import KVCache, attention_layers, page_bytes
from vllm_module.runtime.cache.state_cache import StateCache, copy_bytes, state_bytes
from vllm_module.runtime.model_runner import ModelRunner
from vllm_module.runtime.pooling.embedding import EmbeddingInputs, described_result, embed
from vllm_module.runtime.ranks.worker_experts import WorkerExperts
from vllm_module.runtime.sampling.sampler import warm_up
from vllm_module.runtime.step_inputs import StepInputs
from vllm_module.runtime.warm_up import MOST_TOKENS, largest_steps, warm_up_steps
from vllm_module.weights.sharded_state import ShardedState
from vllm_module.wrapped.model import TransformersForCausalLM

_log = logging.getLogger(__name__)

# Settings by which ranks that compute steps together prepare for steps.
_ALIKE = (
    "tensor_parallel_size", "max_num_batched_tokens", "max_num_seqs", "block_size",
    "kv_cache_dtype", "kv_cache_memory_bytes", "enforce_eager",
)  # fmt: skip
_CPU_CACHE = 1 << 30  # bytes of the cache on a CPU, unless kv_cache_memory_bytes is given
CACHE_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


class SequenceMemory(NamedTuple):
    """What a rank's layers keep of sequences.

    ``windows`` are the sliding windows of its attention layers, in tokens; ``None`` is for a layer
    that attends to all tokens.
    """

    page_bytes: int
    state_bytes: int
    windows: frozenset[int | None]


class Worker(WorkerExperts):
    """Loads this rank's part of the model and runs steps on it.

    Args:
        model: the model to load, or its source if that was already found.
        load_config, device_config: as for :func:`~vllm_module.build.loader.get_model`.
        config: settings of the engine.
        pipe: connects this rank to other stages of a pipeline.

    Attributes:
        config, load_config: as above.
        source: the source of the model.
        fingerprint: of its files, when they were loaded.
        model: this rank's part of it.
        device: where it lies.
        rank: the number of this rank.
        own_tokens: the ranks of engines that share experts, each with tokens of its own; the
            executor sets it.
        other_stages: what ranks of other pipeline stages keep of sequences; the executor sets
            it. All stages have the same pages and slots of states.

    """

    own_tokens: OwnTokens | None = None
    other_stages: Sequence[SequenceMemory] = ()
    _pipe: StagePipe | None = None

    def __init__(
        self,
        model: ModelConfig | ModelSource,
        load_config: LoadConfig,
        device_config: DeviceConfig,
        config: EngineConfig,
        pipe: StagePipe | None = None,
    ) -> None:
        super().__init__()
        self.config, self.load_config, self._pipe = config, load_config, pipe
        self.device = device_config.torch_device
        self.source, self.model, self.fingerprint = find_and_load(model, load_config, device_config)
        if isinstance(self.model, TransformersForCausalLM):
            self.model.check()
        self.cache_dtype = CACHE_DTYPES.get(config.kv_cache_dtype, self.source.dtype)
        self.page_bytes = page_bytes(self.model, config.block_size, self.cache_dtype)
        self.state_bytes = state_bytes(self.model, self.source.dtype)
        self.runner: ModelRunner | None = None
        # What a first step may find to be called without its metadata, by path.
        self._unchecked: dict[str, QuantizableKVCache | RecurrentLayer] = {
            path: each
            for path, each in self.model.named_modules()
            if isinstance(each, QuantizableKVCache | RecurrentLayer)
        }
        self._group = tensor_parallel_group()
        stage = surrounding_stage.get() or PipelineStage(0, 1)
        self._all_ranks = stage.size * self._group.size
        self.rank = (stage.size - 1 - stage.rank) * self._group.size + self._group.rank
        self._shape: tuple[int, int, int] | None = None  # arguments of the last start
        self._adapter_rows = AdapterRows(self.new_slots())
        if config.enable_eplb:
            self.count_experts()

    @property
    def is_encoder(self) -> bool:
        """True if the model computes only hidden states, from whole sequences, without a cache."""
        generates = callable(getattr(self.model, "compute_logits", None))
        return not generates and not attention_layers(self.model)

    @property
    def window(self) -> int | None:
        """Longest sliding window of a layer, in tokens; ``None`` if a layer has none."""
        windows = self.kept.windows.union(*(each.windows for each in self.other_stages))
        if None in windows:
            return None
        return max((window for window in windows if window is not None), default=None)

    @property
    def kept(self) -> SequenceMemory:
        """What this rank keeps of sequences."""
        windows = frozenset(layer.sliding_window for layer in attention_layers(self.model))
        return SequenceMemory(self.page_bytes, self.state_bytes, windows)

    @property
    def described(self) -> dict[str, str]:
        """What all stages, and engines that share experts, have to load and serve alike."""
        source, config = self.source, self.config
        settings = {name: repr(getattr(config, name)) for name in _ALIKE}
        return describe(source.config, source.dtype, source.rules, self.fingerprint) | settings

    @property
    def has_states(self) -> bool:
        """True if layers of any stage keep a state of each sequence."""
        return any((self.state_bytes, *(each.state_bytes for each in self.other_stages)))

    @property
    def caches_prefixes(self) -> bool:
        """True if prompts reuse pages; with states, which must be saved, only if requested."""
        asked = self.config.enable_prefix_caching
        return not self.has_states if asked is None else asked

    @property
    def num_states(self) -> int:
        """Number of states on the device: those of running sequences, and saved ones."""
        return self.config.max_num_seqs * (2 if self.caches_prefixes else 1)

    def describe_states(self) -> str:
        """Return a description of the states on the device, for messages."""
        saved = " and as many saved ones of prefixes" if self.caches_prefixes else ""
        return f"{self.config.max_num_seqs} states of sequences{saved}"

    @property
    def host_states(self) -> int:
        """Number of states that fit into half of the host memory for preempted sequences."""
        # Without attention, no sequence is preempted.
        if not self.has_states or not self._most_bytes()[0]:
            return 0
        most = int(self.config.swap_space * 2**29) // self._most_bytes()[1]
        return min(self.config.max_num_seqs, most)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for the pages of preempted sequences."""
        states = self.host_states
        return int(self.config.swap_space * 2**30) - states * (states and self._most_bytes()[1])

    @property
    def host_pages(self) -> int:
        """Number of pages that fit into that memory on every rank."""
        most = self._most_bytes()[0]
        return self.host_bytes // most if most else 0

    def _most_bytes(self) -> tuple[int, int]:
        """Return the bytes of a page and of a state on the rank where they are largest."""
        others = self.other_stages
        pages = max(self.page_bytes, *(each.page_bytes for each in others), 0)
        return pages, max(self.state_bytes, *(each.state_bytes for each in others), 0)

    def pages(self, max_model_len: int) -> int:
        """Return the number of KV cache pages that fit into this rank's memory, beside the states.

        A model without attention layers has pages without memory, enough for all tokens.
        """
        most = self.config.max_num_seqs * -(-max_model_len // self.config.block_size)
        left = self._memory(max_model_len)
        if not self.page_bytes:
            return most if left >= 0 else 0
        return max(0, left) // self.page_bytes

    def no_page(self) -> str:
        """Return a message for memory that is too small for a page, with what to change."""
        states, lower = "", ""
        if self.state_bytes:
            nbytes = self.num_states * self.state_bytes
            states = f" beside {self.describe_states()} ({nbytes} bytes)"
            lower = ", or lower max_num_seqs"
            if self.caches_prefixes:
                lower += ", or leave out enable_prefix_caching"
        return (
            f"there is no memory for a page of {self.config.block_size} tokens, which takes "
            f"{self.page_bytes} bytes{states}: raise kv_cache_memory_bytes or "
            f"gpu_memory_utilization{lower}"
        )

    def _memory(self, max_model_len: int) -> int:
        """Return the bytes left for pages; negative if the states do not fit."""
        config, size = self.config, self.config.block_size
        # The limit of a user, and that of a CPU, is for pages only.
        if config.kv_cache_memory_bytes is not None:
            return config.kv_cache_memory_bytes
        if self.device.type != "cuda":
            return _CPU_CACHE
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        cache = KVCache(self.model, 1, size, self.device, self.cache_dtype)
        one_state = StateCache(self.model, 1, self.device, self.source.dtype)
        most_pages = -(-max_model_len // size)
        runner = ModelRunner(
            self.model, self.device, config.max_num_seqs, most_pages, pipe=self._pipe
        )
        limits = config.max_num_batched_tokens, config.max_num_seqs, max_model_len
        for inputs in largest_steps(*limits, size):
            runner.run(inputs)
        cache.close()
        one_state.close()
        step = torch.cuda.max_memory_allocated(self.device) - before
        graphs = 0
        # Graphs have their own pool, about as large as the memory of their step.
        if not config.enforce_eager:
            tokens = config.max_num_batched_tokens
            graphs = step * min(MOST_TOKENS, tokens) // tokens
        if self.state_bytes:  # before computing, a step copies states, at most one to each slot
            step = max(step, self.num_states * copy_bytes(self.model, self.source.dtype))
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        reserved = total * (1 - config.gpu_memory_utilization)
        slots, rank = 0, config.max_lora_rank
        if rank is not None:
            slots = slot_bytes(self.model, config.max_loras, rank)
        return int(free - reserved - step - graphs) - slots - self.state_bytes * self.num_states

    def start(self, num_pages: int, host_pages: int, max_model_len: int) -> None:
        """Allocate the caches; on a GPU, compile kernels and capture graphs of decoding steps."""
        config, size, on_gpu = self.config, self.config.block_size, self.device.type == "cuda"
        self.cache = KVCache(self.model, num_pages, size, self.device, self.cache_dtype, host_pages)
        self.states = StateCache(
            self.model, self.num_states, self.device, self.source.dtype, self.host_states
        )
        most_pages, compiled = -(-max_model_len // size), config.enable_torch_compile
        # Ranks meet outside of torch's operations, and so do engines that share experts: one that
        # computes a step again to record it would meet the others' next one. Experts would be
        # counted twice.
        once = config.enable_eplb or config.enforce_eager or compiled
        once = once or self.own_tokens is not None
        records = self.device.type == "cpu" and self._all_ranks == 1 and not once
        self.runner = ModelRunner(
            self.model, self.device, config.max_num_seqs, most_pages, compiled, self._adapter_rows,
            self._pipe, self.own_tokens, records,
        )  # fmt: skip
        if on_gpu and self._shape is None:  # kernels stay compiled while the engine sleeps
            begin = time.monotonic()
            limits = config.max_num_batched_tokens, config.max_num_seqs, max_model_len
            for inputs in warm_up_steps(*limits, size, num_pages, host_pages):
                logits = self.run(inputs)
            if self._pipe is None or self._pipe.is_last:
                warm_up(logits[:1])
            torch.cuda.synchronize()
            _log.info("compiled kernels and tried them in %.1f s", time.monotonic() - begin)
        if config.enable_eplb and self._shape is None:
            self.count_experts()  # from zero, after steps that were tried
        self._shape = num_pages, host_pages, max_model_len
        # What stages send each other is part of no graph.
        if on_gpu and not config.enforce_eager and self._pipe is None:
            self.runner.capture(config.max_num_batched_tokens)

    def run(
        self, inputs: StepInputs | EmbeddingInputs, sampled: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Move pages and states, compute the step's tokens, and return logits ``[rows, vocab]``.

        ``sampled`` has the tokens that ``inputs.input_ids`` index, if they are indices. The first
        rank has them, and the other ranks receive them here. For a batch of an encoder, the result
        is what :func:`~vllm_module.runtime.pooling.embedding.embed` returns.

        Raises ``UnsupportedModelError`` if the model returns anything but logits, or in the first
        step keeps the metadata from a layer.
        """
        if isinstance(inputs, EmbeddingInputs):
            return embed(self.model, self.device, inputs)
        if self.runner is None:
            raise RuntimeError("the engine sleeps: wake_up() first")
        if inputs.pages is not None:
            self.cache.move(inputs.pages)
        if inputs.states is not None:
            self.states.move(inputs.states)
        if inputs.num_sampled:
            if sampled is None:
                sampled = torch.zeros(inputs.num_sampled, dtype=torch.int64, device=self.device)
            sampled = self._group.all_reduce(sampled)  # the others add zeros; all on the device
        if inputs.adapters:  # else layers would add nothing, without a word
            assert self._adapters.keys() >= {*inputs.adapters.values()}, "adapters are in memory"
        for layer in self._unchecked.values():
            layer.ran_without_metadata = False  # set by a call before the first step
        logits = self.runner.run(inputs, sampled)
        for path, layer in self._unchecked.items():
            if layer.ran_without_metadata:  # it took the tokens of all requests for one sequence
                raise UnsupportedModelError(
                    f"{type(self.model).__name__} calls {path} without the metadata of the step, "
                    "so that tokens would not see those before them: pass metadata on to it"
                )
        self._unchecked = {}
        if self._pipe is not None and not self._pipe.is_last:
            return logits  # none
        expected = len(inputs.rows), self.source.config.vocab_size
        if not isinstance(logits, torch.Tensor) or logits.shape != expected:
            raise UnsupportedModelError(
                f"{type(self.model).__name__}.compute_logits should return logits of shape "
                f"{expected}, rows and vocab_size, and returned {described_result(logits)}"
            )
        return logits

    def forget_steps(self) -> None:
        """Drop recorded steps, before memory that they read may change its place."""
        if self.runner is not None:
            self.runner.forget_steps()

    def expect(self, tokens: int) -> None:
        """Begin to receive what the stage before computes of a later step."""
        assert self._pipe is not None
        self._pipe.expect(tokens)

    def first_tokens(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the first token of each row of logits that :meth:`run` returned last."""
        assert self.runner is not None
        return self.runner.first_tokens(logits)

    def call(
        self, method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a method of this object by its name, or a function with this object first."""
        function = getattr(self, method) if isinstance(method, str) else partial(method, self)
        return function(*args, **kwargs)

    def call_pickled(self, sent: bytes) -> Any:
        """Do as :meth:`call` with arguments that this engine's first rank has pickled."""
        return self.call(*pickle.loads(sent))

    def close(self) -> None:
        """Free the memory of the caches and the CUDA graphs."""
        if self.runner is not None:
            self.runner = None
            self.cache.close()
            self.states.close()


def check_ranks(source: ModelSource, size: int, stages: int = 1) -> None:
    """Raise if the model cannot be divided among ``size`` ranks of so many pipeline stages.

    The last rank is tried, because it has the smallest shards, or none. Raises ``ShardingError``,
    and ``UnsupportedModelError`` for stages of a model or of files that have none.
    """
    with source.open() as checkpoint:
        tensors = len(checkpoint)
        if stages > 1 and isinstance(checkpoint, ShardedState):
            raise UnsupportedModelError(
                f"{source.name} is a sharded state, whose files are of ranks without pipeline "
                "stages: leave pipeline_parallel_size out, or load the original checkpoint"
            )
    for rank in (0, size - 1):
        with tensor_parallel(rank=rank, size=size), pipeline_parallel(rank=0, size=stages):
            source.build(torch.device("cpu"), tensors)
