"""Classes that a checkpoint brings as Python files, which auto_map of its config.json names.

They are imported only from a folder whose code the user trusts, by transformers' own import.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from vllm_module.errors import UnsupportedModelError
from vllm_module.messages import describe_error, printable, printable_name, shorten
from vllm_module.wrapped.library import library

CONFIG, CAUSAL_LM = "AutoConfig", "AutoModelForCausalLM"


def needs_code(entries: Mapping[str, Any]) -> bool:
    """Tell whether the class of ``entries`` is code of the checkpoint.

    It is not if transformers has the model type and a class with the name of the architecture: as
    without trust in transformers, its own classes are taken then.
    """
    if not isinstance(entries.get("auto_map"), Mapping):
        return False
    mapping = library("models.auto.configuration_auto").CONFIG_MAPPING
    kind, (architecture, *_) = entries.get("model_type"), entries["architectures"]
    known = isinstance(kind, str) and kind in mapping
    return not (known and hasattr(library(), architecture))


def class_of(entries: Mapping[str, Any], auto_class: str, folder: str | None) -> Any:
    """Return the class that ``auto_map`` has for ``auto_class``; ``None`` if it has none.

    Raises ``UnsupportedModelError`` if the user trusts no code (``folder`` is ``None``), before a
    line of it is run; if it is in another repository; or if it cannot be imported.
    """
    reference = entries["auto_map"].get(auto_class)
    if reference is None:
        return None
    name = printable_name(str(entries["architectures"][0]))
    if folder is None:
        raise UnsupportedModelError(
            f"{name} is defined by code of the checkpoint ({auto_class}: {shorten(reference)} in "
            "auto_map of config.json), which is not run unless you trust it: read it, then give "
            "trust_remote_code=True, or --trust-remote-code on the command line"
        )
    parts = reference.split(".") if isinstance(reference, str) else ()
    if len(parts) != 2 or not all(part.isidentifier() for part in parts):
        other = "--" in str(reference)
        raise UnsupportedModelError(
            f"auto_map of config.json has {shorten(reference)} for {auto_class}: expected "
            "'FILE.CLASS', of a file beside config.json"
            + (", not one of another repository, which no revision pins: copy it" if other else "")
        )
    path = Path(folder) / f"{parts[0]}.py"
    if not path.is_file():
        raise UnsupportedModelError(
            f"{printable(folder)} has no {parts[0]}.py, which auto_map of config.json names for "
            f"{auto_class}: download it beside config.json, and give that folder"
        )
    return _imported(reference, folder, path)


def _imported(reference: str, folder: str, path: Path) -> Any:
    dynamic = library("dynamic_module_utils")
    try:
        dynamic.init_hf_modules()
        # transformers copies files before it imports them, and ranks may be processes.
        with FileLock(Path(dynamic.HF_MODULES_CACHE) / "vllm_module.lock"):
            return dynamic.get_class_from_dynamic_module(reference, folder, local_files_only=True)
    except Exception as error:  # code from outside
        raise UnsupportedModelError(
            f"{printable(path)}, code of the checkpoint, cannot be imported: "
            f"{describe_error(error)}"
        ) from error
