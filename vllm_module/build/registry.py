"""Mapping an architecture's name in ``config.json`` to its class.

Classes are our own models, models that other packages announce, and models that a caller registers.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, reduce
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from traceback import extract_tb, walk_tb
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from vllm_module.base.messages import describe_error, install, printable, printable_name, shorten
from vllm_module.base.outside import NO_FAILURES
from vllm_module.base.waiting import WaitLimitError
from vllm_module.config import ModelImpl
from vllm_module.errors import (
    ModelNotReadyError,
    RankError,
    UnsupportedModelError,
    WeightLoadError,
)
from vllm_module.hf_config import HFConfig
from vllm_module.weights.source import registered_sources

if TYPE_CHECKING:
    from vllm_module.core.module import vLLMModule

logger = logging.getLogger(__name__)

# Names instead of classes, because a model's file is imported when the model is built.
_OURS = {
    "BambaForCausalLM": "vllm_module.models.bamba:BambaForCausalLM",
    "BertForMaskedLM": "vllm_module.models.bert:BertModel",
    "BertForSequenceClassification": "vllm_module.models.classifiers:BertForSequenceClassification",
    "BertModel": "vllm_module.models.bert:BertModel",
    "Cohere2ForCausalLM": "vllm_module.models.cohere:Cohere2ForCausalLM",
    "CohereForCausalLM": "vllm_module.models.cohere:CohereForCausalLM",
    "FalconH1ForCausalLM": "vllm_module.models.falcon_h1:FalconH1ForCausalLM",
    "Gemma2ForCausalLM": "vllm_module.models.gemma2:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "vllm_module.models.gemma3:Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration": ("vllm_module.models.gemma3:Gemma3ForConditionalGeneration"),
    "Glm4ForCausalLM": "vllm_module.models.glm4:Glm4ForCausalLM",
    "GlmForCausalLM": "vllm_module.models.glm4:GlmForCausalLM",
    "DeepseekV2ForCausalLM": "vllm_module.models.deepseek_v2:DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM": "vllm_module.models.deepseek_v3:DeepseekV3ForCausalLM",
    "GPT2LMHeadModel": "vllm_module.models.gpt2:GPT2LMHeadModel",
    "GptOssForCausalLM": "vllm_module.models.gpt_oss:GptOssForCausalLM",
    "GraniteForCausalLM": "vllm_module.models.granite:GraniteForCausalLM",
    "GraniteMoeHybridForCausalLM": (
        "vllm_module.models.granite_moe_hybrid:GraniteMoeHybridForCausalLM"
    ),
    "Lfm2ForCausalLM": "vllm_module.models.lfm2:Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM": "vllm_module.models.lfm2_moe:Lfm2MoeForCausalLM",
    "Lfm2VlForConditionalGeneration": "vllm_module.models.lfm2_vl:Lfm2VlForConditionalGeneration",
    "Lfm3ForCausalLM": "vllm_module.models.lfm3:Lfm3ForCausalLM",
    "LlamaForCausalLM": "vllm_module.models.llama:LlamaForCausalLM",
    "Mamba2ForCausalLM": "vllm_module.models.mamba2:Mamba2ForCausalLM",
    "MistralForCausalLM": "vllm_module.models.llama:MistralForCausalLM",
    "MixtralForCausalLM": "vllm_module.models.mixtral:MixtralForCausalLM",
    "NemotronHForCausalLM": "vllm_module.models.nemotron_h:NemotronHForCausalLM",
    "Olmo2ForCausalLM": "vllm_module.models.olmo2:Olmo2ForCausalLM",
    "OlmoHybridForCausalLM": "vllm_module.models.olmo_hybrid:OlmoHybridForCausalLM",
    "OlmoeForCausalLM": "vllm_module.models.olmoe:OlmoeForCausalLM",
    "Phi3ForCausalLM": "vllm_module.models.phi3:Phi3ForCausalLM",
    "QWenLMHeadModel": "vllm_module.models.qwen:QWenLMHeadModel",
    "Qwen2ForCausalLM": "vllm_module.models.qwen2:Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": (
        "vllm_module.models.qwen_vl:Qwen2VLForConditionalGeneration"
    ),
    "Qwen2MoeForCausalLM": "vllm_module.models.qwen2_moe:Qwen2MoeForCausalLM",
    "Qwen2VLForConditionalGeneration": (
        "vllm_module.models.qwen_vl:Qwen2VLForConditionalGeneration"
    ),
    "Qwen3_5ForCausalLM": "vllm_module.models.qwen3_5:Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "vllm_module.models.qwen3_5:Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM": "vllm_module.models.qwen3_5:Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "vllm_module.models.qwen3_5:Qwen3_5MoeForCausalLM",
    "Qwen3ForCausalLM": "vllm_module.models.qwen3:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "vllm_module.models.qwen3_moe:Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM": "vllm_module.models.qwen3_next:Qwen3NextForCausalLM",
    "Qwen3VLForConditionalGeneration": (
        "vllm_module.models.qwen_vl:Qwen3VLForConditionalGeneration"
    ),
    "Qwen3VLMoeForConditionalGeneration": (
        "vllm_module.models.qwen_vl:Qwen3VLMoeForConditionalGeneration"
    ),
    "RobertaForMaskedLM": "vllm_module.models.roberta:RobertaModel",
    "RobertaForSequenceClassification": (
        "vllm_module.models.classifiers:RobertaForSequenceClassification"
    ),
    "RobertaModel": "vllm_module.models.roberta:RobertaModel",
    "Starcoder2ForCausalLM": "vllm_module.models.starcoder2:Starcoder2ForCausalLM",
    "XLMRobertaForMaskedLM": "vllm_module.models.roberta:RobertaModel",
    "XLMRobertaForSequenceClassification": (
        "vllm_module.models.classifiers:RobertaForSequenceClassification"
    ),
    "XLMRobertaModel": "vllm_module.models.roberta:RobertaModel",
}
_WRAPPER = "vllm_module.wrapped.model:TransformersForCausalLM"
_GROUP = "vllm_module.models"  # group of entry points
# Exceptions of layers about a checkpoint, other ranks or this host; and modules whose other errors
# come from the end of another rank.
_NOT_THE_MODELS = WeightLoadError, ModelNotReadyError, RankError, WaitLimitError, MemoryError
_OF_OTHER_RANKS = "torch.distributed", "vllm_module.distributed", "vllm_module.base.waiting"


@dataclass
class Registrations:
    """Models that were registered in this process.

    Attributes:
        models_by_call: arguments of :func:`register_model`, by architecture.
        files: paths given to :func:`load_model_code`.

    """

    models_by_call: dict[str, Any] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)


registered = Registrations()
_from_files: dict[str, type[vLLMModule]] = {}


def register_model(architecture: str, model: type[vLLMModule] | str) -> None:
    """Use ``model`` for checkpoints whose ``config.json`` names ``architecture``.

    It replaces any other model of this name. Ranks in separate processes know it too, so its class
    must be defined at the top level of a module.

    Args:
        architecture: the name in the list ``architectures`` of ``config.json``.
        model: a subclass of ``vLLMModule``, or ``"package.module:Class"``, which is imported when
            the model is built. It is built from one argument, its configuration: an
            :class:`~vllm_module.hf_config.HFConfig`, or the class's own ``config_class``.

    Raises:
        TypeError: ``model`` is neither.
        ValueError: the text has another form.

    """
    if isinstance(model, str):
        module, colon, name = model.partition(":")
        if not (module and colon and name):
            raise ValueError(f"expected 'package.module:Class', got {model!r}")
    elif (wrong := _not_a_model(architecture, model)) is not None:
        raise TypeError(wrong)
    registered.models_by_call[architecture] = model


def load_model_code(path: Path) -> None:
    """Run a Python file, and use each model class in it for the architecture of the class's name.

    The file may also call :func:`register_model` and ``register_source``. A file that was run
    before is not run again.

    Raises ``UnsupportedModelError`` if there is no such file, it fails, or it has no model.
    """
    try:
        path = path.expanduser().resolve()
        path.stat()
    except FileNotFoundError as error:
        raise UnsupportedModelError(
            f"model_code {printable(path)} does not exist; check the path"
        ) from error
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, or no path at all
        raise UnsupportedModelError(
            f"model_code {printable(path)} is not a Python file: {describe_error(error)}"
        ) from error
    name = f"model_code_{path.stem}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UnsupportedModelError(
            f"model_code {printable(path)} is not a Python file: expected a path that ends in .py"
        )
    module = importlib.util.module_from_spec(spec)
    # Set before the file runs, as an import does: pickle and dataclasses look here.
    sys.modules[name] = module
    before = dict(registered.models_by_call), dict(registered_sources)
    streams = sys.stdout, sys.stderr
    try:
        spec.loader.exec_module(module)
        if None in (sys.stdout, sys.stderr) and None not in streams:
            sys.stdout, sys.stderr = streams
            raise UnsupportedModelError(
                f"model_code {printable(path)} sets sys.stdout or sys.stderr to None: leave them "
                "open, or redirect them while it prints"
            )
        models = _models_in(module)
        if not models and (registered.models_by_call, registered_sources) == before:
            raise UnsupportedModelError(
                f"model_code {printable(path)} has no model: expected a subclass of vLLMModule "
                "with the name of an architecture, or a call of register_model or register_source"
            )
    except BaseException as error:
        sys.modules.pop(name, None)  # the file may have removed it
        if isinstance(error, (UnsupportedModelError, *NO_FAILURES)):
            raise
        raise UnsupportedModelError(
            f"model_code {printable(path)} fails{_line(error, str(path))}: {describe_error(error)}"
        ) from error
    _from_files.update(models)
    registered.files.append(path)


def supported_architectures() -> list[str]:
    """Return all names that :func:`model_class` knows, sorted."""
    return sorted({*_OURS, *_announced(), *_of_this_process()})


def _of_this_process() -> set[str]:
    """Return the architectures of models that a file or a call has registered."""
    # Files also define the layers of their models.
    of_files = {name for name, cls in _from_files.items() if hasattr(cls, "compute_logits")}
    return of_files | registered.models_by_call.keys()


def model_class(architectures: Sequence[str], model_impl: ModelImpl = "auto") -> type[vLLMModule]:
    """Return the class of the first known architecture.

    ``model_impl`` is that of :class:`~vllm_module.config.ModelConfig`: ``"auto"`` falls back to the
    class that runs the transformers library.

    Raises ``UnsupportedModelError`` if none is known, or its class cannot be imported.
    """
    if model_impl == "transformers":
        return _import(architectures[0], _WRAPPER)
    for architecture in architectures:
        if (target := _target(architecture)) is not None:
            return _import(architecture, target) if isinstance(target, str) else target
    elsewhere = f"that library is not installed: {install('transformers')}"
    if model_impl == "native":
        elsewhere = "model_impl is 'native'"
    elif in_transformers(architectures):
        return _import(architectures[0], _WRAPPER)
    elif find_spec("transformers") is not None:
        elsewhere = "it has none of that name"
    named = ", ".join(map(printable_name, architectures[:8]))
    raise UnsupportedModelError(
        f"architectures of config.json: no model here implements {named}; supported: "
        f"{', '.join(supported_architectures())}. "
        "Add a model of your own with register_model, or with --model-code on the command line. "
        f"A causal language model of transformers was not looked for further: {elsewhere}."
    )


def is_known(architectures: Sequence[str]) -> bool:
    """Return whether a model of ours, or a registered one, implements an architecture."""
    return any(_target(each) is not None for each in architectures)


def warn_of_unused_code(path: Path, architectures: Sequence[str]) -> None:
    """Warn if the file of ``model_code`` has models, and none of them for this checkpoint."""
    models = _of_this_process()
    if models and models.isdisjoint(architectures):
        logger.warning(
            "model_code %s has no class for %s of config.json, so another model is built: it has "
            "%s. Name the class as the architecture",
            printable(path),
            " or ".join(map(printable_name, architectures[:8])),
            ", ".join(sorted(map(printable_name, models))),
        )


def settled_impl(
    architectures: Sequence[str], model_impl: ModelImpl, auto_map: object
) -> ModelImpl:
    """Return ``model_impl``, or ``"transformers"`` if only code of a checkpoint defines the model.

    ``auto_map`` is that of ``config.json``, which names the code. Whether the code may run is
    checked later, when its class is needed.
    """
    if model_impl != "auto" or find_spec("transformers") is None:
        return model_impl
    code = isinstance(auto_map, Mapping) and "AutoModelForCausalLM" in auto_map
    return "transformers" if code and not is_known(architectures) else model_impl


def in_transformers(architectures: Sequence[str]) -> bool:
    """Return whether transformers is installed and has one of these language models.

    The wrapper may still refuse the model when it is built.
    """
    installed = find_spec("transformers") is not None
    return installed and any(name in _of_transformers() for name in architectures)


def implementation(cls: type[vLLMModule]) -> Literal["native", "transformers"]:
    """Return the ``model_impl`` of ``cls``, a class from :func:`model_class`."""
    wrapper = f"{cls.__module__}:{cls.__qualname__}" == _WRAPPER
    return "transformers" if wrapper else "native"


def config_class(architectures: Sequence[str], model_impl: ModelImpl = "auto") -> type[HFConfig]:
    """Return the configuration class of the first known architecture."""
    cls = model_class(architectures, model_impl)
    config_cls: Any = getattr(cls, "config_class", HFConfig)
    if not (isinstance(config_cls, type) and issubclass(config_cls, HFConfig)):
        raise UnsupportedModelError(
            f"{cls.__name__}.config_class should be a subclass of HFConfig, got "
            f"{shorten(config_cls)}"
        )
    return config_cls


@contextmanager
def blamed_on(cls: type) -> Iterator[None]:
    """Turn exceptions of a model's code from outside into ``UnsupportedModelError``.

    Errors about a checkpoint or about other ranks are not changed, nor are those of our own models.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, (*NO_FAILURES, *_NOT_THE_MODELS)):
            raise
        if cls.__module__.startswith("vllm_module."):
            raise
        if isinstance(error.__cause__, WaitLimitError) or _raised_in(error, _OF_OTHER_RANKS):
            raise
        file = getattr(sys.modules.get(cls.__module__), "__file__", None)
        raise UnsupportedModelError(
            f"the model {cls.__name__} of {printable(file or cls.__module__)} fails"
            f"{_line(error, file)}: {describe_error(error)}; a model is built from its "
            "configuration, and called with (input_ids, positions, metadata)"
        ) from error


