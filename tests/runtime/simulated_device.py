"""A device that is simulated on the CPU, and its graphs, which refuse what asks the host.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from inspect import isfunction
from typing import Any
from weakref import WeakValueDictionary, ref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_module.weights import reading

try:
    from triton.runtime import interpreter  # tests run with Triton's interpreter
except ImportError:  # Triton exists for Linux alone
    interpreter = None

DEVICE, POOL = torch.device("cuda:0"), (0, 1)
# The host waits for the device to know their result, or its size.
SYNCHRONIZING = (
    "item", "is_nonzero", "_local_scalar_dense", "nonzero", "masked_select", "equal", "allclose",
    "unique", "unique2", "_unique2", "unique_dim", "unique_consecutive", "bincount",
)  # fmt: skip
_KERNELS = "vllm_module.kernels."
_current = threading.local()  # the device of each thread
_alive: WeakValueDictionary[int, OnDevice] = WeakValueDictionary()  # by id
CPU_ONLY = ("_for_cpu", "mkldnn", "onednn", "_cpu")  # of an operator's name
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")


class OnDevice(torch.Tensor):
    """A tensor whose memory, ``memory`` on the CPU, only operators of the device may use."""

    memory: torch.Tensor
    shards: Any
    is_cpu = False
    is_cuda = True
    device = DEVICE

    @staticmethod
    def __new__(cls, memory: torch.Tensor) -> OnDevice:
        layout: Any = {"strides": memory.stride(), "storage_offset": memory.storage_offset()}
        made = torch.Tensor._make_wrapper_subclass(cls, memory.shape, dtype=memory.dtype, **layout)
        made.memory = memory
        _alive[id(made)] = made
        return made

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.memory.untyped_storage()

    def data_ptr(self) -> int:
        return self.memory.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any, **__: Any) -> Any:
        raise AssertionError(f"{function} uses a tensor of the device outside of its simulation")


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Do what ``torch.utils._pytree.tree_map`` does, for arguments and results of operators.

    That is several times as slow, and took a third of the time of tests.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([mapped(change, each) for each in value])
    if kind is dict:
        return {name: mapped(change, each) for name, each in value.items()}
    return change(value)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of arguments or results of operators, in order."""
    found: list[torch.Tensor] = []
    mapped(lambda each: found.append(each) if isinstance(each, torch.Tensor) else None, value)
    return found


def parameter_of(original: Any) -> Any:
    """Return ``nn.Parameter.__new__``, which keeps memory of the device where it is."""
    made: dict[type, type] = {}

    def data(self: Any) -> OnDevice:
        return OnDevice(self.memory)

    def new(cls: Any, values: Any = None, requires_grad: bool = True) -> Any:
        plain = getattr(cls, "of_host", cls)
        if not isinstance(values, OnDevice):
            return original(plain, values, requires_grad)
        if plain not in made:
            shown = {"of_host": plain, "data": property(data), "__module__": plain.__module__}
            made[plain] = type(plain.__name__, (plain, OnDevice), shown)
        return OnDevice.__new__(made[plain], values.memory)

    return new


class HostError(AssertionError):
    """What a captured graph would do wrong, or a device refuse."""


