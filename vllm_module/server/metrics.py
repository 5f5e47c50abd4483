"""Metrics in Prometheus' text format, under vLLM's names."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import accumulate

from vllm_module.runtime.metrics import Counter, Metric, RequestStateStats

# Seconds, as vLLM's buckets.
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
          10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
          20.0, 40.0, 80.0)  # fmt: skip
_WHOLE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
          240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip


class _Histogram:
    def __init__(self, edges: tuple[float, ...]) -> None:
        self.edges, self.sum = edges, 0.0
        self.counts = [0] * (len(edges) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.edges, value)] += 1
        self.sum += value


class Histograms:
    """Times of requests that have ended."""

    def __init__(self) -> None:
        self._histograms = {
            "vllm:time_to_first_token_seconds": _Histogram(_FIRST),
            "vllm:request_time_per_output_token_seconds": _Histogram(_TOKEN),
            "vllm:e2e_request_latency_seconds": _Histogram(_WHOLE),
        }

    def observe(self, stats: RequestStateStats) -> None:
        """Count a request."""
        if not stats.num_generation_tokens:
            return
        first, token, whole = self._histograms.values()
        first.observe(stats.first_token_latency)
        whole.observe(stats.last_token_ts - stats.queued_ts)
        if stats.num_generation_tokens > 1:
            seconds = stats.last_token_ts - stats.first_token_ts
            token.observe(seconds / (stats.num_generation_tokens - 1))

    def lines(self, labels: Mapping[str, str]) -> Iterable[str]:
        """Yield the lines of the text format."""
        for name, histogram in self._histograms.items():
            yield f"# TYPE {name} histogram"
            totals = list(accumulate(histogram.counts))
            for edge, total in zip((*histogram.edges, "+Inf"), totals, strict=True):
                yield f"{name}_bucket{_labelled({**labels, 'le': str(edge)})} {total}"
            yield f"{name}_sum{_labelled(labels)} {histogram.sum}"
            yield f"{name}_count{_labelled(labels)} {totals[-1]}"


def prometheus_text(metrics: Iterable[Metric], histograms: Histograms, model: str) -> str:
    """Return the engine's metrics and histograms as Prometheus reads them."""
    lines: list[str] = []
    known: set[str] = set()
    for metric in metrics:
        counts = isinstance(metric, Counter)
        name = f"{metric.name}_total" if counts else metric.name
        if name not in known:
            known.add(name)
            lines.append(f"# TYPE {name} {'counter' if counts else 'gauge'}")
        labels = {**metric.labels, "model_name": model}
        lines.append(f"{name}{_labelled(labels)} {metric.value}")  # type: ignore[attr-defined]
    return "\n".join([*lines, *histograms.lines({"model_name": model}), ""])


def _labelled(labels: Mapping[str, str]) -> str:
    escaped = {
        name: value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        for name, value in labels.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"
