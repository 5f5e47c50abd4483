"""Counts and times of requests and of the engine, under vLLM's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class RequestStateStats:
    """Times and counts of one request.

    Attributes:
        arrival_time: seconds since 1970.
        queued_ts: time when it was added; this and the following in seconds of ``time.monotonic``.
        scheduled_ts: time when its first step was chosen; 0 before.
        first_token_ts: time when its first token was known; 0 before.
        last_token_ts: time when its latest token was known; 0 before.
        first_token_latency: seconds from its arrival to its first token.
        num_generation_tokens: tokens of all samples.
        num_preemptions: number of times that one of its samples was preempted.

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
    """A number about the engine, under its name in vLLM."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: int = 0


@dataclass
class Gauge(Metric):
    """A number that is valid at this moment."""

    value: float = 0.0


@dataclass
class Totals:
    """Sums over all requests of an engine.

    Attributes:
        prompt_tokens: tokens of prompts whose computation was begun.
        cached_tokens: tokens among them that the prefix cache had.
        generation_tokens: tokens chosen so far.
        preemptions: number of preempted samples.
        requests: number of ended requests, by the finish reason of the sample that ended last.
            Requests that ended because a whole step failed are not counted.

    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    requests: dict[str, int] = field(default_factory=dict)


def engine_metrics(
    totals: Totals, labels: dict[str, str], cache: dict[str, int], **now: float
) -> list[Metric]:
    """Return the totals as counters, and the values of ``now`` as gauges.

    The sizes of the cache are labels of a gauge, as in vLLM.
    """
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
    found += [Gauge(f"vllm:{k}", dict(labels), v) for k, v in now.items()]
    sizes = {name: str(size) for name, size in cache.items()}
    return [*found, Gauge("vllm:cache_config_info", {**labels, **sizes}, 1)]


@contextmanager
def progress(
    use_tqdm: bool | Callable[..., Any], total: int, what: str, done: int = 0
) -> Iterator[Callable[[int], object]]:
    """Yield a function that advances a count; if wanted, draw a progress bar on standard error.

    ``use_tqdm`` is True for a bar of tqdm, or a callable that makes one, such as a class of tqdm's.
    """
    if not use_tqdm:
        yield lambda _: None
        return
    from tqdm.auto import tqdm

    make = use_tqdm if callable(use_tqdm) else tqdm
    with make(total=total, initial=done, desc=what) as bar:
        yield bar.update
