"""Loading from an opened source: a checkpoint by its names, a sharded state by the tree's paths.

A sharded state is loaded like a state dict: each tensor is one rank's parameter or buffer, whole.
All steps of a load but routing are done: tensors are accounted for, materialized, read in threads
and processed. No ``load_weights`` is called, because the names are not a checkpoint's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vllm_module.base.messages import printable, printable_name
from vllm_module.build.registry import blamed_while_loading
from vllm_module.core.fill import Fill
from vllm_module.core.module import vLLMModule
from vllm_module.core.plan import LoadPlan
from vllm_module.core.report import LoadReport, Problem, fold
from vllm_module.core.run import OpenReader, Reader, execute, loading
from vllm_module.core.tree import Node, held_locations
from vllm_module.distributed import tensor_parallel_group
from vllm_module.errors import ShardingError, WeightLoadError
from vllm_module.layers import ParallelLMHead
from vllm_module.parameters import BasevLLMParameter
from vllm_module.weights import Checkpoint, Readers, Weight
from vllm_module.weights.sharded_state import ShardedState

_MOST_NAMED = 10  # number of missing tensors that a message lists by a file's names


def own_tensors(model: vLLMModule, weights: Mapping[str, Weight]) -> Mapping[str, Weight]:
    """Return the tensors to load ``model`` from: for a sharded state, those of its rank.

    Raises ``ShardingError`` for a sharded state of another number of ranks.
    """
    return weights.of_rank(_rank(model, weights)) if isinstance(weights, ShardedState) else weights


def load_from(
    model: vLLMModule,
    weights: Mapping[str, Weight],
    recorded: Iterable[tuple[str, Weight]] | None = None,
    planned: Callable[[LoadPlan], None] | None = None,
    reader: OpenReader | None = None,
) -> None:
    """Load the whole ``model`` from the opened weights of its source.

    ``recorded`` are its :func:`own_tensors`, or with handles that record what is read. ``planned``
    is called with the plan before it is run, by a ``reader`` if one is given. The report of a model
    with ``keep_digests`` has them. Raises what these and :meth:`vLLMModule.load_weights` do.
    """
    layouts: list[Any] = []

    def open_reader(plan: LoadPlan) -> AbstractContextManager[Reader]:
        if planned is not None:
            planned(plan)
        if model.keep_digests and not isinstance(weights, ShardedState):
            layouts.append(plan.layout())
        return Readers(model.load_state.device) if reader is None else reader(plan)

    pairs = own_tensors(model, weights).items() if recorded is None else recorded
    if isinstance(weights, ShardedState):
        with blamed_while_loading(model):
            execute(plan_held(model, dict(pairs)), open_reader)
    else:
        try:
            with (
                blamed_while_loading(model),
                loading(model, pairs, open_reader=open_reader),
            ):
                model.load_weights(pairs)  # overrides expect pairs
        except WeightLoadError as error:
            if error.report is not None and (advice := _advice(model, weights, error.report)):
                error.args = (f"{error} {advice}",)
            raise
    if model.keep_digests and model.load_report is not None:
        model.load_report.digests = model.digest(*layouts)


def _advice(model: vLLMModule, weights: Mapping[str, Weight], report: LoadReport) -> str:
    """Return a sentence on the likely cause of what is missing, or ""."""
    if getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        missing = [name for name, _ in report.missing]
        for path, each in model.named_modules() if len(missing) == 1 else ():
            if isinstance(each, ParallelLMHead) and missing == [f"{path}.weight"]:
                return (
                    f"config.json has tie_word_embeddings, and {type(model).__name__} does not tie "
                    f"its head: in its __init__, give the embedding to {path}.tie_weights()."
                )
    return _lacking(weights, report)


def _lacking(weights: Mapping[str, Weight], report: LoadReport) -> str:
    """Return a sentence with the missing tensors' names in a format that renames tensors, or ""."""
    if not isinstance(weights, Checkpoint) or weights.stored_name is None:
        return ""
    names = fold(filter(None, (weights.stored_name(name) for name, _ in report.missing)))
    if not names:
        return ""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    where = ", ".join(map(printable, weights.files[:2])) + ", …" * (len(weights.files) > 2)
    listed = ", ".join(map(printable_name, names[:_MOST_NAMED]))
    return f"{where} should have {listed}{more}: download it again, or convert the model again."