class SimulatedDevice(TorchDispatchMode):
    """Runs operators on tensors of :data:`DEVICE`, and records those that a graph captures.

    Within :meth:`present`, tensors that are made with ``device="cuda"`` are :class:`OnDevice`. An
    operator on tensors of the device and of the host raises :class:`HostError`. While a graph is
    captured, so does every operator that makes a tensor on the host, waits for the device or copies
    from or to the host.

    Operators that exist for a CPU alone are refused at any time. Within :meth:`stepping`, what a
    step may not do is refused, too: waits for the device, and copies that wait or are not pinned.

    A copy to the host without waiting arrives as late as it may: when the host waits for an event
    that was recorded after it.

    Args:
        launches: whether the host's part of every launch is done, and not only in captures.

    Attributes:
        copies: from the host, as (bytes, whether from pinned memory and without waiting).
        copied_back: copies to the host that the host does not wait for.
        launched: the operations of kernels/ whose launches were done.
        operators: how often each operator had a tensor of the device.
        waits: of the host for the device.

    """

    # Makes torch.zeros(device="cuda") come here without asking for CUDA.
    _mode_key = torch._C._TorchDispatchModeKey.FAKE  # type: ignore[attr-defined]

    def __init__(self, launches: bool = False) -> None:
        super().__init__()
        self.launches, self._stepping = launches, False
        self.copies: list[tuple[int, bool]] = []
        self.pinned: list[torch.Tensor] = []
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] | None = None
        # Memory that graphs share: what was allocated in captures, and the tensors that use it.
        self._allocated: dict[int, tuple[torch.Tensor, list[ref[OnDevice]]]] = {}
        self.pool: set[int] = set()  # addresses of all that was ever allocated in captures
        self.copied_back = self.waits = 0
        self.launched: set[str] = set()
        self.operators: Counter[str] = Counter()
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []  # what is where, and arrives

    @contextmanager
    def present(self) -> Iterator[None]:
        """Have the device there, in inference mode; ``torch.cuda.graph`` captures graphs of it."""

        def nothing(*_: Any, **__: Any) -> None:
            pass

        inference = torch.inference_mode
        with pytest.MonkeyPatch.context() as patch, self.taking_part():
            patch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(_current.device))
            patch.setattr(torch.cuda, "graph", capture)
            patch.setattr(torch.cuda, "graph_pool_handle", lambda: POOL)
            patch.setattr(torch.cuda, "Stream", lambda device: Stream(_current.device))
            patch.setattr(torch.cuda, "Event", lambda **_: Stream(_current.device))
            patch.setattr(torch.cuda, "stream", nullcontext)
            patch.setattr(nn.Parameter, "__new__", parameter_of(nn.Parameter.__new__))
            patch.setattr(reading, "Thread", NoThread)  # a thread has no modes
            # All tensors of the device are of inference mode: torch has no views of others in it.
            patch.setattr(torch, "is_inference_mode_enabled", lambda: False)
            patch.setattr(torch, "inference_mode", lambda mode=True: inference())
            patch.setattr(torch.cuda, "synchronize", nothing)
            patch.setattr(gc, "collect", nothing)  # 0.3 s a capture, for nothing that is simulated
            patch.setattr(torch.cuda, "current_stream", lambda device: Stream(_current.device))
            patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
            patch.setattr(torch.cuda, "get_device_name", lambda *_: "simulated")
            if interpreter is not None:
                patch.setattr(interpreter.GridExecutor, "__call__", nothing)
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.Tensor, "pin_memory", lambda tensor: _current.device.pin(tensor))
            patch.setattr(
                torch.Tensor, "is_pinned", lambda tensor: _current.device.is_pinned(tensor)
            )
            patch.setattr(F, "scaled_dot_product_attention", attend(F.scaled_dot_product_attention))
            yield

    @contextmanager
    def serving(self, memory: int) -> Iterator[None]:
        """Have the device there, of so many bytes, with what an engine asks ``torch.cuda``."""

        def nothing(*_: Any) -> None:
            pass

        with self.present(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "current_device", lambda: 0)
            patch.setattr(torch.cuda, "device_count", lambda: 1)
            patch.setattr(torch.cuda, "device", lambda index: nullcontext())
            patch.setattr(torch.cuda, "mem_get_info", lambda *_: (memory, memory))
            for name in ("memory_allocated", "max_memory_allocated"):
                patch.setattr(torch.cuda, name, lambda *_: 0)
            for name in ("empty_cache", "reset_peak_memory_stats"):
                patch.setattr(torch.cuda, name, nothing)
            yield

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Be this thread's device, while another is there for the thread that started it."""
        before = getattr(_current, "device", None)
        _current.device = self
        try:
            with torch.inference_mode(), NumbersOfHost(), self:
                yield
        finally:
            _current.device = before

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Refuse what a step may not do, apart from waiting for an event."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def _free(self) -> None:
        """Let memory that was allocated in captures, and has no tensor any more, be anything."""
        assert self.calls is not None
        for memory, tensors in list(self._allocated.values()):
            if all(tensor() is None for tensor in tensors):
                del self._allocated[memory.untyped_storage().data_ptr()]
                garbage = torch.nan if memory.is_floating_point() else 2**30
                self.calls.append((torch.Tensor.fill_, (memory, garbage), {}, [memory]))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = function.name().split("::")[1].split(".")[0]
        tensors = tensors_in((args, kwargs))
        ours = [x for x in tensors if isinstance(x, OnDevice)]
        asked = kwargs.get("device")
        to_device = asked is not None and torch.device(asked).type == DEVICE.type
        copied = name in ("to", "_to_copy", "copy_") and (asked is not None or name == "copy_")
        if copied and len(ours) < len(tensors) and (to_device or ours):
            of_host = next(x for x in tensors if not isinstance(x, OnDevice))
            arrives = to_device or isinstance(args[0], OnDevice)
            without_waiting = kwargs.get("non_blocking", args[2:] == (True,))
            pinned = without_waiting and self.is_pinned(of_host)
            if arrives:
                self.copies.append((of_host.nbytes, pinned))
            self._refuse(f"{function} copies between host and device", in_step=not pinned)
        elif ours and asked is not None and not to_device:
            waits = not kwargs.get("non_blocking", False)
            self._refuse(f"{function} copies to the host, which waits", in_step=waits)
        elif ours and any(
            not isinstance(x, OnDevice) and not is_number(x, function) for x in tensors
        ):
            raise HostError(f"{function} has tensors of the device and of the host")
        if ours and any(part in name for part in CPU_ONLY):
            raise HostError(f"{function} is an operator of a CPU")
        if kwargs.pop("pin_memory", False):
            return self.pin(function(*args, **kwargs))
        on_device = bool(ours) or to_device
        if not on_device:
            self._refuse(f"{function} makes a tensor on the host")
            return function(*args, **kwargs)
        self.operators[name] += 1
        if name in SYNCHRONIZING or (
            name in INDEXING and any(x.dtype == torch.bool for x in tensors[1:])
        ):
            self._refuse(f"{function} waits for the device", in_step=True)
        if asked is not None:
            kwargs["device"] = torch.device("cpu")
        if self.calls is not None:
            self._free()
        wrappers = {id(x.memory): x for x in ours}
        wrapped, wrapped_kwargs = args, kwargs
        args, kwargs = mapped(_inner, (args, kwargs))
        given = {x.memory.untyped_storage().data_ptr() for x in ours}
        result = function(*args, **kwargs)
        if asked is not None and not to_device:
            return self._to_host(result, kwargs.get("non_blocking", False))
        if function.namespace == "vllm_module" and (self.launches or self.calls is not None):
            self._launch(name, wrapped, wrapped_kwargs)
        if self.calls is not None:
            made = tensors_in(result)
            if not name.startswith(("empty", "new_empty")):  # memory alone
                self.calls.append((function, args, kwargs, made))

        def outer(value: Any) -> Any:
            if id(value) in wrappers:  # of an operator in place
                return wrappers[id(value)]
            if not isinstance(value, torch.Tensor):
                return value
            wrapper, at = OnDevice(value), value.untyped_storage().data_ptr()
            if at in self._allocated:
                self._allocated[at][1].append(ref(wrapper))
            elif self.calls is not None and at and at not in given:
                count = value.untyped_storage().nbytes() // value.itemsize
                self._allocated[at] = value.as_strided((count,), (1,), 0), [ref(wrapper)]
                self.pool.add(at)
            return wrapper

        return mapped(outer, result)

    def _to_host(self, result: torch.Tensor, without_waiting: bool) -> torch.Tensor:
        """Return a copy of ``result`` on the host, which is there later if nobody waits."""
        if not without_waiting:
            self.arrive(len(self._late))
            return result
        self.copied_back += 1
        late = torch.full_like(result, -(2**40))
        self._late.append((result.clone(), late))  # what it is now, in the order of the stream
        return late

    def arrive(self, count: int) -> None:
        """Do what the host waits for: the first ``count`` copies to it have arrived."""
        self.waits += 1
        for result, late in self._late[:count]:
            late.copy_(result)

    def read(self, what: str) -> None:
        """Have the host wait for all that the device does."""
        self._refuse(what, in_step=True)
        self.arrive(len(self._late))

    def _launch(self, name: str, args: Any, kwargs: Any) -> None:
        """Do what the host does to launch a kernel of ours; what runs instead is its reference."""
        self.launched.add(name)
        module, launch = _launcher(name)
        calls, self.calls = self.calls, []
        try:
            with self:
                module[launch](*args, **kwargs)
        finally:
            self.calls = calls

    def _refuse(self, what: str, in_step: bool = False) -> None:
        if self.calls is not None:
            raise HostError(f"while a graph is captured, {what}")
        if in_step and self._stepping:
            raise HostError(f"in a step, {what}")

    def take(self, model: torch.nn.Module) -> None:
        """Bring a model's parameters and buffers to the device."""
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        copied = OnDevice(tensor.detach().clone())
                        if hasattr(tensor, "shards"):  # an embedding's, which knows its rank
                            copied.shards = tensor.shards
                        tensors[name] = copied  # type: ignore[assignment]

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Do what ``tensor.pin_memory()`` does."""
        self.pinned.append(tensor.clone())
        return self.pinned[-1]

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        memory = tensor.untyped_storage().data_ptr()
        return any(memory == each.untyped_storage().data_ptr() for each in self.pinned)


@cache
def _launcher(name: str) -> tuple[dict[str, Any], str]:
    """Find the namespace of a module, and the function in it that launches an operator's kernel."""
    modules = [vars(each) for key, each in sys.modules.items() if key.startswith(_KERNELS)]
    names = f"{name}_triton", f"{name}_flash"
    found = ((each, n) for each in modules for n in names)
    return next((each, n) for each, n in found if isfunction(each.get(n)))  # or a module's name