@contextmanager
def blamed_while_loading(model: vLLMModule) -> Iterator[None]:
    """Turn exceptions of code from outside that loads or processes into ``UnsupportedModelError``.

    They are those that a method of one of the model's modules raised last, and not our code on its
    behalf, which reads. The message has the module's path. Errors about a checkpoint or about other
    ranks are not changed, nor are interrupts.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, (*NO_FAILURES, *_NOT_THE_MODELS)):
            raise
        if isinstance(error.__cause__, WaitLimitError) or _raised_in(error, _OF_OTHER_RANKS):
            raise
        paths = {id(module): path for path, module in model.named_modules()}
        path: str | None = None
        for frame, _ in walk_tb(error.__traceback__):
            if frame.f_globals.get("__name__", "").startswith("vllm_module."):
                path = None
            elif id(frame.f_locals.get("self")) in paths:
                path, file = paths[id(frame.f_locals["self"])], frame.f_code.co_filename
                method = frame.f_code.co_name
        if path is None:
            raise
        whose = f"{path}.{method}" if path else method
        raise UnsupportedModelError(
            f"{printable_name(whose)} of {printable(file)} fails{_line(error, file)} while weights "
            f"are loaded: {describe_error(error)}"
        ) from error


def _raised_in(error: BaseException, modules: tuple[str, ...]) -> bool:
    names = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    return bool(names) and names[-1].startswith(modules)


def _line(error: BaseException, file: str | None) -> str:
    """Return the line of ``file`` where an error was raised; empty if it was elsewhere."""
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == file]
    return f" in line {lines[-1]}" if lines else ""


def _target(architecture: str) -> type[vLLMModule] | str | None:
    target = registered.models_by_call.get(architecture) or _from_files.get(architecture)
    if target is not None:
        return target
    targets = _announced().get(architecture, [])
    if len(targets) > 1:
        raise UnsupportedModelError(
            f"several installed packages have a model {architecture}: {', '.join(targets)}; "
            "choose one with register_model"
        )
    return targets[0] if targets else _OURS.get(architecture)


@cache
def _of_transformers() -> frozenset[str]:
    """Return the names of transformers' causal language models."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    classes: list[str | tuple[str, ...]] = [
        *auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
        *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values(),
    ]
    names = ((each,) if isinstance(each, str) else each for each in classes)
    return frozenset(name for each in names for name in each)


