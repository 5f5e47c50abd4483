"""Functions that load wrongly.

Each takes the right function as its first argument, or returns a function that does; those in
``first(...)`` take its arguments alone, and are called before it.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from vllm_module import BasevLLMParameter
from vllm_module.core.planner import Planner
from vllm_module.core.routes import Child, Skip
from vllm_module.core.run import Run
from vllm_module.core.state import is_complete, modules_that_load
from vllm_module.core.tensors import is_typed, slots_of
from vllm_module.core.tree import locations, state_of
from vllm_module.kernels.rows.quantize import quantize_static
from vllm_module.parameters import (
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    PerTensorScaleParameter,
)
from vllm_module.weights import read_into

# Where a name leads


class Alike(dict[str, Any]):
    """Routes that a component also finds when it is only ``alike(known, component)``."""

    def __init__(self, right: dict[str, Any], alike: Callable[[str, str], bool]) -> None:
        super().__init__(right)
        self.alike = alike

    def get(self, component: str, default: Any = None) -> Any:
        if component in self:
            return self[component]
        known = (each for each in self if each.endswith(".") == component.endswith("."))
        pairs = ((each, each.rstrip("."), component.rstrip(".")) for each in known)
        return next((self[key] for key, *pair in pairs if self.alike(*pair)), default)


def matched(alike: Callable[[str, str], bool]) -> Callable[..., Any]:
    return lambda routes_of, node: Alike(routes_of(node), alike)


def to_slots(change: Callable[[tuple[str, ...]], Sequence[str]]) -> Callable[..., None]:
    """Fill the slots ``change(slots)`` with the tensors of a fused parameter's ``slots``."""

    def faulty(
        fill: Any, planner: Planner, name: str, weight: Any, location: Any, slot: Any
    ) -> None:
        slots = () if location.find() is None else tuple(location.slots)
        slot = dict(zip(slots, change(slots), strict=True)).get(slot, slot)
        fill(planner, name, weight, location, slot)

    return faulty


def without_aliases(routes_of: Any, node: Any) -> dict[str, Any]:
    aliases = getattr(node.module, "weight_aliases", ())
    return {key: r for key, r in routes_of(node).items() if key.rstrip(".") not in aliases}


def filled_if(known: Callable[..., bool]) -> Callable[..., None]:
    """Pass over a name without a word unless ``known(location, slot)``."""

    def faulty(
        fill: Any, planner: Planner, name: str, weight: Any, location: Any, slot: Any
    ) -> None:
        if known(location, slot):
            fill(planner, name, weight, location, slot)

    return faulty


def by_first_component(find: Any, table: Any, name: str) -> Any:
    route, rest = find(table, name)
    component, _, below = name.partition(".")
    inner = table.get(f"{component}.")
    ends = [*inner.values()] if rest == name and isinstance(inner, dict) else []
    if ends and all(isinstance(each, Child) for each in ends):
        return ends[0], below.partition(".")[2]
    return route, rest


def shortest(find: Any, table: Any, name: str) -> Any:
    component, _, rest = name.partition(".")
    inner = table.get(f"{component}.")
    if isinstance(inner, dict) and "" in inner:
        return inner[""], rest
    return find(table, name)


def skipping_siblings(find: Any, table: Any, name: str) -> Any:
    component, _, below = name.partition(".")
    inner = table.get(f"{component}.")
    for key, route in inner.items() if isinstance(inner, dict) else ():
        if isinstance(route, Skip) and below.startswith(key):
            return route, ""
    return find(table, name)


def is_kept(location: Any, slot: str | None) -> bool:
    tensor = location.find()
    if slot is None or not is_typed(tensor) or slot not in tensor.slots:
        return True
    index = tensor.slots[slot]
    return tensor.experts is None or index[0] is None or index[0] in tensor.experts.kept


def above_its_layer(stored_name: Any, location: Any, slot: str) -> str:
    """Name slots that are stored together only as if each were stored apart."""
    dim = location.tensor.dims[0] if is_typed(location.tensor) else None
    if slot or dim is None or dim.groups is None:
        return stored_name(location, slot)
    return f"{location.node.parent.path}{dim.slots[0].name}.{location.attr}"


# What is accepted


def despite(*words: str) -> Callable[..., str | None]:
    """Accept a tensor that is refused for a reason with all of these words."""

    def faulty(misfit: Any, *args: Any, **kwargs: Any) -> str | None:
        reason = misfit(*args, **kwargs)
        return None if reason and all(word in reason for word in words) else reason

    return faulty


