"""The law of stages: a pipeline's stages hold and compute what the whole model does."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from hypothesis import strategies as st

from vllm_module.core.digests import ModelDigest
from vllm_module.core.module import vLLMModule
from vllm_module.distributed import PipelineStage
from vllm_module.errors import ShardingError, UnsupportedModelError, WeightLoadError
from vllm_module.layout import layout_of_stages, parse_layout
from vllm_module.layout.layout_file import layout_json
from vllm_module.testing.accounting import may_be_absent
from vllm_module.testing.case import Case, forward, law, refusal
from vllm_module.testing.checkpoints import CheckpointForm, Tensors, assert_same_state, state
from vllm_module.testing.layouts import (
    assert_add_up,
    assert_held_as_written,
    digest_by,
    load_unprocessed,
)
from vllm_module.testing.names import Names
from vllm_module.testing.sharding import assert_outputs
from vllm_module.testing.sources import WatchedHandle, WatchedSource
from vllm_module.weights.region import Region


@law
def assert_staged(case: Case) -> None:
    """Law 13: a pipeline's stages hold, each its own layers, what the whole model holds.

    Every layer is on one stage, in order, and stages differ by one layer at most. What comes before
    and behind the layers is on the first and the last stage; what both need, on both. A stage is
    given the whole checkpoint in any order and form. It skips exactly the names of other stages,
    each with a stage that has it, and reads what the whole model reads of its own. It holds the
    whole model's bits, after an update in place too. One after the other, the stages compute the
    whole model's logits, up to the order of sums: that depends on where in memory the factors are.
    A name that is missing or unexpected is refused by its stage alone. The stages' layouts make one
    of all ranks, and their digests add up.

    A module that declares no ``divided_layers`` has to refuse to be divided; that is all.
    """
    if Names.of(case.whole).elsewhere:
        return  # a stage
    path: str | None = getattr(case.whole, "divided_layers", None)
    if path is None:
        refusal(
            UnsupportedModelError,
            lambda: case.build(stage=PipelineStage(0, 2)),
            "divided among stages, and declares no divided_layers",
        )
        return
    layers = len(list(case.whole.get_submodule(path).children()))
    error = refusal(
        ShardingError,
        lambda: case.build(stage=PipelineStage(0, layers + 1)),
        f"{layers} layers were divided among {layers + 1} stages",
    )
    assert f"{layers + 1} " in str(error), f"refused without the numbers: {error}"
    count = case.draw(st.integers(min(layers, 2), min(layers, 4)), "stages")
    stages = [PipelineStage(rank, count) for rank in range(count)]
    names = [{*case.build(stage=stage).expected_weights()} for stage in stages]
    _assert_divided(names, layers, f"{path}.", case)
    _assert_hold_the_whole(case, stages)
    if case.choose([False, True], "layout"):
        _assert_one_layout(case, stages)
    else:
        _assert_refused(case, stages, names)


def _assert_divided(
    names: Sequence[Collection[str]], layers: int, layers_path: str, case: Case
) -> None:
    """Check which stages have which names, from the numbers in the names alone."""
    whole, last = case.whole.expected_weights().keys(), len(names) - 1
    assert set().union(*names) == whole, "the stages' names are not the whole model's"
    found = [
        {int(n[len(layers_path) :].partition(".")[0]) for n in own if n.startswith(layers_path)}
        for own in names
    ]
    held = [number for own in found for number in sorted(own)]
    assert held == [*range(layers)], f"stages have the layers {found}, and there are {layers}"
    sizes = [len(own) for own in found]
    even = sizes[-1] == min(sizes) and max(sizes) - min(sizes) <= 1
    assert even, f"stages have {sizes} layers"
    tied = Names.of(case.whole).tied
    for name in whole:
        if name.startswith(layers_path):
            continue
        on = {stage for stage, own in enumerate(names) if name in own}
        if name in tied:
            assert on == {0, last}, f"{name} is tied, and on the stages {sorted(on)}"
        else:
            assert on in ({0}, {last}), f"{name} is on the stages {sorted(on)}"


class _Held(NamedTuple):
    """What a rank has of a model or a stage after a load, and after an update."""

    loaded: frozenset[str]  # names
    skipped: Mapping[str, str]
    reads: Mapping[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]
    state: Tensors
    outputs: Any
    updated: Tensors


def _assert_hold_the_whole(case: Case, stages: Sequence[PipelineStage]) -> None:
    """Load and update stages and the whole model alike, and compare all that they have."""
    form = CheckpointForm.choose(case.whole, case.random)
    tensors = form.of(case.tensors)
    way = case.choose(["collection", "stream", "calls"], "given as")
    other = case.other_tensors()
    update = {name: other[name] for name in case.some(sorted(other), "updated")}

    def work(module: vLLMModule, inputs: Any = case.inputs) -> _Held:
        plan = module.plan_weights(WatchedSource(tensors))
        reads: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        for read in plan.reads():
            assert isinstance(read.source, WatchedHandle)
            reads.setdefault(read.name, []).append((read.source.start, tuple(read.source.shape)))
        pairs = list(tensors.items())
        if way == "calls":
            for call in range(form.files):
                module.update_weights(pairs[call :: form.files])
            module.check_ready()
        else:
            module.load_weights(iter(pairs) if way == "stream" else pairs)
        before = state(module)
        outputs = None if inputs is None else forward(module, inputs)
        memory = {path: tensor.data_ptr() for path, tensor in module.named_parameters()}
        module.update_weights(update)
        for path, tensor in module.named_parameters():
            assert tensor.data_ptr() == memory[path], f"an update moved {path} of a stage"
        loaded = frozenset(name for each in plan.report.loaded.values() for name in each)
        return _Held(loaded, plan.report.skipped, reads, before, outputs, state(module))

    whole = case.on_every_rank(work)
    inputs, held = case.inputs, list[list[_Held]]()
    for stage in stages:
        held.append(case.on_every_rank(partial(work, inputs=inputs), stage))
        inputs = _next_inputs(inputs, held[-1][0].outputs)
    for rank, all_of_it in enumerate(whole):
        own = [ranks[rank] for ranks in held]
        where = f"of stage {{}} of {len(stages)}, on rank {rank} of {case.size}"
        _assert_accounted(own, all_of_it, where)
        paths = set().union(*(each.state for each in own))
        assert paths == all_of_it.state.keys(), "the stages' tensors are not the whole model's"
        for number, each in enumerate(own):
            which = where.format(number)
            for got, expected, when in (
                (each.state, all_of_it.state, ""),
                (each.updated, all_of_it.updated, ", updated"),
            ):
                assert_same_state(got, {path: expected[path] for path in got}, which + when)
        if case.inputs is not None:
            which = f"the stages' logits on rank {rank} of {case.size}"
            assert_outputs([own[-1].outputs], [all_of_it.outputs], which)


def _next_inputs(inputs: Any, passed: Any) -> Any:
    """Return the model's inputs with what a stage passes on in place of token ids."""
    if isinstance(inputs, dict):
        return inputs | {"input_ids": passed}
    return inputs and (passed, *inputs[1:])


