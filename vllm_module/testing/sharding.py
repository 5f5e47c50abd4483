"""Laws of where weights go: by exact name into one slot, and to the ranks that keep it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from vllm_module.errors import UnexpectedWeightError
from vllm_module.module import vLLMModule
from vllm_module.parameters import BasevLLMParameter, Slot
from vllm_module.testing.case import Case, law, refusal
from vllm_module.testing.checkpoints import (
    Names,
    Tensors,
    assert_same_state,
    converted,
    fuse,
    made,
    same_bits,
    slot_name,
    state,
)
from vllm_module.tree import locations

# How much sharded outputs may differ from unsharded ones, relative to the largest, since sums have
# another order. float64 models normalize and rotate in float32.
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@law
def assert_sharding_equivalent(case: Case) -> None:
    """Law 3: the ranks' shards cover every tensor, and the ranks compute the unsharded outputs.

    The shards, reassembled, are the checkpoint bit for bit: replicas agree, padding is zero, and
    nothing is left out. A tensor that a conversion changes, such as quantizing, is within the
    conversion's error bound. If the module has a ``forward``, every rank's outputs are those of the
    unsharded module up to the order of sums, or approximately if a conversion's bits depend on the
    cut.
    """
    size, whole, tensors = case.size, case.build(), case.tensors
    same_weights = assert_covers(case)
    whole.load_weights(tensors)
    if case.inputs is None:
        return
    expected = case.run(whole)
    assert_outputs(case.run(whole), expected, "called twice, the unsharded module's output")

    def outputs(module: vLLMModule) -> list[Any]:
        module.load_weights(tensors)
        return case.run(module)

    for rank, got in enumerate(case.on_every_rank(outputs)):
        where = f"rank {rank} of {size}: output"
        if same_weights:
            assert_outputs(got, expected, where)
            continue
        for index, (one, other) in enumerate(zip(got, expected, strict=True)):
            error = (one - other).norm() / other.norm()
            assert error < 0.5, f"{where} {index} differs by {error:.2g} of its norm"


def assert_outputs(got: list[Any], expected: list[Any], where: str) -> None:
    """Compare outputs of forward: numbers up to the order of sums, everything else exactly."""
    assert len(got) == len(expected), f"{where}s: {len(got)}, and {len(expected)} on one rank"
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        what = f"{where} {index}"
        if not isinstance(other, torch.Tensor):
            assert one == other, f"{what} is {one!r}, and {other!r} on one rank"
            continue
        assert one.shape == other.shape, (
            f"{what} has the shape {list(one.shape)}, and {list(other.shape)} on one rank"
        )
        if other.dtype not in _TOLERANCES:
            assert torch.equal(one, other), f"{what} is not the same as on one rank"
            continue
        finite = other.isfinite()
        assert torch.equal(one[~finite], other[~finite]), f"{what} is not finite where it should be"
        if not finite.any():
            continue
        error, most = (one - other)[finite].abs().max().item(), other[finite].abs().max().item()
        # In 16 bits, a few outputs may all happen to be small.
        tolerance = _TOLERANCES[other.dtype] * max(most, 0.1 if other.itemsize == 2 else 0)
        assert error <= tolerance, (
            f"{what} differs by {error:.3g} from the unsharded module's, whose largest is "
            f"{most:.3g}"
        )


def assert_covers(case: Case) -> bool:
    """Reassemble the ranks' parameters and compare them with the checkpoint, bit by bit.

    Return whether they are the unsharded module's; only converted tensors may differ, within their
    error bound.
    """
    size, tensors = case.size, case.tensors

    def load(module: vLLMModule) -> Tensors:
        module.load_weights(tensors)
        # Processes exchange tensors by pickle, which cannot encode eight-bit floats.
        return {
            path: tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
            for path, tensor in _restored(module).items()
        }

    whole = case.build()
    whole.load_weights(tensors)
    held = _restored(whole)
    dtypes = {path: tensor.dtype for path, tensor in held.items()}
    conversions = converted(case.whole)
    same_weights = True
    ranks = [
        {path: tensor.view(dtypes.get(path, tensor.dtype)) for path, tensor in rank.items()}
        for rank in case.on_every_rank(load)
    ]
    together = _stored(case.build(0, size), ranks, f"over {size} ranks")
    alone = _stored(case.whole, [held], "on one rank")
    assert together.keys() == alone.keys(), f"{sorted(together.keys() ^ alone.keys())}"
    tied = {name for names in Names.of(case.whole).tied.values() for name in names}
    for name, (path, tensor) in alone.items():
        if path in conversions:
            given, bound = tensors[name], conversions[path].error_bound(tensors[name])
            for got, where in ((tensor, "one rank"), (together[name][1], f"{size} ranks")):
                over = ((got - given).abs() - bound).max().item()
                assert over <= 0, (
                    f"{path} over {where} differs from {name} by {over:.3g} more than its "
                    "conversion allows"
                )
            same_weights &= same_bits(together[name][1], tensor)
            continue
        assert same_bits(together[name][1], tensor), (
            f"{path} over {size} ranks, put together, is not what one rank holds of {name}"
        )
        if name in tied or case.overridden:
            continue
        assert name in tensors, f"{path} keeps {name}, which a whole checkpoint does not hold"
        given = tensors[name].to(tensor.dtype)
        assert same_bits(tensor, given.reshape(tensor.shape)), (
            f"{path} on one rank is not the checkpoint's {name}"
        )
    return same_weights


def _restored(module: vLLMModule) -> Tensors:
    """Return a copy of every stored tensor, by path, with conversions undone."""
    computed = made(module, below=True)
    tensors = {path: tensor for path, tensor in state(module).items() if path not in computed}
    for location in locations(module):
        if location.conversion is not None:
            tensors[location.path] = location.conversion.restored(location.node.module)
    return tensors


def _stored(
    module: vLLMModule, ranks: list[Tensors], where: str
) -> dict[str, tuple[str, torch.Tensor]]:
    """Return the ranks' states reassembled, by checkpoint name, each tensor with its path."""
    declared = dict(module.named_parameters(remove_duplicate=False))
    found = {}
    for path in ranks[0]:
        parameter = declared.get(path)
        tensors = [rank[path] for rank in ranks]
        if isinstance(parameter, BasevLLMParameter):
            for slot, tensor in reassemble(parameter, tensors, f"{path} {where}").items():
                found[slot_name(path, slot) if slot else path] = path, tensor
            continue
        for rank, tensor in enumerate(tensors):
            assert same_bits(tensor, tensors[0]), f"{path} {where}: rank {rank} is not rank 0"
        found[path] = path, tensors[0]
    return found