def only_its_dtype(
    misfit: Any, location: Any, tensor: Any, slot: Any, weight: Any, **kw: Any
) -> Any:
    reason = misfit(location, tensor, slot, weight, **kw)
    return reason or (None if weight.dtype == location.stored_dtype else "expected one dtype")


def filled_twice(fill: Any, planner: Planner, *arguments: Any) -> None:
    fill(planner, *arguments)
    planner.report.duplicated.clear()


def without_missing(raise_if_refused: Any, report: Any, *args: Any, **kwargs: Any) -> None:
    report.missing.clear()
    raise_if_refused(report, *args, **kwargs)


def without_missing_slots(raise_if_refused: Any, report: Any, *args: Any, **kwargs: Any) -> None:
    root = Planner.current().tree.top.module
    loaded = [each for each in locations(root) if each.path in report.loaded]
    names = {each.stored_name(slot) for each in loaded for slot in slots_of(each.tensor)}
    report.missing[:] = [problem for problem in report.missing if problem.name not in names]
    raise_if_refused(report, *args, **kwargs)


def without_missing_experts(raise_if_refused: Any, report: Any, *args: Any, **kwargs: Any) -> None:
    dropped = {
        each.stored_name(slot)
        for each in locations(Planner.current().tree.top.module)
        for slot in slots_of(each.tensor)
        if not is_kept(each, slot)
    }
    report.missing[:] = [problem for problem in report.missing if problem.name not in dropped]
    raise_if_refused(report, *args, **kwargs)


def parameter_only(find: Any, location: Any) -> Any:
    tensor = find(location)
    return tensor if isinstance(tensor, nn.Parameter) else None


def tied_if(same: Callable[..., bool]) -> Callable[..., bool]:
    """Accept a second value of a tied tensor where ``same(second, first)``."""

    def faulty(same_bits: Any, *weights: Any) -> bool:
        *weights, dtype = weights
        copies = [torch.empty(each.shape, dtype=dtype) for each in weights]
        for pair in zip(weights, copies, strict=True):
            read_into(*pair)
        return same(*copies)

    return faulty


def same_bits(one: torch.Tensor, other: torch.Tensor, first: int) -> bool:
    one, other = (each.reshape(-1).view(torch.uint8)[:first] for each in (one, other))
    return torch.equal(one, other)


def written_before_compared(read: Any, run: Run, fills: Any, waiting: Any) -> None:
    for fill in fills:
        if fill.tied_to is not None and not fill.location.tensor.is_meta:
            fill.location.tensor.data.zero_()
    read(run, fills, waiting)


def tied_to_misfits(fill: Any, planner: Planner, *arguments: Any) -> None:
    report = planner.report
    before, report.misshapen = report.misshapen, []
    fill(planner, *arguments)
    report.misshapen[:0] = before


def streamed(groups: Any, planner: Planner, module: Any, weights: Any) -> Iterator[Any]:
    pairs = weights.items() if isinstance(weights, Mapping) else weights
    return groups(planner, module, iter(pairs))


def read_as_it_comes(*, planning: bool) -> Callable[..., Iterator[Any]]:
    """Read each pair of a stream before the next, handles too: in plans, or in loads."""

    def faulty(groups: Any, planner: Planner, module: Any, weights: Any) -> Iterator[Any]:
        arrived = planner._arrived or Run(planner.tree.top.module).fill
        for group in groups(planner, module, weights):
            waiting = len(planner.fills)
            yield group
            if (planner._arrived is None) is planning and not isinstance(weights, Collection):
                planner._take(waiting, arrived)

    return faulty


# What is left behind


def first(do: Callable[..., Any]) -> Callable[..., Any]:
    """Call ``do`` with the arguments, then the right function."""

    def faulty(right: Any, *args: Any, **kwargs: Any) -> Any:
        do(*args, **kwargs)
        return right(*args, **kwargs)

    return faulty


def tag(tensor: torch.Tensor) -> None:
    tensor.is_loaded = True


def untyped(materialized: Any, tensor: torch.Tensor, device: Any) -> Any:
    real = materialized(tensor, device)
    return nn.Parameter(real.data, False) if isinstance(real, BasevLLMParameter) else real


def requiring_grad(materialized: Any, tensor: torch.Tensor, device: Any) -> Any:
    real = materialized(tensor, device)
    trained = isinstance(real, nn.Parameter) and real.is_floating_point()
    return real.requires_grad_(True) if trained else real


def in_float32(materialized: Any, tensor: torch.Tensor, device: Any) -> Any:
    real = materialized(tensor, device)
    if isinstance(real, BasevLLMParameter):
        return real
    wrong = real.data.to(torch.float32)
    return nn.Parameter(wrong, real.requires_grad) if isinstance(real, nn.Parameter) else wrong


# What several calls and files leave out


