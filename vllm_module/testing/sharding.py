"""Laws of sharding and routing: names fill exact slots, and ranks keep the right shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice, product
from traceback import walk_tb
from typing import Any

import torch
from torch import nn

from vllm_module.base.messages import describe_error
from vllm_module.core.module import vLLMModule
from vllm_module.core.tree import locations
from vllm_module.errors import UnexpectedWeightError, UnsupportedModelError
from vllm_module.layers.check import check
from vllm_module.parameters import BasevLLMParameter, Dim, Experts, Slot
from vllm_module.testing.case import Case, law, refusal
from vllm_module.testing.checkpoints import Tensors, assert_same_state, fuse, same_bits, state
from vllm_module.testing.names import Names, converted, made, slot_name, stored_tensors
from vllm_module.testing.unread import Reads, unread

# Largest difference between sharded and unsharded outputs, relative to the largest output, because
# sums have another order. float64 models normalize and rotate in float32.
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@law
def assert_sharding_equivalent(case: Case) -> None:
    """Law 3: the ranks' shards cover every tensor, and the ranks compute the unsharded outputs.

    The shards, reassembled, are the checkpoint bit for bit: replicas agree, padding is zero, and
    nothing is left out. A tensor that a conversion changes, for example by quantizing, is within
    the conversion's error bound. If the module has a ``forward``, every rank's outputs are those of
    the unsharded module up to the order of sums, or approximately if a conversion's bits depend on
    the cut. A layer of a list that runs reads all of its parameters. A causal language model that
    takes metadata, and whose weights are kept as they are, computes sequences of one batch, in
    steps and with a KV cache, as it computes each of them alone and at once.
    """
    size, whole, tensors = case.size, case.build(), case.tensors
    same_weights = assert_covers(case)
    with Reads() as reads:  # a load may compute what a forward pass reads
        whole.load_weights(tensors)
        if case.inputs is None:
            return
        expected = case.run(whole)
    unused = unread(whole, reads)
    assert not unused, (
        f"the forward pass does not read {', '.join(unused)}, though it reads others of the same "
        "layer: use it, or skip it by skipped_weights"
    )
    assert_outputs(case.run(whole), expected, "called twice, the unsharded module's output")
    if case.is_decoder and not converted(whole):
        _assert_batches(whole)

    def outputs(module: vLLMModule) -> list[Any]:
        module.load_weights(tensors)
        try:
            return case.run(module)
        except Exception as error:
            raise AssertionError(
                f"on one of {size} ranks, {_raised_in(error, module)} fails, and not on one rank "
                f"alone: {describe_error(error)}\nA column-parallel layer gives each rank a part "
                "of the features, a row-parallel one takes a part, and nn.Linear has all of them."
            ) from error

    for rank, got in enumerate(case.on_every_rank(outputs)):
        where = f"rank {rank} of {size}: output"
        if same_weights:
            assert_outputs(got, expected, where)
            continue
        for index, (one, other) in enumerate(zip(got, expected, strict=True)):
            error = (one - other).norm() / other.norm()
            assert error < 0.5, f"{where} {index} differs by {error:.2g} of its norm"


def _assert_batches(module: Any) -> None:
    """Check that a loaded language model computes a batch as it computes its sequences alone.

    The KV cache has the dtype that most weights have. An engine has none in float64.
    """
    counts = Counter[torch.dtype]()
    for each in module.parameters():
        counts[each.dtype] += each.numel() * (each.dtype in _TOLERANCES)
    (dtype, _), *_ = counts.most_common()
    if dtype == torch.float64:
        return
    try:
        check(module, dtype, module.config.vocab_size)
    except UnsupportedModelError as error:
        raise AssertionError(
            f"{error}\nPass metadata on to every layer with a KV cache, take the positions that "
            "are given, and keep nothing from one step to the next."
        ) from error
    except Exception as error:
        raise AssertionError(
            f"where two sequences are computed alone and in one batch, {_raised_in(error, module)} "
            f"fails: {describe_error(error)}"
        ) from error


def _raised_in(error: Exception, module: vLLMModule) -> str:
    """Return the path and class of the innermost module whose forward raised ``error``."""
    paths = {each: path for path, each in module.named_modules(prefix=type(module).__name__)}
    within = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    *_, last = (each for each in [module, *within] if isinstance(each, nn.Module) and each in paths)
    return f"{paths[last]} ({type(last).__name__})"


def assert_outputs(got: list[Any], expected: list[Any], where: str) -> None:
    """Compare outputs of ``forward``: numbers up to the order of sums, everything else exactly."""
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
        # In 16 bits, a few outputs may happen to be small all at once.
        tolerance = _TOLERANCES[other.dtype] * max(most, 0.1 if other.itemsize == 2 else 0)
        assert error <= tolerance, (
            f"{what} differs by {error:.3g} from the unsharded module's, whose largest is "
            f"{most:.3g}"
        )


def assert_covers(case: Case) -> bool:
    """Reassemble the ranks' parameters and compare them with the checkpoint, bit by bit.

    Return whether they are equal to the unsharded module's; only converted tensors may differ,
    within their error bound.
    """
    size, tensors = case.size, case.tensors

    def load(module: vLLMModule) -> Tensors:
        module.load_weights(tensors)
        # Processes exchange tensors by pickle, which lacks eight-bit floats.
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
    modules = [case.build(rank, size) for rank in range(size)]
    together = _stored(modules, ranks, f"over {size} ranks")
    alone = _stored([case.whole], [held], "on one rank")
    assert together.keys() == alone.keys(), f"{sorted(together.keys() ^ alone.keys())}"
    names = Names.of(case.whole).tied
    tied = {name for others in names.values() for name in others}
    stored_as = {other: name for name, others in names.items() for other in others}
    lost = tensors.keys() - alone.keys()
    assert not lost, f"a whole checkpoint holds {sorted(lost)}, which no tensor keeps"
    for name, (path, tensor) in alone.items():
        if path in conversions:
            given = tensors[name if name in tensors else stored_as[name]]
            bound = conversions[path].error_bound(given)
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
    modules: Sequence[vLLMModule], ranks: list[Tensors], where: str
) -> dict[str, tuple[str, torch.Tensor]]:
    """Reassemble the ranks' states; return each tensor with its path, by checkpoint name."""
    declared = [dict(module.named_parameters(remove_duplicate=False)) for module in modules]
    whole_names = {
        path: whole
        for prefix, owner in modules[0].named_modules(remove_duplicate=False)
        for path, whole, _ in stored_tensors(prefix, owner)
    }
    found = {}
    for path in ranks[0]:
        parameters = [each.get(path) for each in declared]
        tensors = [rank[path] for rank in ranks]
        if isinstance(parameters[0], BasevLLMParameter):
            stored = reassemble(parameters, tensors, f"{path} {where}")
            for slot, tensor in stored.items():
                found[slot_name(path, slot) if slot else whole_names[path]] = path, tensor
            continue
        for rank, tensor in enumerate(tensors):
            assert same_bits(tensor, tensors[0]), f"{path} {where}: rank {rank} is not rank 0"
        found[whole_names[path]] = path, tensors[0]
    return found