def held_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return each parameter and persistent buffer below ``module`` by path, a tied one once.

    These are the tensors of a sharded state, which :func:`load_held` takes.
    """
    top = Node(module)
    try:
        return {location.path: location.tensor for location in held_locations(top)}
    finally:
        top.forget_below()  # break a cycle that would keep the model alive


def load_held(model: vLLMModule, held: Mapping[str, Weight]) -> None:
    """Load ``model`` from the tensors of :func:`held_tensors`, or copies of them."""
    execute(plan_held(model, held))


def plan_from(model: vLLMModule, weights: Mapping[str, Weight]) -> LoadPlan:
    """Return the plan of :func:`load_from`; nothing is read."""
    own = own_tensors(model, weights)
    if not isinstance(weights, ShardedState):
        plan = model.plan_weights(own)
        plan.report.advice = _advice(model, weights, plan.report)
        return plan
    return plan_held(model, own)


def plan_held(model: vLLMModule, held: Mapping[str, Weight]) -> LoadPlan:
    """Return a plan in which each tensor fills the parameter at its path, as this rank holds it.

    No name is routed. Tensors made by conversions are filled too. The order is that of the tree, in
    which a sharded state is stored.
    """
    left, report, fills = dict(held), LoadReport(), []
    top = Node(model)
    try:
        for location in held_locations(top):
            path, expected = location.path, location.tensor
            weight = left.pop(path, None)
            if weight is None:
                detail = f"expected shape {list(expected.shape)}, as this rank holds it"
                report.missing.append(Problem(path, detail))
            elif (weight.shape, weight.dtype) != (expected.shape, expected.dtype):
                detail = (
                    f"this rank holds {expected.dtype} {list(expected.shape)}, got {weight.dtype} "
                    f"{list(weight.shape)}"
                )
                report.misshapen.append(Problem(path, detail))
            else:
                report.loaded[path] = [path]
                fills.append(Fill(path, None, weight, location, held=True))
    finally:
        top.forget_below()
    detail = f"{type(model).__name__} has no parameter or buffer of this path"
    report.unexpected += [Problem(name, detail) for name in left]
    return LoadPlan(model, report, fills)


def plan_of_rank(plan: LoadPlan, rank: int, weights: Mapping[str, Weight]) -> LoadPlan:
    """Return the plan of another rank by ``plan.of_rank``, with that rank's tensors."""
    other = plan.of_rank(rank)
    if not isinstance(weights, ShardedState):
        return other
    held = weights.of_rank(rank)
    return replace(other, fills=[fill._replace(weight=held[fill.name]) for fill in other.fills])


def _rank(model: vLLMModule, state: ShardedState) -> int:
    """Return the model's rank in ``state``.

    Raises ``ShardingError`` if the model has another number of ranks, or experts that have moved.
    """
    group, expected = tensor_parallel_group(), state.manifest.tensor_parallel_size
    places = {(group.rank, group.size)}
    of_experts = (getattr(each, "experts", None) for each in model.parameters())
    if any(each is not None and each.placement is not None for each in of_experts):
        raise ShardingError(
            f"{printable(state.folder)} has the experts of each rank in order, and those of the "
            "model have other places: load the original checkpoint, or move them back"
        )
    cut = {  # the ranks that the model was built for, not those of the surrounding group
        place
        for parameter in model.parameters()
        if isinstance(parameter, BasevLLMParameter)
        for place in _places(parameter)
    }
    for _, size in cut or places:
        if size != expected:
            raise ShardingError(
                f"{printable(state.folder)} was sharded for {expected} tensor-parallel ranks, and "
                f"the model is built for {size}: load it on {expected}, or shard the original "
                f"checkpoint again with --tp {size}"
            )
    ((rank, _),) = cut or places
    return rank


def _places(parameter: BasevLLMParameter) -> list[tuple[int, int]]:
    places = [(parameter.tp_rank, parameter.tp_size)]
    if parameter.experts is not None:
        places.append((parameter.experts.rank, parameter.experts.size))
    return [(rank, size) for rank, size in places if size > 1]
