"""A device that is simulated on the CPU, and its graphs, which refuse what asks the host.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import ref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from vllm_module.runtime import pieces

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
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any, **__: Any) -> Any:
        raise AssertionError(f"{function} uses a tensor of the device outside of its simulation")


class HostError(AssertionError):
    """What a captured graph would do wrong, or a device refuse."""


class SimulatedDevice(TorchDispatchMode):
    """Runs operators on tensors of :data:`DEVICE`, and records those that a graph captures.

    Within :meth:`present`, tensors that are made with ``device="cuda"`` are :class:`OnDevice`. An
    operator on tensors of the device and of the host raises :class:`HostError`. While a graph is
    captured, so does every operator that makes a tensor on the host, waits for the device or copies
    from or to the host.

    A copy to the host without waiting arrives as late as it may: when the host waits for an event
    that was recorded after it.

    Attributes:
        copies: from the host, as (bytes, whether from pinned memory and without waiting).
        copied_back: copies to the host that the host does not wait for.
        waits: of the host for the device.

    """

    # Makes torch.zeros(device="cuda") come here without asking for CUDA.
    _mode_key = torch._C._TorchDispatchModeKey.FAKE  # type: ignore[attr-defined]

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[int, bool]] = []
        self.pinned: list[torch.Tensor] = []
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] | None = None
        # Memory that graphs share: what was allocated in captures, and the tensors that use it.
        self._allocated: dict[int, tuple[torch.Tensor, list[ref[OnDevice]]]] = {}
        self.copied_back = self.waits = 0
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []  # what is where, and arrives

    @contextmanager
    def present(self) -> Iterator[None]:
        """Have the device there, in inference mode; ``torch.cuda.graph`` captures graphs of it."""

        def nothing(*_: Any, **__: Any) -> None:
            pass

        with pytest.MonkeyPatch.context() as patch, self.taking_part():
            patch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(_current.device))
            patch.setattr(torch.cuda, "graph", capture)
            patch.setattr(torch.cuda, "graph_pool_handle", lambda: POOL)
            patch.setattr(torch.cuda, "Stream", lambda device: "stream")
            patch.setattr(torch.cuda, "stream", nullcontext)
            patch.setattr(pieces, "alias", lambda tensor: OnDevice(tensor.memory))
            patch.setattr(torch.cuda, "synchronize", nothing)
            patch.setattr(torch.cuda, "current_stream", lambda device: Stream(_current.device))
            patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
            patch.setattr(torch.cuda, "get_device_name", lambda *_: "simulated")
            if interpreter is not None:
                patch.setattr(interpreter.GridExecutor, "__call__", nothing)
            patch.setattr(torch.Tensor, "pin_memory", lambda tensor: _current.device.pin(tensor))
            yield

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Be this thread's device, while another is there for the thread that started it."""
        before = getattr(_current, "device", None)
        _current.device = self
        try:
            with torch.inference_mode(), self:
                yield
        finally:
            _current.device = before

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
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        ours = [x for x in tensors if isinstance(x, OnDevice)]
        asked = kwargs.get("device")
        to_device = asked is not None and torch.device(asked).type == DEVICE.type
        copied = name in ("to", "_to_copy", "copy_") and (asked is not None or name == "copy_")
        if copied and len(ours) < len(tensors) and (to_device or ours):
            source = tensors[-1]
            without_waiting = kwargs.get("non_blocking", args[2:] == (True,))
            self.copies.append((source.nbytes, without_waiting and self.is_pinned(source)))
            self._refuse(f"{function} copies from the host")
        elif ours and asked is not None and not to_device:
            self._refuse(f"{function} copies to the host, which waits")
        elif ours and len(ours) < len(tensors):
            raise HostError(f"{function} has tensors of the device and of the host")
        on_device = bool(ours) or to_device
        if not on_device:
            self._refuse(f"{function} makes a tensor on the host")
            return function(*args, **kwargs)
        if name in SYNCHRONIZING or (
            name in INDEXING and any(x.dtype == torch.bool for x in tensors[1:])
        ):
            self._refuse(f"{function} waits for the device")
        if asked is not None:
            kwargs["device"] = torch.device("cpu")
        if self.calls is not None:
            self._free()
        wrappers = {id(x.memory): x for x in ours}
        wrapped, wrapped_kwargs = args, kwargs
        args, kwargs = tree_map(_inner, (args, kwargs))
        given = {x.memory.untyped_storage().data_ptr() for x in ours}
        result = function(*args, **kwargs)
        if asked is not None and not to_device:
            return self._to_host(result, kwargs.get("non_blocking", False))
        if self.calls is not None:
            if function.namespace == "vllm_module":
                self._launch(f"{name}_triton", wrapped, wrapped_kwargs)
            made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
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
            return wrapper

        return tree_map(outer, result)

    def _to_host(self, result: torch.Tensor, without_waiting: bool) -> torch.Tensor:
        """Return a copy of ``result`` on the host, which is there later if nobody waits."""
        if not without_waiting:
            self.arrive(len(self._late))
            return result
        self.copied_back += 1
        late = torch.full_like(result, -(2**40))
        self._late.append((result, late))
        return late

    def arrive(self, count: int) -> None:
        """Do what the host waits for: the first ``count`` copies to it have arrived."""
        self.waits += 1
        for result, late in self._late[:count]:
            late.copy_(result)

    def _launch(self, name: str, args: Any, kwargs: Any) -> None:
        """Do what the host does to launch a kernel of ours; what runs instead is its reference."""
        modules = [each for key, each in sys.modules.items() if key.startswith(_KERNELS)]
        launch = next(vars(each)[name] for each in modules if name in vars(each))
        calls, self.calls = self.calls, []
        try:
            with self:
                launch(*args, **kwargs)
        finally:
            self.calls = calls

    def _refuse(self, what: str) -> None:
        if self.calls is not None:
            raise HostError(f"while a graph is captured, {what}")

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
        return any(tensor is each for each in self.pinned)


class Stream:
    """The stream of a simulated device, whose events come after all that was copied before."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device

    def record_event(self) -> Stream:
        self._count = len(self._device._late)
        return self

    def synchronize(self) -> None:
        self._device.arrive(self._count)


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

    def replay(self) -> None:
        self.replays += 1
        for function, args, kwargs, outputs in self.calls:
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            memory = {x.untyped_storage().data_ptr() for x in given}
            again = [
                x for x in tree_leaves(function(*args, **kwargs)) if isinstance(x, torch.Tensor)
            ]
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