def reassemble(
    parameters: Sequence[Any], ranks: Sequence[torch.Tensor], what: str
) -> dict[str, torch.Tensor]:
    """Reassemble the ranks' tensors of one parameter into the stored tensor of each slot.

    This uses only the declared dimensions, and shares no arithmetic with the code that cuts. Raises
    ``AssertionError`` if replicas differ or padding is not zero; ``what`` names the tensor, and
    ``parameters`` has each rank's parameter.
    """
    first: BasevLLMParameter = parameters[0]
    if first.experts is None:
        return _stored_slots(first.dims, ranks, first.transposed, what)
    experts = [
        _stored_slots(
            first.dims[1:],
            _of_expert(expert, parameters, ranks, what),
            first.transposed,
            f"expert {expert} of {what}",
        )
        for expert in range(first.experts.count)
    ]
    if first.experts.together:
        return {slot: torch.stack([each[slot] for each in experts]) for slot in experts[0]}
    return {
        f"{expert}.{slot}".rstrip("."): tensor
        for expert, slots in enumerate(experts)
        for slot, tensor in slots.items()
    }


def _of_expert(
    expert: int, parameters: Sequence[Any], ranks: Sequence[torch.Tensor], what: str
) -> list[torch.Tensor]:
    """Return the part of ``expert`` on each rank that keeps it."""
    found = []
    for parameter, tensor in zip(parameters, ranks, strict=True):
        kept = experts_kept(parameter.experts)
        assert len(tensor) == len(kept), f"{what}: {len(tensor)} experts on a rank, not {len(kept)}"
        if expert in kept:
            found.append(tensor[kept.index(expert)])
    assert found, f"{what}: no rank keeps expert {expert}"
    return found


def experts_kept(experts: Experts) -> list[int]:
    """Return the experts that a rank keeps; if uneven, the first ranks have one more."""
    placed = list(range(experts.count)) if experts.placement is None else experts.placement
    owners = sorted(place % experts.size for place in range(len(placed)))
    return [expert for expert, owner in zip(placed, owners, strict=True) if owner == experts.rank]


def _stored_slots(
    dims: Sequence[Dim], ranks: Sequence[torch.Tensor], transposed: bool, what: str
) -> dict[str, torch.Tensor]:
    """Return the tensor of each slot that a checkpoint stores apart; ``dims`` lack the experts'."""
    # Like a parameter of one rank, without padding.
    whole = ranks[0].new_empty([dim.size for dim in dims])
    for slots in product(*[range(len(dim.slots)) for dim in dims]):
        region = whole
        for dim, (declared, at) in enumerate(zip(dims, slots, strict=True)):
            sizes = [slot.size for slot in declared.slots]
            region = region.narrow(dim, sum(sizes[:at]), sizes[at])
        region.copy_(_whole_slot(dims, slots, ranks, what))
    stored = {}
    for apart in product(*[range(len(dim.names)) if dim.names else [None] for dim in dims]):
        tensor, names = whole, list[str]()
        for dim, (declared, slot) in enumerate(zip(dims, apart, strict=True)):
            tensor = tensor.index_select(dim, torch.tensor(_stored_order(declared, slot)))
            names += [] if slot is None else [declared.names[slot]]
        stored[".".join(names)] = tensor.transpose(-2, -1) if transposed else tensor
    return stored


