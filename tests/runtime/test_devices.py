"""Every call into a worker runs under its own device, by stand-ins for CUDA, ranks and workers."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed import HashStore

from vllm_module import DeviceConfig, LoadConfig
from vllm_module.config import EngineConfig
from vllm_module.errors import ModelNotReadyError, RankError, WeightLoadError
from vllm_module.runtime.cache.page_pool import PagePool
from vllm_module.runtime.devices import as_called, own_device
from vllm_module.runtime.engine import Engine
from vllm_module.runtime.model_runner import ModelRunner
from vllm_module.runtime.ranks import connections
from vllm_module.runtime.ranks import executor as executors
from vllm_module.runtime.ranks.executor import Executor
from vllm_module.runtime.ranks.group import Ranks
from vllm_module.runtime.scheduler import Scheduler

DEVICES = 3


class Cuda:
    """The current device of each thread, as torch.cuda has it: the first, in a new thread."""

    def __init__(self) -> None:
        self._local = threading.local()

    def current_device(self) -> int:
        return getattr(self._local, "index", 0)

    def set_device(self, device: Any) -> None:
        raise AssertionError(f"the device of the caller's thread becomes {device}, and stays it")

    def device(self, device: torch.device) -> Any:
        return _Current(self, device.index)

    def make_current(self, index: int) -> None:
        self._local.index = index


class _Current:
    def __init__(self, cuda: Cuda, index: int | None) -> None:
        self._cuda, self._index = cuda, index

    def __enter__(self) -> None:
        self._before = self._cuda.current_device()
        if self._index is not None:
            self._cuda.make_current(self._index)

    def __exit__(self, *_: object) -> None:
        self._cuda.make_current(self._before)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    stand_in = Cuda()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: DEVICES)
    for name in ("current_device", "set_device", "device"):
        monkeypatch.setattr(torch.cuda, name, getattr(stand_in, name))
    return stand_in


class StandIn:
    """A worker that notes the current device of each call, and in which thread it is."""

    def __init__(self, source: Any, load_config: Any, device_config: Any, config: Any) -> None:
        self.device, self.config = device_config.torch_device, config
        self.source, self.page_bytes = SimpleNamespace(dtype=torch.bfloat16), 1
        self.state_bytes = self.host_pages = 0
        self.calls: dict[str, int] = {}
        self.refused: str | None = None
        self._note("load")

    def _note(self, name: str) -> None:
        self.calls[name] = torch.cuda.current_device()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def called(*_: object, **__: object) -> Any:
            self._note(name)
            return 1 if name == "pages" else None

        return called

    def update_weights(self, weights: Any, whole: bool) -> None:
        self._note("update_weights")
        for _ in weights:
            assert torch.cuda.current_device() == self.device.index
        if self.refused:
            raise WeightLoadError(self.refused)

    def weights_state(self) -> tuple[str | None, bool]:
        self._note("weights_state")
        return self.refused, True


ENTRIES = {
    "load", "pages", "start", "run", "update_weights", "sleep", "wake_up", "close",
    "weights_state", "reload_weights", "forget_steps",
}  # fmt: skip


def engine(device: str) -> Executor:
    source: Any = SimpleNamespace()
    return Executor(source, LoadConfig(), DeviceConfig(device=device), EngineConfig())


def in_thread(work: Callable[[], object]) -> None:
    """Run ``work`` in a new thread, and raise what it raises."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize(
    ("device", "before", "own"),
    [("cuda:1", 0, 1), ("cuda:1", 2, 1), ("cuda", 2, 2), ("cuda", 0, 0)],
)
@pytest.mark.parametrize("threads", [False, True])
def test_every_entry_runs_under_the_device_of_the_worker(
    monkeypatch: pytest.MonkeyPatch, cuda: Cuda, device: str, before: int, own: int, threads: bool
) -> None:
    """In any thread the worker's device is current, and afterwards the caller's is again.

    Without an index, it is the device that was current where the engine was made.
    """
    monkeypatch.setattr(executors, "Worker", StandIn)
    nothing: Any = None
    cuda.make_current(before)
    made = engine(device)
    worker: Any = made.worker
    assert worker.device == torch.device("cuda", own)
    yielded = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "ab":
            yielded.append(torch.cuda.current_device())
            yield name, torch.empty(0)

    def refused_update() -> None:
        worker.refused = "no"
        with pytest.raises(WeightLoadError, match="no"):
            made.update_weights(iter(()))
        with pytest.raises(ModelNotReadyError, match="no"):
            made.run(nothing)
        worker.refused = None

    for call in (
        lambda: made.start(1),
        lambda: made.run(nothing),
        lambda: made.embed(nothing),
        lambda: made.update_weights(weights()),
        made.sleep,
        made.wake_up,
        made.reload_weights,
        refused_update,
        made.close,
    ):

        def under_another(call: Any = call) -> None:
            if threads:
                cuda.make_current(1)
            there = cuda.current_device()
            call()
            assert cuda.current_device() == there

        in_thread(under_another) if threads else under_another()
        assert cuda.current_device() == before
    assert set(worker.calls) == ENTRIES
    assert set(worker.calls.values()) == {own}
    # What the caller computes while its iterator is read runs under the caller's device.
    assert yielded == [1 if threads else before] * 2


