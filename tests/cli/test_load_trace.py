"""``load --trace`` and ``load --plot``: what is recorded, and what is drawn of it."""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich import filesize

from vllm_module import ModelConfig, tensor_parallel
from vllm_module.build.model_source import ModelSource
from vllm_module.cli.pictures.load_trace import RankTrace, Sample, TraceSpan, chrome_trace
from vllm_module.cli.pictures.plots import memory_curve, plot_memory
from vllm_module.cli.rank_load import load_rank
from vllm_module.quantization import ONLINE, Rules, Scheme, quantize
from vllm_module.quantization.eight_bit import EightBitMethod

Run = Callable[..., Any]
CPU = torch.device("cpu")


def of_kind(events: list[dict[str, Any]], kind: str, rank: int) -> list[dict[str, Any]]:
    return [each for each in events if each.get("cat") == kind and each["pid"] == rank]


def end(event: dict[str, Any]) -> float:
    return event["ts"] + event["dur"]


@pytest.fixture(scope="module")
def quantized(folder: Path) -> tuple[RankTrace, int]:
    """Load rank 1 of 2 in FP8; return the recording and the bytes that were read."""
    source = ModelSource.find(ModelConfig(model=str(folder), quantization="fp8_per_channel"))
    trace = RankTrace(1)
    with tensor_parallel(rank=1, size=2):
        measured, _, model = load_rank(source, CPU, 1, show_progress=False, trace=trace)
    for module in model.modules():  # nothing of the recording stays in the model
        assert "processing" not in vars(module)
        for conversion in getattr(module, "conversions", {}).values():
            assert type(conversion).__module__ == "vllm_module.quantization.online"
    model.check_ready()
    return trace, measured.bytes_read


def test_every_byte_is_in_a_trace(run: Run, folder: Path, tmp_path: Path) -> None:
    """The reads of a rank have the bytes that it read, and every event what the format demands."""
    path = tmp_path / "load.json"
    result = run("load", folder, "--tp", 2, "--device", "cpu", "--trace", path, "--json")
    loaded = result.json["ranks"]
    trace = json.loads(path.read_text())
    events = trace["traceEvents"]
    for event in events:
        assert {"ph", "pid", "tid", "name", "args"} <= set(event)
        assert isinstance(event["tid"], int)
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    for rank in loaded:
        reads = of_kind(events, "read", rank["rank"])
        assert sum(event["args"]["bytes"] for event in reads) == rank["bytes_read"]
        threads = {
            event["tid"]: event["args"]["name"]
            for event in events
            if event["name"] == "thread_name" and event["pid"] == rank["rank"]
        }
        assert {threads[event["tid"]] for event in reads} <= {"MainThread", "weight-reader"}
        memory = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == rank["rank"]]
        assert len(memory) >= 2
        assert min(memory) > 50_000_000
    assert not of_kind(events, "process", 0)  # nothing was quantized
    names = {event["name"] for event in of_kind(events, "read", 0)}
    assert len(names) == 36


def test_a_trace_of_quantizing(quantized: tuple[RankTrace, int]) -> None:
    """A layer's pieces are read inside of quantizing, and it is processed after that."""
    trace, bytes_read = quantized
    assert sum(span.bytes for span in trace.spans if span.kind == "read") == bytes_read
    by_path = defaultdict(list)
    for span in trace.spans:
        by_path[span.path].append(span)
    layer = "model.layers.1.mlp.down_proj"
    spans = by_path[f"{layer}.weight"]
    quantizing = [span for span in spans if span.kind == "quantize"]
    assert quantizing
    for read in (span for span in spans if span.kind == "read"):
        assert any(
            each.thread == read.thread and each.start <= read.start and read.end <= each.end
            for each in quantizing
        )
    (processing,) = by_path[layer]
    assert processing.kind == "process"
    assert processing.start >= max(span.end for span in spans)
    (module,) = [
        event
        for event in chrome_trace([trace])["traceEvents"]
        if event.get("cat") == "module" and event["name"] == layer
    ]
    assert module["args"]["bytes"] == sum(span.bytes for span in spans)
    assert module["ts"] + module["dur"] == pytest.approx(
        (processing.end - trace.samples[0].time) / 1000
    )


class Recorded(EightBitMethod):
    """Puts its own processing of each layer into a trace."""

    def __init__(self, scheme: Scheme, trace: RankTrace, paths: dict[Any, str]) -> None:
        super().__init__(scheme)
        self.trace, self.paths = trace, paths

    def process_weights_after_loading(self, layer: Any) -> None:
        with self.trace.span("method", "", self.paths[layer]):
            super().process_weights_after_loading(layer)


