"""Draw faults of weights that move: ``moves_that_fail.py DIRECTORY SEEDS...``, some at a time.

Each draw has processes of its own: ranks of a trainer, which send boxes, and those of an engine,
which are models. Something happens to one of them at a drawn tensor. Each rank writes what it
raised to ``DIRECTORY/<seed>/rank<R>.json``, and what its model holds afterwards.
"""

from __future__ import annotations

import copy
import json
import os
import random
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from vllm_module.base.process_groups import private_group
from vllm_module.cooperative import receive_boxes, send_boxes
from vllm_module.cooperative.rank_transfer import RankTransfer
from vllm_module.core.module import vLLMModule
from vllm_module.distributed import expert_parallel, tensor_parallel, together
from vllm_module.errors import ModelNotReadyError
from vllm_module.layout import Layout, StoredTensorLayout, TransferPlan, layout_of_shards, rows
from vllm_module.testing import random_weights
from vllm_module.testing.checkpoints import same_bits, state

MOVES = runpy.run_path(str(Path(__file__).with_name("moves_together.py")))
SUPPORT, build, held = (MOVES[name] for name in ("SUPPORT", "build", "held"))
AT_ONCE = 6  # draws; most of their processes wait
PATIENCE = 5.0  # seconds that a message may take
LONG = 60.0  # the same, where what happens ends no process, and others are told all the same
LIMIT = 150.0  # seconds until all ranks have written what they raised
OF_BOTH = (
    "is killed", "is stopped", "hangs", "fails", "is interrupted", "is another version",
    "has another plan",
)  # fmt: skip
OF_TRAINER = "sends twice", "has NaN", "lacks it", "has another shape", "has another dtype"
KINDS = [(fault, side) for fault in OF_BOTH for side in range(2)]  # 1 is the engine's
KINDS += [(fault, 0) for fault in OF_TRAINER]
ALONE = "is killed", "is stopped", "hangs", "is interrupted"  # others can tell by its messages
SLOW = "is stopped", "hangs", "sends twice"


class Draw(NamedTuple):
    """What happens to which rank, at which of its tensors (as a fraction of all of them)."""

    fault: str
    family: str
    source: int  # ranks
    target: int
    rank: int
    at: float
    bucket: int
    alone: bool  # ranks are not told of each other's failures by `together`

    @property
    def is_trainer(self) -> bool:
        return self.rank < self.source

    @property
    def timeout(self) -> float:
        """Seconds that a message may take: many, if others are to know of the fault before."""
        return PATIENCE if self.fault in SLOW else LONG


def drawn(seed: int) -> Draw:
    """Return a draw. Each kind of fault of each side comes in turn."""
    choose = random.Random(seed)
    fault, side = KINDS[seed % len(KINDS)]
    source, target = choose.choice((2, 3, 4)), choose.choice((2, 4))
    rank = choose.randrange(target) + source if side else choose.randrange(source)
    family, bucket = choose.choice(("llama", "mixtral", "phi3")), choose.choice((0, 1 << 13))
    at = choose.random() * (0.5 if fault == "is interrupted" else 1)  # it waits for what follows
    alone = fault in ALONE and choose.random() < 0.3
    at *= 0.8 if alone else 1  # after the last tensor nobody could tell
    return Draw(fault, family, source, target, rank, at, bucket, alone)


def model_of(draw: Draw, rank: int) -> vLLMModule:
    experts = [expert_parallel()] if draw.family == "mixtral" else []
    config = MOVES["config_of"](draw.family)
    model: vLLMModule = build(config, None, tensor_parallel(rank=rank, size=draw.target), *experts)
    return model


@cache
def planned(family: str, source: int, target: int) -> tuple[Layout, TransferPlan, Any]:
    """Return the trainer's layout, the plan, and shapes of the checkpoint's tensors."""
    model = model_of(Draw("", family, source, target, 0, 0.0, 0, False), 0)
    names = model.expected_weights()
    layout = model.plan_weights(names).layout()
    entries = [
        StoredTensorLayout(name, entry.shape, entry.dtype, name, 0)
        for name, entry, _ in layout.names()
    ]
    shards = layout_of_shards(entries, source, lambda _, shape, at: rows(shape, at, source))
    return shards, TransferPlan(shards, layout), names


