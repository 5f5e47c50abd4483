"""What is counted of requests and of the engine; names are vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class RequestStateStats:
    """When a request did what.

    Attributes:
        arrival_time: seconds since 1970.
        queued_ts: when it was added, as all that follow in seconds of ``time.monotonic``.
        scheduled_ts: when its first step was chosen; 0 before.
        first_token_ts: when its first token was known; 0 before.
        last_token_ts: when its latest token was known; 0 before.
        first_token_latency: seconds from its arrival to its first token.
        num_generation_tokens: of all samples.
        num_preemptions: how often a sample had to make room for others.

    """

    num_generation_tokens: int = 0
    num_preemptions: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0

    def add_token(self, now: float) -> None:
        """Count a token that became known at ``now``."""
        if not self.num_generation_tokens:
            self.first_token_ts = now
            self.first_token_latency = now - self.queued_ts
        self.num_generation_tokens += 1
        self.last_token_ts = now


@dataclass
class StepStats:
    """The measurements of one step.

    Attributes:
        counts: for each sequence of the step, its tokens that were computed.
        used_pages: of the KV cache, before pages of sequences that ended were freed.
        seconds: that the step took.

    """

    counts: list[int]
    used_pages: int
    seconds: float


@dataclass
class Metric:
    """A number of the engine, by its name in vLLM."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: int = 0


@dataclass
class Gauge(Metric):
    """A number that is true now."""

    value: float = 0.0


@dataclass
class Totals:
    """Sums over all requests of an engine.

    Attributes:
        prompt_tokens: of prompts whose computation was begun.
        cached_tokens: those of them that the prefix cache had.
        generation_tokens: chosen so far.
        preemptions: of samples.
        requests: that ended, by the reason of their first sample.

    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    requests: dict[str, int] = field(default_factory=dict)


def engine_metrics(totals: Totals, labels: dict[str, str], **now: float) -> list[Metric]:
    """Return sums as counters, and numbers of the moment, which are named, as gauges."""
    counted = {
        "prompt_tokens": totals.prompt_tokens,
        "generation_tokens": totals.generation_tokens,
        "prefix_cache_queries": totals.prompt_tokens,
        "prefix_cache_hits": totals.cached_tokens,
        "num_preemptions": totals.preemptions,
    }
    found: list[Metric] = [Counter(f"vllm:{k}", dict(labels), v) for k, v in counted.items()]
    for reason, count in totals.requests.items():
        with_reason = {**labels, "finished_reason": reason}
        found.append(Counter("vllm:request_success", with_reason, count))
    return found + [Gauge(f"vllm:{k}", dict(labels), v) for k, v in now.items()]


@contextmanager
def progress(
    use_tqdm: bool | Callable[..., Any], total: int, what: str, done: int = 0
) -> Iterator[Callable[[int], object]]:
    """Yield a function that counts on, and draw its progress bar on standard error if wanted.

    ``use_tqdm`` is true for a bar of tqdm, or makes one, such as a class of tqdm's.
    """
    if not use_tqdm:
        yield lambda _: None
        return
    from tqdm.auto import tqdm

    make = use_tqdm if callable(use_tqdm) else tqdm
    with make(total=total, initial=done, desc=what) as bar:
        yield bar.update
