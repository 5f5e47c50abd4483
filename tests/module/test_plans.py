"""Plans: the recursion of a load, with handles that are never read."""

from __future__ import annotations

import runpy
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_module import vLLMModule
from vllm_module.core.run import execute
from vllm_module.distributed import tensor_parallel
from vllm_module.errors import (
    MissingWeightError,
    ModelNotReadyError,
    WeightLoadError,
    WeightReadError,
)
from vllm_module.layers import RMSNorm
from vllm_module.testing import failing_reads
from vllm_module.testing.checkpoints import assert_same_state, state
from vllm_module.weights import PIECE_BYTES, reader_threads, staging_buffers

tree = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("tree.py"))))


def unreadable(tensors):
    return failing_reads(tensors, tensors, AssertionError("read"))


def test_a_plan_reads_nothing_and_names_every_part() -> None:
    """Law 8: a rank's plan has each handle narrowed to what it keeps; the model stays on meta."""
    tensors = tree.checkpoint()
    handles = unreadable(tensors)
    kept = 0
    for rank in range(2):
        with tensor_parallel(rank=rank, size=2):
            model = tree.Model()
        plan = model.plan_weights(handles)
        assert plan.report.ok
        reads = list(plan.reads())
        read_here = {read.name for read in reads}
        # The vocabulary of 10 is padded to 64 rows, so rank 0 has all of it.
        assert read_here == set(tensors) - ({"embed.weight", "head.weight"} if rank else set())
        kept += sum(r.source.shape.numel() for r in reads if r.name == "blocks.0.q_proj.weight")
        assert all(p.is_meta for n, p in model.named_parameters() if ".plain." not in n)
        with pytest.raises(ModelNotReadyError):
            model.check_ready()
    assert kept == tensors["blocks.0.q_proj.weight"].numel()


def test_a_plan_of_a_stream_of_tensors_writes_nothing() -> None:
    """Tensors that an iterator yields are not copied, whether or not the model is loaded."""
    tensors = tree.checkpoint()
    model = tree.Model().eval()
    plain = state(model.blocks[0].plain)
    assert model.plan_weights(iter(tensors.items())).report.ok
    assert all(p.is_meta for n, p in model.named_parameters() if ".plain." not in n)
    assert_same_state(state(model.blocks[0].plain), plain, "after a plan")
    model.load_weights(tensors)
    before = state(model)
    plan = model.plan_weights((name, tensor + 1) for name, tensor in tensors.items())
    assert {read.name for read in plan.reads()} == tensors.keys()
    assert_same_state(state(model), before, "after a plan")
    model(torch.arange(3))


def test_a_plan_tells_what_a_load_would_refuse() -> None:
    """A plan's report has the problems, and no error is raised; it takes expected_weights too."""
    tensors = tree.Model().expected_weights()
    assert all(tensor.is_meta for tensor in tensors.values())
    assert tree.Model().plan_weights(tensors).report.ok
    del tensors["embed.weight"]
    report = tree.Model().plan_weights(tensors).report
    assert [problem.name for problem in report.missing] == ["embed.weight"]


def test_handles_are_refused_before_a_byte_is_read() -> None:
    """Law 8: names, shapes and dtypes are compared first, even in a stream."""
    handles = unreadable(tree.checkpoint())
    del handles["blocks.1.norm.weight"]
    for weights in (handles, iter(handles.items())):
        with pytest.raises(MissingWeightError):
            tree.Model().load_weights(weights)


def test_a_plan_says_how_much_memory_the_load_takes() -> None:
    """Law 7: the parameters once, and beside them what the reading threads hold at a time."""
    handles = unreadable(tree.checkpoint())
    model = tree.Model()
    plan = model.plan_weights(handles)
    whole = sum(t.numel() * t.itemsize for t in (*model.parameters(), *model.buffers()))
    assert plan.memory("cpu") == (whole, 0, 0)
    buffers = staging_buffers(reader_threads(torch.device("cuda")))
    assert plan.memory("cuda:1") == (whole, buffers * PIECE_BYTES, 0)
    cast = {name: each.double() for name, each in tree.checkpoint().items()}
    plan = model.plan_weights(unreadable(cast))
    sizes = sorted(8 * read.source.shape.numel() for read in plan.reads())
    few, many = (sum(sizes[-reader_threads(torch.device(on)) :]) for on in ("cpu", "cuda"))
    assert plan.memory("cpu") == (whole, few, 0)
    assert plan.memory("cuda") == (whole, buffers * PIECE_BYTES, many)


