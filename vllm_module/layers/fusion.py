"""Fewer launches: what a module computes, in the form that its only reader wants it in.

- A product in FP8 quantizes its input in a launch of its own. The norm or activation that computes
  the input quantizes it in its own launch.
- Attention normalizes and rotates queries and keys, and writes the cache, in one launch.

The forward pass of a model says nothing of it. Its class declares what it knows about its readers::

    class MLP(vLLMModule):
        sole_readers = {"x": "gate_up_proj", "act_fn": "down_proj"}

        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_up_proj(x)))

That is: the argument ``x`` is given to ``gate_up_proj`` and to nothing else, and so is what
``act_fn`` returns to ``down_proj``. A tuple names several readers, of which each module has one.
The declaration belongs to the ``forward`` of the same class: a subclass that overrides ``forward``,
or a method that it calls, is given tensors, unless it declares the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_all_modules

from vllm_module.layers.activation import GeluAndMul, SiluAndMul
from vllm_module.layers.attention import Attention
from vllm_module.layers.deferred import DEFERRED, Deferred
from vllm_module.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm_module.layers.mla import MLAAttention
from vllm_module.layers.norm import RMSNorm
from vllm_module.layers.rotary import RotaryEmbedding
from vllm_module.quantization.eight_bit import EightBitMethod
from vllm_module.quantization.rows import RowScheme

# By their forward passes: a subclass that overrides one is given tensors, and returns them.
_QUANTIZING = {RMSNorm.forward, SiluAndMul.forward, GeluAndMul.forward}
_PRODUCTS = {ReplicatedLinear.forward, ColumnParallelLinear.forward, RowParallelLinear.forward}
_DEFERRING = {
    RMSNorm.forward: {RotaryEmbedding.forward, MLAAttention.forward},
    RotaryEmbedding.forward: {Attention.forward, MLAAttention.forward},
}
Readers = Mapping[str, str | tuple[str, ...]]


def fuse(model: nn.Module) -> nn.Module:
    """Let the modules of ``model`` be computed in fewer launches; return ``model``.

    Call it after layers are quantized; before or after the weights are loaded is the same. The bits
    of the results do not change. What a module returns goes to a reader in another form only
    where all modules on the way run nothing but the forward passes of their classes, without a hook
    of any kind, and while the module that declares the reader runs; never while a graph is traced
    or derivatives are recorded. So norms give tensors to everyone else.
    """
    for module in model.modules():
        declared = declared_readers(type(module)).items()
        pairs = tuple(
            (name, reader)
            for name, reader in ((name, _present(module, readers)) for name, readers in declared)
            if _may_fuse(getattr(module, name, None), getattr(module, reader, None))
        )
        hooks = list(module._forward_pre_hooks.values())
        if pairs and not any(_is_ours(hook) for hook in hooks):
            fusion = Fusion(pairs)
            module.register_forward_pre_hook(fusion.begin)
            module.register_forward_hook(fusion.end, always_call=True)
    return model


class Fusion:
    """Hooks of a module: while it runs, children may return what only their readers take.

    Args:
        pairs: the names of each such child and of its reader.

    """

    def __init__(self, pairs: tuple[tuple[str, str], ...]) -> None:
        self.pairs = pairs

    def begin(self, module: nn.Module, args: object) -> None:
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return
        children = module._modules
        for name, reader in self.pairs:
            child = children.get(name)
            if child is not None:
                vars(child)["output_form"] = _form(child, children.get(reader))

    def end(self, module: nn.Module, args: object, output: object) -> None:
        if torch.compiler.is_compiling():
            return
        for name, _ in self.pairs:
            child = module._modules.get(name)
            if child is not None:
                vars(child).pop("output_form", None)


def declared_readers(cls: Any) -> Readers:
    """Return ``sole_readers`` of the class whose ``forward`` ``cls`` has, where it holds."""
    readers: Readers = _declared(cls, cls.forward)
    return readers


@lru_cache(maxsize=256)
def _declared(cls: Any, forward: Callable[..., Any]) -> Readers:
    owner: Any = next(each for each in cls.__mro__ if "forward" in vars(each))
    readers: Readers = vars(owner).get("sole_readers", {})
    code = getattr(forward, "__code__", None)
    # Not its own: a wrapper, which may read more, or a function that was put there later.
    own = forward.__qualname__ == f"{owner.__qualname__}.forward"
    if code is None or not own or hasattr(forward, "__wrapped__"):
        return {}
    same = all(getattr(cls, name, None) is getattr(owner, name, None) for name in code.co_names)
    return readers if same else {}


def is_plain(module: nn.Module) -> bool:
    """Return whether a call of ``module`` is one of its class's ``forward``, and nothing else.

    It is not with a hook of any kind but :class:`Fusion`, nor where the class has a ``__call__`` or
    the instance a ``forward`` of its own, or is compiled.
    """
    return not (
        type(module).__call__ is not nn.Module.__call__
        or not all(map(_is_ours, module._forward_hooks.values()))
        or not all(map(_is_ours, module._forward_pre_hooks.values()))
        or module._backward_hooks
        or module._backward_pre_hooks
        or module._compiled_call_impl is not None
        or "forward" in module.__dict__
        or of_all_modules._global_forward_hooks
        or of_all_modules._global_forward_pre_hooks
        or of_all_modules._global_backward_hooks
        or of_all_modules._global_backward_pre_hooks
    )


def _is_ours(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), Fusion)


def _present(module: nn.Module, readers: str | tuple[str, ...]) -> str:
    """Return the name of the one of ``readers`` that ``module`` has; "" for none or several."""
    names = (readers,) if isinstance(readers, str) else readers
    present = [name for name in names if module._modules.get(name) is not None]
    return present[0] if len(present) == 1 else ""


def _may_fuse(child: nn.Module | None, reader: nn.Module | None) -> bool:
    """Return whether the classes of both allow it; hooks may come and go."""
    if not isinstance(child, nn.Module) or not isinstance(reader, nn.Module):
        return False
    writes = type(child).forward
    if type(reader).forward in _DEFERRING.get(writes, ()):
        return True
    layer = _product(reader)
    if layer is None or writes not in _QUANTIZING:
        return False
    return isinstance(layer.quant_method, EightBitMethod)


def _form(child: nn.Module, reader: nn.Module | None) -> RowScheme | Deferred | None:
    """Return in which form ``child`` returns its result to ``reader`` now; ``None``: a tensor."""
    if reader is None or not is_plain(child) or not is_plain(reader):
        return None
    writes = type(child).forward
    if type(reader).forward in _DEFERRING.get(writes, ()):
        return DEFERRED
    if writes not in _QUANTIZING:
        return None
    layer = _product(reader)
    return layer.row_scheme() if layer is not None and is_plain(layer) else None


def _product(reader: nn.Module) -> LinearBase | None:
    """Return the linear layer that multiplies what ``reader`` is given, if nothing else does."""
    layer: Any = reader
    if not isinstance(reader, LinearBase):
        code = type(reader).forward.__code__
        arguments = code.co_varnames[: code.co_argcount]
        readers = declared_readers(type(reader))
        given = [names for argument, names in readers.items() if argument in arguments]
        layer = getattr(reader, _present(reader, given[0]), None) if len(given) == 1 else None
    return layer if isinstance(layer, LinearBase) and type(layer).forward in _PRODUCTS else None
