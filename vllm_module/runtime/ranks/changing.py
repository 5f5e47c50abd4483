"""Changes of the weights on every rank of an engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from vllm_module.adapters import AdapterConfig
from vllm_module.cooperative import SentBoxes
from vllm_module.core.fill import refuse_nan_sent
from vllm_module.errors import ModelNotReadyError, RankError, WeightReadError
from vllm_module.runtime.devices import as_called, own_device
from vllm_module.runtime.ranks.group import Ranks
from vllm_module.runtime.ranks.processes import Processes
from vllm_module.runtime.ranks.worker import Worker
from vllm_module.runtime.ranks.worker_weights import SLEEPING
from vllm_module.runtime.served_adapter import LoadedAdapter
from vllm_module.weights import Weight, send_weights
from vllm_module.weights.changes import Changes
from vllm_module.weights.handle import Pairs
from vllm_module.weights.region import Region


class WeightChanges:
    """The methods of an executor that change weights or adapters, and sleep.

    Attributes:
        refusal: reason why no step runs after a failed change of the weights; else ``None``.
        asleep: level at which the engine sleeps; 0 if it is awake.
        sleeping: what sleeps: ``"weights"``, ``"kv_cache"``.

    """

    size: int
    stages: int
    leads: bool
    worker: Worker
    _ranks: Ranks
    _timeout: float
    _closed: str | None
    check: Callable[[], None]
    collective_rpc: Callable[..., list[Any]]
    _do: Callable[..., Any]
    _everywhere: Callable[..., list[Any]]
    _each: Callable[..., None]
    _tell: Callable[..., None]
    _or_end: Callable[..., AbstractContextManager[None]]

    def __init__(self) -> None:
        self.refusal: str | None = None
        self.asleep, self.sleeping = 0, frozenset[str]()
        self._awaits_weights = False  # True if an update is to wake up the weights only
        # True if weights were updated since they were loaded from the model's source.
        self._updated = False

    @property
    def started_ranks(self) -> bool:
        """True if this process started the other ranks, on this host."""
        return isinstance(self._ranks.processes, Processes)

    @property
    def every_rank_calls(self) -> bool:
        """True if every rank makes each call (``external_launcher``), and hears of no other one."""
        return self.size > 1 and not self._ranks.is_led

    @property
    def needs_whole(self) -> bool:
        """True if only a whole checkpoint updates the weights, which were dropped or are broken."""
        return self.refusal is not None or (self.asleep == 2 and "weights" in self.sleeping)

    def update_weights(self, weights: Pairs | SentBoxes) -> None:
        """Update the weights of every rank's model, in place.

        Raises the errors of this rank's model, ``RankError`` if another rank's model refuses them,
        and ``WeightReadError`` if an iterator lost touch with a trainer. If any weight was changed
        before the error, no step runs until an update loads a whole checkpoint. If the engine
        sleeps without weights, a whole checkpoint wakes it up.
        """
        whole = self.needs_whole
        if self._ranks.device.type == "cuda" and isinstance(weights, Iterator):
            weights = as_called(weights, own_device(torch.device("cuda")))
        if not isinstance(weights, Collection | SentBoxes):
            weights = _given(weights)
        with self._or_refuse():
            # Other ranks get the weights one by one, and write each before the next one arrives.
            if self.stages > 1 and isinstance(weights, Collection):
                self._check_stages(weights, whole)
            elif self.size > 1 and isinstance(weights, Collection):
                self.check()
                self._each("check_update", weights, whole)
            if isinstance(weights, SentBoxes):
                limit = self._timeout + weights.timeout  # ranks wait for each other in the meeting
                self._everywhere("update_from_boxes", weights, whole, timeout=limit)
            else:
                self._give("update_weights", weights, whole)
            self._updated = True
            if "weights" in self.sleeping:
                caches = [] if self._awaits_weights else ["kv_cache"]
                self._everywhere("wake_up", caches)
                self._wake(["weights", *caches])

    def _check_stages(
        self, weights: Mapping[str, Weight] | Collection[tuple[str, Weight]], whole: bool
    ) -> None:
        """Raise what any stage would raise before it writes anything of an update.

        Stages get names, shapes and dtypes. The values are here.
        """
        pairs = list(weights.items() if isinstance(weights, Mapping) else weights)
        self.check()
        # Refuses what is no pair of name and tensor. All values are looked at below.
        self._do("check_update", pairs, whole, False)
        # What has no dense values is sent as it is, for the stage of that name to refuse.
        described = [
            (name, Region.of(name, each) if _has_region(each) else each) for name, each in pairs
        ]
        self._everywhere("check_update", described, whole)
        if not self.worker.model.allow_nan:
            refuse_nan_sent(pairs, stored=not whole)

    def load_adapter(self, number: int, path: str, again: bool) -> list[LoadedAdapter]:
        """Load an adapter on every rank, maybe ``again``, and return what each has, by rank.

        Raises what the ranks raise; then no rank has it.
        """
        try:
            found: list[LoadedAdapter] = self._everywhere("load_adapter", number, path, again)
        except Exception:
            if self._closed is None:
                self.drop_adapter(number)
            raise
        return found

    def check_adapter_used(self, number: int) -> None:
        """Raise if a layer of any rank has added nothing in a step with the adapter."""
        self._everywhere("check_adapter_used", number)

    def drop_adapter(self, number: int) -> None:
        """Free an adapter on every rank."""
        self._everywhere("drop_adapter", number)

    def take_adapter(
        self, number: int, weights: Mapping[str, Weight], config: AdapterConfig | None
    ) -> None:
        """Give every rank new A and B of an adapter, which :meth:`update_adapter` writes.

        ``config`` has the settings of new files. Raises what the ranks raise; then none keeps them.
        """
        try:
            self._give("take_adapter", weights, number, config)
        except Exception:
            if self._closed is None:
                self._everywhere("forget_taken")
            raise

    def update_adapter(self, number: int) -> None:
        """Write on every rank what it has taken; if that raises, some may have written a part."""
        self._everywhere("update_adapter", number)

    def _give(self, name: str, weights: Pairs, *arguments: Any) -> None:
        """Call a method of every rank's worker with weights, which other ranks get in buckets."""
        with self._or_end(self._timeout):
            self._tell(name, *arguments)
        if self.size == 1:
            self._do(name, weights, *arguments)
        elif not self._ranks.is_led:
            self._each(name, weights, *arguments)
        else:

            def take(weights: Iterable[tuple[str, Weight]]) -> None:
                self._do(name, weights, *arguments)

            with self._or_end(self._timeout, unless_refused=True):
                send_weights(weights, group=self._ranks.control, also=take)

    def sleep(self, level: int = 1) -> None:
        """Free the memory of weights and cache on every rank.

        At level 1 the weights are moved to host memory; at level 2 they are dropped.

        Raises ``ModelNotReadyError`` at level 1 after a failed update of the weights, and
        ``MemoryError`` if host memory is too small for them.
        """
        if level == 1 and self.refusal is not None:
            raise ModelNotReadyError(f"sleep(level=2) drops the weights: {self.refusal}")
        try:
            self._everywhere("sleep", level)
        except Exception:
            if self._closed is None:
                with self._or_refuse():
                    self._everywhere("wake_up")  # ranks with enough memory are already asleep
            raise
        self.asleep, self.sleeping, self._awaits_weights = level, frozenset(SLEEPING), False

    def wake_up(self, tags: Collection[str] = SLEEPING) -> None:
        """Restore the weights of a sleeping engine on every rank, and allocate the caches.

        Of ``tags`` without the caches, weights that exist nowhere any more wait for an update.

        Raises ``ModelNotReadyError`` if they exist nowhere any more.
        """
        if self.asleep == 2 and self._updated and "weights" in self.sleeping:
            self._awaits_weights = "kv_cache" not in tags
            if self._awaits_weights:
                return
            raise ModelNotReadyError(
                "the weights that slept were dropped, and updates had changed them since they were "
                "loaded: update_weights with a whole checkpoint, or reload_weights() to go back to "
                f"those in {self.worker.source.name}"
            )
        with self._or_refuse():
            self._everywhere("wake_up", [tag for tag in SLEEPING if tag in tags])
        self._wake(tags)

    def _wake(self, tags: Collection[str]) -> None:
        self.sleeping -= frozenset(tags)
        self.asleep = self.asleep if self.sleeping else 0

    def rearrange_experts(self, placements: Mapping[str, tuple[int, ...]]) -> list[int]:
        """Move the experts of layers on every rank; return the bytes that came to each.

        If that fails midway, no step runs until a whole checkpoint is loaded.
        """
        with self._or_refuse():
            received: list[int] = self._everywhere("rearrange_experts", placements)
        return received

    def reload_weights(self) -> None:
        """Load every rank's weights from the source, also after sleep or a failed update."""
        with self._or_refuse():
            self._everywhere("reload_weights")
        self._wake(SLEEPING)
        self._updated = False

    def continue_for(self, before: WeightChanges) -> None:
        """Record of the weights what ``before`` knows, an executor that these ranks loaded from."""
        worker = before.worker
        self.collective_rpc("loaded_from", args=(worker.source, worker.fingerprint))
        self._updated = before._updated

    @contextmanager
    def _or_refuse(self) -> Iterator[None]:
        """If changing the weights fails, refuse steps in case only some were changed."""
        try:
            yield
        except BaseException:
            if self._closed is None:
                states = self._everywhere("weights_state")
                why = next((why for why, _ in states if why is not None), None)
                if why is None and len({took for _, took in states}) > 1:
                    why = "some ranks took an update of the weights that others refused"
                self.refusal = why or self.refusal  # ranks do not know of wrong digests
            raise
        self.refusal = None


def _has_region(weight: Any) -> bool:
    if isinstance(weight, torch.Tensor):
        return weight.layout == torch.strided
    return hasattr(weight, "narrow") and not isinstance(weight, Changes)


def _given(weights: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
    """Yield ``weights``; that ranks of a trainer are lost is no failure of the engine's ranks."""
    try:
        yield from weights
    except RankError as error:
        raise WeightReadError(f"the weights of an update did not all come: {error}") from error
