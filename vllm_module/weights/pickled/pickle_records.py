"""Pickles, read without running them: what they ask for is kept as records.

A pickle is a program for a stack. It names classes and functions and says what to call them with.
Here a name stays a name, and a call becomes a record of its name and arguments, which the format
that reads the pickle looks at. So nothing that a pickle names is imported or called.
"""

from __future__ import annotations

import pickletools
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, ClassVar

from vllm_module.base.messages import describe_error, shorten
from vllm_module.weights.header import DAMAGED

_MOST_KEY = 1 << 31  # larger integers could be chosen to have the same hash
_ATOMS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
# Operations that push their argument.
_VALUES = frozenset({
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE",
    "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES",
})  # fmt: skip
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS = frozenset({"BINPUT", "LONG_BINPUT", "MEMOIZE"})
_GETS = frozenset({"BINGET", "LONG_BINGET"})
# What picklers of protocol 2 write for names, numbers, strings, tuples, lists and dicts.
PLAIN = frozenset({
    "PROTO", "STOP", "MARK", "EMPTY_TUPLE", "TUPLE", *_TUPLES, "EMPTY_LIST", "APPEND", "APPENDS",
    "EMPTY_DICT", "SETITEM", "SETITEMS", "BINPUT", "LONG_BINPUT", *_GETS, "GLOBAL", "REDUCE",
    "BUILD", *_ATOMS, "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE",
})  # fmt: skip
# What those of protocol 4 write in addition, and for objects.
NEWER = frozenset({"FRAME", "MEMOIZE", "STACK_GLOBAL", "NEWOBJ"}) | _VALUES


class PickleError(Exception):
    """What a pickle has that is refused, as the rest of a sentence that begins with its file."""


class BrokenPickleError(PickleError):
    """Bytes that are no pickle."""


@dataclass(frozen=True, eq=False)
class Name:
    """A class, function or constant that a pickle names: ``torch.float32``."""

    path: str


