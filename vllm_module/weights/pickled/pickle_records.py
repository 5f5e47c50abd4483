"""Parsing pickles without running them: calls become records.

A pickle is a program for a stack. It names classes and functions and calls them with arguments.
Here a name stays a name, and a call becomes a record of the name and the arguments, which the
format's reader inspects. So nothing that a pickle names is imported or called.
"""

from __future__ import annotations

import pickletools
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, ClassVar

from vllm_module.base.messages import describe_error, shorten
from vllm_module.weights.header import DAMAGED

_MOST_KEY = 1 << 31  # larger integers can be chosen to have equal hashes
_ATOMS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
# Operations that push their argument.
_VALUES = frozenset({
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE",
    "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES",
})  # fmt: skip
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS = frozenset({"BINPUT", "LONG_BINPUT", "MEMOIZE"})
_GETS = frozenset({"BINGET", "LONG_BINGET"})
# Operations that picklers of protocol 2 write for names, numbers, strings, tuples, lists, dicts.
PLAIN = frozenset({
    "PROTO", "STOP", "MARK", "EMPTY_TUPLE", "TUPLE", *_TUPLES, "EMPTY_LIST", "APPEND", "APPENDS",
    "EMPTY_DICT", "SETITEM", "SETITEMS", "BINPUT", "LONG_BINPUT", *_GETS, "GLOBAL", "REDUCE",
    "BUILD", *_ATOMS, "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE",
})  # fmt: skip
# Operations that picklers of protocol 4 add, also for objects.
NEWER = frozenset({"FRAME", "MEMOIZE", "STACK_GLOBAL", "NEWOBJ"}) | _VALUES


class PickleError(Exception):
    """The pickle has something that is refused; the message continues "<file> "."""


class BrokenPickleError(PickleError):
    """The bytes are not a pickle."""


@dataclass(frozen=True, eq=False)
class Name:
    """A class, function or constant that a pickle names: ``torch.float32``."""

    path: str


@dataclass(eq=False, repr=False)
class Record:
    """A call of ``name`` in a pickle, with its arguments and the state set on its result."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None

    # The default would print nested arguments, which may hold each other many times.
    def __repr__(self) -> str:
        return f"<{self.name}>"


class RecordReader:
    """A reader of pickles; subclasses choose the operations and names that a format may have.

    Attributes:
        operations: accepted operations, by their names in ``pickletools``.
        most_operations: limit on their number. One byte of operation may take a hundred in memory.

    """

    operations: ClassVar[frozenset[str]] = PLAIN
    most_operations: ClassVar[int] = 6_000_000

    def knows(self, path: str) -> bool:
        """Return whether a pickle may have this name; other names are refused."""
        return False

    def make(self, path: str, arguments: tuple[Any, ...]) -> Any:
        """Return the object that stands for a call of an accepted name."""
        return Record(path, arguments)

    def build(self, made: Any, state: Any) -> None:
        """Set ``state`` on an object that :meth:`make` returned."""
        if not isinstance(made, Record):
            raise PickleError(f"its pickle gives a state to {type(made).__name__}")
        made.state = state

    def find(self, identity: Any) -> Any:
        """Return the object of the persistent id ``identity``, stored outside the pickle."""
        raise PickleError("its pickle asks for a persistent object")

    def read(self, data: bytes) -> Any:
        """Return the object in the pickle ``data``.

        Raises ``PickleError``, and ``BrokenPickleError`` for bytes that are no pickle.
        """
        try:
            return self._read(data)
        except (PickleError, MemoryError):
            raise
        except Exception as error:  # a damaged pickle raises errors of many kinds
            reason = describe_error(error)
            raise BrokenPickleError(f"its pickle is broken ({reason}). {DAMAGED}") from None

    def _read(self, data: bytes) -> Any:
        stack: list[Any] = []
        below: list[list[Any]] = []  # stacks below each mark
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
                    continue  # attributes of a state dict, such as module versions, are ignored
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
        if arguments:  # each call would copy its arguments
            raise PickleError("its pickle makes a collections.OrderedDict of something else")
        return OrderedDict()


def _set_items(target: Any, items: list[Any]) -> None:
    """Store alternating keys and values in a dict."""
    if not isinstance(target, dict) or len(items) % 2:
        raise PickleError(f"its pickle sets items of {type(target).__name__}")
    for key, value in zip(items[::2], items[1::2], strict=True):
        # The hash of nested tuples may take forever.
        if not isinstance(key, str | Record) and not (type(key) is int and abs(key) < _MOST_KEY):
            raise PickleError(f"its pickle has a dict with a key of type {type(key).__name__}")
        target[key] = value
