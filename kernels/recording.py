"""Recording what a computation does on a CPU, to do it again without the Python code between.

It is for a CPU what a CUDA graph is for a GPU: a step of one token spends more time in Python,
between small operations, than in these.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_LIBRARIES = "aten", "mkldnn"  # whose schemas say what is read and written
_MASKS = torch.bool, torch.uint8
_OF_DTYPES = {"result_type", "can_cast"}
_KERNELS = __name__.rpartition(".")[0] + "."
_READS = {"__array__", "__dlpack__", "item", "numpy", "storage", "tolist", "untyped_storage"}
_REFUSED = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape

# The recording that runs, for functions that torch's dispatcher does not see.
recording_in_use: ContextVar[Recording | None] = ContextVar("recording", default=None)


def as_one(work: Callable[[], Any]) -> Any:
    """Return what work returns: a tensor, or several.

    If it is recorded, its Python code runs again each time: it may read numbers on the host and
    decide by them. It reads and writes nothing but memory of tensors that stay where they are.
    """
    recording = recording_in_use.get()
    return work() if recording is None else recording.one(work)


class NotRecordableError(Exception):
    """A computation cannot be done again by its operations alone."""


class Recording:
    """The operations of a computation on a CPU, in order, and the tensors that they use.

    Operations of torch are seen by its dispatcher. Views are made once, and so is memory that is
    not written yet. All others are done again on the same memory. Compiled functions of ours tell
    of themselves by :meth:`add`. What :meth:`again` computes follows from the numbers in the
    tensors, and from nothing that Python code decides: where this gets numbers from a tensor,
    recording ends with an error.

    Args:
        given: tensors that exist before. Others that are read and were made by no operation are in
            ``constants``.

    Attributes:
        constants: the memory of these, by address. Record twice: if memory is a constant in the
            second recording alone, the computation has made it without an operation of torch, or
            keeps it for the next time.
        nbytes: bytes of the memory that the operations have made, which this object keeps.

    """

    def __init__(self, given: Iterable[torch.Tensor]) -> None:
        self.constants: dict[int, torch.UntypedStorage] = {}
        self.nbytes = 0
        self._calls: list[Callable[[], object]] = []
        self._held: list[object] = []  # what the calls have only addresses of
        self._made = {_address(each) for each in given}
        self._paused = False

    def add(self, call: Callable[[], object], *held: object) -> None:
        """Add a call that was made just now, and objects that it needs."""
        self._calls.append(call)
        self._held += held

    def one(self, work: Callable[[], Any]) -> Any:
        """Do work and return its result; all of it is one operation of this recording."""
        token, self._paused = recording_in_use.set(None), True
        try:
            result = work()
            self._keep(_tensors(result), set())
            self._calls.append(_Again(work, result))
        finally:
            self._paused = False
            recording_in_use.reset(token)
        return result

    @torch.inference_mode()
    def again(self) -> None:
        """Do everything again."""
        for call in self._calls:
            call()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record what runs inside, in this thread.

        Raises ``NotRecordableError`` where it cannot be done again by its operations alone.
        """
        token = recording_in_use.set(self)
        try:
            with _Reads(lambda: self._paused), _Operations(self._note):
                yield
        finally:
            recording_in_use.reset(token)

    def _keep(self, results: list[torch.Tensor], before: set[int]) -> None:
        """Keep the memory of results, but for what was there before."""
        new = {_address(each): each.untyped_storage().nbytes() for each in results}
        self.nbytes += sum(new[each] for each in new.keys() - before - self._made)
        self._made |= new.keys()
        self._held += results

    def _note(self, operation: Any, args: Any, kwargs: Any, result: Any) -> None:
        if self._paused:
            return
        name = operation.name()
        used, results = _tensors((args, kwargs)), _tensors(result)
        # Of indices, masks alone give another number of results for other numbers.
        refused = any(tag in operation.tags for tag in _REFUSED) and (
            name != "aten::index.Tensor" or any(each.dtype in _MASKS for each in _tensors(args[1]))
        )
        if name.split("::")[0] not in _LIBRARIES or refused:
            raise NotRecordableError(f"{name} cannot be done again")
        if not all(each.is_cpu for each in (*used, *results)):
            raise NotRecordableError(f"{name} is not on the CPU")
        for each in used:
            if _address(each) not in self._made:
                self.constants[_address(each)] = each.untyped_storage()
        before, new = {_address(each) for each in used}, {_address(each) for each in results}
        self._keep(results, before)
        self._held += used
        call, short = partial(operation, *args, **kwargs), name.split("::")[1].split(".")[0]
        if operation._schema.is_mutable:
            self._calls.append(call)
        elif short in _EMPTY or short in _OF_DTYPES or (new and new <= before):
            return  # memory to be written, nothing of any number, or a view
        elif isinstance(result, torch.Tensor) and not result.numel():
            return
        elif not new or torch.Tag.nondeterministic_seeded in operation.tags:
            raise NotRecordableError(f"{name} cannot be done again")
        elif any(each.untyped_storage().nbytes() < each.nbytes for each in results):
            raise NotRecordableError(f"{name} returns elements that share memory")
        else:
            out = _with_out(operation) if isinstance(result, torch.Tensor) else None
            into = None if out is None else partial(out, *args, **kwargs, out=result)
            self._calls.append(into or _Again(call, result))