@dataclass(eq=False, repr=False)
class Record:
    """What a pickle makes by calling ``name``, and the state that it gives to that."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None

    def __repr__(self) -> str:  # the arguments may hold each other, many times
        return f"<{self.name}>"


class RecordReader:
    """Reads a pickle; a format says in a subclass which operations and names it may have.

    Attributes:
        operations: their names in ``pickletools``.
        most_operations: that are accepted. One of a byte may take a hundred in memory.

    """

    operations: ClassVar[frozenset[str]] = PLAIN
    most_operations: ClassVar[int] = 6_000_000

    def knows(self, path: str) -> bool:
        """Tell whether a pickle may have this name; the others are refused."""
        return False

    def make(self, path: str, arguments: tuple[Any, ...]) -> Any:
        """Return what stands for a call of a name that is known."""
        return Record(path, arguments)

    def build(self, made: Any, state: Any) -> None:
        """Give ``state`` to what :meth:`make` returned."""
        if not isinstance(made, Record):
            raise PickleError(f"its pickle gives a state to {type(made).__name__}")
        made.state = state

    def find(self, identity: Any) -> Any:
        """Return what is stored outside of the pickle under ``identity``."""
        raise PickleError("its pickle asks for a persistent object")

    def read(self, data: bytes) -> Any:
        """Return the object in the pickle ``data``.

        Raises ``PickleError``, and ``BrokenPickleError`` for bytes that are no pickle.
        """
        try:
            return self._read(data)
        except (PickleError, MemoryError):
            raise
        except Exception as error:  # bytes that are no pickle raise errors of many kinds
            reason = describe_error(error)
            raise BrokenPickleError(f"its pickle is broken ({reason}). {DAMAGED}") from None

    def _read(self, data: bytes) -> Any:
        stack: list[Any] = []
        below: list[list[Any]] = []  # the stacks under each mark
        memo: dict[int, Any] = {}
        argument: Any

        def marked() -> list[Any]:
            nonlocal stack
            items, stack = stack, below.pop()
            return items

        for count, (operation, argument, position) in enumerate(pickletools.genops(data)):
            if count == self.most_operations:
                raise PickleError(f"its pickle has more than the {count} operations that are read")
            name = operation.name
            if name not in self.operations:
                raise PickleError(f"its pickle has {name}, which torch does not write")
            if name in _VALUES:
                stack.append(argument)
            elif name in _PUTS:
                index: int = len(memo) if name == "MEMOIZE" else argument
                if index > len(memo) + 1:
                    raise PickleError(f"its pickle puts number {index} into a memo of {len(memo)}")
                memo[index] = stack[-1]
            elif name in _GETS:
                stack.append(memo[argument])
            elif name in _TUPLES:
                count = _TUPLES[name]
                if len(stack) < count:
                    raise IndexError("pop from an empty stack")
                stack[-count:] = [tuple(stack[-count:])]
            elif name in _ATOMS:
                stack.append(_ATOMS[name])
            elif name == "MARK":
                below.append(stack)
                stack = []
            elif name == "TUPLE":
                items = marked()
                stack.append(tuple(items))
            elif name == "EMPTY_TUPLE":
                stack.append(())
            elif name == "EMPTY_LIST":
                stack.append([])
            elif name == "EMPTY_DICT":
                stack.append({})
            elif name in ("APPEND", "APPENDS"):
                items = [stack.pop()] if name == "APPEND" else marked()
                if type(stack[-1]) is not list:
                    raise PickleError(f"its pickle appends to {type(stack[-1]).__name__}")
                stack[-1].extend(items)
            elif name in ("SETITEM", "SETITEMS"):
                items = [stack.pop(-2), stack.pop()] if name == "SETITEM" else marked()
                _set_items(stack[-1], items)
            elif name == "GLOBAL":
                assert position is not None
                module_end = data.index(b"\n", position)
                name_end = data.index(b"\n", module_end + 1)
                module = data[position + 1 : module_end].decode()
                stack.append(self._name(module, data[module_end + 1 : name_end].decode()))
            elif name == "STACK_GLOBAL":
                stack[-2:] = [self._name(*stack[-2:])]
            elif name in ("REDUCE", "NEWOBJ"):
                arguments = stack.pop()
                stack.append(self._called(stack.pop(), arguments))
            elif name == "BUILD":
                state = stack.pop()
                if type(stack[-1]) is OrderedDict and isinstance(state, dict):
                    continue  # attributes of a state dict, such as the versions of its modules
                self.build(stack[-1], state)
            elif name == "BINPERSID":
                stack.append(self.find(stack.pop()))
            elif name == "SHORT_BINSTRING":
                if not argument.isascii():
                    raise PickleError("its pickle has bytes for a string, as Python 2 wrote them")
                stack.append(argument)
            else:
                assert name in ("PROTO", "FRAME", "STOP"), name
        return stack.pop()

    def _name(self, module: Any, name: Any) -> Name:
        if not isinstance(module, str) or not isinstance(name, str):
            raise PickleError("its pickle asks for something that has no name")
        path = f"{module}.{name}"
        if path != "collections.OrderedDict" and not self.knows(path):
            raise PickleError(
                f"its pickle asks for {shorten(path)}, which is not read, and nothing of it was run"
            )
        return Name(path)

    def _called(self, called: Any, arguments: Any) -> Any:
        if not isinstance(called, Name) or not isinstance(arguments, tuple):
            raise PickleError("its pickle calls something that has no name")
        if called.path != "collections.OrderedDict":
            return self.make(called.path, arguments)
        if arguments:  # each call would copy what it is given
            raise PickleError("its pickle makes a collections.OrderedDict of something else")
        return OrderedDict()


def _set_items(target: Any, items: list[Any]) -> None:
    """Put keys and values, one after the other, into a dict."""
    if not isinstance(target, dict) or len(items) % 2:
        raise PickleError(f"its pickle sets items of {type(target).__name__}")
    for key, value in zip(items[::2], items[1::2], strict=True):
        # The hash of nested tuples may take forever.
        if not isinstance(key, str | Record) and not (type(key) is int and abs(key) < _MOST_KEY):
            raise PickleError(f"its pickle has a dict with a key of type {type(key).__name__}")
        target[key] = value
