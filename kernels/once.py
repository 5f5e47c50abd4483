"""Values that are made once in a process, whatever threads ask for them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Once(Generic[P, T]):
    """``functools.cache`` for values that others have the address of, or compare by identity.

    Of two threads that ask at once, ``functools.cache`` calls the function for both and drops the
    value of the first. Here the second one waits, and both get the same value.

    Arguments are given by position.
    """

    def __init__(self, make: Callable[P, T]) -> None:
        functools.update_wrapper(self, make)
        self._make: Callable[..., T] = make
        self._made: dict[tuple[Any, ...], T] = {}
        self._lock = threading.Lock()

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> T:
        """Return the value for these arguments."""
        assert not named, "arguments are given by position"
        if arguments not in self._made:
            with self._lock:
                if arguments not in self._made:
                    self._made[arguments] = self._make(*arguments)
        return self._made[arguments]

    def cache_clear(self) -> None:
        """Forget all values."""
        self._made.clear()