def is_number(tensor: torch.Tensor, function: Any) -> bool:
    """Return whether torch takes a tensor of the host as a number, beside others of a device."""
    pointwise = torch.Tag.pointwise in function.tags or "fill" in function.name()
    return tensor.dim() == 0 and pointwise


class NumbersOfHost(TorchFunctionMode):
    """Have tensors of numbers copied to the device by an operator, which torch hides from modes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if func is torch.Tensor.new_tensor and isinstance(args[0], OnDevice):
            func, args, device = torch.tensor, args[1:], DEVICE
        if func in (torch.Tensor.tolist, torch.Tensor.numpy) and isinstance(args[0], OnDevice):
            _current.device.read(f"{func.__name__} waits for the device")
            return func(args[0].memory, *args[1:], **kwargs)
        makes = func in (torch.tensor, torch.as_tensor, torch.asarray)
        if makes and device is not None and torch.device(device).type == DEVICE.type:
            return func(*args, **{**kwargs, "device": "cpu"}).to(DEVICE)
        return func(*args, **kwargs)


class NoThread:
    """A thread of a process that has no more of them."""

    def __init__(self, **_: Any) -> None:
        pass

    def start(self) -> None:
        raise RuntimeError


class Stream:
    """The stream of a simulated device, whose events come after all that was copied before."""

    device = DEVICE

    def __init__(self, device: SimulatedDevice) -> None:
        self._device, self._count = device, 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other._device is self._device

    __hash__ = None  # type: ignore[assignment] # as of what compares by value

    def wait_stream(self, other: Stream) -> None:
        pass

    def query(self) -> bool:
        return True

    def record(self, stream: Stream) -> None:
        self.record_event()

    def record_event(self) -> Stream:
        self._count = len(self._device._late)
        return self

    def synchronize(self) -> None:
        self._device.arrive(self._count)


def attend(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's attention, which on tensors of a device is written out.

    Torch looks at the memory, finds a CPU's and takes an operator of a CPU.
    """

    def attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        if not any(isinstance(x, OnDevice) for x in (query, key, value, attn_mask)):
            options = {"scale": scale, "enable_gqa": enable_gqa}
            return original(query, key, value, attn_mask, dropout_p, is_causal, **options)
        assert not dropout_p
        if enable_gqa:
            group = query.shape[-3] // key.shape[-3]
            key, value = (x.repeat_interleave(group, -3) for x in (key, value))
        scores = query.float() @ key.float().transpose(-2, -1)
        scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device)
            attn_mask = ones.tril()
        if attn_mask is not None:
            masks = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -torch.inf) if masks else scores + attn_mask
        return (scores.softmax(-1) @ value.float()).to(query.dtype)

    return attention