@cache
def _announced() -> dict[str, list[str]]:
    """Return the entry points of installed packages, by architecture."""
    targets: dict[str, list[str]] = {}
    for point in entry_points(group=_GROUP):
        if point.value not in targets.setdefault(point.name, []):
            # A class that replaces one of our models is worth a warning.
            level = logging.WARNING if point.name in _OURS else logging.INFO
            instead = " instead of ours" if point.name in _OURS else ""
            text = "the model %s is %s of an installed package%s"
            logger.log(level, text, point.name, point.value, instead)
            targets[point.name].append(point.value)
    return targets


def _import(architecture: str, target: str) -> type[vLLMModule]:
    # An installed package's entry may name a nested class, and extras.
    point = EntryPoint(architecture, target, _GROUP)
    matched = point.pattern.match(target)
    if matched is None or not matched["attr"]:
        raise UnsupportedModelError(
            f"the model {shorten(target)} of {architecture} should be named package.module:Class"
        )
    ours = target.startswith("vllm_module.")
    try:
        cls: Any = reduce(getattr, point.attr.split("."), importlib.import_module(point.module))
    except BaseException as error:
        # Another error in one of our modules is a bug.
        bug = ours and not isinstance(error, (ImportError, AttributeError))
        if bug or isinstance(error, NO_FAILURES):
            raise
        raise UnsupportedModelError(
            f"the model {target} of {architecture} cannot be imported: {describe_error(error)}"
        ) from error
    if (wrong := _not_a_model(architecture, cls)) is not None:
        raise UnsupportedModelError(wrong)
    return cls


def _not_a_model(architecture: str, cls: object) -> str | None:
    """Return why ``cls`` cannot be a model, or ``None`` if it can."""
    from vllm_module.core.module import vLLMModule

    if isinstance(cls, type) and issubclass(cls, vLLMModule):
        return None
    return (
        f"the model of {architecture} should be a subclass of vLLMModule or its "
        f"'package.module:Class', got {shorten(cls)}"
    )


def _models_in(module: ModuleType) -> dict[str, type[vLLMModule]]:
    """Return the model classes that the file defines, without those that it imports."""
    from vllm_module.core.module import vLLMModule

    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, vLLMModule)
        and value.__module__ == module.__name__
    }
