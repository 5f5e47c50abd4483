"""Counts and times of requests and of the engine, under vLLM's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

# Upper edges of buckets in seconds, as in vLLM.
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
          10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
          20.0, 40.0, 80.0)  # fmt: skip
_WHOLE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
          240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip


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
class Histogram(Metric):
    """How many values were observed, their sum, and how many were at most each upper edge."""

    count: int = 0
    sum: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict)


def _times() -> list[Histogram]:
    return [
        Histogram(f"vllm:{name}_seconds", buckets=dict.fromkeys([*map(str, edges), "+Inf"], 0))
        for name, edges in {
            "time_to_first_token": _FIRST,
            "request_time_per_output_token": _TOKEN,
            "e2e_request_latency": _WHOLE,
        }.items()
    ]


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
        times: of the same requests, if they have a token: to the first one, for each after it,
            and in all.

    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    requests: dict[str, int] = field(default_factory=dict)
    times: list[Histogram] = field(default_factory=_times)

    def end(self, reason: str, stats: RequestStateStats, tokens: int) -> None:
        """Count a request that has ended, whose longest sample has ``tokens``."""
        self.requests[reason] = self.requests.get(reason, 0) + 1
        if not tokens:
            return
        first, last = stats.first_token_ts, stats.last_token_ts
        token = (last - first) / (tokens - 1) if tokens > 1 else None
        observed = stats.first_token_latency, token, last - stats.queued_ts
        for histogram, seconds in zip(self.times, observed, strict=True):
            if seconds is not None:
                histogram.count += 1
                histogram.sum += seconds
                for edge in histogram.buckets:
                    histogram.buckets[edge] += seconds <= float(edge)


def engine_metrics(
    totals: Totals, labels: dict[str, str], cache: dict[str, int], **now: float
) -> list[Metric]:
    """Return the totals as counters and histograms, and the values of ``now`` as gauges.

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
    found += [replace(t, labels=dict(labels), buckets=dict(t.buckets)) for t in totals.times]
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