def _stored_order(dim: Dim, at: int | None) -> list[int]:
    """Return the indices of a parameter's features in the order in which a checkpoint stores them.

    ``at`` is the features' slot; ``None`` if the checkpoint stores all slots as one tensor.
    """
    features = iter(range(dim.size))
    slots = [_in_pairs(list(islice(features, slot.size)), slot.pairs) for slot in dim.slots]
    if at is not None:
        return slots[at]
    groups = dim.groups or 1
    stored = []
    for group in range(groups):
        for slot in slots:
            share = len(slot) // groups
            stored += slot[group * share : (group + 1) * share]
    return stored


def _in_pairs(features: list[int], size: int) -> list[int]:
    """Interleave the halves of each run of ``size`` features; 0 means unchanged."""
    if not size:
        return features
    runs = [features[start : start + size] for start in range(0, len(features), size)]
    halves = [(run[: size // 2], run[size // 2 :]) for run in runs]
    return [
        feature
        for first, second in halves
        for pair in zip(first, second, strict=True)
        for feature in pair
    ]


def _whole_slot(
    dims: Sequence[Dim], slots: Sequence[int], ranks: Sequence[torch.Tensor], what: str
) -> torch.Tensor:
    """Join the ranks' parts of one slot in each dimension, and remove the padding."""
    declared = [dim.slots[at] for dim, at in zip(dims, slots, strict=True)]
    what = f"slot {'.'.join(slot.name for slot in declared if slot.name)!r} of {what}"
    pieces = list(ranks)
    for at_dim, (dim, at) in enumerate(zip(dims, slots, strict=True)):
        local = [slot.padded // slot.parts for slot in dim.slots]
        assert sum(local) == ranks[0].shape[at_dim], f"{what}: the slots do not fill the tensor"
        pieces = [piece.narrow(at_dim, sum(local[:at]), local[at]) for piece in pieces]
    for at_dim, slot in enumerate(declared):
        if slot.parts > 1:
            pieces = [_joined(pieces, slot, at_dim, what)]
    for rank, piece in enumerate(pieces):
        assert same_bits(piece, pieces[0]), f"{what}: rank {rank} differs"
    whole = pieces[0]
    for at_dim, slot in enumerate(declared):
        padding = whole.narrow(at_dim, slot.size, whole.shape[at_dim] - slot.size)
        assert not padding.to(torch.float64).count_nonzero(), f"{what}: padding is not zero"
        whole = whole.narrow(at_dim, 0, slot.size)
    return whole


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

    A fused tensor, with its slots in the order of ``shard_names``, loads like separate tensors: it
    is cut by slot first and by rank second. A name that only resembles a known one, or that belongs
    elsewhere in the tree, is unexpected.
    """
    names = Names.of(case.whole)
    split, whole = case.build(case.rank, case.size), case.build(case.rank, case.size)
    split.load_weights(case.tensors)
    fused = fuse(case.tensors, names.fused)
    whole.load_weights(fused)
    assert_same_state(state(whole), state(split), f"on {case.at()} when it is stored fused")
    # Another spelling of a name leads to the same place.
    spelled = {case.choose([n, *names.aliases.get(n, ())], "spelled"): n for n in fused}
    other = case.build(case.rank, case.size)
    other.load_weights({spelling: fused[name] for spelling, name in spelled.items()})
    assert_same_state(state(other), state(split), f"on {case.at()}, spelled as {[*spelled]}")

    of_others = [f"{each}.weight" for each in names.elsewhere]
    known = sorted(names.known.union(names.skipped, of_others))
    kinds = [sorted(case.tensors), known, sorted(names.skipped) or known]
    kinds += [of_others] if of_others else []
    name = case.choose(case.random.choice(kinds), "name")
    unknown = {similar for similar in _resembling(name, known) if not names.resolve(similar)}
    similar = case.some(sorted(unknown), "similar names", most=20)
    module = case.build(case.rank, case.size)
    some = next(iter(case.tensors.values()))
    error = refusal(
        UnexpectedWeightError,
        lambda: module.load_weights(case.tensors | dict.fromkeys(similar, some)),
        f"{similar}, which only resemble {name!r}, were not refused",
    )
    assert error.report is not None
    refused = [problem.name for problem in error.report.unexpected]
    assert sorted(refused) == sorted(similar), f"of {similar}, only {refused} were refused"


def _resembling(name: str, known: Iterable[str]) -> set[str]:
    """Return names that differ from ``name`` in one component, or by one more or one fewer."""
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