class _DispatchMode(TorchDispatchMode):
    """A mode of torch's dispatcher that does not import torch's compiler.

    Torch would do so to keep it from compiling :meth:`__torch_dispatch__`, in 0.7 s, and call the
    method through it.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Effects(_DispatchMode):
    """Finds what a computation on a CPU does besides its results: done again, it would differ.

    Args:
        expected: tensors that it may write, though it has not made them.

    Attributes:
        found: the name of an operation that wrote to other memory that was there before, drew
            random numbers, or is another library's, which may do anything; ``None`` if there was
            none.

    """

    def __init__(self, expected: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.found: str | None = None
        self._made = {_address(each) for each in expected}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = dict(zip((each.name for each in func._schema.arguments), args, strict=False))
        given |= kwargs or {}
        written = [
            given.get(each.name)
            for each in func._schema.arguments
            if each.alias_info is not None and each.alias_info.is_write
            if torch.Tag.inplace_view not in func.tags  # writes no numbers
        ]
        used = {_address(each) for each in _tensors((args, kwargs))}
        addresses = {_address(each) for each in _tensors(written)}
        new = {_address(each) for each in _tensors(result)} - used
        # Without new memory and without writing, such as dropout in inference, nothing was drawn.
        random = torch.Tag.nondeterministic_seeded in func.tags and (addresses or new)
        others = func.name().split("::")[0] not in _LIBRARIES
        if others or random or not addresses <= self._made:
            self.found = func.name()
        self._made |= new
        return result


class _Again:
    """An operation whose results are written where they were."""

    def __init__(self, operation: Callable[[], Any], result: Any) -> None:
        self._operation, self._results = operation, _tensors(result)

    def __call__(self) -> None:
        for result, new in zip(self._results, _tensors(self._operation()), strict=True):
            result.copy_(new)


@cache
def _with_out(operation: Any) -> Any:
    """Return the form of an operation that writes its only result into ``out``, if there is one."""

    def described(arguments: Any) -> list[tuple[str, str]]:
        return [(each.name, str(each.type)) for each in arguments]

    own = described(operation._schema.arguments)
    for name in operation.overloadpacket.overloads():
        other = getattr(operation.overloadpacket, name)
        *given, last = other._schema.arguments
        if last.is_out and last.name == "out" and described(given) == own:
            return other
    return None


class _Operations(_DispatchMode):
    """Tells of each operation that torch's dispatcher sees."""

    def __init__(self, tell: Callable[..., None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._tell(func, args, kwargs or {}, result)
        return result


class _Reads(TorchFunctionMode):
    """Refuses what gives numbers to Python code without an operation."""

    def __init__(self, paused: Callable[[], bool]) -> None:
        super().__init__()
        self._paused = paused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READS and not self._paused():
            raise NotRecordableError(f"{func.__name__} gives numbers to Python code")
        if getattr(func, "__name__", "") == "data_ptr" and not self._paused():
            # Kernels tell a recording what they do with addresses; nobody else does.
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if not caller.startswith(_KERNELS):
                raise NotRecordableError(f"{caller} takes the address of a tensor")
        return func(*args, **(kwargs or {}))


def _tensors(nested: Any) -> list[torch.Tensor]:
    """Return the tensors with memory in nested tuples, lists and dicts."""
    leaves = tree_leaves(nested)
    return [each for each in leaves if isinstance(each, torch.Tensor) and each.numel()]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