def forgetting(run: Run, fills: Any, waiting: Any) -> None:
    for fill in fills if run.partial else ():
        fill.location.node.state.loaded.clear()


def one_further(narrow: Any, handle: Any, dim: int, start: int, length: int) -> Any:
    return narrow(handle, dim, start + (start + length < handle.shape[dim]), length)


# When a module is ready, and where its memory is


def some_are_all(root: nn.Module) -> None:
    for location in locations(root):
        if loaded := location.node.state.loaded.get(location.local):
            loaded |= {*slots_of(location.tensor)}


def while_it_is_loaded(check_ready: Any, root: nn.Module) -> None:
    states = [state_of(module) for module in modules_that_load(root)]
    in_progress = [state for state in states if state.in_progress]
    for state in in_progress:
        state.in_progress = False
    try:
        check_ready(root)
    finally:
        for state in in_progress:
            state.in_progress = True


def twice_at_a_time(module: Any) -> None:
    try:
        Planner.current()
    except AssertionError:  # the outermost call of its thread
        state_of(module).in_progress = False


@contextmanager
def root_alone(loading: Any, module: Any, *arguments: Any, **named: Any) -> Iterator[Any]:
    try:
        with loading(module, *arguments, **named) as planner:
            yield planner
    except BaseException:
        for each in modules_that_load(module):
            if each is not module:
                state_of(each).refusal = None
        raise


def in_new_memory(execute: Any, run: Run, *arguments: Any) -> None:
    execute(run, *arguments)
    for location in locations(run.root):
        module, attr = location.node.module, location.attr
        setattr(module, attr, copy.deepcopy(getattr(module, attr)))


def unwritten(read: Any, run: Run, *arguments: Any) -> None:
    try:
        read(run, *arguments)
    finally:
        run.written = False


def written_from_the_start(init: Any, run: Run, *arguments: Any, **named: Any) -> None:
    init(run, *arguments, **named)
    run.written = True


def whole_after_update(execute: Any, run: Run, *arguments: Any) -> None:
    execute(run, *arguments)
    for module in modules_that_load(run.root) if run.partial else ():
        state_of(module).refusal = None


# What is made of weights as they arrive


def above_zero(quantize: Any, values: Any, quantized: Any, scale: Any, block: Any) -> None:
    quantize(values.clamp(min=0), quantized, scale, block)
    quantize_static(values, quantized, scale, block)


def truncated(quantize: Any, values: Any, quantized: Any, scale: Any, block: Any) -> None:
    quantize(values, quantized, scale, block)
    if not quantized.dtype.is_floating_point:
        rows, columns = values.shape
        of_each = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        quantized.copy_((values.float() / of_each[:rows, :columns]).trunc())


def codes_swapped(quantize_nf4: Any, wide: Any, packed: Any, absmax: Any, blocksize: int) -> None:
    quantize_nf4(wide, packed, absmax, blocksize)
    packed.copy_((packed >> 4) | (packed << 4))


def scales_of_another_row(
    quantize_nf4: Any, wide: Any, packed: Any, absmax: Any, blocksize: int
) -> None:
    quantize_nf4(wide, packed, absmax, blocksize)
    absmax.copy_(absmax.roll(1, 0))


def scales_left_on_meta(execute: Any, run: Run, *arguments: Any) -> None:
    execute(run, *arguments)
    kinds = PerTensorScaleParameter | ChannelQuantScaleParameter | BlockQuantScaleParameter
    for module in run.root.modules() if is_complete(run.root) else ():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, kinds):
                module._parameters[name] = parameter.materialize_on("meta")


def by_the_given_name(read: Any, run: Run, fills: Any, waiting: Any) -> None:
    given = {fill.location.path: fill for fill in fills}
    read(run, fills, waiting)
    filled = {each.location.tensor: each.slots for each in given.values()}
    for location in locations(run.root):
        if location.path not in given and location.tensor in filled:
            loaded = location.node.state.loaded.get(location.local, set())
            loaded.difference_update(filled[location.tensor])


# What a load costs


def kept(planner: Planner, name: str, weight: Any, *others: Any) -> None:
    planner.kept = [*getattr(planner, "kept", ()), weight]


def read_whole(pieces: Any, fill: Any) -> Any:
    weight = fill.weight
    weight = weight if isinstance(weight, torch.Tensor) else weight.read()
    return pieces(fill._replace(weight=weight))


def dropped_too(jobs: Any, fill: Any) -> Iterator[Any]:
    yield from jobs(fill)
    if not is_kept(fill.location, fill.slot):
        weight = fill.weight
        yield weight, torch.empty(weight.shape, dtype=weight.dtype)
