"""Laws of what a load accepts: every tensor accounted for, in any order and any form."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from hypothesis import strategies as st

from vllm_module.errors import DuplicateWeightError, ModelNotReadyError, WeightLoadError
from vllm_module.parameters import BasevLLMParameter
from vllm_module.testing.case import Case, law, refusal
from vllm_module.testing.checkpoints import (
    Names,
    Tensors,
    assert_same_state,
    checkpoint_forms,
    state,
    write_checkpoint,
)
from vllm_module.weights import open_checkpoint

Pairs = list[tuple[str, torch.Tensor]]


@law
def assert_accounting_exact(case: Case) -> None:
    """Law 1: every tensor is loaded or skipped by a rule, every slot filled once, or it is refused.

    A whole checkpoint is reported name by name. One with tensors missing, unexpected, given twice
    or misshapen is refused, collection or stream, naming exactly those; the module will not run,
    and of a refused collection nothing is read. A tensor that two modules share, as the
    configuration's ``tie_word_embeddings`` says, may be stored twice, but not with two values.
    """
    names = Names.of(case.whole)
    config = getattr(case.whole, "config", None)
    if getattr(config, "tie_word_embeddings", False):
        assert names.tied, "the configuration ties the embedding and the head, the module does not"
    for name, (other, *_) in names.tied.items():
        _assert_tie_is_compared(case, name, other)
    tensors = case.tensors | {name: torch.ones(2) for name in names.skipped}
    module = case.build(case.rank, case.size)
    filled = module.load_weights(tensors)
    module.check_ready()
    report = module.load_report
    assert report is not None
    used = [name for sources in report.loaded.values() for name in sources]
    assert sorted(used) == sorted(case.tensors), f"the report tells of {sorted(used)}"
    assert sorted(report.skipped) == sorted(names.skipped), f"skipped {sorted(report.skipped)}"
    assert filled == report.loaded.keys(), f"returned {sorted(filled)}"

    pairs, expected = _damaged(case, tensors)
    module = case.build(case.rank, case.size)
    streamed = case.draw(st.booleans(), "as a stream")
    error = refusal(
        WeightLoadError,
        lambda: module.load_weights(iter(pairs) if streamed else tuple(pairs)),
        f"a damaged checkpoint was loaded: {expected}",
    )
    assert error.report is not None, str(error)
    meta = [p.is_meta for p in module.parameters() if isinstance(p, BasevLLMParameter)]
    assert streamed or all(meta), "something of a refused collection was read"
    for kind, damaged in expected.items():
        told = sorted(problem.name for problem in getattr(error.report, kind))
        assert told == sorted(damaged), f"{kind}: told {told}, not {sorted(damaged)}"
        for name in damaged:
            assert name.split(".")[-1] in str(error), f"{name} is not in the message: {error}"
    refusal(ModelNotReadyError, module.check_ready, f"ready although it refused: {expected}")


def _assert_tie_is_compared(case: Case, name: str, other: str) -> None:
    tensors = case.tensors | {other: -case.tensors[name]}
    module = case.build(case.rank, case.size)
    kept = {read.name for read in module.plan_weights(tensors).reads()}
    if name not in kept:
        return  # padding alone is all this rank keeps of it, and there is nothing to compare
    error = refusal(
        DuplicateWeightError,
        lambda: module.load_weights(tensors),
        f"{name} and {other}, which are tied, were loaded with two values",
    )
    for each in (name, other):
        assert each in str(error), f"{each} is not in the message: {error}"


def _damaged(case: Case, tensors: Tensors) -> tuple[Pairs, dict[str, list[str]]]:
    """Return a checkpoint with one to three damages, and the names that each kind is told of."""
    own = sorted(case.tensors)
    chosen = case.draw(
        st.lists(st.sampled_from(own), min_size=1, max_size=3, unique=True), "damaged names"
    )
    expected: dict[str, list[str]] = {
        "missing": [],
        "unexpected": [],
        "duplicated": [],
        "misshapen": [],
    }
    pairs = dict(tensors)
    more: Pairs = []
    for name in chosen:
        kind = case.draw(st.sampled_from(sorted(_DAMAGES)), f"damage of {name}")
        _DAMAGES[kind](name, pairs, more, expected)
    return [*pairs.items(), *more], expected


def _drop(name: str, pairs: Tensors, more: Pairs, expected: dict[str, list[str]]) -> None:
    del pairs[name]
    expected["missing"].append(name)


def _rename(name: str, pairs: Tensors, more: Pairs, expected: dict[str, list[str]]) -> None:
    pairs[f"{name}_2"] = pairs.pop(name)
    expected["missing"].append(name)
    expected["unexpected"].append(f"{name}_2")


def _add(name: str, pairs: Tensors, more: Pairs, expected: dict[str, list[str]]) -> None:
    pairs[f"extra.{name}"] = pairs[name]
    expected["unexpected"].append(f"extra.{name}")


def _repeat(name: str, pairs: Tensors, more: Pairs, expected: dict[str, list[str]]) -> None:
    more.append((name, pairs[name]))
    expected["duplicated"].append(name)


def _lengthen(name: str, pairs: Tensors, more: Pairs, expected: dict[str, list[str]]) -> None:
    tensor = pairs[name]
    pairs[name] = torch.cat([tensor, tensor]) if tensor.dim() else tensor.repeat(2)
    expected["misshapen"].append(name)


def _stack(name: str, pairs: Tensors, more: Pairs, expected: dict[str, list[str]]) -> None:
    pairs[name] = pairs[name].unsqueeze(0).unsqueeze(0)
    expected["misshapen"].append(name)


def _retype(name: str, pairs: Tensors, more: Pairs, expected: dict[str, list[str]]) -> None:
    pairs[name] = torch.zeros(pairs[name].shape, dtype=torch.complex64)
    expected["misshapen"].append(name)


_Damage = Callable[[str, Tensors, Pairs, dict[str, list[str]]], None]
_DAMAGES: dict[str, _Damage] = {
    "dropped": _drop,
    "renamed": _rename,
    "added": _add,
    "given twice": _repeat,
    "twice as long": _lengthen,
    "two more dimensions": _stack,
    "another dtype": _retype,
}


@law
def assert_order_independent(case: Case) -> None:
    """Law 2: any order of names, any split into files or calls and any form give the same bits.

    Drawn are how it is stored (the order, which fused layers are one tensor, by which of its names
    a tied one goes), and whether it comes as a collection, a stream, files or several updates.
    """
    expected = case.build(case.rank, case.size)
    expected.load_weights(case.tensors)
    form = case.draw(checkpoint_forms(case.whole), "stored as")
    tensors = form.of(case.tensors)
    pairs = list(tensors.items())
    way = case.draw(st.sampled_from(["collection", "stream", "calls", "files"]), "given as")
    module = case.build(case.rank, case.size)
    if way == "calls":
        for call in range(form.files):
            module.update_weights(pairs[call :: form.files])
        module.check_ready()
    elif way == "files":
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(Path(folder), tensors, files=form.files)
            with open_checkpoint(folder) as checkpoint:
                module.load_weights(checkpoint.items())
    else:
        module.load_weights(iter(pairs) if way == "stream" else pairs)
    assert_same_state(state(module), state(expected), f"on {case.at()}, given as {way}")
