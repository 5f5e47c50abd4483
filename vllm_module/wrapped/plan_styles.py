"""The tensor-parallel plan of a transformers class: a style for each module or parameter.

Each style is translated here to one of our layers or parameters. A style that cuts nothing on this
rank, such as one about gradients, becomes a whole copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from vllm_module.base.messages import shorten
from vllm_module.errors import UnsupportedModelError
from vllm_module.layers import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm_module.layers.linear import LinearBase
from vllm_module.parameters import BasevLLMParameter, Dim, Slot

COLUMN = "colwise"
EXPERTS = "moe_tp_experts"
GATHERED = frozenset(("colwise_gather_output", "colwise_rep"))
_SPLIT_INPUT = frozenset(("rowwise_split_input", "rowwise_rep"))
_WHOLE = frozenset(
    (
        "replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params",
        "embedding_rowwise", "embedding_colwise",
    )
)  # fmt: skip
ALL_REDUCE = "all_reduce"
IDENTITY = "moe_identity_expert"
_KNOWN = (
    _WHOLE
    | GATHERED
    | _SPLIT_INPUT
    | {COLUMN, EXPERTS, ALL_REDUCE, IDENTITY, "rowwise", "packed_colwise", "packed_rowwise"}
)


class Plan:
    """Styles of the modules and parameters of a model.

    Args:
        entries: styles by path, with ``*`` for each number in it.
        owner: name of the model's class, for messages.

    Raises ``UnsupportedModelError`` for a style that is not known.

    """

    def __init__(self, entries: Mapping[str, str], owner: str) -> None:
        self.entries = dict(entries)
        self._used: set[str] = set()
        for path, style in self.entries.items():
            if not isinstance(style, str) or style not in _KNOWN:
                raise UnsupportedModelError(
                    f"the tensor-parallel plan of {owner} has the style {shorten(style)} for "
                    f"{path}, which is not known: expected one of {', '.join(sorted(_KNOWN))}"
                )

    def style(self, path: str) -> str | None:
        """Return the style of the module or parameter at ``path``; ``None`` if it has none."""
        parts = ("*" if part.isdecimal() else part for part in path.split("."))
        name = ".".join(parts)
        style = self.entries.get(name)
        if style is not None:
            self._used.add(name)
        return style

    @property
    def unused(self) -> list[str]:
        """Entries that no module asked for, sorted."""
        return sorted(self.entries.keys() - self._used)


def linear_of(
    style: str | None,
    linear: nn.Linear,
    path: str,
    size: int,
    *,
    kv_heads: int | None,
    names: tuple[str, ...],
) -> LinearBase:
    """Return our layer for ``linear``, on ``size`` ranks.

    ``kv_heads`` is the number of heads in its output, if that is keys or values. ``names`` are the
    names of the layers that a checkpoint stores in its place.
    """
    inputs, outputs, bias = linear.in_features, linear.out_features, linear.bias is not None
    common: dict[str, Any] = {"bias": bias, "params_dtype": linear.weight.dtype}
    slots = names or None
    if style in (COLUMN, *GATHERED):
        if slots is not None:
            raise _unsupported(path, style, "a checkpoint stores its parts apart")
        parts = size if kv_heads is None else min(kv_heads, size)
        output = Dim.cut(outputs, parts)
        gathered = style in GATHERED
        return ColumnParallelLinear(
            inputs, outputs, gather_output=gathered, output=output, **common
        )
    if style == "packed_colwise":
        halves = [outputs // 2] * 2
        return MergedColumnParallelLinear(inputs, halves, shard_names=slots, **common)
    if style == "rowwise" or style in _SPLIT_INPUT:
        return RowParallelLinear(inputs, outputs, input_is_parallel=style == "rowwise", **common)
    if style is None or style in _WHOLE or style == ALL_REDUCE:
        output = Dim.whole(outputs)
        if slots is not None:
            output = Dim(tuple(Slot(name, outputs // len(slots)) for name in slots))
        return ReplicatedLinear(inputs, outputs, output=output, **common)
    raise _unsupported(path, style, "it is a linear layer")


def parameter_of(
    style: str, parameter: torch.Tensor, path: str, rank: int, size: int
) -> BasevLLMParameter:
    """Return our typed parameter for one that a transformers module holds itself."""
    dims = [Dim.whole(each) for each in parameter.shape]
    column, last = max(parameter.ndim - 2, 0), parameter.ndim - 1
    at = last if style.endswith("rowwise") else column
    if style in ("packed_colwise", "packed_rowwise"):
        halves = (Slot(each, parameter.shape[at] // 2, size) for each in ("0", "1"))
        dims[at] = Dim(tuple(halves), groups=1)
    elif style == COLUMN or (style == "rowwise" and parameter.ndim > 1):
        dims[at] = Dim.cut(parameter.shape[at], size)
    elif style != "rowwise" and style not in _WHOLE:
        raise _unsupported(path, style, "it is a parameter")
    return BasevLLMParameter(*dims, tp_rank=rank, tp_size=size, dtype=parameter.dtype)


def _unsupported(path: str, style: str | None, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the tensor-parallel plan has the style {style} for {path}, which is not supported there: "
        f"{why}"
    )
