"""Changes of the weights and adapters of one rank of an engine, and its sleep."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch

from vllm_module.adapters import (
    Adapter,
    AdapterConfig,
    AdapterPlans,
    attach,
    base_names,
    check_base,
    check_used,
    detach,
    file_versions,
    fingerprint,
    gathered,
    open_adapter,
)
from vllm_module.base.garbage import paused_gc
from vllm_module.base.messages import printable
from vllm_module.build.held import held_tensors, load_from, load_held
from vllm_module.build.model_source import ModelSource
from vllm_module.config import EngineConfig
from vllm_module.cooperative import SentBoxes
from vllm_module.core.fill import Fill, refuse_nan
from vllm_module.core.module import vLLMModule
from vllm_module.core.state import refuse_to_run
from vllm_module.distributed import OwnTokens
from vllm_module.errors import ModelNotReadyError, UnsupportedModelError, WeightReadError
from vllm_module.layers.fused_moe import ExpertsLinear
from vllm_module.layers.lora_rows import AdapterRows
from vllm_module.layers.lora_slots import AdapterSlots
from vllm_module.layers.placed_experts import PlacedExperts
from vllm_module.runtime.held_file import forget_layout
from vllm_module.runtime.model_runner import ModelRunner
from vllm_module.runtime.planned_layout import forget_planned_layout
from vllm_module.runtime.served_adapter import LoadedAdapter
from vllm_module.weights import Weight
from vllm_module.weights.handle import Pairs
from vllm_module.weights.pairs import OpenWeights
from vllm_module.weights.sharded_state import ShardedState

if TYPE_CHECKING:
    from vllm_module.runtime.replica import WeightServer

SLEEPING = "weights", "kv_cache"  # what sleeps, by vLLM's names, in the order of waking up
P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W", bound="WorkerWeights")


def changes_weights(
    method: Callable[Concatenate[W, P], T],
) -> Callable[Concatenate[W, P], T]:
    """Count a change of the weights, and hold the lock meanwhile."""

    @wraps(method)
    def changing(worker: W, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with worker.weights_lock:
            worker.weight_changes += 1
            return method(worker, *args, **kwargs)

    return changing


class WorkerWeights:
    """The methods of a worker that change weights or adapters, and sleep.

    Attributes:
        weight_changes: number of changes of the weights that have begun.
        weights_lock: is held while they change.
        servers: those that send what this rank holds, by the name of the file.

    """

    model: vLLMModule
    source: ModelSource
    device: torch.device
    config: EngineConfig
    runner: ModelRunner | None
    start: Callable[[int, int, int], None]
    close: Callable[[], None]
    own_tokens: OwnTokens | None
    rank: int
    _all_ranks: int
    _shape: tuple[int, int, int] | None
    _adapter_rows: AdapterRows
    fingerprint: str

    def __init__(self) -> None:
        self.weight_changes, self.weights_lock = 0, threading.RLock()
        self.servers: dict[str, WeightServer] = {}
        self._took_update = True  # True if all of the last update or load was written
        self._slept: dict[str, torch.Tensor] | None = None  # weights in host memory, by path
        self._dropped = False  # True if it sleeps without weights
        self._adapters: dict[int, Adapter] = {}
        self._adapter_plans: AdapterPlans | None = None
        self._taken: dict[str, Weight] = {}  # of an update of an adapter
        self._has_slots = True  # False while the memory of slots is freed

    @changes_weights
    def update_weights(self, weights: Pairs, whole: bool = False) -> None:
        """Update weights in place. If ``whole``, they must be a whole checkpoint."""
        self._took_update = False
        for adapter in self._adapters.values():
            adapter.base_has_changed = True
        if whole:
            self.model.load_weights(weights)
            self._dropped = False
        else:
            self.model.update_weights(weights)
        self._took_update = True

    def update_from_boxes(self, boxes: SentBoxes, whole: bool) -> None:
        """Update weights in place by boxes that the ranks of a trainer send to this one.

        If another rank fails once all was written here, the model refuses to run: its weights are
        neither the old ones nor those of an update that has succeeded.
        """
        dropped, written = self._dropped, False

        def update(weights: Iterable[tuple[str, Weight]]) -> None:
            nonlocal written
            self.update_weights(weights, whole)
            written = True

        try:
            boxes.update(self.rank, update)
        except BaseException as error:
            if written:
                self._dropped, self._took_update = dropped, False
                refuse_to_run(self.model, error)
            raise

    def check_update(
        self,
        weights: Mapping[str, Weight] | Collection[tuple[str, Weight]],
        whole: bool,
        values: bool = True,
    ) -> None:
        """Raise the errors that an update with ``weights`` would raise before writing anything.

        Unless ``values``, no number is looked at.
        """
        plan = self.model.plan_weights(weights)
        if not whole:
            plan.report.missing.clear()
        plan.report.raise_if_refused(type(self.model).__name__, touched=False)
        if values and not self.model.allow_nan:
            refuse_nan(plan.fills, stored=not whole)

    @paused_gc()
    def load_adapter(self, number: int, path: str, again: bool = False) -> LoadedAdapter:
        """Load this rank's part of an adapter.

        One that is loaded ``again`` was made for the base as it was then, which updates may have
        changed, as they do under adapters that stay in memory. So copies of the base's tensors
        that PEFT saves beside A and B are not compared again.

        Raises ``WeightLoadError`` if it does not fit the model; then nothing has changed.
        """
        if self.config.enable_torch_compile:
            raise UnsupportedModelError(
                "adapters are not computed where torch.compile fuses a model: leave out "
                "enable_torch_compile"
            )
        versions = file_versions(path)
        with open_adapter(path) as (config, weights):
            if not again:
                check_base(config, self.source.source.folder, self.source.config)
            if self._adapter_plans is None:
                self._adapter_plans = AdapterPlans(self.model)
            is_base = (lambda copy: True) if again else Fill.is_held
            adapter = self._adapter_plans.load(config, weights, is_base)
            adapter.base_has_changed = again
        if self.own_tokens is not None:
            for layer in adapter.layers():
                if isinstance(layer.base[0], ExpertsLinear):
                    raise UnsupportedModelError(
                        "the adapter has parts of experts, which are computed elsewhere where "
                        "engines share them (data_parallel_size): leave that out, or merge the "
                        "adapter into its base model with PEFT's merge_and_unload()"
                    )
        compared = fingerprint(path) if self._all_ranks > 1 else ""
        if file_versions(path) != versions:
            raise WeightReadError(f"{printable(path)} has changed while it was read: load it again")
        attach(adapter, number, self._adapter_rows, self.config.max_lora_rank)
        self._adapters[number] = adapter
        sizes = [each.nbytes for each in adapter.tensors()]
        return LoadedAdapter(len(sizes) // 2, sum(sizes), versions, compared)

    def drop_adapter(self, number: int) -> None:
        """Free an adapter, if this rank has it."""
        adapter = self._adapters.pop(number, None)
        if adapter is not None:
            detach(adapter, number)
            if self._adapter_rows.slots is not None:
                self._adapter_rows.slots.forget(number)

    def check_adapter_used(self, number: int) -> None:
        """Raise ``UnsupportedModelError`` if a step with an adapter used not all of its layers."""
        check_used(self._adapters[number], number)

    def take_adapter(
        self, weights: Pairs, number: int, config: AdapterConfig | None = None
    ) -> None:
        """Take A and B under PEFT's names for :meth:`update_adapter`, without writing them.

        Raises ``UnsupportedModelError`` if ``config``, their settings, are others, and
        ``WeightLoadError`` if they do not fit.
        """
        adapter = self._adapters[number]
        if config is not None:
            check_base(config, self.source.source.folder, self.source.config)
            adapter.config.check_same(config)
        self._taken = base_names(gathered(weights), adapter.config)
        adapter.check_update(self._taken)

    def forget_taken(self) -> None:
        """Free what was taken for an update that is not to be."""
        self._taken = {}

    def update_adapter(self, number: int) -> None:
        """Write what was taken into A and B of an adapter; if that raises, they are a mixture."""
        taken, self._taken = self._taken, {}
        self._adapters[number].update(taken)
        self._adapter_rows.updates += 1
        if self._adapter_rows.slots is not None:
            self._adapter_rows.slots.refill(number)

    def call_with_adapter(self, number: int, function: Callable[[Adapter], Any]) -> Any:
        """Return what a function returns for this rank's part of an adapter."""
        return function(self._adapters[number])

    def loaded_from(self, source: ModelSource, fingerprint: str) -> None:
        """Record where the weights come from, as their model says that came with them."""
        self.source, self.fingerprint = source, fingerprint

    def weights_state(self) -> tuple[str | None, bool]:
        """Return why the model refuses to run, or None, and whether the last update was whole."""
        try:
            self.model.check_ready()
        except ModelNotReadyError as error:
            return str(error), self._took_update
        return None, self._took_update

    @changes_weights
    def sleep(self, level: int) -> None:
        """Free the memory of the caches, of the CUDA graphs, of the weights and of slots.

        At level 1 weights are first copied to host memory; at level 2 they are dropped. On a CPU,
        level 1 leaves them in place. Adapters are in host memory, and stay there.

        Raises ``MemoryError`` if host memory is too small for level 1.
        """
        if level == 2:
            self._dropped = True
        elif self.device.type == "cpu":
            self.close()
            return
        else:
            held = held_tensors(self.model)
            _check_host_memory(sum(each.nbytes for each in held.values()), self._all_ranks)
            self._slept = {path: each.detach().cpu() for path, each in held.items()}
            del held
        self.close()
        if self.device.type != "cpu":
            self._free_slots()
        self.model.sleep()

    def new_slots(self) -> AdapterSlots | None:
        """Return slots of adapters without memory; ``None`` on a CPU, which needs none."""
        if self.device.type == "cpu":
            return None
        return AdapterSlots(self.config.max_loras, self.device, self.config.max_lora_rank)

    def _free_slots(self) -> None:
        """Free the memory of slots; no graph is left that knows it."""
        layers: Iterable[Any] = self.model.modules()
        for layer in layers:
            if getattr(layer, "adapters", None) is not None:  # with the memory of slots
                layer.adapters = None
        self._adapter_rows.set_slots(None)
        self._adapter_rows.slots = self.new_slots()
        self._has_slots = False

    def _fill_slots(self) -> None:
        for number, adapter in self._adapters.items() if not self._has_slots else ():
            attach(adapter, number, self._adapter_rows, self.config.max_lora_rank)
        self._has_slots = True

    @changes_weights
    def wake_up(self, tags: Collection[str] = SLEEPING) -> None:
        """Restore the weights of a sleeping rank, and allocate the caches, or one of the two.

        Raises ``ModelNotReadyError`` if they were dropped and the source has changed since.
        """
        if "weights" in tags and self._slept is not None:
            load_held(self.model, self._slept)
        elif "weights" in tags and self._dropped:
            with self.source.open() as checkpoint:
                if checkpoint.fingerprint != self.fingerprint:
                    raise ModelNotReadyError(
                        f"the weights that slept were dropped, and those in {self.source.name} "
                        "have changed since: update_weights with a whole checkpoint, or "
                        "reload_weights() to take the changed ones"
                    )
                self._load(checkpoint)
                self._took_update = True
        self._awake(caches="kv_cache" in tags)

    @changes_weights
    def reload_weights(self) -> None:
        """Load the source's weights, whatever the model has, and allocate the caches."""
        with self.source.open() as checkpoint:
            self._load(checkpoint)
            self.fingerprint = checkpoint.fingerprint
        self._took_update = True
        self._awake()

    def _load(self, checkpoint: OpenWeights) -> None:
        """Load all weights. Where experts have moved, a sharded state has them in order."""
        layers = [each for each in self.model.modules() if isinstance(each, PlacedExperts)]
        moved = [each for each in layers if each.experts.placement is not None]
        if isinstance(checkpoint, ShardedState) and moved:
            if self._adapters:
                raise UnsupportedModelError(
                    f"{self.source.name} has the experts of each rank in order, and adapters have "
                    "parts beside the experts as they were moved: unload_adapter them first"
                )
            lacking = ModelNotReadyError("experts are in order, and their weights were not loaded")
            refuse_to_run(self.model, lacking)
            for each in moved:
                each.place_experts(None)
            self.forget_places()
        load_from(self.model, checkpoint)

    def forget_places(self) -> None:
        """Take anew what is made of the places of experts, when it is asked for."""
        forget_layout(self.model)
        forget_planned_layout(self.model)
        self._adapter_plans = None

    def _awake(self, *, caches: bool = True) -> None:
        """Record that the model has weights; give adapters and freed caches memory again."""
        self._fill_slots()
        self._slept, self._dropped = None, False
        if caches and self.runner is None and self._shape is not None:
            self.start(*self._shape)


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
