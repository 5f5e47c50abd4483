"""Which weights of a layer nothing reads, though the layer runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Notes which memory the operations inside the block compute from.

    An operation that returns a view, or writes to a tensor, does not read it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.spans = set[tuple[int, int]]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        if not func.is_view:
            declared = func._schema.arguments
            given = [*zip(declared, args, strict=False)]
            given += [(each, named[each.name]) for each in declared if each.name in named]
            for argument, value in given:
                if argument.alias_info is None or not argument.alias_info.is_write:
                    self.spans |= {_span(each) for each in tree_leaves(value) if _has_memory(each)}
        return func(*args, **named)


def unread(module: nn.Module, reads: Reads) -> list[str]:
    """Return the parameters that were not read, of layers of which another one was.

    A layer is what a list or dict of modules has: one that does not run at all may be for other
    inputs, and so may modules outside of lists.
    """
    kinds = nn.ModuleList | nn.ModuleDict
    lists = {path for path, each in module.named_modules() if isinstance(each, kinds)}
    layers = defaultdict[str, dict[str, bool]](dict)
    for path, parameter in module.named_parameters():
        inner = [at for at in _above(path) if at.rpartition(".")[0] in lists]
        if inner and _has_memory(parameter):
            layers[inner[-1]][path] = _was_read(parameter, reads)
    return [
        path for read in layers.values() if any(read.values()) for path in read if not read[path]
    ]


def _above(path: str) -> Iterator[str]:
    """Yield the paths of the modules that ``path`` is below, the outermost first."""
    names = path.split(".")
    return (".".join(names[:end]) for end in range(1, len(names)))


def _has_memory(value: Any) -> bool:
    """Tell whether ``value`` is a tensor at addresses: none is of a sparse or nested one."""
    strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return strided and value.numel() > 0 and not value.is_meta


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte of ``tensor`` and of the one after its last."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.itemsize


def _was_read(parameter: nn.Parameter, reads: Reads) -> bool:
    start, end = _span(parameter)
    return any(start < other_end and other < end for other, other_end in reads.spans)