def test_every_rank_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch, cuda: Cuda) -> None:
    """A rank that is started runs under the device of its number, and joins the group under it."""
    noted: list[tuple[str, torch.device, int]] = []

    class Recorded:
        def __init__(
            self, source: Any, load: Any, device_config: Any, config: Any, *connections: Any
        ) -> None:
            noted.append(("make", device_config.torch_device, cuda.current_device()))

        def follow(self) -> None:
            noted.append(("follow", torch.device("cuda"), cuda.current_device()))

    def initialize(_: object, rank: int, size: int, device: torch.device, __: object) -> None:
        assert (rank, size) == (2, 3)
        noted.append(("join", device, cuda.current_device()))

    monkeypatch.setattr(executors, "Executor", Recorded)
    monkeypatch.setattr(executors, "meeting_place", lambda *_: HashStore())
    monkeypatch.setattr(connections, "private_group", initialize)
    threads = torch.get_num_threads()
    given: Any = None, LoadConfig(), DeviceConfig(device="cuda"), EngineConfig()
    executors._serve(2, 3, 0, threads, *given)
    assert [(name, current) for name, _, current in noted] == [
        ("join", 2),
        ("join", 2),
        ("make", 2),
        ("follow", 2),
    ]
    assert [device for _, device, _ in noted[:3]] == [
        torch.device("cuda:2"),
        torch.device("cpu"),
        torch.device("cuda:2"),
    ]
    assert cuda.current_device() == 0
    assert own_device(torch.device("cuda"), 1) == torch.device("cuda:1")
    assert own_device(torch.device("cpu"), 1) == torch.device("cpu")
    with pytest.raises(ValueError, match="4 ranks need a CUDA device each, and there are 3"):
        own_device(torch.device("cuda"), 3)


class Aborted:
    """Ranks of two, whose collectives are aborted while the first waits for a result."""

    rank, size, group, pipe, ended, is_led = 0, 2, None, None, False, True
    device = torch.device("cuda:0")

    def __init__(self, *_: object) -> None:
        self.aborted = self.aborts = False

    def tell(self, message: object) -> None:
        """Send nothing."""

    def say_who_hangs(self) -> None:
        """Log nothing."""

    def query(self) -> bool:
        self.aborted = self.aborts
        return True

    def part(self, error: BaseException) -> BaseException:
        return error

    def close(self) -> None:
        """End nothing."""


