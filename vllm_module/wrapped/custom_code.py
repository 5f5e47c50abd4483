"""Classes in Python files of a checkpoint, which ``auto_map`` in its config.json names.

They are imported by transformers, and only from a folder whose code the user trusts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import Any

from filelock import FileLock, Timeout

from vllm_module.base.messages import describe_error, printable, printable_name, shorten
from vllm_module.base.outside import NO_FAILURES, blamed
from vllm_module.errors import RankError, UnsupportedModelError, WeightLoadError
from vllm_module.weights.regular_file import is_there, open_regular
from vllm_module.wrapped.library import library

_log = logging.getLogger(__name__)

# Seconds to wait while another process imports: until a log message, and until an error.
_SILENCE, _LONGEST_IMPORT = 10.0, 600.0
CONFIG, CAUSAL_LM = "AutoConfig", "AutoModelForCausalLM"


def needs_code(entries: Mapping[str, Any]) -> bool:
    """Return whether the class of ``entries`` is code of the checkpoint.

    It is not if transformers has the model type and a class with the architecture's name. Then
    transformers' own class is used, as transformers does without trust.
    """
    if not isinstance(entries.get("auto_map"), Mapping):
        return False
    mapping = library("models.auto.configuration_auto").CONFIG_MAPPING
    kind, (architecture, *_) = entries.get("model_type"), entries["architectures"]
    known = isinstance(kind, str) and kind in mapping
    return not (known and hasattr(library(), architecture))


def class_of(entries: Mapping[str, Any], auto_class: str, folder: str | None) -> Any:
    """Return the class that ``auto_map`` names for ``auto_class``; ``None`` if it names none.

    Raises ``UnsupportedModelError`` if the user trusts no code (``folder`` is ``None``), before any
    of it runs; if it is in another repository; or if it cannot be imported.
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
    path = code_file(reference, auto_class, Path(folder), "config.json")
    whose = f"{printable(path)}, code of the checkpoint, cannot be imported"
    with blamed(whose, UnsupportedModelError, (WeightLoadError,)), importing():
        dynamic = library("dynamic_module_utils")
        return dynamic.get_class_from_dynamic_module(reference, folder, local_files_only=True)


@contextmanager
def running() -> Iterator[None]:
    """Turn what code of a checkpoint raises in the block into ``UnsupportedModelError``.

    What our layers raise in it is not changed.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, (*NO_FAILURES, WeightLoadError, RankError, MemoryError)):
            raise
        # The innermost frame that is not of a library that the code calls.
        for frame, line in reversed([*walk_tb(error.__traceback__)]):
            module = frame.f_globals.get("__name__", "")
            if module.startswith("vllm_module."):
                raise
            if module.startswith("transformers_modules."):
                raise UnsupportedModelError(
                    f"{printable(Path(frame.f_code.co_filename).name)}, code of the checkpoint, "
                    f"fails in line {line}: {describe_error(error)}"
                ) from error
        raise


def code_file(reference: object, auto_class: str, folder: Path, named_in: str) -> Path:
    """Return the file of ``folder`` that ``reference`` names, which will be imported.

    ``named_in`` is the file whose ``auto_map`` has the reference for ``auto_class``.

    Raises ``UnsupportedModelError`` if the file is in another repository or missing, or if it or
    other code beside it is a link out of the checkpoint: transformers follows relative imports.
    """
    parts = reference.split(".") if isinstance(reference, str) else ()
    if len(parts) != 2 or not all(part.isidentifier() for part in parts):
        other = "--" in str(reference)
        raise UnsupportedModelError(
            f"auto_map of {named_in} has {shorten(reference)} for {auto_class}: expected "
            f"'FILE.CLASS', of a file beside {named_in}"
            + (", not one of another repository, which no revision pins: copy it" if other else "")
        )
    path = folder / f"{parts[0]}.py"
    if not is_there(path):
        raise UnsupportedModelError(
            f"{printable(folder)} has no {parts[0]}.py, which auto_map of {named_in} names for "
            f"{auto_class}: download it beside {named_in}, and give that folder"
        )
    for each in sorted(folder.rglob("*.py")):
        os.close(open_regular(each, folder))
    return path


@contextmanager
def importing() -> Iterator[None]:
    """Hold a lock while importing checkpoints' code, because transformers first copies its files.

    Raises ``UnsupportedModelError`` if another process holds it for longer than
    ``_LONGEST_IMPORT``. After ``_SILENCE``, the log names the wait.
    """
    dynamic = library("dynamic_module_utils")
    dynamic.init_hf_modules()
    lock = FileLock(Path(dynamic.HF_MODULES_CACHE) / "vllm_module.lock")
    try:
        lock.acquire(timeout=_SILENCE)
    except Timeout:
        _log.warning("waiting for another process that imports code of a checkpoint")
        try:
            lock.acquire(timeout=_LONGEST_IMPORT)
        except Timeout:
            raise UnsupportedModelError(
                "another process has been importing code of a checkpoint for longer than "
                f"{_LONGEST_IMPORT:g} s: end it (it holds {printable(lock.lock_file)})"
            ) from None
    try:
        yield
    finally:
        lock.release()
