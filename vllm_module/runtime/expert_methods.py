"""Methods of ``LLM`` on where the experts of its layers are."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from vllm_module.base.messages import describe_error, shorten
from vllm_module.parameters import Experts
from vllm_module.parameters.balancing import balanced_placement
from vllm_module.runtime.engine import Engine
from vllm_module.runtime.ranks.executor import Executor


class ExpertMethods:
    """The methods of :class:`~vllm_module.LLM` that move experts between ranks."""

    engine: Engine
    executor: Executor
    _changing: Callable[[], AbstractContextManager[None]]
    _check_whole: Callable[[], None]

    def expert_placements(self) -> dict[str, tuple[int, ...]]:
        """Return the expert at each place of each layer, by the layer's path, in their order.

        Places are counted on all ranks in their order; each rank has as many as the others, or
        one more.
        """
        with self.engine.alone():
            return {path: _placement(each) for path, each in self._experts().items()}

    def expert_counts(self) -> dict[str, list[int]]:
        """Return the tokens that each expert of a layer got since experts were rearranged last.

        They are those of all steps, by the layer's path; with ``enable_eplb``, else there are none.
        Those of prompts count, and those that are computed again.
        """
        with self.engine.alone():
            return self._of_stages("expert_counts")

    def rearrange_experts(
        self,
        counts: Sequence[Sequence[float]] | None = None,
        *,
        placements: Mapping[str, Sequence[int]] | None = None,
    ) -> int:
        """Move experts to other ranks, between two steps, so that each has as much to do.

        Requests go on, and keep what has been computed: the model is the same, up to the order in
        which ranks add up. Updates and digests know the new places, and so does :meth:`layout`,
        from which a trainer that sends boxes has to plan again.

        On GPUs, a checkpoint in FP8 with static scales of activations takes the largest scale of a
        rank's experts for all of them. So a move changes results there within FP8's rounding.

        Args:
            counts: tokens of each expert, by layer, in the order of :meth:`expert_placements`;
                by default those of :meth:`expert_counts`. Where experts go then,
                :func:`~vllm_module.parameters.balancing.balanced_placement` says.
            placements: where experts go, by the path of a layer. Other layers stay as they are.

        Returns:
            The bytes that ranks have sent each other.

        Raises:
            ValueError: no experts are spread over ranks, other layers or experts are counted,
                none are counted here, adapters are loaded, or a placement has no integers.
            ShardingError: an expert has no place, or two on one rank.
            RuntimeError: the engine sleeps.
            RankError: a rank ended or hangs. The engine has ended then.

        """
        self.executor.alone("rearrange_experts")
        with self._changing():
            self._check_whole()
            # Where every rank makes this call, each might have been given others.
            counts, placements = self.executor.of_first((counts, placements))
            if counts is not None and placements is not None:
                raise ValueError("rearrange_experts takes either counts of tokens or placements")
            experts = self._experts()
            if not experts:
                raise ValueError(
                    "no experts are spread over ranks: rearrange_experts is for a model with "
                    "experts, on several ranks, with enable_expert_parallel"
                )
            if adapters := self.engine.adapters:
                raise ValueError(
                    f"the adapter {shorten(next(iter(adapters)))} has parts beside the experts, "
                    "which do not move: unload_adapter it first, and load it again afterwards"
                )
            if counts is None and placements is None:
                counts = [*self._of_stages("expert_counts").values()]
                if not counts:
                    raise ValueError(
                        "this engine counts no tokens of experts: make it with enable_eplb=True, "
                        "or give counts or placements"
                    )
            wanted = _balanced(experts, counts) if placements is None else placements
            new = {
                path: placement
                for path, placement in _checked(experts, wanted).items()
                if placement != _placement(experts[path])
            }
            try:
                received = self.executor.rearrange_experts(new) if new else []
            except BaseException as error:
                if not self.executor.can_run:
                    self.engine.fail(f"rearranging the experts failed: {describe_error(error)}")
                raise
            if self.executor.worker.config.enable_eplb:
                self.executor.collective_rpc("count_experts")
        return sum(received)

    def _experts(self) -> dict[str, Experts]:
        found: dict[str, Experts] = self._of_stages("placed_experts")
        return found

    def _of_stages(self, method: str) -> dict[str, Any]:
        """Return what a worker's method returns of each layer on the first rank of its stage."""
        self.executor.check()
        of_ranks = self.executor.collective_rpc(method)
        of_stages = of_ranks[:: self.executor.size // self.executor.stages]
        # The first ranks have the last stage.
        return {path: each for stage in reversed(of_stages) for path, each in stage.items()}


def _placement(experts: Experts) -> tuple[int, ...]:
    return tuple(range(experts.count)) if experts.placement is None else experts.placement


def _balanced(experts: Mapping[str, Experts], counts: Any) -> dict[str, tuple[int, ...]]:
    numbers = [[float(each) for each in of_layer] for of_layer in counts]
    expected = [each.count for each in experts.values()]
    if [len(each) for each in numbers] != expected:
        raise ValueError(
            f"counts should have a row for each of {len(expected)} layers and a number for each of "
            f"{max(expected)} experts, got {len(numbers)} rows"
            + (f" of {len(numbers[0])}" if numbers else "")
        )
    return {
        path: balanced_placement(of_layer, each.size, _placement(each))
        for (path, each), of_layer in zip(experts.items(), numbers, strict=True)
    }


def _number(path: str, value: Any) -> int:
    """Return an expert's number as Python's, from which layouts and tables are made."""
    kind = getattr(value, "dtype", type(value))
    try:
        if kind in (bool, torch.bool):  # as tensors and numpy arrays have them, too
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(
            f"a placement of {path} should have numbers of experts as integers, got "
            f"{shorten(value)} of type {getattr(kind, '__name__', kind)}"
        ) from None


def _checked(
    experts: Mapping[str, Experts], placements: Mapping[str, Sequence[int]]
) -> dict[str, tuple[int, ...]]:
    checked = {}
    for path, placement in placements.items():
        if path not in experts:
            raise ValueError(
                f"no layer {shorten(path)} has experts that are spread over ranks: expected of "
                f"{', '.join(list(experts)[:4])}"
            )
        own = experts[path]
        new = replace(own, placement=tuple(_number(path, each) for each in placement))
        if new.places != own.places:
            raise ValueError(f"{path} has {own.places} places for experts, got {new.places}")
        checked[path] = _placement(new)
    return checked
