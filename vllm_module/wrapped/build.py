"""Building a transformers model from its configuration: parameters on meta, buffers real.

Buffers that are computed when the class is built, such as frequencies of rotary embeddings, are in
no checkpoint, so they cannot be on meta. Parameters can, and take no memory there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from vllm_module.base.messages import describe_error, printable_name, shorten
from vllm_module.base.outside import NO_FAILURES
from vllm_module.errors import UnsupportedModelError
from vllm_module.wrapped.library import library

_hook_lock = threading.Lock()  # the hook is global to the process, and ranks may be threads


def build(config: Any, architecture: str, code_class: Any = None) -> Any:
    """Build the causal language model of ``config``, with its tied weights tied.

    ``config`` is a configuration of transformers; of a multimodal model, the text model is built.
    ``architecture`` is the name in ``config.json``. ``code_class`` is the class from the
    checkpoint's own code, if there is one; then that class is built.

    Raises ``UnsupportedModelError`` if transformers has no causal language model for it, if its
    code fails, or if a buffer that no checkpoint stores has no values.
    """
    if code_class is not None:
        return _ready(_built(code_class, config), code_class)
    text, cls = class_for(config, architecture)
    if text is not config:  # tied weights are declared by the whole model, or else there are none
        text.tie_word_embeddings = getattr(config, "tie_word_embeddings", False)
    return _ready(_built(cls, text), cls)


def class_for(config: Any, architecture: str) -> tuple[Any, Any]:
    """Return the language model's configuration in ``config``, and transformers' class for it.

    Raises ``UnsupportedModelError`` if there is none, or none with the name ``architecture``.
    """
    text = text_config(config)
    cls = _class_of(text, architecture if text is config else "")
    if cls is None:
        raise UnsupportedModelError(
            f"transformers {library().__version__} has no causal language model for "
            f"{architecture} (model_type {config.model_type!r})"
        )
    if text is config and cls.__name__ != architecture:
        raise UnsupportedModelError(
            f"config.json names the architecture {printable_name(architecture)}, and its "
            f"model_type {config.model_type!r} is that of {cls.__name__}: expected both of one"
        )
    return text, cls


def _ready(model: Any, cls: Any) -> Any:
    """Return ``model``, of ``cls``, with its final dtypes, plain buffers and in evaluation mode."""
    _keep_float32(model)
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta and name in module._non_persistent_buffers_set:
                raise UnsupportedModelError(
                    f"{cls.__name__}: the buffer {path}.{name} has no values when the model is "
                    "built, and no checkpoint stores it"
                )
            if buffer is not None:  # drop the attributes that torch's Buffer sets on the tensor
                module._buffers[name] = buffer.detach()
    return model.eval()


def build_whole(config: Any, architecture: str) -> Any:
    """Build the multimodal model of ``config`` on meta; ``None`` if ``config`` is only text.

    Raises ``UnsupportedModelError`` if transformers has no such class, or its code fails.
    """
    if text_config(config) is config:
        return None
    cls = getattr(library(), architecture, None)
    if cls is None:
        raise UnsupportedModelError(
            f"transformers {library().__version__} has no {printable_name(architecture)}"
        )
    with torch.device("meta"):
        return _built(cls, config)


def text_config(config: Any) -> Any:
    """Return the configuration of the causal language model in ``config``, perhaps all of it."""
    text = config.get_text_config(decoder=True)
    return config if text is config or _class_of(text, "") is None else text


def _class_of(config: Any, architecture: str) -> Any:
    """Return the class for ``config``, or the class of this name; ``None`` if there is none."""
    known = library("models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING
    try:
        cls = known[type(config)]
    except KeyError:
        named = getattr(library(), architecture, None) if "CausalLM" in architecture else None
        return named if getattr(named, "config_class", None) is type(config) else None
    return cls[0] if isinstance(cls, (list, tuple)) else cls


def _built(cls: Any, config: Any) -> Any:
    pretrained = library("modeling_utils").PreTrainedModel
    if not (isinstance(cls, type) and issubclass(cls, pretrained)):
        raise UnsupportedModelError(
            f"{shorten(cls)} is not a class of models: expected a subclass of PreTrainedModel"
        )
    try:
        with _parameters_on_meta():
            model = cls(config)
            model.tie_weights()
    except BaseException as error:  # code from outside
        if isinstance(error, NO_FAILURES):
            raise
        entry = _entry_of(config.to_dict(), error.args[0]) if type(error) is KeyError else None
        why = f"{entry} {shorten(error.args[0])} is not known to it" if entry else ""
        raise UnsupportedModelError(
            f"{cls.__name__} of {_origin(cls)} cannot be built from config.json: "
            f"{why or describe_error(error)}"
        ) from error
    return model


def _entry_of(entries: Mapping[str, Any], value: Any) -> str | None:
    """Return the path of the entry with the string ``value``; ``None`` if no entry has it."""
    for name, each in entries.items():
        if isinstance(value, str) and each == value:
            return str(name)
        if isinstance(each, Mapping) and (below := _entry_of(each, value)):
            return f"{name}.{below}"
    return None


def _origin(cls: Any) -> str:
    own = cls.__module__.startswith("transformers.")
    return "transformers" if own else "the checkpoint's code"


def _keep_float32(model: Any) -> None:
    """Cast the tensors to float32 that transformers keeps in float32 in a 16-bit model.

    An example is the bias for the choice of experts, which 16 bits would round.
    """
    plan = model._get_dtype_plan(torch.get_default_dtype())
    if not plan:
        return
    named, *_ = library("core_model_loading").build_glob_alternation(list(plan))
    for path, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or tensor.itemsize > 2 or not tensor.is_floating_point():
                    continue
                if named.search(f"{path}.{name}".lstrip(".")):
                    tensors[name] = tensor.float()
                    if tensors is module._parameters:
                        tensors[name] = nn.Parameter(tensors[name], requires_grad=False)


class _EmptyOnMeta(TorchFunctionMode):
    """Mode in which ``torch.empty`` allocates on meta, so that new parameters take no memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    thread = threading.get_ident()

    def to_meta(module: nn.Module, name: str, parameter: Any) -> Any:
        if parameter is None or parameter.is_meta or threading.get_ident() != thread:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=False)

    with _hook_lock:
        hook = register_module_parameter_registration_hook(to_meta)
        try:
            with _EmptyOnMeta():
                yield
        finally:
            hook.remove()