def _assert_accounted(stages: Sequence[_Held], whole: _Held, where: str) -> None:
    """Check which names are loaded and skipped, and what is read."""
    for number, each in enumerate(stages):
        which = where.format(number)
        others = whole.loaded - each.loaded
        assert each.skipped.keys() - whole.skipped.keys() == others, (
            f"skipped are {sorted(each.skipped)}, and others' are {sorted(others)} {which}"
        )
        for name in others:
            holder = re.match(r"pipeline stage (\d+) of ", each.skipped[name])
            assert holder is not None, f"{name} is skipped as {each.skipped[name]!r} {which}"
            assert name in stages[int(holder[1])].loaded, f"{each.skipped[name]}: {name} {which}"
        read = {name: parts for name, parts in whole.reads.items() if name in each.loaded}
        assert each.reads == read, f"{each.reads} is read in place of {read} {which}"


def _assert_refused(
    case: Case, stages: Sequence[PipelineStage], names: Sequence[Collection[str]]
) -> None:
    """Rename one tensor, and find it refused by the stages that have it, and by no other."""
    renamed = case.choose(sorted(case.tensors), "renamed")
    wrong = f"{renamed}_2"
    tensors = {wrong if name == renamed else name: each for name, each in case.tensors.items()}
    absent = may_be_absent(case.whole)
    for stage, own in zip(stages, names, strict=True):
        module = case.build(case.rank, case.size, stage)
        if renamed not in own:
            module.load_weights(tensors)
            continue
        error = refusal(
            WeightLoadError,
            partial(module.load_weights, tensors),
            f"stage {stage.rank} of {stage.size} has {renamed}, and does not refuse {wrong}",
        )
        assert error.report is not None, str(error)
        missing, unexpected = error.report.missing, error.report.unexpected
        assert [each.name for each in unexpected] == [wrong], str(error)
        assert [each.name for each in missing] == [renamed] * (renamed not in absent), str(error)


def _assert_one_layout(case: Case, stages: Sequence[PipelineStage]) -> None:
    """Put the stages' layouts together, and compare all ranks with what the whole one says.

    It is read back from JSON, which refuses boxes that overlap or leave something out.
    """
    size, tensors = case.size, case.tensors
    regions = {name: Region.of(name, tensor) for name, tensor in tensors.items()}
    layout = layout_of_stages(
        [case.build(0, size, stage).plan_weights(regions).layout(size) for stage in stages]
    )
    data = layout_json(layout)
    assert parse_layout(data) == layout, "the layout differs after it was written and read"
    held, digests = list[Tensors](), list[ModelDigest]()
    for stage in stages:
        held += case.on_every_rank(partial(load_unprocessed, tensors), stage)
        digests += case.on_every_rank(partial(digest_by, layout, tensors), stage)
    assert_held_as_written(json.loads(data), tensors, held)
    assert_add_up(digests, layout, tensors)
