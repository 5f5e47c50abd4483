"""What happens while ranks load: who reads, quantizes and processes what, and the memory it takes.

Nothing below the command line knows of it: handles, conversions and modules are wrapped while a
recorded load runs, by the interfaces that they have anyway.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from vllm_module.build.held import own_tensors, plan_from
from vllm_module.core.module import vLLMModule
from vllm_module.weights import Destination, Weight
from vllm_module.weights.handle import Handle, Sink
from vllm_module.weights.pairs import OpenWeights

_SAMPLE_SECONDS = 0.004
_MODULE_TRACKS = 1 << 23  # numbers that are no thread's on Linux


class TraceSpan(NamedTuple):
    """One thing that a thread did, in nanoseconds of the system's monotonic clock.

    ``kind`` is read, quantize or process; ``path`` is the parameter's or the module's.
    """

    kind: str
    name: str
    path: str
    thread: int
    start: int
    end: int
    bytes: int


class Sample(NamedTuple):
    """The memory at one time: of the process, and of the device's tensors if it is a GPU."""

    time: int
    resident: int
    device: int | None


@dataclass
class RankTrace:
    """The recording of one rank's load.

    Attributes:
        rank: whose load it is.
        final_bytes: the memory of the tensors that the load materialized.
        spans: in the order in which they ended.
        samples: of the memory, by time; the first is from before the load.
        threads: the names of the threads, by the number that a span has.

    """

    rank: int
    final_bytes: int = 0
    spans: list[TraceSpan] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    threads: dict[int, str] = field(default_factory=dict)

    @contextmanager
    def recording(
        self, model: vLLMModule, checkpoint: OpenWeights, device: torch.device
    ) -> Iterator[list[tuple[str, Handle]]]:
        """Record the load in the block; yield the checkpoint's pairs, to load ``model`` from."""
        path_of = {each.name: each.location.path for each in plan_from(model, checkpoint).fills}
        tensors = {*model.parameters(), *model.buffers()}
        self.final_bytes = sum(tensor.nbytes for tensor in tensors if tensor.is_meta)
        handles: Mapping[str, Any] = own_tensors(model, checkpoint)
        pairs: list[tuple[str, Handle]] = [
            (name, _RecordedHandle(handle, name, path_of.get(name, name), self))
            for name, handle in handles.items()
        ]
        with ExitStack() as stack:
            for path, module in model.named_modules():
                if isinstance(module, vLLMModule):
                    stack.enter_context(self._recorded(path, module))
            stack.enter_context(self._sampling(device))
            yield pairs

    @contextmanager
    def span(self, kind: str, name: str, path: str, nbytes: int = 0) -> Iterator[None]:
        """Record what this thread does in the block."""
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            end = time.perf_counter_ns()
            thread = threading.get_native_id()
            self.threads.setdefault(thread, threading.current_thread().name)
            self.spans.append(TraceSpan(kind, name, path, thread, start, end, nbytes))

    @contextmanager
    def _recorded(self, path: str, module: vLLMModule) -> Iterator[None]:
        """Record the conversions and the processing of ``module`` itself."""
        with ExitStack() as stack:
            if module.conversions:
                recorded = {
                    attr: _RecordedConversion(conversion, f"{path}.{attr}", self)
                    for attr, conversion in module.conversions.items()
                }
                stack.enter_context(_attribute(module, "conversions", recorded))
            if steps := module.processing():

                def process() -> None:
                    with self.span("process", path, path):
                        for step in steps:
                            step()

                stack.enter_context(_attribute(module, "processing", lambda: (process,)))
            yield

    @contextmanager
    def _sampling(self, device: torch.device) -> Iterator[None]:
        done = threading.Event()

        def sample() -> None:
            allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
            self.samples.append(Sample(time.perf_counter_ns(), _resident(), allocated))

        def follow() -> None:
            while not done.wait(_SAMPLE_SECONDS):
                sample()

        sample()
        follower = threading.Thread(target=follow, name="memory", daemon=True)
        follower.start()
        try:
            yield
        finally:
            done.set()
            follower.join()
            sample()

    def added(self) -> list[tuple[float, int]]:
        """Return the seconds since the load began, and the bytes added by then.

        They are those of a GPU's tensors or, without one, of the process.
        """
        first = self.samples[0]
        return [
            (
                (each.time - first.time) / 1e9,
                each.resident - first.resident
                if each.device is None or first.device is None
                else each.device - first.device,
            )
            for each in self.samples
        ]


@contextmanager
def _attribute(module: torch.nn.Module, name: str, value: object) -> Iterator[None]:
    """Give ``module`` an attribute of its own for the time of the block."""
    own = vars(module)
    missing = object()
    before = own.get(name, missing)
    own[name] = value
    try:
        yield
    finally:
        if before is missing:
            del own[name]
        else:
            own[name] = before


