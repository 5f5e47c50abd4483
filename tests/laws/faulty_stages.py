"""Faulty ways to divide a model among pipeline stages, for the laws on stages.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch

from vllm_module.errors import ModelNotReadyError
from vllm_module.layers.stages import OtherStage


def one_layer_more(right: Callable[..., range], stage: Any, count: int) -> range:
    """Let a stage hold the first layer of the next one, too."""
    own = right(stage, count)
    return range(own.start, min(own.stop + 1, count))


def one_layer_less(right: Callable[..., range], stage: Any, count: int) -> range:
    """Let the last stage lack its first layer."""
    own = right(stage, count)
    return range(own.start + (own.stop == count), own.stop)


def but_the_tied(right: Callable[..., Any], model: Any, weights: Any) -> Any:
    """Update all but the embedding where the first layer is elsewhere."""
    layers = getattr(getattr(model, "model", None), "layers", ())
    if not len(layers) or not isinstance(layers[0], OtherStage):
        return right(model, weights)
    pairs = weights.items() if isinstance(weights, dict) else weights
    return right(model, [(name, each) for name, each in pairs if "embed" not in name])


def once_loaded(right: Callable[..., Any], model: Any, weights: Any) -> Any:
    """Update a stage while it loads, and nothing of it afterwards."""
    is_stage = any(isinstance(each, OtherStage) for each in model.modules())
    with suppress(ModelNotReadyError):
        model.check_ready()
        return None if is_stage else right(model, weights)
    return right(model, weights)


def held_elsewhere(right: Callable[..., Any], attr: str, child: Any) -> Any:
    """Take a decoder layer that is here for one of another stage, in any stage."""
    declared = right(attr, child)
    if attr.isdecimal() and hasattr(child, "self_attn"):
        return declared._replace(held_elsewhere="pipeline stage 0 of 3 holds it")
    return declared


def with_tensors_of_others(right: Callable[..., Iterator[Any]], plan: Any) -> Iterator[Any]:
    """Read the first tensor of the plan twice where the module is a stage."""
    reads = list(right(plan))
    stage = any(isinstance(each, OtherStage) for each in plan.module.modules())
    return iter(reads + reads[:1] if stage else reads)


def without_residual(right: Callable[..., Any], model: Any, passed: Any, *others: Any) -> Any:
    if isinstance(passed, tuple):
        passed = passed[0], torch.zeros_like(passed[1])
    return right(model, passed, *others)
