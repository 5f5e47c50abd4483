"""One rank of an engine: its part of the model, its caches, and the operations on them."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vllm_module.adapters import (
    Adapter,
    attach,
    base_names,
    check_used,
    detach,
    file_versions,
    open_adapter,
    slot_bytes,
)
from vllm_module.base.garbage import paused_gc
from vllm_module.base.messages import printable
from vllm_module.build.consistency import describe
from vllm_module.build.held import held_tensors, load_from, load_held
from vllm_module.build.loader import find_and_load
from vllm_module.build.model_source import ModelSource
from vllm_module.config import DeviceConfig, EngineConfig, LoadConfig, ModelConfig
from vllm_module.core.fill import refuse_nan
from vllm_module.distributed import (
    PipelineStage,
    StagePipe,
    pipeline_parallel,
    surrounding_stage,
    tensor_parallel,
    tensor_parallel_group,
)
from vllm_module.errors import ModelNotReadyError, UnsupportedModelError, WeightReadError
from vllm_module.layers.lora_rows import AdapterRows
from vllm_module.layers.lora_slots import AdapterSlots
from vllm_module.runtime.cache.kv_cache import KVCache, attention_layers, page_bytes
from vllm_module.runtime.cache.state_cache import StateCache, copy_bytes, state_bytes
from vllm_module.runtime.model_runner import MOST_TOKENS, ModelRunner, described_result
from vllm_module.runtime.pooling.embedding import EmbeddingInputs, embed
from vllm_module.runtime.sampling.sampler import warm_up
from vllm_module.runtime.served_adapter import LoadedAdapter
from vllm_module.runtime.step_inputs import StepInputs
from vllm_module.runtime.warm_up import largest_steps, warm_up_steps
from vllm_module.weights import Weight
from vllm_module.weights.sharded_state import ShardedState
from vllm_module.wrapped.model import TransformersForCausalLM

_log = logging.getLogger(__name__)

_CPU_CACHE = 1 << 30  # bytes of the cache on a CPU, unless kv_cache_memory_bytes is given
SLEEPING = "weights", "kv_cache"  # what sleeps, by vLLM's names, in the order of waking up
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


class Worker:
    """Loads this rank's part of the model and runs steps on it.

    Args:
        model: the model to load, or its source if that was already found.
        load_config, device_config: as for :func:`~vllm_module.build.loader.get_model`.
        config: settings of the engine.
        pipe: connects this rank to other stages of a pipeline.

    Attributes:
        source: the source of the model.
        model: this rank's part of it.
        device: where it lies.
        rank: the number of this rank.
        of_other_stages: what ranks of other pipeline stages keep of sequences; the executor sets
            it. All stages have the same pages and slots of states.

    """

    of_other_stages: Sequence[SequenceMemory] = ()
    _pipe: StagePipe | None = None

    def __init__(
        self,
        model: ModelConfig | ModelSource,
        load_config: LoadConfig,
        device_config: DeviceConfig,
        config: EngineConfig,
        pipe: StagePipe | None = None,
    ) -> None:
        self.config, self._pipe = config, pipe
        self.device = device_config.torch_device
        self.source, self.model, self._fingerprint = find_and_load(
            model, load_config, device_config
        )
        if isinstance(self.model, TransformersForCausalLM):
            self.model.check()
        self.cache_dtype = CACHE_DTYPES.get(config.kv_cache_dtype, self.source.dtype)
        self.page_bytes = page_bytes(self.model, config.block_size, self.cache_dtype)
        self.state_bytes = state_bytes(self.model, self.source.dtype)
        self.runner: ModelRunner | None = None
        self._group = tensor_parallel_group()
        stage = surrounding_stage.get() or PipelineStage(0, 1)
        self._stages = stage.size
        self.rank = (stage.size - 1 - stage.rank) * self._group.size + self._group.rank
        self._shape: tuple[int, int, int] | None = None  # arguments of the last start
        self._took_update = True  # True if all of the last update was written
        self._slept: dict[str, torch.Tensor] | None = None  # weights in host memory, by path
        self._dropped = False  # True if it sleeps without weights
        on_gpu, most = self.device.type == "cuda", (config.max_loras, config.max_lora_rank)
        self._adapter_rows = AdapterRows(AdapterSlots(*most) if on_gpu else None)
        self._adapters: dict[int, Adapter] = {}
        self._checked: set[int] = set()  # adapters all of whose layers were used

    @property
    def is_encoder(self) -> bool:
        """True if the model computes only hidden states, from whole sequences, without a cache."""
        generates = callable(getattr(self.model, "compute_logits", None))
        return not generates and not attention_layers(self.model)

    @property
    def window(self) -> int | None:
        """Longest sliding window of a layer, in tokens; ``None`` if a layer has none."""
        windows = self.kept.windows.union(*(each.windows for each in self.of_other_stages))
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
        """What all stages have to load alike."""
        source = self.source
        return describe(source.config, source.dtype, source.rules, self._fingerprint)

    @property
    def has_states(self) -> bool:
        """True if layers of any stage keep a state of each sequence."""
        return any((self.state_bytes, *(each.state_bytes for each in self.of_other_stages)))

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
        others = self.of_other_stages
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
        self.runner = ModelRunner(
            self.model, self.device, config.max_num_seqs, most_pages, compiled, self._adapter_rows,
            self._pipe,
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

        Raises ``RuntimeError`` if the model returns anything but logits.
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
        logits = self.runner.run(inputs, sampled)
        if self._pipe is not None and not self._pipe.is_last:
            return logits  # none
        if inputs.adapters and inputs.rows:
            for number in {*inputs.adapters.values()} - self._checked:
                check_used(self._adapters[number], number)
                self._checked.add(number)
        expected = len(inputs.rows), self.source.config.vocab_size
        if not isinstance(logits, torch.Tensor) or logits.shape != expected:
            raise UnsupportedModelError(
                f"{type(self.model).__name__}.compute_logits should return logits of shape "
                f"{expected}, rows and vocab_size, and returned {described_result(logits)}"
            )
        return logits

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

    def update_weights(
        self, weights: Mapping[str, Weight] | Iterable[tuple[str, Weight]], whole: bool = False
    ) -> None:
        """Update weights in place. If ``whole``, they must be a whole checkpoint."""
        self._took_update = False
        if whole:
            self.model.load_weights(weights)
            self._dropped = False
        else:
            self.model.update_weights(weights)
        self._took_update = True

    def check_update(
        self, weights: Mapping[str, Weight] | Collection[tuple[str, Weight]], whole: bool
    ) -> None:
        """Raise the errors that an update with ``weights`` would raise before writing anything."""
        plan = self.model.plan_weights(weights)
        if not whole:
            plan.report.missing.clear()
        plan.report.raise_if_refused(type(self.model).__name__, touched=False)
        if not self.model.allow_nan:
            refuse_nan(plan.fills)

    @paused_gc()
    def load_adapter(self, number: int, path: str) -> LoadedAdapter:
        """Load this rank's part of an adapter.

        Raises ``WeightLoadError`` if it does not fit the model; then nothing has changed.
        """
        if self.config.enable_torch_compile:
            raise UnsupportedModelError(
                "adapters are not computed where torch.compile fuses a model: leave out "
                "enable_torch_compile"
            )
        versions = file_versions(path)
        with open_adapter(path) as (config, weights):
            adapter = Adapter(self.model, config)
            adapter.load(weights)
        if file_versions(path) != versions:
            raise WeightReadError(f"{printable(path)} has changed while it was read: load it again")
        attach(adapter, number, self._adapter_rows, self.config.max_lora_rank)
        self._adapters[number] = adapter
        size = sum(each.nbytes for each in adapter.parameters())
        return LoadedAdapter(len(list(adapter.layers())), size, versions)

    def drop_adapter(self, number: int) -> None:
        """Free an adapter, if this rank has it."""
        adapter = self._adapters.pop(number, None)
        if adapter is not None:
            detach(adapter, number)
            if self._adapter_rows.slots is not None:
                self._adapter_rows.slots.forget(number)

    def update_adapter(self, number: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Update A and B of an adapter in place, under PEFT's names.

        Raises ``WeightLoadError`` if they do not fit; then nothing has changed.
        """
        adapter = self._adapters[number]
        adapter.update(base_names(weights, adapter.config))
        self._adapter_rows.updates += 1
        if self._adapter_rows.slots is not None:
            self._adapter_rows.slots.refill(number)

    def call_with_adapter(self, number: int, function: Callable[[Adapter], Any]) -> Any:
        """Return what a function returns for this rank's part of an adapter."""
        return function(self._adapters[number])

    def weights_state(self) -> tuple[str | None, bool]:
        """Return why the model refuses to run, or None, and whether the last update was whole."""
        try:
            self.model.check_ready()
        except ModelNotReadyError as error:
            return str(error), self._took_update
        return None, self._took_update

    def sleep(self, level: int) -> None:
        """Free the memory of the caches, of the CUDA graphs and of the weights.

        At level 1 weights are first copied to host memory; at level 2 they are dropped. On a CPU,
        level 1 leaves them in place.

        Raises ``MemoryError`` if host memory is too small for them.
        """
        if level == 2:
            self._dropped = True
        elif self.device.type == "cpu":
            self.close()
            return
        else:
            held = held_tensors(self.model)
            ranks = self._group.size * self._stages
            _check_host_memory(sum(each.nbytes for each in held.values()), ranks)
            self._slept = {path: each.detach().cpu() for path, each in held.items()}
            del held
        self.close()
        self.model.sleep()

    def close(self) -> None:
        """Free the memory of the caches and the CUDA graphs."""
        if self.runner is not None:
            self.runner = None
            self.cache.close()
            self.states.close()

    def wake_up(self, tags: Collection[str] = SLEEPING) -> None:
        """Restore the weights of a sleeping rank, and allocate the caches, or one of the two.

        Raises ``ModelNotReadyError`` if they were dropped and the source has changed since.
        """
        if "weights" in tags and self._slept is not None:
            load_held(self.model, self._slept)
        elif "weights" in tags and self._dropped:
            with self.source.open() as checkpoint:
                if checkpoint.fingerprint != self._fingerprint:
                    raise ModelNotReadyError(
                        f"the weights that slept were dropped, and those in {self.source.name} "
                        "have changed since: update_weights with a whole checkpoint, or "
                        "reload_weights() to take the changed ones"
                    )
                load_from(self.model, checkpoint)
        self._awake(caches="kv_cache" in tags)

    def reload_weights(self) -> None:
        """Load the source's weights, whatever the model has, and allocate the caches."""
        with self.source.open() as checkpoint:
            self._fingerprint = checkpoint.fingerprint
            load_from(self.model, checkpoint)
        self._awake()

    def _awake(self, *, caches: bool = True) -> None:
        """Record that the model has weights; allocate the caches if they were freed."""
        self._slept, self._dropped = None, False
        if caches and self.runner is None and self._shape is not None:
            self.start(*self._shape)


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


def _check_host_memory(nbytes: int, ranks: int) -> None:
    """Raise ``MemoryError`` if the host has less than ``nbytes`` for each rank."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        (available,) = (int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvail"))
    except (OSError, ValueError):  # without Linux the size is unknown, and allocation fails later
        return
    if nbytes * ranks > available:
        raise MemoryError(
            f"the weights of {ranks} ranks take {nbytes * ranks / 2**30:.1f} GiB of host memory, "
            f"and {available / 2**30:.1f} GiB are available: sleep(level=2) drops them"
        )