def test_a_plan_is_shown_as_a_table() -> None:
    """``repr`` and a notebook show counts and sizes, and no module tree."""
    tensors = tree.checkpoint()
    del tensors["head.weight"]
    plan = tree.Model().plan_weights(unreadable(tensors | {"<b>": torch.ones(1)}))
    lines = repr(plan).splitlines()
    assert lines[0] == "LoadPlan"
    assert {"missing": "1", "unexpected": "1"}.items() <= dict(
        line.split(maxsplit=1) for line in lines[1:]
    ).items()
    assert "<th style='text-align:left'>missing</th>" in plan._repr_html_()
    assert "Model" in plan._repr_html_()


def test_a_plan_is_run_as_a_load_is() -> None:
    """A plan holds all that a load needs: running it gives the bits that a load gives."""
    tensors = tree.checkpoint()
    expected, model = tree.Model().eval(), tree.Model().eval()
    expected.load_weights(tensors)
    plan = model.plan_weights(tensors)
    execute(plan)
    assert_same_state(state(model), state(expected), "by its plan")
    model(torch.arange(3))
    assert model.load_report is plan.report
    del tensors["blocks.0.norm.weight"]
    refused = tree.Model()
    with pytest.raises(MissingWeightError, match=r"blocks\.0\.norm\.weight"):
        execute(refused.plan_weights(tensors))
    assert all(p.is_meta for n, p in refused.named_parameters() if ".plain." not in n)


class Elsewhere:
    """A reader that asks a server for all of a module's pieces before it fills any."""

    def __init__(self, asked: list[str], fails_at: str = "") -> None:
        self.asked, self.fails_at = asked, fails_at

    def __enter__(self):
        return self

    def __exit__(self, *error: object) -> None:
        self.asked.append("closed")

    def stages(self, weight, destination) -> bool:
        return True

    def read(self, jobs) -> None:
        jobs = list(jobs)
        self.asked += [handle.name for handle, _ in jobs]
        for handle, destination in jobs:
            if handle.name == self.fails_at:
                raise WeightReadError(f"{handle.name}: the server hung up")
            handle.read_into(destination)


def test_another_reader_gets_the_plan_in_its_order() -> None:
    """It fetches what the plan says, and a failure leaves the model on meta."""
    tensors = tree.checkpoint()
    expected, model = tree.Model(), tree.Model()
    expected.load_weights(tensors)
    asked: list[str] = []
    plan = model.plan_weights(tensors)
    execute(plan, lambda plan: Elsewhere(asked))
    assert_same_state(state(model), state(expected), "read elsewhere")
    assert asked == [*(fill.name for fill in plan.fills), "closed"]
    broken = tree.Model()
    with pytest.raises(WeightReadError, match=r"embed\.weight: the server hung up"):
        execute(broken.plan_weights(tensors), lambda plan: Elsewhere([], "embed.weight"))
    assert all(p.is_meta for n, p in broken.named_parameters() if ".plain." not in n)
    with pytest.raises(ModelNotReadyError, match="hung up"):
        broken(torch.arange(3))


def test_running_a_plan_checks_what_planning_does_not_look_at() -> None:
    """A tensor without data is refused by name when the plan is run, and nothing is written."""
    tensors = tree.checkpoint()
    tensors["embed.weight"] = tensors["embed.weight"].to("meta")
    model = tree.Model()
    plan = model.plan_weights(tensors)
    assert plan.report.ok
    with pytest.raises(WeightLoadError, match=r"embed\.weight: expected a tensor with data"):
        execute(plan)

    class Layer(vLLMModule):
        zero_weights = {"bias": "it has none"}

        def __init__(self) -> None:
            super().__init__()
            self.norm = RMSNorm(4)

    for values, fits in ((torch.zeros(4), True), (torch.ones(4), False)):
        layer = Layer()
        plan = layer.plan_weights({"norm.weight": torch.ones(4), "bias": values})
        assert plan.report.skipped == {"bias": "it has none"}
        with nullcontext() if fits else pytest.raises(WeightLoadError, match="expected zeros"):
            execute(plan)
