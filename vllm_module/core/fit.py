"""Messages for names and weights that do not fit, and the values of tensors that may be absent."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from vllm_module.base.messages import shorten
from vllm_module.core import changes
from vllm_module.core.report import Problem, fold
from vllm_module.core.routes import routes_of
from vllm_module.core.tensors import expected_shape, is_typed
from vllm_module.core.tree import Location, loads_itself
from vllm_module.weights import Weight, read_into
from vllm_module.weights.changes import Changes

_COMPARED_BYTES = 16 << 20  # of a vector at a time
_PLAIN = (torch.Tensor, nn.Parameter)


def misfit(
    location: Location, tensor: torch.Tensor, slot: str | None, weight: Weight, *, needs_data: bool
) -> str | None:
    """Say why ``weight`` cannot fill ``slot`` of ``tensor``; ``None`` if it can."""
    if problem := _not_plain(weight, needs_data=needs_data):
        return problem
    if slot is None and (apart := _in_two_orders(tensor)):
        return f"its name does not tell in which order the rows are: expected {', '.join(apart)}"
    shape = weight.shape
    if not (tensor.accepts(slot, shape) if is_typed(tensor) else shape == tensor.shape):
        expected = expected_shape(tensor, slot)
        hint = ", its transpose" if len(shape) == 2 and expected == [*reversed(shape)] else ""
        return f"expected shape {expected}, got {list(weight.shape)}{hint}"
    if isinstance(weight, Changes):
        return changes.refusal(location, slot, weight)
    conversion = location.conversion
    dtype = tensor.dtype if conversion is None else conversion.dtype
    if conversion is None and is_typed(tensor) and tensor.stored_dtypes:
        if weight.dtype in tensor.stored_dtypes:
            return None
        return f"expected dtype {' or '.join(map(str, tensor.stored_dtypes))}, got {weight.dtype}"
    widens = (weight.dtype, dtype) == (torch.int32, torch.int64)  # Kimi-K2's weight_shape
    if weight.dtype != dtype and not widens and not (converts(weight.dtype) and converts(dtype)):
        return f"expected dtype {dtype} or one that converts to it, got {weight.dtype}"
    return None


def _in_two_orders(tensor: torch.Tensor) -> tuple[str, ...]:
    """Return the slots of a tensor if some are stored as rotary pairs, which their names say."""
    dims = tensor.dims if is_typed(tensor) else ()
    return next((dim.names for dim in dims if any(slot.pairs for slot in dim.slots)), ())


def _not_plain(weight: Any, *, needs_data: bool) -> str | None:
    """Say why ``weight`` is neither a handle nor a tensor that can be narrowed and copied."""
    if not isinstance(weight, torch.Tensor):
        if not all(hasattr(weight, name) for name in ("shape", "dtype", "narrow", "read_into")):
            return f"expected a tensor or a handle, got {type(weight).__name__}"
        kinds = type(weight.shape), type(weight.dtype)
        if kinds != (torch.Size, torch.dtype):
            names = " and ".join(kind.__name__ for kind in kinds)
            return f"expected a handle whose shape and dtype are Size and dtype, got {names}"
        return None
    if weight.layout != torch.strided or weight.is_nested:
        kind = "a nested one" if weight.is_nested else str(weight.layout)
        return f"expected one dense tensor, got {kind}; call its to_dense(), or unbind it"
    if weight.is_quantized:
        return f"expected a tensor that is not quantized, got {weight.dtype}; call its dequantize()"
    if type(weight) not in _PLAIN and is_lazy(weight):
        return "expected a tensor with a shape, got one that is not initialized"
    if not needs_data:
        return None
    if weight.is_meta:
        return "expected a tensor with data, got one on the meta device"
    # What overrides it may have no memory, or that of one rank alone.
    cls = type(weight)
    if cls not in _PLAIN and cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return (
            f"expected a plain tensor, got {cls.__name__}; unwrap it, as DTensor.full_tensor() does"
        )
    return None


def zero_rule(location: Location) -> str | None:
    """Return why a checkpoint may have zeros where no tensor is; ``None`` if it may not."""
    rules: Mapping[str, str] = getattr(location.node.module, "zero_weights", {})
    return rules.get(location.attr)


def not_zeros(weight: Weight) -> str | None:
    """Read ``weight``, and say why it is no vector of zeros; ``None`` if it is one."""
    if problem := _not_plain(weight, needs_data=True):
        return problem
    if len(weight.shape) != 1 or not converts(weight.dtype):
        return f"expected a vector of zeros, got {weight.dtype} {list(weight.shape)}"
    length, step = weight.shape[0], _COMPARED_BYTES // weight.dtype.itemsize
    for first in range(0, length, step):
        part = weight.narrow(0, first, min(step, length - first))
        values = torch.empty(part.shape, dtype=part.dtype, device="cpu")
        read_into(part, values)
        if bool((wrong := values != 0).any()):
            return f"expected zeros or no such tensor, got {values[wrong][0].item():g}"
    return None


def absent_weight(location: Location, slot: str) -> torch.Tensor | None:
    """Return what fills a slot that a checkpoint may lack; ``None`` if it has to have it."""
    of_module = getattr(location.node.module, "absent_weight", None)  # none of a plain module
    found: torch.Tensor | None = of_module(location.attr, slot) if of_module else None
    return found


def missing(location: Location, slot: str) -> Problem:
    """Name a slot that nothing fills as a checkpoint would, and say what it is a slot of."""
    expected = f"expected shape {expected_shape(location.tensor, slot)}"
    if slot:
        *_, layer, attr = ("", "this layer", *location.path.split("."))[-3:]
        # Without the number of an expert, which the name has, so that the lines of all can fold.
        expected += f", slot {slot.rpartition('.')[2]!r} of {layer}.{attr}"
    return Problem(location.stored_name(slot), expected)


def converts(dtype: torch.dtype) -> bool:
    """Tell whether loading converts values: floating point of 16 bits and more, never quantized."""
    return dtype.is_floating_point and dtype.itemsize > 1


def no_place(location: Location, slot: str | None) -> str:
    """Say why no tensor is at ``location``, and what the module has instead."""
    node, attr = location.node, location.attr
    module = type(node.module).__name__
    if location.is_made:
        return f"{location.path} is made of full-precision weights while they are loaded"
    declared = attr in node.module._parameters or attr in node.module._buffers
    if slot and node.module._parameters.get(attr) is not None and not is_typed(location.tensor):
        return (
            f"{location.path} is a plain Parameter, which has no slots such as {slot!r}: create it "
            "as a typed one, such as ModelWeightParameter(Dim((Slot(...), ...)), ...)"
        )
    if declared or slot is not None:
        with_slot = f" with a slot {slot!r}" if slot else ""
        return f"{module} was built without {attr!r}{with_slot}"
    for alias, target in getattr(node.module, "weight_aliases", {}).items():
        if f"{attr}.".startswith(f"{alias}."):
            return f"weight_aliases of {module} lead to {target!r}, which is not there"
    component = attr.partition(".")[0]
    for name, child in node.module._modules.items():
        if child is None or loads_itself(child):
            continue
        if component in getattr(child, "shard_names", ()):
            return (
                f"{module}.{name} declares shard_names, which has no effect, because "
                f"{type(child).__name__} is no vLLMModule: make it one"
            )
    if (unregistered := _unregistered(vars(node.module).get(component))) is not None:
        return f"{module}.{component} is {unregistered}"
    known = dict.fromkeys(name.partition(".")[0] for name in routes_of(node))
    # The lines of several numbers can fold, because they say the same.
    number = component.isdecimal()
    if component in known:
        below = routes_of(node).get(f"{component}.")
        if number and isinstance(below, dict):
            names = tuple(dict.fromkeys(each.partition(".")[0] for each in below))
            return f"{module} has below each number {_listed(names)}"
        return f"{module}.{component} is known, but not with a name like this"
    what = "such number" if number else shorten(component)
    return f"{module} has no {what}; it has {_listed(tuple(known))}"


def _unregistered(value: Any) -> str | None:
    """Say what an attribute is that should hold weights, and that PyTorch does not know of."""
    if isinstance(value, torch.Tensor):
        return "a plain tensor: make it an nn.Parameter, or a buffer by register_buffer"
    held = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list | tuple) and any(isinstance(each, nn.Module) for each in held):
        instead = "nn.ModuleDict" if isinstance(value, dict) else "nn.ModuleList"
        return f"a {type(value).__name__}, whose modules PyTorch does not see: make it an {instead}"
    return None


@lru_cache(maxsize=16)  # the same for all experts that a checkpoint has too many
def _listed(known: tuple[str, ...]) -> str:
    names = fold(known)
    return (
        ", ".join(names) if len(names) <= 16 else f"{len(names)} other components"
    ) or "no weights"