class Rank:
    """One process of a draw."""

    def __init__(self, directory: Path, draw: Draw, rank: int) -> None:
        self.directory, self.draw, self.rank = directory, draw, rank
        self.size = draw.source + draw.target
        self.layout, self.plan, names = planned(draw.family, draw.source, draw.target)
        self.weights = [random_weights(names, seed=seed) for seed in (1, 2, 3)]
        self.store = dist.FileStore(str(directory / "store"), self.size)
        self.fails = rank == draw.rank
        self.model: Any = None
        if rank >= draw.source:
            self.model = model_of(draw, rank - draw.source)
            self.model.load_weights(self.weights[0])
        self.met = ""  # the tensor at which it happened

    def group(self, name: str) -> Any:
        store = dist.PrefixStore(name, self.store)
        limit = timedelta(seconds=LIMIT)
        return private_group(store, self.rank, self.size, torch.device("cpu"), limit)

    def meet(self, name: str, number: int) -> None:
        """Wait until all ranks have come so far, or ``number`` of them."""
        self.store.add(name, 1)
        SUPPORT["wait_until"](lambda: self.store.add(name, 0) >= number, name)

    def shards(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {}
        for name, each in weights.items():
            first, count = (of[0] for of in rows(tuple(each.shape), self.rank, self.draw.source))
            found[name] = each[first : first + count]
        return found

    def names(self, rank: int) -> list[tuple[int, str]]:
        """Return what a rank sends or receives: numbers and names in the plan's order."""
        sends = rank < self.draw.source
        of, number = rank if sends else rank - self.draw.source, 0
        found = []
        for route in self.plan.routes:
            for entry in route.tensors:
                for expert in range(*route.experts):
                    number += 1
                    for hop in route.sent:
                        is_end = of == (hop.source if sends else hop.target)
                        if is_end and hop.experts[0] <= expert < sum(hop.experts):
                            name = entry.name_of(expert) if entry.experts else entry.name
                            found.append((number, name))
                            break
        return found

    def happens_at(self) -> str:
        """Return the tensor at which it happens to this rank, or at which this rank waits for it.

        Those that an interrupted rank is to wait for stop at the same place of the plan's order.
        """
        draw, own = self.draw, self.names(self.rank)
        if self.fails or draw.fault != "is interrupted":
            return own[int(draw.at * len(own))][1]
        if (self.model is None) == draw.is_trainer:
            return ""
        theirs = self.names(draw.rank)
        place, _ = theirs[int(draw.at * len(theirs))]
        for number, name in own:
            if number >= place:
                return name
        self.store.add("waited for", 1)
        return ""

    def happen(self, name: str) -> None:
        """Do what happens at a tensor, or wait for it where another rank is to be interrupted."""
        draw = self.draw
        self.met = name
        if draw.fault == "is interrupted":
            if not self.fails:  # the rank waits for this one
                self.store.add("waited for", 1)
                path = self.directory / f"rank{draw.rank}.json"
                SUPPORT["wait_until"](path.exists, "a rank is interrupted")
            return
        if not self.fails:
            return
        bucket, moving = self.draw.bucket, object.__new__(RankTransfer)
        moving.plan = self.plan
        batches = [[each.name for each in batch] for batch in moving.batches(bucket)]
        while name not in batches[0]:
            del batches[0]
        (self.directory / "met.json").write_text(json.dumps([name, *chain(*batches)]))
        if draw.fault == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if draw.fault == "is stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if draw.fault == "hangs":
            time.sleep(LIMIT)
        if draw.fault == "fails":
            raise ValueError("of the program")

    def interrupt(self) -> None:
        others = self.draw.target if self.draw.is_trainer else self.draw.source
        store = dist.FileStore(str(self.directory / "store"), self.size)
        SUPPORT["wait_until"](lambda: store.add("waited for", 0) >= others, "ranks wait")
        time.sleep(0.3)  # it waits in torch by now, or will not wait for long
        (self.directory / "interrupted").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGINT)

    def fault_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        if not self.fails:
            return tensor
        fault = self.draw.fault
        if fault == "has NaN":
            tensor = tensor.clone()
            tensor.view(-1)[-1] = float("nan")
        if fault == "has another shape":
            tensor = tensor[:, :-1] if tensor.dim() > 1 else tensor[:-1]
        if fault == "has another dtype":
            tensor = tensor.float()
        return None if fault == "lacks it" else tensor

    def move(self, turn: int, group: Any, version: str, plan: TransferPlan, at: str) -> None:
        """Send or receive; at tensor ``at`` it happens."""
        options: dict[str, Any] = {
            "group": group, "bucket_bytes": self.draw.bucket, "timeout": self.draw.timeout,
            "weight_version": version,
        }  # fmt: skip
        rank = self
        if self.model is None:

            class Shards(dict[str, torch.Tensor]):
                def get(self, name: str, default: Any = None) -> Any:
                    if name != at:
                        return self[name]
                    if not rank.met:
                        rank.happen(name)
                    return rank.fault_of(name, self[name])

            send_boxes(plan, self.layout, Shards(self.shards(self.weights[turn])), **options)
            if self.fails and self.draw.fault == "sends twice" and at:
                send_boxes(plan, self.layout, self.shards(self.weights[turn]), **options)
            return

        def arrived() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in receive_boxes(plan, **options):
                if name == at:
                    self.happen(name)
                yield name, tensor

        self.model.update_weights(arrived())

    def holds(self, turn: int) -> bool:
        other = model_of(self.draw, self.rank - self.draw.source)
        other.load_weights(self.weights[turn])
        mine, expected = state(self.model), state(other)
        return all(same_bits(mine[path], each) for path, each in expected.items())

    def run(self) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.set_num_threads(1)
        draw, note = self.draw, dict[str, Any]()
        at = self.happens_at()
        version, plan = "1", self.plan
        if self.fails and draw.fault == "is another version":
            version = "2"
        if self.fails and draw.fault == "has another plan":
            plan = copy.copy(plan)
            plan.routes = plan.routes[::-1]
        group = self.group("first")
        self.meet("ready", self.size)
        if self.fails and draw.fault == "is interrupted":
            threading.Thread(target=self.interrupt, daemon=True).start()
        try:
            work = partial(self.move, 1, group, version, plan, at)
            note["said"] = note["causes"] = ""
            if draw.alone:
                work()
            else:
                together(work, timeout=draw.timeout, group=group)
        except BaseException as error:
            note["kind"], note["said"] = type(error).__name__, str(error)
            note["causes"] = str(error.__cause__)
            stack = traceback.extract_tb(error.__traceback__)
            note["waited"] = "interruptibly" in [each.name for each in stack]
            note["ranks"] = list(getattr(error, "ranks", ()))
        note["met"], note["at"] = self.met, time.time()
        if self.model is not None:
            try:
                self.model.check_ready()
            except ModelNotReadyError as error:
                note["refuses"] = str(error)
            note["holds"] = [turn for turn in (0, 1) if self.holds(turn)]
        path = self.directory / f"rank{self.rank}.json"
        path.with_suffix(".new").write_text(json.dumps(note))
        path.with_suffix(".new").rename(path)
        if draw.fault in ("is killed", "is stopped", "hangs"):
            return
        # The next round, in another group, by the same ranks.
        del group
        group = self.group("second")
        self.meet("again", self.size)
        self.met = "over"
        together(partial(self.move, 2, group, "3", self.plan, ""), timeout=LONG, group=group)
        right = self.model is None or self.holds(2)
        (self.directory / f"again{self.rank}").write_text(str(right))


