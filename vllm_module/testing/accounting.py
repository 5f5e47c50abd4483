"""Laws of what a load accepts: every tensor accounted for, in any order and any form."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from hypothesis import note

from vllm_module.errors import DuplicateWeightError, ModelNotReadyError, WeightLoadError
from vllm_module.parameters import BasevLLMParameter
from vllm_module.testing.case import Case, law, refusal
from vllm_module.testing.checkpoints import (
    CheckpointForm,
    Names,
    Tensors,
    assert_same_state,
    converted,
    state,
    write_checkpoint,
)
from vllm_module.testing.sources import WatchedHandle, WatchedSource
from vllm_module.weights import open_checkpoint


@law
def assert_accounting_exact(case: Case) -> None:
    """Law 1: every tensor is loaded or skipped by a rule, every slot filled once, or it is refused.

    A whole checkpoint is reported name by name. One with tensors missing, unexpected, given twice
    or misshapen is refused, collection or stream, naming exactly those; the module will not run,
    and of a refused collection nothing is read: a module that was whole goes on. A tensor that
    two modules share, as the configuration's ``tie_word_embeddings`` says, may be stored twice, but
    not with two values.
    """
    names = Names.of(case.whole)
    _assert_tied_as_configured(case, names)
    skipped = [
        f"{name}{below}"
        for name in names.skipped
        for below in case.some(["", ".x", ".x.weight"], f"below {name}", least=0)
    ]
    tied = sorted(name for others in names.tied.values() for name in others)
    stored = case.some(tied, "stored again", least=0)
    again = {n: name for name, others in names.tied.items() for n in others if n in stored}
    tensors = case.tensors | {other: case.tensors[name] for other, name in again.items()}
    given = tensors | {name: torch.ones(2) for name in skipped}
    module = case.build(case.rank, case.size)
    filled = module.load_weights(given)
    module.check_ready()
    report = module.load_report
    assert report is not None
    used = [name for sources in report.loaded.values() for name in sources]
    assert sorted(used) == sorted(tensors), f"the report tells of {sorted(used)}"
    assert sorted(report.skipped) == sorted(skipped), f"skipped {sorted(report.skipped)}"
    assert filled == report.loaded.keys(), f"returned {sorted(filled)}"
    for other, name in again.items():
        _assert_tie_is_compared(case, tensors, name, other)

    damage = _Damage(case, given, again)
    before = state(module)
    refusal(
        WeightLoadError,
        lambda: module.load_weights(tuple(damage.pairs)),
        f"a damaged checkpoint was loaded anew: {damage.told}",
    )
    module.check_ready()  # nothing was written: it goes on with what it has
    assert_same_state(state(module), before, "after it refused another checkpoint")
    module = case.build(case.rank, case.size)
    streamed = case.choose([False, True], "as a stream")
    error = refusal(
        WeightLoadError,
        lambda: module.load_weights(iter(damage.pairs) if streamed else tuple(damage.pairs)),
        f"a damaged checkpoint was loaded: {damage.told}",
    )
    assert error.report is not None, str(error)
    meta = [p.is_meta for p in module.parameters() if isinstance(p, BasevLLMParameter)]
    assert streamed or all(meta), "something of a refused collection was read"
    for kind, damaged in damage.told.items():
        told = sorted(problem.name for problem in getattr(error.report, kind))
        assert told == sorted(damaged), f"{kind}: told {told}, not {sorted(damaged)}"
        for name in damaged:
            assert name.split(".")[-1] in str(error), f"{name} is not in the message: {error}"
    refusal(ModelNotReadyError, module.check_ready, f"ready although it refused: {damage.told}")


def _assert_tied_as_configured(case: Case, names: Names) -> None:
    """Check that the head is the embedding where the configuration says so, and nowhere else."""
    ties = getattr(getattr(case.whole, "config", None), "tie_word_embeddings", None)
    if ties:
        assert names.tied, "the configuration ties the embedding and the head, the module does not"
    elif ties is not None:
        heads = {n for group in names.tied.values() for n in group if n.startswith("lm_head.")}
        assert not heads, f"{heads.pop()} is tied, and the configuration says that it is not"


def _assert_tie_is_compared(case: Case, tensors: Tensors, name: str, other: str) -> None:
    """Two names of one tensor that differ in one bit of what the rank keeps are refused."""
    module = case.build(case.rank, case.size)
    reads = module.plan_weights(WatchedSource(tensors)).reads()
    kept = [read.source for read in reads if read.name == other and read.source.shape.numel()]
    if not kept:
        return  # padding alone is all this rank keeps of it, and there is nothing to compare
    assert isinstance(kept[0], WatchedHandle)
    position = case.choose(range(kept[0].shape.numel()), f"element of {other}")
    index = torch.unravel_index(torch.tensor(position), kept[0].shape)
    at = tuple(int(i) + start for i, start in zip(index, kept[0].start, strict=True))
    changed = tensors[name].clone()
    changed[at].view(-1).view(torch.uint8)[0] ^= 1
    error = refusal(
        DuplicateWeightError,
        lambda: module.load_weights(tensors | {other: changed}),
        f"{name} and {other}, which are tied, were loaded with two values",
    )
    for each in (name, other):
        assert each in str(error), f"{each} is not in the message: {error}"


class _Damage:
    """One to three damages of a checkpoint: its pairs, and the names each kind is told of."""

    def __init__(self, case: Case, tensors: Tensors, again: Mapping[str, str]) -> None:
        self.told: dict[str, list[str]] = {
            "missing": [],
            "unexpected": [],
            "duplicated": [],
            "misshapen": [],
        }
        self._case = case
        self._tensors = dict(tensors)
        self._more: list[tuple[str, torch.Tensor]] = []
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
        own = sorted([*case.tensors, *again])
        for name in case.some(own, "damaged names", most=3):
            # What is stored under another name too is not missed.
            spare = {"dropped", "renamed"} if name in {*again, *again.values()} else set()
            kind = case.choose(sorted(kinds.keys() - spare), f"damage of {name}")
            kinds[kind](name)

    @property
    def pairs(self) -> list[tuple[str, torch.Tensor]]:
        return [*self._tensors.items(), *self._more]

    def _drop(self, name: str) -> None:
        del self._tensors[name]
        self.told["missing"].append(name)

    def _rename(self, name: str) -> None:
        self._tensors[f"{name}_2"] = self._tensors[name]
        self._drop(name)
        self.told["unexpected"].append(f"{name}_2")

    def _add(self, name: str) -> None:
        self._tensors[f"_extra.{name}"] = self._tensors[name]
        self.told["unexpected"].append(f"_extra.{name}")

    def _repeat(self, name: str) -> None:
        self._more.append((name, self._tensors[name]))
        self.told["duplicated"].append(name)

    def _replace(self, name: str, tensor: torch.Tensor) -> None:
        self._tensors[name] = tensor
        self.told["misshapen"].append(name)

    def _lengthen(self, name: str) -> None:
        tensor = self._tensors[name]
        first, *rest = tensor.shape or (1,)
        self._replace(name, torch.zeros(first + 1, *rest, dtype=tensor.dtype))

    def _stack(self, name: str) -> None:
        self._replace(name, self._tensors[name][None, None])

    def _retype(self, name: str) -> None:
        tensor = self._tensors[name]
        others = {torch.int32, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64}
        dtype = self._case.choose(sorted(others - {tensor.dtype}, key=str), "dtype")
        self._replace(name, torch.zeros(tensor.shape, dtype=dtype))

    def _empty(self, name: str) -> None:
        self._replace(name, self._tensors[name].to("meta"))


@law
def assert_order_independent(case: Case) -> None:
    """Law 2: any order of names, any split into files or calls and any form give the same bits.

    Drawn are how it is stored (the order, which fused layers are one tensor, by which of its names
    a tied one goes), in which precision, and whether it comes as a collection, a stream, files or
    several updates.
    """
    wide = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    # What an override or a conversion computes depends on the precision that it is given.
    computed = case.overridden or converted(case.whole)
    dtype = None if computed else case.choose([None, *wide], "stored dtype")
    given = {
        name: tensor.to(dtype) if dtype and tensor.dtype in wide else tensor
        for name, tensor in case.tensors.items()
    }
    expected = case.build(case.rank, case.size)
    expected.load_weights({n: t.to(case.tensors[n].dtype) for n, t in given.items()})
    form = CheckpointForm.choose(case.whole, case.random)
    note(f"stored as {form}")
    tensors = form.of(given)
    pairs = list(tensors.items())
    ways = ["collection", "files", "stream", "calls", "files"]  # most is to be seen in files
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
