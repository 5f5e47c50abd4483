"""Histograms of times, beside Prometheus' definition of a bucket."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from vllm_module.runtime.metrics import RequestStateStats, Totals, engine_metrics
from vllm_module.server.metrics import prometheus_text

FIRST, TOKEN, WHOLE = (
    "vllm:time_to_first_token_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
)


def read(totals: Totals, name: str) -> tuple[dict[float, int], float, int]:
    """Return the count of each bucket by its upper edge, the sum, and the number of values."""
    text = prometheus_text(engine_metrics(totals, {}, {}), "m")
    assert text.count(f"# TYPE {name} histogram\n") == 1
    buckets = re.findall(rf'^{name}_bucket{{model_name="m",le="([^"]+)"}} (\d+)$', text, re.M)
    (total,) = re.findall(rf"^{name}_sum{{[^}}]+}} (.+)$", text, re.M)
    (count,) = re.findall(rf"^{name}_count{{[^}}]+}} (\d+)$", text, re.M)
    return {float(edge): int(number) for edge, number in buckets}, float(total), int(count)


@pytest.mark.parametrize("name", [FIRST, TOKEN, WHOLE])
def test_a_bucket_has_all_values_up_to_its_edge(name: str) -> None:
    """Values on each edge, between two, below the first and above the last."""
    edges = list(read(Totals(), name)[0])
    assert edges == sorted(edges)
    assert edges[-1] == float("inf")
    between = [(low + high) / 2 for low, high in pairwise(edges[:-1])]
    values = [0.0, *edges[:-1], *between, 2 * edges[-2]]
    totals = Totals()
    for value in values:
        stats = RequestStateStats(num_generation_tokens=2, last_token_ts=value)
        stats.first_token_latency = value if name == FIRST else 0.0
        totals.end("stop", stats, 2)
    buckets, total, count = read(totals, name)
    assert buckets == {edge: sum(value <= edge for value in values) for edge in edges}
    assert (total, count) == (pytest.approx(sum(values)), len(values))


@pytest.mark.parametrize("tokens", [1, 2, 3, 9])
def test_the_time_of_a_token_is_the_mean_of_those_after_the_first(tokens: int) -> None:
    """Tokens become known at times that are written down; one token alone has no such time."""
    stats, times = (
        RequestStateStats(queued_ts=3.0),
        [5.0 + 0.5 * number for number in range(tokens)],
    )
    for time in times:
        stats.add_token(time)
    totals = Totals()
    totals.end("stop", stats, tokens)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps) if gaps else 0.0
    assert read(totals, TOKEN)[1:] == (pytest.approx(mean), int(bool(gaps)))
    assert read(totals, FIRST)[1:] == (2.0, 1)
    assert read(totals, WHOLE)[1:] == (times[-1] - 3.0, 1)


def test_a_request_without_a_token_is_not_counted() -> None:
    totals = Totals()
    totals.end("stop", RequestStateStats(queued_ts=3.0), 0)
    assert all(read(totals, name)[2] == 0 for name in (FIRST, TOKEN, WHOLE))
