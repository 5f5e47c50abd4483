"""Importing the transformers library, which is an extra."""

from __future__ import annotations

import importlib
from typing import Any

from vllm_module.base.messages import describe_error, install
from vllm_module.errors import UnsupportedModelError


def library(module: str = "") -> Any:
    """Return the transformers package, or a module of it, such as ``"masking_utils"``.

    Raises ``UnsupportedModelError``, which names the extra, if it is not installed or too old.
    """
    name = f"transformers.{module}" if module else "transformers"
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnsupportedModelError(
            "model_impl 'transformers' runs the model of the transformers library, and "
            f"{name} cannot be imported ({describe_error(error)}): "
            f"{install('transformers')}"
        ) from error
