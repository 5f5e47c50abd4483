"""The sampling parameters that a checkpoint's ``generation_config.json`` recommends."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vllm_module.errors import CheckpointFormatError
from vllm_module.messages import printable
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.weights import read_json
from vllm_module.weights.regular_file import is_there

_NAMES = {  # the entries that vLLM reads too, and ours
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def default_sampling_params(
    folder: Path | None, override: Mapping[str, Any] = MappingProxyType({})
) -> SamplingParams:
    """Return the parameters that the file recommends; ``model_fields_set`` names those it has.

    As in vLLM, ``do_sample`` is not read: a temperature counts. Entries of ``override`` replace the
    file's; without a ``folder`` there are only these. Raises ``CheckpointFormatError`` for a value
    that is no such parameter.
    """
    path = None if folder is None else folder / "generation_config.json"
    entries: dict[str, Any] = {}
    if folder is not None and path is not None and is_there(path):
        entries = read_json(path, folder)
    entries |= override
    given = {ours: entries[name] for name, ours in _NAMES.items() if entries.get(name) is not None}
    try:
        return SamplingParams(**given)
    except ValueError as error:
        ours, problem = re.split(r"\b", str(error).splitlines()[0], maxsplit=2)[1:]
        name = next(name for name, each in _NAMES.items() if each == ours)
        if name in override or path is None:
            raise ValueError(f"override_generation_config: {name}{problem}") from None
        raise CheckpointFormatError(
            f"{printable(path)}: {name}{problem}; correct the file, or pass "
            "generation_config='vllm', with which it is not read"
        ) from None
