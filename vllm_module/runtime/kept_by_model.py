"""What the modules of a model keep in Python, to find out whether a step has changed it."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

_DEPTH = 4  # of containers and objects in each other, in one module
_MOST = 1 << 10  # entries of a container, or numbers of an array, that are compared
_CODE = type, FunctionType, BuiltinFunctionType, MethodType, ModuleType
_CONTAINERS = list, tuple, set, frozenset, deque, Mapping, np.ndarray
_NUMBERS = bool, int, float, complex, str, bytes
_OF_TORCH = vars(nn.Module()).keys() - {"_parameters", "_buffers", "_modules"}


class KeptByModel:
    """What a model's modules keep now: their attributes, and what is in these.

    Attributes are the same if they are the same objects or equal numbers. A tensor is another one
    if its memory is elsewhere; the numbers in it are not compared. What Python code keeps outside
    of the modules is not found.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held: list[tuple[Any, tuple[Any, ...]]] = []
        self._seen: set[int] = set()
        self._add(model, _DEPTH)

    def has_changed(self) -> bool:
        """Return whether the modules keep something else now."""
        return any(not _same(before, _content(holder)) for holder, before in self._held)

    def _add(self, value: Any, depth: int) -> None:
        if isinstance(value, nn.Module):
            value, depth = vars(value), _DEPTH
        elif not isinstance(value, (torch.Tensor, *_CONTAINERS)):
            value = None if isinstance(value, _CODE) else getattr(value, "__dict__", None)
        if value is None or not depth or id(value) in self._seen:
            return
        content = _content(value)
        self._seen.add(id(value))
        if not isinstance(value, (tuple, frozenset)):  # these cannot change
            self._held.append((value, content))
        if isinstance(value, Mapping):
            for key, each in value.items():
                if len(value) <= _MOST and key not in _OF_TORCH:
                    self._add(each, depth - 1)
        elif not isinstance(value, (torch.Tensor, np.ndarray)):
            for each in content:
                self._add(each, depth - 1)


def _content(holder: Any) -> tuple[Any, ...]:
    if isinstance(holder, dict):  # nearly all are
        return (*holder, *holder.values()) if len(holder) <= _MOST else (len(holder),)
    if isinstance(holder, torch.Tensor):
        return (holder.data_ptr(),)
    if isinstance(holder, np.ndarray):
        return (holder.tobytes() if holder.size <= _MOST else 0,)
    if len(holder) > _MOST:
        return (len(holder),)
    return (*holder, *holder.values()) if isinstance(holder, Mapping) else tuple(holder)


def _same(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    if len(before) != len(now):
        return False
    if all(map(operator.is_, before, now)):
        return True
    return all(
        a is b or (type(a) is type(b) and isinstance(a, _NUMBERS) and a == b)
        for a, b in zip(before, now, strict=True)
    )
