"""The host's work of a decoding step: everything but the model and the choice of tokens.

    python tests/bench/host.py [--out tests/bench/results/host.json]

Runs on a CPU; the model returns logits that are there already. Refuses to print a number unless
every sequence has its own pages in the tables that the model gets, and the next token that its
logits give. Beside it, in the same rounds: what it takes to make a tensor of all block tables from
lists, as the runner once did in every step, and the least work of Python with so many sequences:
a pass over them that makes a list and a tensor of each of a step's inputs.

Then, of a device that computes a step in 3.8 ms, as long as an H200 takes to read the weights of an
8B model: how long it has nothing to do in a step, with ``async_scheduling`` and without. The device
is a clock, for which the host waits where it reads tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from machine import clock, machine, over, spread, write
from stepping import steps

from vllm_module import SamplingParams
from vllm_module.layers import AttentionMetadata
from vllm_module.runtime import engine
from vllm_module.runtime.cache.page_pool import PagePool
from vllm_module.runtime.engine import Engine
from vllm_module.runtime.model_runner import ModelRunner
from vllm_module.runtime.sampling import sampler
from vllm_module.runtime.sampling.sampler import Sampled
from vllm_module.runtime.scheduler import Scheduler
from vllm_module.runtime.step_inputs import StepInputs

SIZES = ((1, 2048), (64, 256), (64, 2048), (256, 2500))
PAGE, VOCAB, STEPS = 16, 64, 96  # six pages more for each sequence
CPU = torch.device("cpu")
DEVICE_STEP = 3.8e-3  # seconds
sampling: list[float] = []  # seconds of the calls that choose tokens and read them


def timed(work: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``work``, which adds its seconds to ``sampling``."""

    def call(*arguments: Any) -> Any:
        begin = time.perf_counter()
        result = work(*arguments)
        sampling.append(time.perf_counter() - begin)
        return result

    return call


class Device:
    """A clock that is busy for some time after each launch, and how long it was not."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.idle, self.ready = seconds, 0.0, 0.0

    def launch(self) -> None:
        now = time.perf_counter()
        self.idle = max(0.0, now - self.ready)
        self.ready = max(now, self.ready) + self.seconds

    def download(self, numbers: torch.Tensor) -> Any:
        """Return what :class:`~vllm_module.runtime.transfers.Download` does: wait, and read."""
        ready = self.ready

        def read(wait: object) -> list[Any]:
            while time.perf_counter() < ready:
                pass
            return numbers.tolist()

        return SimpleNamespace(read=read)


class Prepared:
    """A model that takes no time: a token's logits are those prepared for it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))
        self.next_token = order.tolist()
        self.logits = torch.nn.functional.one_hot(order, VOCAB).float()
        self.metadata: AttentionMetadata | None = None

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        self.metadata = metadata
        self.device.launch()
        return ids.unsqueeze(-1)

    def compute_logits(self, ids: torch.Tensor) -> torch.Tensor:
        return self.logits[ids.squeeze(-1)]