class Running:
    """The processes of a draw."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory, self.draw = directory / str(seed), drawn(seed)
        self.directory.mkdir()
        (self.directory / "draw.json").write_text(json.dumps(self.draw._asdict()))
        planned(self.draw.family, self.draw.source, self.draw.target)  # once, for all ranks
        self.begin = time.monotonic()

        def work(rank: int) -> None:
            log = os.open(self.directory / f"rank{rank}.log", os.O_CREAT | os.O_WRONLY)
            os.dup2(log, 1)
            os.dup2(log, 2)
            Rank(self.directory, self.draw, rank).run()

        self.pids = dict(enumerate(SUPPORT["fork_ranks"](self._size(), work, port=0)))

    def _size(self) -> int:
        return self.draw.source + self.draw.target

    def has_ended(self) -> bool:
        """Return whether all have, or none of those that are left goes on."""
        for rank, pid in [*self.pids.items()]:
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self.pids[rank]
        faulty = self.draw.rank if self.draw.fault in ("is stopped", "hangs") else None
        if self.pids.keys() - {faulty} and time.monotonic() - self.begin < LIMIT:
            return False
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return True


def main(directory: Path, seeds: list[int]) -> None:
    torch.set_num_threads(1)
    waiting, running = seeds[::-1], list[Running]()
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            running.append(Running(directory, waiting.pop()))
        running = [each for each in running if not each.has_ended()]
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(each) for each in sys.argv[2:]])