@pytest.mark.parametrize("aborts", [False, True])
@pytest.mark.parametrize("name", ["run", "embed"])
def test_what_an_aborted_collective_leaves_is_no_result(
    monkeypatch: pytest.MonkeyPatch, cuda: Cuda, name: str, aborts: bool
) -> None:
    """Waiting raises if a rank ended meanwhile: an abort ends the wait, and leaves wrong logits."""
    monkeypatch.setattr(executors, "Worker", StandIn)
    monkeypatch.setattr(executors, "Ranks", Aborted)
    made = engine("cuda")
    ranks: Any = made._ranks
    ranks.aborts = aborts
    event: Any = SimpleNamespace(query=ranks.query)
    stream = SimpleNamespace(record_event=lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    result: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda:0"))
    made.worker.run = lambda *_: result  # type: ignore[method-assign]
    step: Any = None
    assert made.run(step) is result  # without waiting
    wait = partial(made.wait, event) if name == "run" else partial(made.embed, step)
    if not aborts:
        wait()
        return
    with pytest.raises(RankError, match="another rank ended"):
        wait()
    with pytest.raises(RankError, match="the engine has ended"):
        made.run(step)


@pytest.mark.parametrize("how", ["closed", "lost"])
def test_a_wait_that_outlasts_the_engine_says_how_it_ended(
    monkeypatch: pytest.MonkeyPatch, cuda: Cuda, how: str
) -> None:
    """It names the rank that has failed meanwhile, or that another thread has closed the engine."""
    monkeypatch.setattr(executors, "Worker", StandIn)
    monkeypatch.setattr(executors, "Ranks", Aborted)
    made = engine("cuda")
    ranks: Any = made._ranks
    ranks.aborts = True

    def fail(*_: object) -> None:
        raise RankError("rank 1 (pid 7) was killed by signal 9", [1])

    def end() -> bool:
        if how == "closed":
            made.close()
        else:
            made.worker.run = fail  # type: ignore[method-assign, assignment]
            with pytest.raises(RankError):
                made.run(step)
        return bool(ranks.query())

    step: Any = None
    event: Any = SimpleNamespace(query=end)
    expected = "it was closed" if how == "closed" else r"rank 1 \(pid 7\) was killed"
    with pytest.raises(RuntimeError, match=f"^the engine has ended: {expected}") as caught:
        made.wait(event)
    assert getattr(caught.value, "ranks", ()) == (() if how == "closed" else (1,))


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("failed", [False, True])
def test_an_engine_aborts_before_it_shuts_down(device: str, started: bool, failed: bool) -> None:
    """Of collectives on a device, shutting down would wait for the rank that hangs or ends.

    Ranks that were started here are killed, maybe in the middle of a step that is launched.
    """
    done: list[str] = []
    group: Any = SimpleNamespace(
        abort=lambda: done.append("abort"),
        shutdown=lambda: done.append("shutdown"),
        _device_types=[],
    )
    ranks = Ranks(EngineConfig(), torch.device("cpu"), lambda: None, tuple)
    ranks.device, ranks.group, ranks._owns_groups = torch.device(device), group, True
    if started:
        processes: Any = SimpleNamespace(end=lambda: done.append("end"))
        ranks.processes = processes
    if failed:
        ranks.part(ValueError("a step failed"))
    ranks.close()
    aborts = (failed or started) and device != "cpu"
    assert done == ["abort"] * aborts + ["end"] * started + ["shutdown"]
    assert ranks.aborted == aborts


class Stream:
    """A stream that notes which others it waits for."""

    device = torch.device("cuda:1")

    def __init__(self, name: str, noted: list[str]) -> None:
        self.name, self.noted = name, noted

    def wait_stream(self, other: Stream) -> None:
        self.noted.append(f"{self.name} waits for {other.name}")


class Streams:
    """The current stream of each thread, as torch.cuda has it."""

    def __init__(self, default: Stream) -> None:
        self._default, self._local = default, threading.local()

    def current_stream(self, device: torch.device) -> Stream:
        assert device == Stream.device
        return getattr(self._local, "stream", self._default)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream(Stream.device)
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before


@pytest.mark.parametrize("fails", [False, True])
def test_threads_with_streams_of_their_own_share_the_engines(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """All that an engine launches is on one stream, between what a thread launches around it."""
    noted: list[str] = []
    default, own = Stream("default", noted), Stream("own", noted)
    streams = Streams(default)
    for name in ("current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(streams, name))

    def launch() -> None:
        noted.append(f"launched on {streams.current_stream(Stream.device).name}")

    def work() -> None:
        with contextlib.suppress(ValueError), engine.alone():
            launch()
            if fails:
                raise ValueError

    def elsewhere() -> None:
        with streams.stream(own):
            work()
            launch()

    scheduler, engines = Scheduler(PagePool(1, 1), PagePool(0, 1), 1, 1), cast(Any, default)
    engine = Engine(lambda *_: torch.empty(0), scheduler, 1, 1, stream=engines)
    work()
    assert noted == ["launched on default"]  # and nothing waits
    in_thread(elsewhere)
    assert noted[1:] == [
        "default waits for own",
        "launched on default",
        "own waits for default",
        "launched on own",
    ]


def test_graphs_are_captured_on_the_device_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """All captures use one stream of the model's device: torch's own is of the first capture's."""

    class Model:
        def __call__(self, ids: torch.Tensor, *_: object) -> torch.Tensor:
            return ids.unsqueeze(1).float()

        def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden

    def graph(_: object, pool: object, stream: object) -> Any:
        captures.append((pool, stream))
        return contextlib.nullcontext()

    captures: list[tuple[object, object]] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: ("stream", device))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    device, model = torch.device("meta"), Model()
    ModelRunner(model, device, 4, 2).capture(20)  # type: ignore[arg-type]
    # Prompts of 20 and 16 tokens; 4, 2 and 1 sequences that decode.
    assert captures == [("pool", ("stream", device))] * 5


def test_an_item_is_freed_before_the_next_is_computed() -> None:
    """Tensors of an update, of which a caller's generator makes one at a time."""
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []  # of the tensors made before, when the next is made

    def tensors() -> Iterator[torch.Tensor]:
        for number in range(3):
            alive.append(sum(each() is not None for each in made))
            tensor = torch.full((2,), number)
            made.append(weakref.ref(tensor))
            yield tensor
            del tensor

    items = as_called(tensors(), torch.device("cpu"))
    assert [next(items).tolist() for _ in range(3)] == [[0, 0], [1, 1], [2, 2]]
    assert alive == [0, 0, 0]
