"""Methods of ``LLM`` on LoRA adapters: loading them, and taking new weights for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_module.adapters import gathered, open_adapter
from vllm_module.base.messages import shorten
from vllm_module.build.model_source import ModelSource
from vllm_module.errors import ModelNotReadyError
from vllm_module.runtime.arguments import check_type
from vllm_module.runtime.engine import Engine
from vllm_module.runtime.merged_weights import merged_weights
from vllm_module.runtime.ranks.executor import Executor
from vllm_module.runtime.served_adapter import AdapterMemory, LoRARequest, ServedAdapter
from vllm_module.runtime.text.prompts import Prompt
from vllm_module.weights import Weight


class AdapterMethods:
    """The methods of :class:`~vllm_module.LLM` on adapters."""

    engine: Engine
    executor: Executor
    source: ModelSource
    _update_named: Callable[..., None]
    _changing: Callable[..., Any]
    _check_whole: Callable[[], None]
    _adapter_numbers: Iterator[int]

    def load_adapter(self, name: str, path: str | Path) -> ServedAdapter:
        """Load a LoRA adapter from a folder in PEFT's layout, on every rank.

        Requests ask for it by ``lora_request`` of :meth:`generate`, or the key ``adapter`` of a
        prompt. Their rows are computed with it, in one batch with those of other adapters and of
        the model itself. With ``max_cpu_loras``, one that is not used may leave the memory; it is
        read again from ``path`` when a request needs it, and must be the same then.

        Raises:
            ValueError: another adapter has this name.
            WeightLoadError: the adapter does not fit the model, or cannot be computed; it is not
                loaded, and requests continue.
            RuntimeError: the engine sleeps.

        """
        check_type("name", name, "text", str)
        check_type("path", path, "a folder", str, Path)
        if not name:
            raise ValueError("an adapter needs a name that is not empty")
        with self.engine.alone():
            if name in self.engine.adapters:
                raise ValueError(
                    f"an adapter is called {shorten(name)} already: unload_adapter it first, or "
                    "give another name"
                )
            return self._load_new(name, path)

    def unload_adapter(self, name: str) -> None:
        """Free an adapter's memory on every rank.

        Raises ``ValueError`` if there is none of this name, and ``RuntimeError`` while requests use
        it.
        """
        with self.engine.alone():
            self.executor.check()
            adapter = self.engine.adapter(name)
            self._refuse_used(adapter)
            del self.engine.adapters[name]
            self._memory().drop(adapter)

    def update_adapter(
        self, name: str, weights: Mapping[str, Weight] | Iterable[tuple[str, Weight]] | str | Path
    ) -> None:
        """Update A and B of an adapter in place, between two steps, on every rank.

        Only they are sent, once to each rank. Names are PEFT's, as ``get_peft_model_state_dict``
        has them; what is not named stays. Running requests keep the keys and values that are
        computed. Outputs list the versions: ``"0/sql@1"`` after the first update of ``sql``.

        Args:
            name: of a loaded adapter.
            weights: as for :meth:`update_weights`: a mapping, or pairs, such as
                ``receive_weights`` yields; they are gathered while steps go on. Or a folder in
                PEFT's layout, with the settings of the adapter.

        Raises:
            ValueError: there is no adapter of this name.
            WeightLoadError: the weights do not fit; nothing was changed.
            RuntimeError: the engine sleeps.

        If writing them fails midway, no request is computed with the mixture: A and B leave the
        memory, and are read again from the adapter's folder. If updates had changed them before,
        they are in no file, and requests end with an error until the adapter is loaded again.

        """
        check_type(
            "weights", weights, "a folder, or names with tensors", str, Path, Mapping, Iterable
        )
        with self.engine.reading():
            self.engine.adapter(name)  # refused before anything is read
        config = None
        if isinstance(weights, (str, Path)):
            with open_adapter(weights) as (config, opened):
                weights = gathered(opened)
        else:
            weights = gathered(weights)
        with self.engine.alone():
            self._check_awake()
            adapter = self.engine.adapter(name)
            if not adapter.in_memory:
                self._load(adapter)
            self.executor.take_adapter(adapter.number, weights, config)
            try:
                self.executor.update_adapter(adapter.number)
            except BaseException:
                if self.executor.end is None:
                    self._memory().drop(adapter)  # A and B are a mixture
                    self.engine.drop()  # the step after one that is launched would not read them
                raise
            adapter.updates += 1  # requests from now on look for other pages

    def merge_adapter(self, name: str) -> None:
        """Add an adapter to the model's weights, on every rank, and unload it.

        From now on all requests are computed with it; other adapters add to the sums. The stored
        tensors have the bits of PEFT's ``merge_and_unload``, and are written by
        :meth:`update_weights`. Until then, host memory holds those that change.

        Raises:
            ValueError: there is no adapter of this name.
            RuntimeError: requests use it, the engine sleeps, or an update of the model had failed.
            UnsupportedModelError: the model is quantized, or another model would be computed (an
                adapter of an embedding that is tied to the head).
            WeightLoadError: a sum is no number of its dtype; nothing was changed.

        """
        with self._changing():
            self._check_whole()
            adapter = self.engine.adapter(name)
            self._refuse_used(adapter)
            if not adapter.in_memory:
                self._load(adapter)
            weights = merged_weights(self.source, self.executor, adapter)
            self._update_named(f"merging the adapter {shorten(name)}", weights)
            del self.engine.adapters[name]
            self._memory().drop(adapter)

    def list_adapters(self) -> list[ServedAdapter]:
        """Return the adapters that were loaded, in memory or not, in the order of loading."""
        with self.engine.reading():
            return list(self.engine.adapters.values())

    def _refuse_used(self, adapter: ServedAdapter) -> None:
        used = sum(each.adapter is adapter for each in self.engine.requests.values())
        if used:
            raise RuntimeError(
                f"{used} requests use the adapter {shorten(adapter.name)}: wait for them, or abort "
                "them"
            )

    def _check_awake(self) -> None:
        self.executor.check()
        if "weights" in self.executor.sleeping:  # and slots, which are filled at the end
            raise ModelNotReadyError("the engine sleeps: wake_up() first")

    def _memory(self) -> AdapterMemory:
        memory = self.engine.adapter_memory
        assert memory is not None, "the LLM made the engine with it"
        return memory

    def _load(self, adapter: ServedAdapter) -> None:
        """Read an adapter, for which others may leave the memory, but not those that are used."""
        self._check_awake()
        self._memory().load(adapter, self.engine.scheduler.running_adapters())

    def _load_new(self, name: str, path: str | Path) -> ServedAdapter:
        adapter = ServedAdapter(name, next(self._adapter_numbers), str(path))
        self._load(adapter)
        self.engine.adapters[name] = adapter
        return adapter

    def _with_adapters(self, prompts: Sequence[Any], lora_request: Any) -> list[Any]:
        """Return prompts with the names of their adapters, which are loaded if they have a path.

        All of them are loaded, or none. A prompt that names another adapter is refused.
        """
        if isinstance(lora_request, (list, tuple)) and not lora_request:
            return list(prompts)
        one = isinstance(lora_request, (str, LoRARequest))
        if not one and not isinstance(lora_request, Iterable):
            raise ValueError(f"lora_request should be a LoRARequest, got {shorten(lora_request)}")
        asked = [lora_request] * len(prompts) if one else list(lora_request)
        if len(asked) != len(prompts):
            raise ValueError(f"there are {len(asked)} lora_request for {len(prompts)} prompts")
        found = [_name_and_path(each) for each in asked]
        if any(path for _, path in found):
            self._load_all([(name, path) for name, path in found if name is not None and path])
        return [
            prompt if name is None or isinstance(prompt, ValueError) else with_adapter(prompt, name)
            for prompt, (name, _) in zip(prompts, found, strict=True)
        ]

    def _load_all(self, asked: list[tuple[str, str]]) -> None:
        """Load the adapters of these names and folders that are not there, or none of them.

        Other threads, which may ask for the same, wait meanwhile.
        """
        with self.engine.alone():
            folders = {name: each.path for name, each in self.engine.adapters.items()}
            for name, path in asked:
                if Path(folders.setdefault(name, path)) != Path(path):
                    raise ValueError(
                        f"the adapter {shorten(name)} was loaded from {shorten(folders[name])}, "
                        f"and this one is in {shorten(path)}: give it another name"
                    )
            new = [name for name in folders if name not in self.engine.adapters]
            try:
                for name in new:
                    self._load_new(name, folders[name])
            except BaseException:
                loaded = [self.engine.adapters.pop(name, None) for name in new]
                for adapter in loaded:
                    if adapter is not None and self.executor.end is None:
                        self._memory().drop(adapter)
                raise


def _name_and_path(asked: Any) -> tuple[str | None, str]:
    """Return the name that a ``lora_request`` has, and the folder, or nothing."""
    if asked is None or (isinstance(asked, str) and asked):
        return asked, ""
    name, path = getattr(asked, "lora_name", None), getattr(asked, "lora_path", None)
    if not isinstance(name, str) or not name or not isinstance(path, (str, Path, type(None))):
        raise ValueError(f"lora_request should be a LoRARequest, got {shorten(asked)}")
    return name, str(path or "")


def with_adapter(prompt: Prompt, name: str) -> dict[str, Any] | ValueError:
    """Return a prompt that asks for the adapter of this name, or why it is refused."""
    if isinstance(prompt, Mapping):
        own = prompt.get("adapter")
        if own is not None and own != name:
            return ValueError(
                f"the prompt asks for the adapter {shorten(own)}, and lora_request for "
                f"{shorten(name)}: leave one of them out"
            )
        return {**prompt, "adapter": name}
    key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    return {key: prompt, "adapter": name}
