"""Metrics in Prometheus' text format, under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vllm_module.runtime.metrics import Counter, Histogram, Metric


def prometheus_text(metrics: Iterable[Metric], model: str) -> str:
    """Return the engine's metrics as Prometheus reads them."""
    lines: list[str] = []
    known: set[str] = set()
    for metric in metrics:
        name = f"{metric.name}_total" if isinstance(metric, Counter) else metric.name
        if name not in known:
            known.add(name)
            lines.append(f"# TYPE {name} {type(metric).__name__.lower()}")
        labels = {**metric.labels, "model_name": model}
        if isinstance(metric, Histogram):
            for edge, count in metric.buckets.items():
                lines.append(f"{name}_bucket{_labelled({**labels, 'le': edge})} {count}")
            lines.append(f"{name}_sum{_labelled(labels)} {metric.sum}")
            lines.append(f"{name}_count{_labelled(labels)} {metric.count}")
        else:
            lines.append(f"{name}{_labelled(labels)} {metric.value}")  # type: ignore[attr-defined]
    return "\n".join([*lines, ""])


def _labelled(labels: Mapping[str, str]) -> str:
    escaped = {
        name: value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        for name, value in labels.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"
