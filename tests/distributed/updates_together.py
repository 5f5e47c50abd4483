"""Scenarios of trainers that fail in the middle of an update, for ``scenarios.py``.

Trainers are forked before anything else, and each waits for its turn. A round has a process group
of its own, as after a rank that was killed.
"""

from __future__ import annotations

import itertools
import os
import random
import runpy
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from vllm_module.cooperative import receive_boxes, send_boxes
from vllm_module.layout import (
    StoredTensorLayout,
    TransferPlan,
    layout_of_shards,
    parse_layout,
    rows,
)
from vllm_module.layout.layout_file import layout_json
from vllm_module.weights import receive_weights, send_weights
from vllm_module.weights.changes import find_changes

of_engines = runpy.run_path(str(Path(__file__).with_name("engines_together.py")))
engine, tokens, raised_by = (of_engines[name] for name in ("engine", "tokens", "raised_by"))
prepare = runpy.run_path(str(Path(__file__).with_name("loading_together.py")))["prepare"]
SCENARIOS: dict[str, tuple[int, Callable[[Path, int], Any]]] = {}
PATIENCE = 3.0  # seconds that a trainer may be silent
STREAMED = (
    "dies", "good", "stops", "good", "raises", "good", "has NaN", "good", "has another shape",
    "good", "has another name", "good", "is another version", "is not named", "is two", "good",
    "sends elements",
)  # fmt: skip
BOXES = (
    "dies", "good", "stops", "good", "sends twice", "good", "is another version",
    "has another plan", "good", "has NaN", "good",
)  # fmt: skip


def scenario(size: int) -> Callable[[Callable[[Path, int], Any]], Callable[[Path, int], Any]]:
    def enter(function: Callable[[Path, int], Any]) -> Callable[[Path, int], Any]:
        SCENARIOS[function.__name__] = (size, function)
        return function

    return enter


def weights_of(directory: Path, turn: int) -> dict[str, torch.Tensor]:
    """Return weights that no other round has."""
    weights = load_file(directory.parent / "good" / "model.safetensors")
    return {name: tensor.roll(turn + 1, -1) for name, tensor in weights.items()}


def join(directory: Path, turn: int, rank: int, size: int) -> None:
    meeting = f"file://{directory}/meeting{turn}"
    patience = timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", meeting, timeout=patience, rank=rank, world_size=size)


class Trainer:
    """A process that makes one call when it is told to."""

    def __init__(self, work: Callable[[], object]) -> None:
        turn, self._go = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._go)
            self._end_with(work, turn)
        os.close(turn)

    def _end_with(self, work: Callable[[], object], turn: int) -> NoReturn:
        if os.read(turn, 1):  # nothing, if the parent has ended
            raised_by(work)
        os._exit(0)

    def go(self) -> None:
        os.write(self._go, b"x")

    def go_on(self) -> None:
        """Let it notice that the round is over, which takes its patience; none waits for that."""
        os.kill(self._pid, signal.SIGCONT)

    def end(self) -> None:
        os.waitpid(self._pid, 0)


