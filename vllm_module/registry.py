"""Architecture names of ``config.json`` and the classes that implement them."""

from __future__ import annotations

import importlib

from vllm_module.errors import UnsupportedModelError
from vllm_module.messages import printable_name
from vllm_module.module import vLLMModule

# Names, not classes: a model's file is imported when it is asked for.
_MODELS = {
    "GraniteForCausalLM": "granite:GraniteForCausalLM",
    "LlamaForCausalLM": "llama:LlamaForCausalLM",
    "MistralForCausalLM": "llama:MistralForCausalLM",
    "Qwen2ForCausalLM": "qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "qwen3:Qwen3ForCausalLM",
}


def supported_architectures() -> list[str]:
    """Return the names that :func:`model_class` knows, sorted."""
    return sorted(_MODELS)


def model_class(architectures: list[str]) -> type[vLLMModule]:
    """Return the class of the first architecture that is known.

    Raises ``UnsupportedModelError`` if none is.
    """
    for architecture in architectures:
        if target := _MODELS.get(architecture):
            file, name = target.split(":")
            module = importlib.import_module(f"vllm_module.models.{file}")
            cls: type[vLLMModule] = getattr(module, name)
            return cls
    named = ", ".join(map(printable_name, architectures[:8]))
    raise UnsupportedModelError(
        f"config.json names the architecture {named}, which no model here "
        f"implements; supported: {', '.join(supported_architectures())}"
    )
