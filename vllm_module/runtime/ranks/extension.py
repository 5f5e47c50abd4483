"""A caller's own functions, and methods of its own class, on the ranks of an engine."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from vllm_module.base.messages import describe_error, shorten
from vllm_module.base.outside import blamed
from vllm_module.runtime.ranks.worker import Worker


class OwnCalls:
    """The methods of an executor that call what a caller chooses."""

    size: int
    worker: Worker
    check: Callable[[], None]
    _do: Callable[..., Any]
    _everywhere: Callable[..., list[Any]]

    def apply_model(self, func: Callable[[torch.nn.Module], Any]) -> list[Any]:
        """Call a function with every rank's model and return all results, by rank.

        Raises what :meth:`collective_rpc` raises.
        """
        return self.collective_rpc(_call_with_model, args=(func,))

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every rank's worker, or a function of it; return all results, by rank.

        Raises ``ValueError`` for a method that workers lack, and for what cannot be pickled.
        """
        self.check()
        called = method, tuple(args), dict(kwargs or {})
        if isinstance(method, str) and not callable(getattr(self.worker, method, None)):
            raise ValueError(
                f"workers have no method {shorten(method)}: give a function of the worker, or a "
                "worker_extension_cls that has it"
            )
        if self.size == 1:
            return [self._do("call", *called)]
        try:
            sent = pickle.dumps(called)
        except Exception as error:
            raise ValueError(
                "what other ranks call is sent by pickle: give a function that a module defines, "
                f"which they can import, and such arguments: {describe_error(error)}"
            ) from None
        return self._everywhere("call_pickled", sent, timeout=timeout)


def worker_class(base: type[Worker], extension: type | str | None) -> type[Worker]:
    """Return a class of workers: ``base``, with the methods of ``extension``.

    Args:
        extension: a class, or its qualified name: ``"package.module.Class"``. Its ``__init__`` is
            not called. ``None`` or ``""`` for none.

    Raises ``ValueError`` for a name that leads to no class, or a class with a name that workers
    have themselves.

    """
    if extension is None or extension == "":
        return base
    cls = _class_at(extension) if isinstance(extension, str) else extension
    own = {name for each in cls.__mro__[:-1] for name in vars(each)}
    own = {name for name in own if not (name.startswith("__") and name.endswith("__"))}

    def refuse(taken: set[str]) -> None:
        if taken:
            raise ValueError(
                f"worker_extension_cls {cls.__module__}.{cls.__qualname__} has "
                f"{', '.join(sorted(taken))}, which workers have themselves: choose other names"
            )

    refuse({name for name in own if hasattr(base, name)})

    def init(self: Worker, *arguments: Any) -> None:
        base.__init__(self, *arguments)
        refuse(own & vars(self).keys())

    return type("Worker", (base, cls), {"__init__": init})


def _class_at(name: str) -> type:
    """Import the class with a qualified name."""
    module, _, attribute = name.rpartition(".")
    whose = (
        f"worker_extension_cls {shorten(name)} leads to no class, expected 'package.module.Class'"
    )
    with blamed(whose, ValueError):
        found = getattr(importlib.import_module(module), attribute)
    if not isinstance(found, type):
        raise ValueError(f"worker_extension_cls {shorten(name)} should be a class, got {found!r}")
    return found


def _call_with_model(worker: Worker, func: Callable[[torch.nn.Module], Any]) -> Any:
    return func(worker.model)