class Host:
    """An engine whose requests decode, each with about ``pages`` pages."""

    def __init__(self, sequences: int, pages: int, seconds: float, overlapped: bool) -> None:
        self.device, self.overlapped = Device(seconds), overlapped
        self.model = Prepared(self.device)
        most = pages + STEPS // PAGE + 2
        runner = ModelRunner(self.model, CPU, sequences, most)  # type: ignore[arg-type]
        pool = PagePool(most * sequences, PAGE)
        scheduler = Scheduler(pool, PagePool(0, PAGE), sequences, 1 << 30)

        def execute(inputs: StepInputs, sampled: torch.Tensor | None = None) -> torch.Tensor:
            self.inputs = inputs
            return runner.run(inputs, sampled)

        length = most * PAGE
        self.engine = Engine(execute, scheduler, VOCAB, length, async_scheduling=overlapped)
        params = SamplingParams(temperature=0, max_tokens=10 * STEPS, ignore_eos=True)
        # Sequences come to the ends of their pages in different steps.
        requests = [
            self.engine.add(str(index), [index % 7] * (pages * PAGE - index % PAGE), params)
            for index in range(sequences)
        ]
        self.sequences = [request.sequences[0] for request in requests]
        self.steps = steps(self.engine, requests)
        self.step()

    def step(self) -> float:
        """Return the seconds of a step without the choice of tokens."""
        sampling.clear()
        sampler.Download = self.device.download  # type: ignore[assignment, misc]
        return next(self.steps).seconds - sum(sampling)

    def check(self) -> None:
        """Take a step, and refuse to go on unless it computes what it should."""
        last = [sequence.tokens[-1] for sequence in self.sequences]
        self.step()
        metadata = self.model.metadata
        assert metadata is not None
        for row, (sequence, token) in enumerate(zip(self.sequences, last, strict=True)):
            # The model was called last with this step's tokens, or already with the next one's.
            position = len(sequence.tokens) - (1 if self.overlapped else 2)
            slot = sequence.pages[position // PAGE] * PAGE + position % PAGE
            right = (
                metadata.block_tables[row, : len(sequence.pages)].tolist() == sequence.pages
                and metadata.slot_mapping[row] == slot
                and metadata.context_lens[row] == position + 1
                and sequence.tokens[-2:] == [token, self.model.next_token[token]]
            )
            if not right:
                raise SystemExit(f"sequence {row} is computed from other pages or tokens")

    def idle(self, steps: int) -> list[float]:
        """Return for how many seconds the device has nothing to do in each of some steps."""
        seconds = []
        for _ in range(steps):
            self.step()
            seconds.append(self.device.idle)
        return seconds

    def tables_from_lists(self) -> float:
        """Return the seconds to make a tensor of all block tables."""

        def work() -> None:
            width = max(len(sequence.pages) for sequence in self.sequences)
            padded = [s.pages + [-1] * (width - len(s.pages)) for s in self.sequences]
            torch.tensor(padded, dtype=torch.int32)

        return clock(work)

    def least(self) -> float:
        """Return the seconds of one pass over the sequences and six tensors of the results."""
        begin = time.perf_counter()
        lists: list[list[int]] = [[], [], [], [], [], []]
        for sequence in self.sequences:
            lists[0].append(sequence.tokens[-1])
            lists[1].append(sequence.num_computed)
            lists[2].append(sequence.pages[-1])
            lists[3].append(sequence.num_computed)
            lists[4].append(sequence.num_computed)
            lists[5].append(sequence.row)
        for values in lists:
            torch.tensor(values)
        return time.perf_counter() - begin


def measure(sequences: int, pages: int) -> dict[str, Any]:
    host = Host(sequences, pages, 0.0, False)
    host.check()
    entries = []
    seconds: dict[str, list[float]] = {"step": [], "tables from lists": [], "least": []}
    for _ in range(STEPS // PAGE - 1):
        # Sixteen steps of each after one another, since each reads much memory of its own.
        for _ in range(PAGE):
            seconds["step"].append(host.step())
            entries.append(sum(len(changed) for _, _, changed in host.inputs.new_pages))
        seconds["tables from lists"] += [host.tables_from_lists() for _ in range(PAGE)]
        seconds["least"] += [host.least() for _ in range(PAGE)]
    host.check()
    ways = {
        name: Host(sequences, pages, DEVICE_STEP, name == "overlapped")
        for name in ("in turn", "overlapped")
    }
    idle: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(STEPS // PAGE - 1):
        for name, each in ways.items():
            each.check()
            idle[name] += each.idle(PAGE - 1)
    return {
        "idle microseconds": {name: spread([s * 1e6 for s in idle[name]]) for name in idle},
        "microseconds": {name: spread([s * 1e6 for s in each]) for name, each in seconds.items()},
        "tables from lists over step": spread(over(seconds, "tables from lists", "step")),
        "step over least": spread(over(seconds, "step", "least")),
        "entries written a step": statistics.mean(entries),
        "entries of the tables": sequences * pages,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    engine.sample, Sampled.read = timed(engine.sample), timed(Sampled.read)  # type: ignore[method-assign]
    results = {}
    for sequences, pages in SIZES:
        figures = measure(sequences, pages)
        results[f"{sequences} x {pages}"] = figures
        step = figures["microseconds"]["step"]
        print(
            f"{sequences} sequences of {pages} pages: {step['median']:.0f} µs a step (least "
            f"{step['least']:.0f}), {figures['step over least']['median']:.1f} times the least of "
            f"Python; block tables from lists alone would take "
            f"{figures['tables from lists over step']['median']:.1f} times as long as the step; "
            f"{figures['entries written a step']:.1f} of "
            f"{figures['entries of the tables']} entries are written; a device has nothing to do "
            f"for {figures['idle microseconds']['in turn']['least']:.0f} µs of a step or more, "
            f"and for {figures['idle microseconds']['overlapped']['median']:.0f} (greatest "
            f"{figures['idle microseconds']['overlapped']['greatest']:.0f}) if steps overlap",
            flush=True,
        )
    if arguments.out:
        write(arguments.out, results)


if __name__ == "__main__":
    main()
