"""Triton, imported when a kernel is first launched.

No kernel runs on a CPU, and there Triton's import, and its look at the source of each kernel, are a
tenth of the time to a first token. Kernels are written as always, with ``@triton.jit`` and ``tl``.
What stands for them until then is replaced in the modules of all kernels that a launch may reach.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable
from typing import Any

_lock = threading.RLock()


class _StandIn:
    """Stands for an object of Triton's until a kernel is launched."""

    def real(self) -> Any:
        """Return the object."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what looks at objects in general asks for such
            raise AttributeError(name)
        return getattr(self.real(), name)


class _Module(_StandIn):
    def __init__(self, name: str) -> None:
        self._name = name

    def real(self) -> Any:
        return importlib.import_module(self._name)


class _Triton(_Module):
    def jit(self, function: Any = None, **options: Any) -> Any:
        """Return what stands for a kernel, or a decorator with these options."""
        if function is None:
            return functools.partial(self.jit, **options)
        kernel: Any = _Kernel(function, options)
        return functools.update_wrapper(kernel, function)


class _Kernel(_StandIn):
    """Stands for a kernel.

    Attributes:
        names: those of its module, by which Triton finds what the kernel calls.

    """

    def __init__(self, function: Callable[..., None], options: dict[str, Any]) -> None:
        self._function, self._options = function, options
        self.names = function.__globals__
        self._jitted: Any = None
        self._ready = False

    def __getitem__(self, grid: Any) -> Any:
        return self.real()[grid]

    def real(self) -> Any:
        if not self._ready:
            with _lock:
                # Another thread may launch what is replaced, so what kernels call comes first.
                for names in reversed(_reached(self.names, {}).values()):
                    others = [each for each in [*names.items()] if isinstance(each[1], _StandIn)]
                    names |= {name: _of_triton(each) for name, each in others}
                self.jitted()  # once, also of a kernel that no module names
                self._ready = True
        return self.jitted()

    def jitted(self) -> Any:
        """Return Triton's kernel, which cannot be launched yet."""
        if self._jitted is None:
            self._jitted = triton.real().jit(self._function, **self._options)
        return self._jitted


def _reached(names: dict[str, Any], found: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Add the names of a module, and of those whose kernels it names, to what is found, by id."""
    found[id(names)] = names
    for each in [*names.values()]:  # to which another thread may add
        if isinstance(each, _Kernel) and id(each.names) not in found:
            _reached(each.names, found)
    return found


def _of_triton(value: _StandIn) -> Any:
    return value.jitted() if isinstance(value, _Kernel) else value.real()


def real(value: Any) -> Any:
    """Return what a value stands for, or the value."""
    return value.real() if isinstance(value, _StandIn) else value


triton = _Triton("triton")
tl = _Module("triton.language")
