"""Methods of ``LLM`` that call functions of the caller on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from vllm_module.base.messages import shorten
from vllm_module.runtime.arguments import check_type
from vllm_module.runtime.engine import Engine
from vllm_module.runtime.ranks.executor import Executor

_T = TypeVar("_T")


class RankMethods:
    """The methods of :class:`~vllm_module.LLM` that call a function on all ranks at once."""

    engine: Engine
    executor: Executor

    def apply_model(self, func: Callable[[nn.Module], _T]) -> list[_T]:
        """Call a function with the model on every rank, and return all results, by rank.

        Args:
            func: function of the model. With several ranks it must be a module's function, which
                pickle can send, and its results must be picklable. To change weights, call
                :meth:`~vllm_module.LLM.update_weights`: changes made by a function are not checked.

        Raises the exceptions of the function.

        """
        if not callable(func):
            raise ValueError(f"func should be a function of the model, got {shorten(func)}")
        with self.engine.alone():
            return self.executor.apply_model(func)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every rank's worker at once, and return all results, by rank.

        Args:
            method: its name, or a function that gets the worker first. A worker has ``model``,
                ``device``, ``rank`` and the methods of ``worker_extension_cls``.
            timeout: seconds to wait for other ranks once rank 0 has its result; by default those of
                ``load_config``. A rank that has not answered then is named, and the engine ends.
            args, kwargs: arguments of the method. With several ranks, these, the function and the
                results are pickled.

        Weights that a method changes are not checked: call
        :meth:`~vllm_module.LLM.update_weights` for that.

        Raises the exceptions of the method; ``RankError`` names another rank that raised, ended or
        did not answer.

        """
        if not isinstance(method, str) and not callable(method):
            raise ValueError(
                f"method should be the name of a method or a function, got {shorten(method)}"
            )
        check_type("timeout", timeout, "seconds above 0 or None", int, float, type(None))
        if timeout is not None and not 0 < timeout < float("inf"):
            raise ValueError(f"timeout should be seconds above 0 or None, got {timeout}")
        with self.engine.alone():
            return self.executor.collective_rpc(method, timeout, args, kwargs)
