"""Whose model is built, and how much of it each rank holds whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from vllm_module.base.messages import printable
from vllm_module.build.model_source import ModelSource
from vllm_module.build.registry import implementation, model_class


class _Rank(Protocol):
    @property
    def replicated(self) -> float: ...


def impl_of(source: ModelSource) -> Literal["native", "transformers"]:
    """Return whose model ``source`` builds."""
    config = source.config
    return implementation(model_class(config.architectures, config.model_impl))


def impl_line(source: ModelSource, ranks: Sequence[_Rank]) -> str:
    """Return a line that says whose model it is, and what its ranks hold whole."""
    line = f"model_impl: {impl_of(source)}"
    if getattr(source.config, "code_class", None) is not None:
        line += f", by code of the checkpoint in {printable(source.folder)}"
    if len(ranks) == 1:
        return line
    return f"{line}; {ranks[0].replicated:.1%} of the parameters are whole on each rank"