class _RecordedHandle:
    """A handle whose reading is recorded."""

    __slots__ = ("_handle", "_name", "_path", "_trace")

    def __init__(self, handle: Handle, name: str, path: str, trace: RankTrace) -> None:
        self._handle, self._name, self._path, self._trace = handle, name, path, trace

    @property
    def shape(self) -> torch.Size:
        return self._handle.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._handle.dtype

    def narrow(self, dim: int, start: int, length: int) -> _RecordedHandle:
        narrowed = self._handle.narrow(dim, start, length)
        return _RecordedHandle(narrowed, self._name, self._path, self._trace)

    def read_into(self, destination: torch.Tensor) -> None:
        nbytes = self.shape.numel() * self.dtype.itemsize
        with self._trace.span("read", self._name, self._path, nbytes):
            self._handle.read_into(destination)

    def read(self) -> torch.Tensor:
        nbytes = self.shape.numel() * self.dtype.itemsize
        with self._trace.span("read", self._name, self._path, nbytes):
            return self._handle.read()

    def __repr__(self) -> str:
        return repr(self._handle)


class _RecordedSink:
    """A sink whose conversion is recorded; what it reads meanwhile is a span inside of it."""

    def __init__(self, sink: Sink, path: str, trace: RankTrace) -> None:
        self._sink, self._path, self._trace = sink, path, trace
        self.device = sink.device

    def receive(self, weight: Weight) -> None:
        with self._trace.span("quantize", self._path, self._path):
            self._sink.receive(weight)


class _RecordedConversion:
    """A conversion whose sinks are recorded."""

    def __init__(self, conversion: Any, path: str, trace: RankTrace) -> None:
        self._conversion, self._path, self._trace = conversion, path, trace
        self.dtype, self.makes = conversion.dtype, conversion.makes  # are asked for often

    def jobs(
        self, module: Any, weight: Weight, slot: str | None
    ) -> Iterator[tuple[Weight, Destination]]:
        for piece, destination in self._conversion.jobs(module, weight, slot):
            if not isinstance(destination, torch.Tensor):
                destination = _RecordedSink(destination, self._path, self._trace)
            yield piece, destination

    def __getattr__(self, name: str) -> Any:
        return getattr(self._conversion, name)


def _resident() -> int:
    """Return the resident bytes of this process; its peak where the system tells no more."""
    with suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def chrome_trace(ranks: Sequence[RankTrace]) -> dict[str, Any]:
    """Return the recordings in Chrome's Trace Event Format, which Perfetto opens.

    A rank is a process there. It has a track for each thread, and tracks on which each module lasts
    from its first byte to the end of its processing. The memory is in counters.
    """
    begin = min(each.samples[0].time for each in ranks)
    events = [event for each in ranks for event in _rank_events(each, begin)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _rank_events(trace: RankTrace, begin: int) -> Iterator[dict[str, Any]]:
    def named(what: str, tid: int, name: str) -> dict[str, Any]:
        return {"ph": "M", "pid": trace.rank, "tid": tid, "name": what, "args": {"name": name}}

    def complete(span: TraceSpan, tid: int) -> dict[str, Any]:
        return {
            "ph": "X",
            "pid": trace.rank,
            "tid": tid,
            "name": span.name,
            "cat": span.kind,
            "ts": (span.start - begin) / 1000,  # the format counts microseconds
            "dur": (span.end - span.start) / 1000,
            "args": {"kind": span.kind, "path": span.path, "bytes": span.bytes},
        }

    yield named("process_name", 0, f"rank {trace.rank}")
    for tid, name in trace.threads.items():
        yield named("thread_name", tid, name)
    for span in trace.spans:
        yield complete(span, span.thread)
    free_at: list[int] = []  # by track: when its last module ended
    for span in _module_spans(trace.spans):
        # Events of one track must not overlap.
        track = next((i for i, end in enumerate(free_at) if end <= span.start), len(free_at))
        if track == len(free_at):
            free_at.append(0)
            yield named("thread_name", _MODULE_TRACKS + track, "modules")
        free_at[track] = span.end
        yield complete(span, _MODULE_TRACKS + track)
    for sample in trace.samples:
        memory = {"resident memory": sample.resident, "device memory": sample.device}
        for name, nbytes in memory.items():
            if nbytes is not None:
                time = (sample.time - begin) / 1000
                counter = {"ph": "C", "pid": trace.rank, "tid": 0, "name": name, "ts": time}
                yield counter | {"args": {"bytes": nbytes}}


def _module_spans(spans: Sequence[TraceSpan]) -> list[TraceSpan]:
    """Return for each module the time from its first span to its last, in order of the start."""
    by_module: dict[str, list[TraceSpan]] = {}
    for span in spans:
        path = span.path if span.kind == "process" else span.path.rpartition(".")[0]
        by_module.setdefault(path, []).append(span)
    return sorted(
        (
            TraceSpan(
                "module",
                path or "(the model itself)",
                path,
                0,
                min(each.start for each in own),
                max(each.end for each in own),
                sum(each.bytes for each in own),
            )
            for path, own in by_module.items()
        ),
        key=lambda span: span.start,
    )
