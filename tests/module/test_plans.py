"""Plans: the recursion of a load, with handles that are never read."""

from __future__ import annotations

import math
import runpy
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from vllm_module import vLLMModule
from vllm_module.core.plan import LoadPlan
from vllm_module.core.run import execute
from vllm_module.distributed import tensor_parallel
from vllm_module.errors import (
    MissingWeightError,
    ModelNotReadyError,
    WeightLoadError,
    WeightReadError,
)
from vllm_module.layers import MergedColumnParallelLinear, RMSNorm
from vllm_module.testing import failing_reads
from vllm_module.testing.checkpoints import assert_same_state, state
from vllm_module.weights import PIECE_BYTES, open_checkpoint, reader_threads, staging_buffers
from vllm_module.weights.region import Region

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


class Guessed(vLLMModule):
    """A module with a tensor of each kind: typed, plain, a buffer, and zeros that it lacks."""

    zero_weights = {"bias": "it has none"}

    def __init__(self) -> None:
        super().__init__()
        self.merged = MergedColumnParallelLinear(4, [3, 5], bias=False, shard_names=["a", "b"])
        self.plain = nn.BatchNorm1d(4)


def outcome(plan: LoadPlan) -> tuple[str, dict[str, torch.Tensor]]:
    """Run a plan; return what was refused, and what its module holds."""
    try:
        execute(plan)
    except WeightLoadError as error:
        return str(error), {}
    return "", state(plan.module)


def test_a_plan_made_again_does_what_a_new_plan_does() -> None:
    """Whatever decides in the values, of the first weights or of those after them."""
    shapes = {name: each.shape for name, each in Guessed().expected_weights().items()}
    fine = {
        name: torch.ones((), dtype=torch.int64) if not shape else torch.rand(shape)
        for name, shape in shapes.items()
    } | {"bias": torch.zeros(4)}
    changes: dict[str, dict[str, torch.Tensor]] = {"fine": {}, "no zeros": {"bias": torch.ones(4)}}
    changes |= {f"NaN in {name}": {name: fine[name] * math.nan} for name in ("a.weight", "bias")}
    changes |= {f"no {name}": {name: fine[name].to("meta")} for name in ("b.weight", "plain.bias")}
    changes["others"] = {name: each + 1 for name, each in fine.items() if name != "bias"}
    for first in changes.values():
        kept = Guessed().plan_weights(
            {name: Region.of(name, each) for name, each in (fine | first).items()}
        )
        for what, change in changes.items():
            weights = fine | change
            refused, held = outcome(Guessed().plan_weights(weights))
            assert bool(refused) == (what not in ("fine", "others")), what
            again, holds = outcome(kept.again(weights))
            assert again == refused
            assert_same_state(holds, held, f"of {what}")
        assert all(each.is_meta for each in kept.module.merged.parameters())


@pytest.mark.parametrize(("gap", "joined"), [(0, "xy"), (15, "xy"), (16, "uxy"), (31, "uxy")])
def test_ranges_are_joined_up_to_the_gap(tmp_path: Path, gap: int, joined: str) -> None:
    """Vectors of 16 bytes follow each other in the file; the second of four is not read."""
    names = "uvxy"  # in the order of the file
    save_file({f"{name}.weight": torch.ones(4) for name in names}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    starts = {name: len(data) - 64 + 16 * at for at, name in enumerate(names)}
    module = vLLMModule()
    for name in "uxy":
        module.add_module(name, RMSNorm(4))
    with open_checkpoint(tmp_path) as checkpoint:
        handles = {name: handle for name, handle in checkpoint.items() if name != "v.weight"}
        ranges = module.plan_weights(handles).ranges(gap=gap)
    found = [(begin, end) for _, begin, end in ranges]
    alone = [(starts["u"], starts["u"] + 16)] if joined == "xy" else []
    assert found == [*alone, (starts[joined[0]], len(data))]


@pytest.mark.parametrize("gap", [None, 0, 40])
def test_the_ranges_of_a_rank_are_all_that_it_needs(tmp_path: Path, gap: int | None) -> None:
    """A load of a file with nothing outside of the ranges gives the same tensors.

    Without gaps, the ranges have exactly the bytes that the rank keeps.
    """

    def build(rank: int) -> vLLMModule:
        with tensor_parallel(rank=rank, size=4):
            return tree.Model(blocks=1)

    weights = {
        name: torch.randn(tensor.shape).to(tensor.dtype)
        for name, tensor in build(0).expected_weights().items()
    }
    weights["blocks.0.mlp.down_proj.weight"] = torch.randn(8, 12)
    save_file(weights, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    with open_checkpoint(tmp_path) as checkpoint:
        plan = build(0).plan_weights(dict(checkpoint.items()))
        for rank in range(4):
            ranges = plan.ranges(rank, gap)
            other = bytearray(b"\xff" * len(data))
            other[:header] = data[:header]
            for file, begin, end in ranges:
                assert file == tmp_path / "model.safetensors"
                other[begin:end] = data[begin:end]
            if gap == 0:
                kept = sum(read.nbytes for read in plan.of_rank(rank).reads())
                assert sum(end - begin for _, begin, end in ranges) == kept
            folder = tmp_path / f"{rank}"
            folder.mkdir()
            (folder / "model.safetensors").write_bytes(other)
            one, whole = build(rank), build(rank)
            with open_checkpoint(folder) as part:
                one.load_weights(dict(part.items()))
            whole.load_weights(weights)
            for name, tensor in one.state_dict().items():
                assert torch.equal(tensor, whole.state_dict()[name]), f"{name} on rank {rank}"