def test_what_a_quantization_method_does_is_in_the_span_of_its_layer(folder: Path) -> None:
    """The method's check lies inside the layer's processing, on the same thread."""
    source, trace = ModelSource.find(ModelConfig(model=str(folder))), RankTrace(0)
    model = source.build(CPU)
    paths = {module: path for path, module in model.named_modules()}
    quantize(model, Rules((("Linear", Recorded(ONLINE["fp8_per_channel"], trace, paths)),)))
    with source.open() as checkpoint, trace.recording(model, checkpoint, CPU) as pairs:
        model.load_weights(pairs)
    processing = {span.path: span for span in trace.spans if span.kind == "process"}
    checks = [span for span in trace.spans if span.kind == "method"]
    assert len(checks) == 3 * 4 + 1  # four in each layer, and the head
    for check in checks:
        around = processing[check.path]
        assert around.thread == check.thread
        assert around.start <= check.start <= check.end <= around.end


def test_recording_changes_no_value(folder: Path) -> None:
    """A recorded load gives the same bits as another one."""
    source = ModelSource.find(ModelConfig(model=str(folder), quantization="fp8_per_channel"))
    models = []
    for trace in (None, RankTrace(0)):
        with tensor_parallel(rank=0, size=1):
            models.append(load_rank(source, CPU, 0, show_progress=False, trace=trace)[2])
    plain, recorded = (model.state_dict() for model in models)
    assert list(plain) == list(recorded)
    for name, tensor in plain.items():
        assert torch.equal(tensor.view(torch.uint8), recorded[name].view(torch.uint8))


def test_modules_that_overlap_have_tracks_of_their_own() -> None:
    """Two events of one track never overlap, and a track is used again when it is free."""
    trace = RankTrace(0, samples=[Sample(0, 1, None)], threads={7: "weight-reader"})
    for name, begin, stop in (("a", 0, 30), ("b", 10, 40), ("c", 35, 50), ("b", 20, 45)):
        trace.spans.append(TraceSpan("read", f"{name}.weight", f"{name}.weight", 7, begin, stop, 1))
    modules = of_kind(chrome_trace([trace])["traceEvents"], "module", 0)
    tracks = {event["name"]: event["tid"] for event in modules}
    assert tracks["a"] == tracks["c"] != tracks["b"]
    assert len(modules) == 3


def test_the_memory_that_is_drawn() -> None:
    """The curve is what the load added, beside the weights' size; a GPU's memory goes first."""
    trace = RankTrace(3, final_bytes=100)
    trace.samples = [Sample(10**9, 1000, None), Sample(2 * 10**9, 1105, None)]
    curve = memory_curve(trace)
    assert (curve["seconds"], curve["bytes"]) == ([0.0, 1.0], [0, 105])
    assert (curve["final"], curve["peak"]) == (100, 105)
    assert curve["label"] == "rank 3: peak 1.05 of the weights"
    trace.samples = [Sample(0, 1000, 50), Sample(1, 9000, 150)]
    assert memory_curve(trace)["bytes"] == [0, 100]
    assert memory_curve(trace)["memory"] == "device memory"


def test_the_weights_that_are_drawn(quantized: tuple[RankTrace, int], folder: Path) -> None:
    """The line of the weights is at the size of what the load materialized."""
    config = ModelConfig(model=str(folder), quantization="fp8_per_channel")
    with tensor_parallel(rank=1, size=2):
        model = ModelSource.find(config).build(CPU)
    expected = sum(parameter.nbytes for parameter in model.parameters())
    assert quantized[0].final_bytes == expected


@pytest.mark.parametrize("command", ["load", "bench"])
def test_without_matplotlib(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """--plot names the extra before anything is loaded."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as where it is not installed
    result = run(command, folder, "--plot", tmp_path / "plot.png")
    assert (result.code, result.out) == (1, "")
    install = "pip install 'matplotlib>=3.8' (the extra vllm-module[plot])"
    assert result.err == f"error: --plot needs matplotlib: {install}\n"


def test_a_plot_of_memory(quantized: tuple[RankTrace, int], run: Run, tmp_path: Path) -> None:
    """The file has one panel for each rank; another kind of file is refused with those it takes."""
    pytest.importorskip("matplotlib", reason="needs the extra plot")
    other = RankTrace(0, quantized[0].final_bytes, samples=quantized[0].samples)
    path = tmp_path / "memory.svg"
    plot_memory([other, quantized[0]], path)
    drawing = path.read_text()
    assert drawing.count('id="axes_') == 2
    result = run("load", "nowhere", "--plot", tmp_path / "plot.txt")
    assert (result.code, result.out) == (2, "")
    assert "must end in one of ." in result.err
    assert ".png" in result.err


@pytest.mark.parametrize("nbytes", [each for n in (4, 6, 9, 12) for each in (10**n - 1, 10**n)])
def test_memory_is_drawn_in_the_unit_that_its_size_has(tmp_path: Path, nbytes: int) -> None:
    """A size at the edge of two units has that of rich, as all that the commands print."""
    pytest.importorskip("matplotlib", reason="needs the extra plot")
    trace = RankTrace(0, 1000, samples=[Sample(0, 0, None), Sample(1, nbytes, None)])
    plot_memory([trace], tmp_path / "memory.svg")
    (unit,) = re.findall(r"added, (\w+)", (tmp_path / "memory.svg").read_text())
    assert unit == filesize.decimal(nbytes).split()[1]
