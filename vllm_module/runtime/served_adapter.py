"""Adapters that an engine serves, and the ways to ask for one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_module.base.messages import printable, shorten
from vllm_module.errors import WeightReadError


@dataclass(frozen=True)
class LoRARequest:
    """An adapter for requests, by vLLM's names.

    Attributes:
        lora_name: its name.
        lora_int_id: any number; adapters are told apart by their names.
        lora_path: the folder to load it from, if it is not loaded.

    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


class LoadedAdapter(NamedTuple):
    """An adapter on one rank.

    Attributes:
        num_layers, num_bytes: its layers and bytes there.
        files: the versions of the files that were read.
        fingerprint: of these files, if there are several ranks.

    """

    num_layers: int
    num_bytes: int
    files: tuple[tuple[str, int, int, int], ...]
    fingerprint: str = ""


@dataclass(eq=False)
class ServedAdapter:
    """An adapter that requests of an engine may ask for.

    Attributes:
        name: by which requests ask for it.
        number: by which ranks know it; never used again.
        path: the folder that it was loaded from.
        updates: how often its weights have been updated.
        in_memory: whether the ranks hold A and B; if not, they are read when a request needs them.
        used: when a step used it last; a larger number is later.
        loaded: what each rank has found when it was loaded first.
        is_checked: whether a step has used all of its layers.

    """

    name: str
    number: int
    path: str
    updates: int = 0
    in_memory: bool = False
    used: int = 0
    loaded: list[LoadedAdapter] = field(default_factory=list, repr=False)
    is_checked: bool = False

    @property
    def num_layers(self) -> int:
        """Layers of rank 0 that it adds to."""
        return self.loaded[0].num_layers

    @property
    def num_bytes(self) -> int:
        """Size of A and B on rank 0, in memory or not."""
        return self.loaded[0].num_bytes

    @property
    def version(self) -> str:
        """Name and number of updates, such as ``"sql@2"``."""
        return f"{self.name}@{self.updates}"

    def salt(self, of_prompt: str | None) -> Hashable:
        """Return what cached pages of this version have in place of the salt of a prompt."""
        return self.number, self.updates, of_prompt


class AdapterMemory:
    """The adapters that are in memory: those that were used last, and those that were updated.

    What an update wrote is in no file, so such an adapter stays until it is unloaded. Others leave
    once a new one has been read, so while it is read there is one more.

    Args:
        load: reads an adapter, by number and folder, on every rank, and knows whether it was
            loaded before.
        drop: frees one, by number, on every rank.
        check: raises if a layer of any rank ignores one, by number, after a step with it.
        most: how many may be in memory beside those that were updated; ``None`` for all.

    """

    def __init__(
        self,
        load: Callable[[int, str, bool], list[LoadedAdapter]],
        drop: Callable[[int], object],
        check: Callable[[int], object],
        most: int | None,
    ) -> None:
        self._load, self._drop, self._check, self._most = load, drop, check, most
        self._held: dict[ServedAdapter, None] = {}
        self._uses = 0

    def use(self, adapters: Collection[ServedAdapter]) -> None:
        """Note that a step uses these adapters."""
        self._uses += 1
        for adapter in adapters:
            adapter.used = self._uses

    def load(self, adapter: ServedAdapter, running: Collection[ServedAdapter] = ()) -> None:
        """Read an adapter that is not in memory, and drop others for it that are not ``running``.

        Raises what reading it raises, and ``WeightReadError`` if ranks have read different files,
        or others than it was loaded from first; then it is not in memory, and no other is dropped.
        """
        if adapter.updates:
            raise WeightReadError(
                f"an update of the adapter {shorten(adapter.name)} had failed midway, and what "
                "updates before it wrote is in no file: unload_adapter it, and load it again"
            )
        loaded = self._load(adapter.number, adapter.path, bool(adapter.loaded))
        change = ""
        if len({each.fingerprint for each in loaded}) > 1:
            change = "are not the same on all ranks, or have changed while they were read: load it"
        # The number of ranks may be another one than then.
        if adapter.loaded and {each.files for each in loaded} != {e.files for e in adapter.loaded}:
            change = "have changed since it was loaded: unload_adapter it, and load it"
        if change:
            self._drop(adapter.number)
            raise WeightReadError(
                f"the files of the adapter {shorten(adapter.name)} in {printable(adapter.path)} "
                f"{change} again"
            )
        adapter.loaded, adapter.in_memory = loaded, True
        self.use([adapter])
        self._held[adapter] = None
        self._make_room({*running, adapter})

    def check(self, adapter: ServedAdapter) -> None:
        """Raise, after the first step with an adapter, if a layer has added nothing."""
        if adapter.in_memory and not adapter.is_checked:
            self._check(adapter.number)
            adapter.is_checked = True

    def drop(self, adapter: ServedAdapter) -> None:
        """Free an adapter, if it is in memory."""
        if adapter.in_memory:
            adapter.in_memory = False
            del self._held[adapter]
            self._drop(adapter.number)

    def _make_room(self, running: Collection[ServedAdapter]) -> None:
        """Drop the adapters that were used longest ago, if more are in memory than may be."""
        if self._most is None:
            return
        counted = [each for each in self._held if not each.updates]
        idle = [each for each in counted if each not in running]
        idle.sort(key=lambda each: each.used)
        for each in idle[: max(0, len(counted) - self._most)]:
            self.drop(each)