def _inner(value: Any) -> Any:
    return value.memory if isinstance(value, OnDevice) else value


class Graph:
    """What torch.cuda.CUDAGraph does: runs the same operators on the same memory again."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device, self.replays = device, 0

    def capture_begin(self, pool: object) -> None:
        assert self._device.calls is None, "a graph is being captured"
        assert pool == POOL, "one pool is for all graphs"
        self._device.calls = []

    def capture_end(self) -> None:
        assert self._device.calls is not None
        self._device._free()
        self.calls, self._device.calls = self._device.calls, None
        # A graph keeps no memory but its pool's. Here its calls do, so no address is used again.
        self._given = {
            x.untyped_storage().data_ptr(): function
            for function, args, kwargs, _ in self.calls
            for x in tensors_in((args, kwargs))
            if x.untyped_storage().data_ptr() not in {0, *self._device.pool}
        }

    def replay(self) -> None:
        self.replays += 1
        held = {x.memory.untyped_storage().data_ptr() for x in list(_alive.values())}
        for at in self._given.keys() - held:
            raise HostError(f"{self._given[at]} reads memory that was given up after the capture")
        for function, args, kwargs, outputs in self.calls:
            given = tensors_in((args, kwargs))
            memory = {x.untyped_storage().data_ptr() for x in given}
            again = tensors_in(function(*args, **kwargs))
            for output, value in zip(outputs, again, strict=True):
                if output.untyped_storage().data_ptr() not in memory:
                    output.copy_(value)


@contextmanager
def capture(graph: Graph, pool: object, stream: str) -> Iterator[None]:
    """Do what torch.cuda.graph does."""
    graph.capture_begin(pool)
    try:
        yield
    finally:
        graph.capture_end()