def reassemble(
    parameter: BasevLLMParameter, ranks: Sequence[torch.Tensor], what: str
) -> dict[str, torch.Tensor]:
    """Reassemble the ranks' tensors of one parameter into the stored tensor of each slot.

    Works from the declared dimensions alone, and shares no arithmetic with the code that cuts.
    Raises ``AssertionError`` if replicas differ or padding is not zero; ``what`` names the tensor.
    """
    stored = {}
    at = 0
    for slot in parameter.dims[parameter.slot_dim].slots:
        part_size = slot.padded // slot.parts
        pieces = [tensor.narrow(parameter.slot_dim, at, part_size) for tensor in ranks]
        at += part_size
        for dim, declared in enumerate(parameter.dims):
            dim_slot = slot if dim == parameter.slot_dim else declared.slots[0]
            if dim_slot.parts > 1:
                pieces = [_joined(pieces, dim_slot, dim, f"slot {slot.name!r} of {what}")]
        for rank, piece in enumerate(pieces):
            assert same_bits(piece, pieces[0]), f"{what}: slot {slot.name!r}: rank {rank} differs"
        whole = pieces[0]
        for dim, declared in enumerate(parameter.dims):
            size = (slot if dim == parameter.slot_dim else declared.slots[0]).size
            padding = whole.narrow(dim, size, whole.shape[dim] - size)
            assert not padding.to(torch.float64).count_nonzero(), f"{what}: padding is not zero"
            whole = whole.narrow(dim, 0, size)
        stored[slot.name] = whole
    assert at == ranks[0].shape[parameter.slot_dim], f"{what}: its slots do not fill it"
    return stored


def _joined(pieces: list[torch.Tensor], slot: Slot, dim: int, what: str) -> torch.Tensor:
    """Join the parts along ``dim``; if ranks outnumber parts, neighbouring ranks share a part."""
    ranks_per_part = len(pieces) // slot.parts
    for rank, piece in enumerate(pieces):
        first = rank // ranks_per_part * ranks_per_part
        assert same_bits(piece, pieces[first]), f"{what}: rank {rank} is no copy of rank {first}"
    return torch.cat(pieces[::ranks_per_part], dim=dim)


@law
def assert_routed_exactly(case: Case) -> None:
    """Law 4: a name fills exactly the slot that it names, and whole components are compared.

    A fused tensor, with its slots in the order of ``shard_names``, loads like separate tensors: cut
    by slot first and by rank second. A name that only resembles a known one, or that belongs
    elsewhere in the tree, is unexpected.
    """
    names = Names.of(case.whole)
    split, whole = case.build(case.rank, case.size), case.build(case.rank, case.size)
    split.load_weights(case.tensors)
    whole.load_weights(fuse(case.tensors, names.fused))
    assert_same_state(state(whole), state(split), f"on {case.at()} when it is stored fused")

    name = case.choose(sorted(case.tensors), "name")
    unknown = {
        similar
        for similar in _resembling(name, [*case.tensors, *(each.name for each in names.fused)])
        if similar not in case.tensors and not names.resolve(similar)
    }
    similar = case.some(sorted(unknown), "similar names", most=20)
    module = case.build(case.rank, case.size)
    error = refusal(
        UnexpectedWeightError,
        lambda: module.load_weights(case.tensors | dict.fromkeys(similar, case.tensors[name])),
        f"{similar}, which only resemble {name!r}, were not refused",
    )
    assert error.report is not None
    refused = [problem.name for problem in error.report.unexpected]
    assert sorted(refused) == sorted(similar), f"of {similar}, only {refused} were refused"


def _resembling(name: str, known: Iterable[str]) -> set[str]:
    """Return names that differ from ``name`` in one component, or have one more or one fewer."""
    components = name.split(".")
    others = {component for other in known for component in other.split(".")}
    similar = {f"{name}.", f".{name}", f"{name}.{components[-1]}"}
    for at, component in enumerate(components):
        variants = {component + component, component[:-1], component + "s", "x" + component}
        variants |= {component.swapcase(), "0" + component, "", " " + component} | others
        for variant in variants - {component}:
            similar.add(".".join((*components[:at], variant, *components[at + 1 :])))
        similar.add(".".join((*components[:at], *components[at + 1 :])))
    return similar