def fail(fault: str, name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Do what a trainer does in the middle, or return what it sends."""
    if fault == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "raises":
        raise ValueError("of the trainer")
    if fault == "has NaN":
        tensor = tensor.clone()
        tensor.view(-1)[-1] = float("nan")
    if fault == "has another shape":
        tensor = tensor.view(-1)[1:]
    return (f"another.{name}" if fault == "has another name" else name), tensor


def stream(directory: Path, fault: str, turn: int, rank: int) -> None:
    """Send weights in buckets, one of which the fault meets."""
    join(directory, turn, rank, 3 if fault == "is two" else 2)
    at = random.Random(turn).randrange(1, len(weights_of(directory, turn)))

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        for number, pair in enumerate(weights_of(directory, turn).items()):
            yield fail(fault, *pair) if number == at else pair

    weights: Any = pairs()
    if fault == "sends elements":
        before = weights_of(directory, turn - 1)
        weights = [(name, find_changes(before[name], after)) for name, after in weights]
    version = None if fault == "is not named" else f"step-{turn - (fault == 'is another version')}"
    send_weights(weights, bucket_bytes=1 << 10, digests=turn % 2 == 0, weight_version=version)


def outcome(llm: Any, fault: str, said: str) -> dict[str, Any]:
    """Return what the engine says of a round, what it computes afterwards, and of which version."""
    found: list[Any] = []
    refused = raised_by(lambda: found.append(tokens(llm)))
    return {
        "fault": fault, "said": said, "tokens": found, "refused": refused,
        "version": llm.weight_version,
    }  # fmt: skip


@scenario(1)
def streams_that_fail(directory: Path, rank: int) -> Any:
    """An engine that leads a second rank takes streams from a trainer in each round."""
    trainers = [
        [
            Trainer(lambda f=fault, t=turn, r=rank: stream(directory, f, t, r))
            for rank in range(1 + (fault == "is two"))
        ]
        for turn, fault in enumerate(STREAMED)
    ]
    outcomes = []
    with engine(directory, tensor_parallel_size=2, distributed_executor_backend="mp") as llm:
        for turn, fault in enumerate(STREAMED):
            for each in trainers[turn]:
                each.go()

            def update(turn: int = turn) -> None:
                join(directory, turn, len(trainers[turn]), len(trainers[turn]) + 1)
                version = f"step-{turn}"
                with receive_weights(src=0, weight_version=version) as weights:
                    llm.update_weights(weights, weight_version=version)

            outcomes.append(outcome(llm, fault, raised_by(update)))
            for each in trainers[turn]:
                each.go_on()
            dist.destroy_process_group()
    for each in itertools.chain.from_iterable(trainers):
        each.end()
    return outcomes


def push(directory: Path, fault: str, turn: int) -> None:
    """Send boxes to two ranks, by a plan from one that has whole tensors."""
    join(directory, turn, 0, 3)
    layouts: list[Any] = [None] * 3
    dist.all_gather_object(layouts, None)
    target = parse_layout(layouts[1])
    weights = weights_of(directory, turn)
    names = [*weights]
    at = names[random.Random(turn).randrange(1, len(names))]
    if fault == "has NaN":
        weights |= [fail(fault, at, weights[at])]
    source = layout_of_shards(target.tensors, 1, lambda _, shape, at: ((0,) * len(shape), shape))
    plan = TransferPlan(source, target)
    if fault == "has another plan":  # in which both ranks keep other halves
        routes = [
            each if len(each.boxes) == 1 else replace(each, boxes=each.boxes[::-1])
            for each in plan.routes
        ]
        plan.routes = tuple(routes)

    class Failing(dict[str, torch.Tensor]):
        def get(self, name: str, default: Any = None) -> Any:
            return fail(fault, name, self[name])[1] if name == at else self[name]

    version = f"step-{turn - (fault == 'is another version')}"
    for _ in range(1 + (fault == "sends twice")):
        send_boxes(
            plan, source, Failing(weights), bucket_bytes=1 << 12, timeout=PATIENCE,
            weight_version=version,
        )  # fmt: skip


@scenario(2)
def boxes_that_fail(directory: Path, rank: int) -> Any:
    """Two ranks of a launcher are an engine and take boxes from a third process."""
    trainers = [
        Trainer(lambda f=fault, t=turn: push(directory, f, t))
        for turn, fault in enumerate(BOXES)
        if rank == 0
    ]
    settings = {"distributed_executor_backend": "external_launcher", "tensor_parallel_size": 2}
    llm = engine(directory, **settings)
    shown = layout_json(llm.layout())
    target = parse_layout(shown)
    source = layout_of_shards(target.tensors, 1, lambda _, shape, at: ((0,) * len(shape), shape))
    plan = TransferPlan(source, target)
    outcomes = []
    for turn, fault in enumerate(BOXES):
        if rank == 0:
            trainers[turn].go()

        def update(turn: int = turn, fault: str = fault) -> None:
            join(directory, turn, rank + 1, 3)
            dist.all_gather_object([None] * 3, shown)
            for again in range(1 + (fault == "sends twice")):
                version = f"step-{turn}" + "'" * again
                arrived = receive_boxes(
                    plan, bucket_bytes=1 << 12, timeout=PATIENCE, weight_version=version
                )
                llm.update_weights(arrived, weight_version=version)

        outcomes.append(outcome(llm, fault, raised_by(update)))
        if rank == 0:
            trainers[turn].go_on()
        dist.destroy_process_group()
    for each in trainers:
        each.end()
    llm.close()
    return outcomes


@scenario(8)
def boxes_by_hosts(directory: Path, rank: int) -> Any:
    """Rows of four ranks are joined on hosts of two, and go once to each host of two others."""
    dist.init_process_group("gloo")
    whole = {f"w{at}": torch.arange(at * 96, at * 96 + 96.0).view(16, 6) for at in range(4)}
    entries = [StoredTensorLayout(name, (16, 6), "float32", name, 0) for name in whole]
    source = layout_of_shards(entries, 4, lambda _, shape, at: rows(shape, at, 4))
    columns = [((0, 3 * (at // 2)), (16, 3)) for at in range(4)]
    target = layout_of_shards(entries, 4, lambda _, __, at: columns[at])
    plan = TransferPlan(source, target, source_node=2, target_node=2, most=2)
    stages = [sorted({(each.source, each.target) for each in of}) for of in plan.messages]
    batch = {"bucket_bytes": 2 * 16 * 6 * 4}  # two of the four tensors
    if rank < 4:
        shards = {name: each[4 * rank : 4 * rank + 4] for name, each in whole.items()}
        send_boxes(plan, source, shards, **batch)
        return stages
    (_, first), _ = columns[rank - 4]
    return {
        name: torch.equal(tensor[:, first : first + 3], whole[name][:, first : first + 3])
        for name, tensor in receive_boxes(plan, **batch)
    }
