"""The operations of a pickle, looked at before anything is made of it.

A pickle is a program for a stack. A few bytes of it can take as much memory or time as they like: a
number in its memo that makes the memo long, or tuples of tuples of which each holds the one before
several times. Such operations are refused here.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

_MOST = 256  # objects in a tuple and in those that it holds; sizes, strides and paths have few
# What picklers write for numbers, strings, tuples, lists, dicts and objects since protocol 2.
_KNOWN = frozenset({
    "PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT",
    "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINSTRING", "BINSTRING", "SHORT_BINBYTES",
    "BINBYTES", "BINBYTES8", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "EMPTY_TUPLE",
    "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT",
    "SETITEM", "SETITEMS", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET", "GLOBAL",
    "STACK_GLOBAL", "NEWOBJ", "REDUCE", "BUILD", "BINPERSID",
})  # fmt: skip
_PUTS = frozenset({"BINPUT", "LONG_BINPUT", "MEMOIZE"})
_GETS = frozenset({"BINGET", "LONG_BINGET"})
_HOLD = frozenset({"TUPLE1", "TUPLE2", "TUPLE3", "TUPLE", "NEWOBJ", "REDUCE"})


def operations(data: bytes, refuse: Callable[[str], NoReturn]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the argument of each operation of a pickle.

    ``refuse`` is called with an operation that tensors and their descriptions do not need, with a
    memo that is not numbered in order, and with a tuple of more than 256 objects, nested ones
    counted as often as they are held: the time of its hash grows with them. Bytes that are no
    pickle raise errors of several kinds.
    """
    stack: list[int] = []  # how many objects each entry stands for; 0 is a mark
    memo: dict[int, int] = {}
    argument: Any
    for operation, argument, _ in pickletools.genops(data):
        name = operation.name
        if name not in _KNOWN:
            refuse(f"its pickle has {name}, which torch does not write")
        yield name, argument
        if name in _PUTS:
            index: int = len(memo) if name == "MEMOIZE" else argument
            if index > len(memo) + 1:
                refuse(f"its pickle puts number {index} into a memo of {len(memo)}")
            memo[index] = stack[-1]
        elif name in _GETS:
            stack.append(memo[argument])
        elif name == "MARK":
            stack.append(0)
        else:
            before = operation.stack_before
            held = 0
            if pickletools.markobject in before:
                while count := stack.pop():
                    held += count
                before = before[: before.index(pickletools.markobject)]
            for _each in before:
                held += stack.pop()
            if name in _HOLD and held >= _MOST:
                refuse(f"its pickle has a tuple of more than {_MOST} objects, nested ones included")
            if operation.stack_after:
                stack.append(1 + held if name in _HOLD else 1)
