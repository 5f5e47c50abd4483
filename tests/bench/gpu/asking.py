"""Which candidates kernels list, found by running them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm_module.kernels import choices

Asked = dict[tuple[str, str], list[str]]  # names of candidates, by kernel and case


@contextmanager
def asked() -> Iterator[Asked]:
    """Yield the choices that kernels make inside, filled while they do."""
    found: Asked = {}
    original = choices.choose

    def choose(kernel: str, case: str, candidates: Mapping[str, Any], device: Any) -> Any:
        found[kernel, case] = list(candidates)
        return original(kernel, case, candidates, device)

    # Kernels import the function, so each one's module has it under a name.
    places = [
        (module, name)
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").startswith("vllm_module.kernels.")
        for name, value in list(vars(module).items())
        if value is original
    ]
    for module, name in places:
        setattr(module, name, choose)
    try:
        yield found
    finally:
        for module, name in places:
            setattr(module, name, original)
