"""What a stage sends to the next one, and messages that ranks hear ahead, without processes."""

from __future__ import annotations

import gc
import queue
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_module.base.waiting import at_most
from vllm_module.distributed import pipe
from vllm_module.distributed.pipe import StagePipe
from vllm_module.errors import RankError
from vllm_module.kernels.matmul.products import Products
from vllm_module.runtime.ranks import in_flight
from vllm_module.runtime.ranks.in_flight import PipelineSteps, StepsInFlight, heard_ahead

_PATIENCE = 20.0  # seconds


class Links:
    """Links in memory between the ranks of a group, which here is a pair: rank and size."""

    def __init__(self) -> None:
        self._ways: dict[tuple[int, int], queue.SimpleQueue[Any]] = defaultdict(queue.SimpleQueue)

    def isend(self, tensor: torch.Tensor, group: tuple[int, int], group_dst: int) -> Any:
        taken = threading.Event()
        self._ways[group[0], group_dst].put((tensor, taken))

        def wait(*_: Any) -> None:
            assert taken.wait(_PATIENCE), "what was sent is not taken"

        return SimpleNamespace(wait=wait)

    def irecv(self, tensor: torch.Tensor, group: tuple[int, int], group_src: int) -> Any:
        def wait(*_: Any) -> None:
            sent, taken = self._ways[group_src, group[0]].get(timeout=_PATIENCE)
            assert (sent.shape, sent.dtype) == (tensor.shape, tensor.dtype)
            tensor.copy_(sent)
            taken.set()

        return SimpleNamespace(wait=wait)


@pytest.fixture(autouse=True)
def links(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pipe, "dist", Links())
    monkeypatch.setattr(pipe, "rank_and_size", lambda group: group)
    with at_most(_PATIENCE):
        yield


def two(size: int = 2) -> list[StagePipe]:
    return [StagePipe((rank, size), torch.device("cpu")) for rank in (0, 1)]  # type: ignore


def test_the_thread_that_receives_ends_with_its_pipe() -> None:
    """A program that makes one engine after another keeps neither threads nor connections."""
    before = {*threading.enumerate()}
    first, second = two()
    second.expect(3)
    first.send((torch.ones(3, 2),))
    assert len(second.receive(3)) == 1
    (thread,) = {*threading.enumerate()} - before
    pipe_of_second = weakref.ref(second)
    del second
    gc.collect()
    assert pipe_of_second() is None
    thread.join(_PATIENCE)
    assert not thread.is_alive()


@pytest.mark.parametrize("expected", [(), (0, 1, 2, 3), (1, 2), (3,)], ids=str)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_tensor_of_every_step_arrives(count: int, expected: tuple[int, ...]) -> None:
    """Tensors differ in columns and dtypes; some steps are expected before they are received."""
    first, second = two(size=4)
    dtypes = torch.float32, torch.bfloat16, torch.float64, torch.float16
    rows = 3, 1, 0, 5
    steps = [
        tuple(torch.randn(tokens, 2 + 3 * i).to(dtypes[i]) for i in range(count)) for tokens in rows
    ]
    for step in steps:
        first.send(step)
    for number, step in enumerate(steps):
        if number in expected[:1]:
            for each in expected:
                second.expect(rows[each])
        received = second.receive(rows[number])
        assert len(received) == count
        assert all(torch.equal(*pair) for pair in zip(received, step, strict=True))
        assert [each.dtype for each in received] == [*dtypes[:count]]


@pytest.mark.parametrize("size", [2, 3])
def test_a_stage_goes_on_while_as_many_steps_as_stages_are_under_way(size: int) -> None:
    """One step more is sent once the next stage has taken the first one."""
    first, second = two(size)
    done: list[int] = []

    def send() -> None:
        for step in range(size + 1):
            first.send((torch.full((1, 1), float(step)),))
            done.append(step)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    end = time.monotonic() + 30
    while len(done) < size and time.monotonic() < end:
        time.sleep(0.001)
    thread.join(0.1)
    assert done == [*range(size)]
    assert second.receive(1)[0].item() == 0
    thread.join(30)
    assert done == [*range(size + 1)]


def test_steps_are_computed_in_the_order_of_telling_and_no_further() -> None:
    computed: list[int] = []

    def compute(inputs: Any) -> torch.Tensor:
        computed.append(inputs)
        return torch.tensor([float(inputs)])

    steps = StepsInFlight(compute)
    told = [steps.add(number) for number in range(5)]  # type: ignore[arg-type]
    for asked, so_far in ((1, 2), (0, 2), (1, 2), (2, 3)):
        assert told[asked]().item() == asked
        assert computed == [*range(so_far)]
    steps.compute()
    assert computed == [*range(5)]
    assert [each().item() for each in told] == [*range(5)]
    assert computed == [*range(5)]


@pytest.mark.parametrize("before", range(4))
def test_no_step_is_computed_once_the_engine_has_ended(before: int) -> None:
    """Its pipes are closed; the logits of what was computed before the end are still there."""
    engine: Any = PipelineSteps()
    engine._closed = engine.refusal = None
    engine._step_timeout, engine.products = 1.0, Products()
    engine._or_end, engine._tell = lambda *_: nullcontext(), lambda *_: None
    engine.worker, computed = SimpleNamespace(expect=lambda rows: None), list[Any]()

    def do(name: str, inputs: Any) -> torch.Tensor:
        computed.append(inputs)
        return torch.tensor(len(computed))

    engine._do = do
    told = [engine.launch(SimpleNamespace(input_ids=[at])) for at in range(3)]
    if before:
        told[before - 1]()
    engine._closed = "rank 1 ended"
    engine.settle()
    for at, step in enumerate(told):
        if at < before:
            assert step().item() == at + 1
            continue
        with pytest.raises(RuntimeError, match="the engine has ended: rank 1 ended"):
            step()
    assert len(computed) == before


def test_only_steps_are_heard_of_while_a_message_is_carried_out() -> None:
    """A second message has its own part as well, which the main thread receives."""
    script = ["run", "update", "run", "run", "sleep", "update", "run", "close"]
    heard: list[str] = []
    expected: list[int] = []

    def hear() -> tuple[str, list[int]]:
        heard.append(script[len(heard)])
        return heard[-1], [len(heard)]

    done = []
    for name, _ in heard_ahead(hear, expected.append):  # type: ignore[arg-type]
        done.append(name)
        if name not in ("run", "close"):
            time.sleep(0.05)
            assert heard == done
    assert done == script
    assert expected == [at + 1 for at, name in enumerate(script) if name == "run"]


@pytest.mark.parametrize("other", ["a", "b"])
def test_stages_of_other_models_are_refused(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage has loaded, but the second one perhaps another model."""
    engine = PipelineSteps()
    engine._timeout, engine._ranks = 1.0, SimpleNamespace(control=None)  # type: ignore
    worker: Any = SimpleNamespace(kept="kept", described={"m": "a"})
    loaded = "kept", {"m": other}
    monkeypatch.setattr(in_flight, "together", lambda load, **_: [load(), loaded])
    if other == "a":
        engine._load_stage(lambda: worker)
        assert worker.other_stages == ("kept", "kept")
        return
    with pytest.raises(RankError, match="differ"):
        engine._load_stage(lambda: worker)
