"""What happens to the weights of a running LLM: updates, sleep, and functions of a caller."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from torch import nn

from vllm_module.base.messages import describe_error, shorten
from vllm_module.errors import ModelNotReadyError
from vllm_module.runtime.arguments import known_arguments
from vllm_module.runtime.engine import Engine
from vllm_module.runtime.ranks.executor import Executor
from vllm_module.weights import Weight

_T = TypeVar("_T")


class WeightMethods:
    """The methods of :class:`~vllm_module.LLM` that change weights between two steps."""

    engine: Engine
    executor: Executor

    def update_weights(self, weights: Mapping[str, Weight] | Iterable[tuple[str, Weight]]) -> None:
        """Update weights of the running model in place, between two steps.

        Running requests keep the keys and values that are computed already. An update that is
        refused before anything was written changes nothing: requests go on. If it fails later,
        they end with the reason as their ``error``, and new requests are refused until an update
        brings a whole checkpoint, or :meth:`reload_weights` succeeds.

        An engine that sleeps at level 2 takes a whole checkpoint, and is awake then.

        Raises:
            WeightLoadError: the model refuses the weights.
            RuntimeError: the engine sleeps, and has its weights in host memory.

        """
        with self.engine.alone():
            self.executor.check()
            if self.executor.asleep == 1:
                raise RuntimeError("the engine sleeps: wake_up() first")
            self._change("an update of the weights", self.executor.update_weights, weights)

    def sleep(self, level: int = 1, **options: Any) -> None:
        """Free the memory of the weights and the KV cache, until :meth:`wake_up`.

        Args:
            level: 1 copies the weights to host memory, so that the engine wakes up with them; on a
                CPU they stay where they are. 2 drops them.
            options: ``mode`` of vLLM, with any value: nothing goes on when an engine sleeps.

        Raises:
            RuntimeError: there are requests.
            MemoryError: host memory has no room for the weights.
            ModelNotReadyError: an update of the weights broke midway, and the level is 1.

        """
        known_arguments("LLM.sleep", options, (), {"mode": (...,)})
        if isinstance(level, bool) or level not in (1, 2):
            raise ValueError(f"level should be 1 or 2, got {shorten(level)}")
        with self.engine.alone():
            self.executor.check()
            if self.engine.requests:
                raise RuntimeError(f"{len(self.engine.requests)} requests are going on")
            if self.executor.asleep:
                raise RuntimeError("the engine sleeps already: wake_up() first")
            self.executor.sleep(level)
            self.engine.fail("the engine sleeps: wake_up() first")

    def wake_up(self, tags: None = None) -> None:
        """Give the engine the weights that it slept with, and accept requests.

        Those of level 2 are loaded from the model's folder again, if no update had changed them and
        the folder has not changed since. Does nothing if the engine is awake. All of it wakes up:
        ``tags`` of vLLM are not supported.

        Raises ``ModelNotReadyError`` if the weights that slept are nowhere any more, or if an
        update of the weights broke midway.
        """
        known_arguments("LLM.wake_up", {"tags": tags}, (), {"tags": ()})
        with self.engine.alone():
            self.executor.check()
            if self.executor.asleep:
                self._change("waking up", self.executor.wake_up)
            elif self.executor.refusal is not None:
                raise ModelNotReadyError(
                    "waking up repairs no update: update_weights with a whole checkpoint, or "
                    f"reload_weights(): {self.executor.refusal}"
                )

    def reload_weights(self) -> None:
        """Load the weights of the model's folder again, as they are there now.

        Updates since the first load are lost. A sleeping engine wakes up, and one whose update
        broke is repaired. Raises what loading raises.
        """
        with self.engine.alone():
            self.executor.check()
            self._change("reloading the weights", self.executor.reload_weights)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Have later prompts reuse no page that is computed by now; return ``True``.

        Requests that are running go on, whatever the arguments of vLLM are.
        """
        del reset_running_requests, reset_connector
        with self.engine.alone():
            self.executor.check()
            self.engine.scheduler.reset_prefix_cache()
        return True

    def apply_model(self, func: Callable[[nn.Module], _T]) -> list[_T]:
        """Call a function with the model on every rank, and return all results, by rank.

        Args:
            func: takes the model. Several ranks need a function of a module, which pickle can send,
                and results that it can send back. To change weights, call :meth:`update_weights`:
                what a function changes, no check sees.

        Raises what the function raises.

        """
        if not callable(func):
            raise ValueError(f"func should be a function of the model, got {shorten(func)}")
        with self.engine.alone():
            return self.executor.apply_model(func)

    def _change(self, what: str, change: Callable[..., None], *arguments: Any) -> None:
        try:
            change(*arguments)
        except BaseException as error:
            if not self.executor.can_run:
                self.engine.fail(f"{what} failed: {describe_error(error)}")
            raise
        self.engine.resume()
