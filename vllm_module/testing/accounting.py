"""Laws of accounting: every tensor is loaded, skipped or refused, in any order and form."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from hypothesis import note

from vllm_module.core.fit import absent_weight
from vllm_module.core.module import vLLMModule
from vllm_module.core.tensors import slots_of
from vllm_module.core.tree import locations
from vllm_module.errors import DuplicateWeightError, ModelNotReadyError, WeightLoadError
from vllm_module.parameters import BasevLLMParameter
from vllm_module.testing.case import Case, law, refusal
from vllm_module.testing.checkpoints import (
    CheckpointForm,
    Tensors,
    assert_same_state,
    state,
    write_checkpoint,
)
from vllm_module.testing.names import Names, converted
from vllm_module.testing.sources import WatchedHandle, WatchedSource
from vllm_module.weights import open_checkpoint


@law
def assert_accounting_exact(case: Case) -> None:
    """Law 1: every tensor is loaded or skipped by a rule, and every slot is filled exactly once.

    The report of a complete checkpoint lists every name. A checkpoint, collection or stream, with
    missing, unexpected, duplicated or misshapen tensors is refused with exactly these names, and
    the module does not run. No tensor of a refused collection is read, so a loaded module keeps
    running. A tied tensor, which two modules share, may be stored twice, but not with two values;
    the module is tied if and only if the configuration's ``tie_word_embeddings`` is true.
    """
    names = Names.of(case.whole)
    _assert_tied_as_configured(case, names)
    skipped = [
        f"{name}{below}"
        for name in names.skipped
        for below in case.some(["", ".x", ".x.weight"], f"below {name}", least=0)
    ]
    if names.elsewhere:
        below_others = [f"{name}.x{end}" for name in names.elsewhere for end in ("", ".weight")]
        skipped += case.some(below_others, "of other stages")
    tied = sorted(name for others in names.tied.values() for name in others)
    stored = case.some(tied, "stored again", least=0)
    first_name = {n: name for name, others in names.tied.items() for n in others if n in stored}
    tensors = case.tensors | {other: case.tensors[name] for other, name in first_name.items()}
    given = tensors | {name: torch.ones(2) for name in skipped}
    module = case.build(case.rank, case.size)
    filled = module.load_weights(given)
    module.check_ready()
    report = module.load_report
    assert report is not None
    used = [name for sources in report.loaded.values() for name in sources]
    assert sorted(used) == sorted(tensors), f"the report lists {sorted(used)}"
    assert sorted(report.skipped) == sorted(skipped), f"skipped {sorted(report.skipped)}"
    assert filled == report.loaded.keys(), f"returned {sorted(filled)}"
    for other, name in first_name.items():
        _assert_tie_is_compared(case, tensors, name, other)

    damage = _Damage(case, given, first_name)
    before = state(module)
    refusal(
        WeightLoadError,
        lambda: module.load_weights(tuple(damage.pairs)),
        f"a damaged checkpoint was loaded anew: {damage.problems}",
    )
    try:
        module.check_ready()  # nothing was written, so the module can still run
    except ModelNotReadyError as broken:
        raise AssertionError(
            "a refused collection was written in part: a load_weights that is overridden should "
            f"pass a collection on as a list, not as a generator ({broken})"
        ) from broken
    assert_same_state(state(module), before, "after it refused another checkpoint")
    module = case.build(case.rank, case.size)
    streamed = case.choose([False, True], "as a stream")
    error = refusal(
        WeightLoadError,
        lambda: module.load_weights(iter(damage.pairs) if streamed else tuple(damage.pairs)),
        f"a damaged checkpoint was loaded: {damage.problems}",
    )
    assert error.report is not None, str(error)
    meta = [p.is_meta for p in module.parameters() if isinstance(p, BasevLLMParameter)]
    assert streamed or all(meta), "part of a refused collection was read"
    for kind, damaged in damage.problems.items():
        reported = sorted(problem.name for problem in getattr(error.report, kind))
        assert reported == sorted(damaged), f"{kind}: reported {reported}, not {sorted(damaged)}"
        for name in damaged:
            assert name.split(".")[-1] in str(error), f"{name} is not in the message: {error}"
    refusal(ModelNotReadyError, module.check_ready, f"ready although it refused: {damage.problems}")


def _assert_tied_as_configured(case: Case, names: Names) -> None:
    """Check that the head and the embedding are tied if and only if the configuration says so."""
    if not hasattr(case.whole, "compute_logits") or names.elsewhere:
        return  # an encoder's configuration ties a head that the model lacks, as a stage may
    ties = getattr(getattr(case.whole, "config", None), "tie_word_embeddings", None)
    if ties:
        assert names.tied, "the configuration ties the embedding and the head, the module does not"
    elif ties is not None:
        heads = {n for group in names.tied.values() for n in group if n.startswith("lm_head.")}
        assert not heads, f"{heads.pop()} is tied, and the configuration says that it is not"


def _assert_tie_is_compared(case: Case, tensors: Tensors, name: str, other: str) -> None:
    """Check that two stored copies of a tied tensor are refused if one bit that is kept differs."""
    module = case.build(case.rank, case.size)
    reads = module.plan_weights(WatchedSource(tensors)).reads()
    kept = [read.source for read in reads if read.name == other and read.source.shape.numel()]
    if not kept:
        return  # the rank keeps only padding
    assert isinstance(kept[0], WatchedHandle)
    position = case.choose(range(kept[0].shape.numel()), f"element of {other}")
    index = torch.unravel_index(torch.tensor(position), kept[0].shape)
    at = tuple(int(i) + start for i, start in zip(index, kept[0].start, strict=True))
    changed = tensors[name].clone()
    changed[at].view(-1).view(torch.uint8)[0] ^= 1
    module.load_weights(tensors)
    before = state(module)
    error = refusal(
        DuplicateWeightError,
        lambda: module.load_weights(tensors | {other: changed}),
        f"{name} and {other}, which are tied, were loaded with two values",
    )
    for each in (name, other):
        assert each in str(error), f"{each} is not in the message: {error}"
    module.check_ready()  # nothing was written
    assert_same_state(state(module), before, f"after it refused two values of {name}")


def may_be_absent(module: vLLMModule) -> set[str]:
    """Return names that a checkpoint may lack, because the layer itself fills their slots."""
    return {
        location.stored_name(slot)
        for location in locations(module)
        for slot in slots_of(location.tensor)
        if absent_weight(location, slot) is not None
    }


class _Damage:
    """A checkpoint damaged in one to three places, and the names that must be reported.

    ``first_name`` maps names that store a tied tensor again to the name that stores it first.
    """

    def __init__(self, case: Case, tensors: Tensors, first_name: Mapping[str, str]) -> None:
        self.problems: dict[str, list[str]] = {
            "missing": [],
            "unexpected": [],
            "duplicated": [],
            "misshapen": [],
        }
        self._case = case
        self._tensors = dict(tensors)
        self._duplicates: list[tuple[str, torch.Tensor]] = []
        kinds = {
            "dropped": self._drop,
            "renamed": self._rename,
            "added": self._add,
            "given twice": self._repeat,
            "one longer": self._lengthen,
            "two more dimensions": self._stack,
            "another dtype": self._retype,
            "on meta": self._empty,
        }
        stored_twice = {*first_name, *first_name.values()}
        absent = may_be_absent(case.whole)
        for name in case.some(sorted([*case.tensors, *first_name]), "damaged names", most=3):
            # Nothing is missing if another name stores the same tensor, or the layer fills it.
            dropped = {"dropped", "renamed"}
            harmless = dropped if name in stored_twice or name in absent else set()
            kind = case.choose(sorted(kinds.keys() - harmless), f"damage of {name}")
            kinds[kind](name)

    @property
    def pairs(self) -> list[tuple[str, torch.Tensor]]:
        return [*self._tensors.items(), *self._duplicates]

    def _drop(self, name: str) -> None:
        del self._tensors[name]
        self.problems["missing"].append(name)

    def _rename(self, name: str) -> None:
        self._tensors[f"{name}_2"] = self._tensors[name]
        self._drop(name)
        self.problems["unexpected"].append(f"{name}_2")

    def _add(self, name: str) -> None:
        self._tensors[f"_extra.{name}"] = self._tensors[name]
        self.problems["unexpected"].append(f"_extra.{name}")

    def _repeat(self, name: str) -> None:
        self._duplicates.append((name, self._tensors[name]))
        self.problems["duplicated"].append(name)

    def _replace(self, name: str, tensor: torch.Tensor) -> None:
        self._tensors[name] = tensor
        self.problems["misshapen"].append(name)

    def _lengthen(self, name: str) -> None:
        tensor = self._tensors[name]
        first, *rest = tensor.shape or (1,)
        self._replace(name, torch.zeros(first + 1, *rest, dtype=tensor.dtype))

    def _stack(self, name: str) -> None:
        self._replace(name, self._tensors[name][None, None])

    def _retype(self, name: str) -> None:
        tensor = self._tensors[name]
        others = {torch.int32, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64}
        others.discard(tensor.dtype)
        if tensor.dtype == torch.int64:  # narrower integers are accepted for int64
            others.discard(torch.int32)
        dtype = self._case.choose(sorted(others, key=str), "dtype")
        self._replace(name, torch.zeros(tensor.shape, dtype=dtype))

    def _empty(self, name: str) -> None:
        self._replace(name, self._tensors[name].to("meta"))


@law
def assert_order_independent(case: Case) -> None:
    """Law 2: any order of names, any split into files or calls and any form give the same bits.

    Drawn are the order, the fused layers stored as one tensor, the names of tied tensors, the
    stored dtype, and the form: a collection, a stream, files or several updates.
    """
    floats = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    # An override or a conversion may give other results for an input of another precision.
    computed = case.overridden or converted(case.whole)
    dtype = None if computed else case.choose([None, *floats], "stored dtype")
    given = {
        name: tensor.to(dtype) if dtype and tensor.dtype in floats else tensor
        for name, tensor in case.tensors.items()
    }
    expected = case.build(case.rank, case.size)
    expected.load_weights({n: t.to(case.tensors[n].dtype) for n, t in given.items()})
    form = CheckpointForm.choose(case.whole, case.random)
    note(f"stored as {form}")
    tensors = form.of(given)
    pairs = list(tensors.items())
    # Files are listed twice because they find the most faults.
    ways = ["collection", "files", "stream", "calls", "files"]
    way = case.choose(ways, "given as")
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
