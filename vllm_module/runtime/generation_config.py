"""Reading ``generation_config.json``: sampling parameters, and the tokens that end a text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vllm_module.base.messages import printable, shorten
from vllm_module.errors import CheckpointFormatError
from vllm_module.hf_config import overridden
from vllm_module.runtime.arguments import check_type
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.weights import read_json
from vllm_module.weights.regular_file import is_there

_NAMES = {  # entries that vLLM reads too, and our names of them
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def own_folder(given: str | Path) -> Path | None:
    """Return the folder given as ``generation_config``; ``None`` for the model's own.

    Raises ``ValueError`` for a folder without the file.
    """
    check_type("generation_config", given, "'auto', 'vllm' or a folder", str, Path)
    if str(given) in ("auto", "vllm"):
        return None
    if not is_there(Path(given, "generation_config.json")):
        raise ValueError(
            "generation_config should be 'auto', for the model's own file, 'vllm', for none, or a "
            f"folder that has a generation_config.json, and is {shorten(given)}"
        )
    return Path(given)


def default_sampling_params(
    folder: Path | None, override: Mapping[str, Any] = MappingProxyType({})
) -> SamplingParams:
    """Return the parameters that the file recommends; ``model_fields_set`` names those it has.

    As in vLLM, ``do_sample`` is not read, because temperature decides. Entries of ``override``
    replace the file's; without a ``folder``, only these are used. Raises ``CheckpointFormatError``
    for a value that is no such parameter.
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


def stop_tokens(
    folder: Path,
    generation: Path | None = None,
    override: Mapping[str, Any] | None = None,
    hf_overrides: Mapping[str, Any] | None = None,
) -> set[int]:
    """Return the tokens in ``eos_token_id`` of generation_config.json and of config.json.

    A fine-tune may change only one of the two files. The tokenizer's end token is separate. A
    config.json without the entry may have it in ``text_config``, the entries of its text model. The
    first file is in ``generation``, or else in ``folder``, and entries of ``override`` replace it;
    those of ``hf_overrides`` replace config.json's.

    Raises ``CheckpointFormatError`` if a file is not a JSON object, or the entry is not integers.
    """
    found: set[int] = set()
    first = folder if generation is None else generation
    for inside, name, instead, argument in (
        (first, "generation_config.json", override or {}, "override_generation_config"),
        (folder, "config.json", hf_overrides or {}, "hf_overrides"),
    ):
        path = inside / name
        entries = overridden(read_json(path, inside) if is_there(path) else {}, instead, path)
        if entries:
            eos: Any = entries.get("eos_token_id")
            if eos is None and isinstance(text := entries.get("text_config"), dict):
                eos = text.get("eos_token_id")
            if eos is not None:
                tokens = eos if isinstance(eos, list) else [eos]
                if not all(type(token) is int for token in tokens):
                    where = argument if "eos_token_id" in instead else printable(path)
                    raise CheckpointFormatError(
                        f"{where}: eos_token_id should be a token or a list of tokens, "
                        f"and is {shorten(eos)}"
                    )
                found.update(tokens)
    return found
