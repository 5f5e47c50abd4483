"""Checking that a model gives the metadata of a step to its layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm_module.core.module import vLLMModule
from vllm_module.errors import UnsupportedModelError
from vllm_module.layers import RecurrentLayer
from vllm_module.quantization import QuantizableKVCache


@contextmanager
def metadata_given(model: vLLMModule) -> Iterator[None]:
    """Compute a step within it, with a cache; refuse a model that keeps metadata from a layer.

    Such a layer takes the tokens of all requests for one sequence without a past.

    Raises ``UnsupportedModelError``, which names the first one.
    """
    layers = {
        name: each
        for name, each in model.named_modules()
        if isinstance(each, QuantizableKVCache | RecurrentLayer)
    }
    for layer in layers.values():
        layer.ran_without_metadata = False  # by a call beside the steps
    yield
    for name, layer in layers.items():
        if layer.ran_without_metadata:
            raise UnsupportedModelError(
                f"{type(model).__name__} calls {name} without the metadata of the step, so that "
                "tokens would not see those before them: pass metadata on to it"
            )
