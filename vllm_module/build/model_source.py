"""The source of a model, resolved once, and its configuration."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from vllm_module.base.messages import describe_error, printable, printable_name, shorten
from vllm_module.build import registry
from vllm_module.build.encoder_decoders import ENCODER_DECODERS
from vllm_module.build.registry import model_class
from vllm_module.config import ModelConfig
from vllm_module.core.module import vLLMModule
from vllm_module.distributed import (
    expert_parallel,
    pipeline_parallel,
    surrounding_stage,
    tensor_parallel,
    tensor_parallel_group,
)
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError
from vllm_module.hf_config import (
    HFConfig,
    architectures_of,
    parse_config,
    quantization_file,
    read_entries,
)
from vllm_module.quantization import Rules, quantize, rules_for, valid_weights
from vllm_module.weights import Weight
from vllm_module.weights.dummy import DummyWeights
from vllm_module.weights.joined import JoinedWeights
from vllm_module.weights.pairs import OpenWeights, PairsCheckpoint
from vllm_module.weights.sharded_state import ShardedState, read_manifest
from vllm_module.weights.source import Source, find_source, open_weights

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # dtypes that a model runs in
# The default dtype is global to the process, and simulated ranks build in threads.
_default_dtype_lock = threading.Lock()


@dataclass(frozen=True)
class ModelSource:
    """A model's source, and the configuration in its folder.

    A hub id or a URL is resolved once, in :meth:`find`. Code that takes the source afterwards, in
    this process or in another, reads from the same place. When pickled, it contains the
    registrations of the model and the source that it needs.

    Attributes:
        source: the folder and the weights.
        config: ``config.json``, with the overrides of the ``ModelConfig``.
        dtype: dtype of parameters that are not quantized.
        rules: rules for quantizing layers; ``None`` if no layer is quantized.
        spread_experts: True if each rank holds whole experts.
        redundant_experts: number of places of a layer for more copies of experts.
        secondary: further sources, each with the path of the module that its names are below.
        is_dummy: True if values are made up and no weights are opened.
        overrides: entries that replace those of ``config.json``.

    """

    source: Source
    config: HFConfig
    dtype: torch.dtype
    rules: Rules | None
    spread_experts: bool = False
    secondary: tuple[tuple[str, Source], ...] = ()
    is_dummy: bool = False
    redundant_experts: int = 0
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def find(cls, model: ModelConfig | ModelSource, load_format: str = "auto") -> ModelSource:
        """Find the folder, downloading it if necessary, and read its configuration.

        No weights are read. A source is returned unchanged. ``load_format`` is ``LoadConfig``'s.

        Raises:
            CheckpointFormatError: there is no such model, or its files are damaged.
            UnsupportedModelError: the configuration requests something that is not implemented.

        """
        if isinstance(model, ModelSource):
            return model
        if model.model_code is not None:
            registry.load_model_code(model.model_code)
        if model.num_redundant_experts and not model.enable_expert_parallel:
            raise ValueError(
                "num_redundant_experts are experts that several ranks hold whole: give "
                "enable_expert_parallel as well"
            )
        source = find_source(
            model.model,
            model.revision,
            load_format=load_format,
            download_dir=model.download_dir,
            token=model.hf_token,
            code=model.trust_remote_code,
        )
        config = read_config(source.folder, model)
        if model.model_code is not None and model.model_impl != "transformers":
            registry.warn_of_unused_code(model.model_code, config.architectures)
        is_sharded = getattr(source, "load_format", None) == "sharded_state"
        if is_sharded and model.num_redundant_experts:
            raise UnsupportedModelError(
                f"{printable(source.folder)} is a sharded state, which has each expert once: leave "
                "num_redundant_experts out, or load the original checkpoint"
            )
        manifest = read_manifest(source.folder) if is_sharded else None
        model = model if manifest is None else manifest.settle(model, config)
        stored = getattr(config, "quantization_config", None)
        try:
            rules = rules_for(model.quantization, stored)
        except (CheckpointFormatError, UnsupportedModelError) as error:
            file = quantization_file(source.folder, model.hf_overrides)
            if file is not None:
                error.args = (f"{error}. {printable(file)} has these entries, not config.json",)
            raise
        is_dummy = load_format == "dummy"
        if is_dummy and isinstance(stored, Mapping) and stored.get("quant_method") == "gguf":
            raise UnsupportedModelError(
                f"no dummy weights are made of the blocks in {printable(model.model)}: expected a "
                "file of F32, F16 or BF16, or a config.json without the file"
            )
        if rules is not None and rules.experts_may_be_plain and not is_dummy:
            with open_weights(source) as checkpoint:
                rules = rules.for_experts({name: each.dtype for name, each in checkpoint.items()})
        dtype = _parameter_dtype(model, config, None if is_dummy else source)
        # A sharded state contains the tensors of all sources.
        alone = is_dummy or manifest is not None
        secondary = () if alone else _secondary_sources(model, config)
        spread, redundant = model.enable_expert_parallel, model.num_redundant_experts
        return cls(
            source, config, dtype, rules, spread, secondary, is_dummy, redundant, model.hf_overrides
        )

    @property
    def folder(self) -> Path:
        """The folder with ``config.json``, the tokenizer's files and usually the weights."""
        return self.source.folder

    @property
    def name(self) -> str:
        """The model's name in messages: its URL, its one file, or its folder."""
        return printable(getattr(self.source, "path", self.source.folder))

    @property
    def revision(self) -> str | None:
        """The commit of a snapshot in the hub's cache; ``None`` for any other folder."""
        return self.folder.name if self.folder.parent.name == "snapshots" else None

    def open(self) -> OpenWeights:
        """Open the weights and check their headers. ``bytes_read`` starts at zero.

        Dummy weights have the names that a whole model on one rank expects; their ``bytes_read``
        counts the values that are computed.
        """
        if self.is_dummy:
            with tensor_parallel(rank=0, size=1), pipeline_parallel(rank=0, size=1):
                model = build_model(self.config, self.dtype, torch.device("cpu"), self.rules)
            expected = model.expected_weights() | valid_weights(model)
            return PairsCheckpoint(self.source.folder, DummyWeights(expected))
        if self.secondary:
            return PairsCheckpoint(
                self.source.folder, JoinedWeights([("", self.source), *self.secondary])
            )
        return open_weights(self.source)

    def build(self, device: torch.device, tensors: int | None = None) -> vLLMModule:
        """Build this rank's model in evaluation mode: parameters on meta, to load onto ``device``.

        The rank and size are those of the surrounding :func:`tensor_parallel` or process group. If
        ``tensors`` is given, the number of tensors in the checkpoint, a model with far more
        parameters than these can fill raises ``CheckpointFormatError`` before it is built
        completely.
        """
        redundant = self.redundant_experts
        with expert_parallel(redundant=redundant) if self.spread_experts else nullcontext():
            return build_model(self.config, self.dtype, device, self.rules, tensors).eval()

    def __reduce__(self) -> tuple[Callable[..., ModelSource], tuple[Any, ...]]:
        values = tuple(getattr(self, field.name) for field in fields(self))
        models_by_call, files = registry.registered.models_by_call, registry.registered.files
        models = {
            name: models_by_call[name]
            for name in self.config.architectures
            if name in models_by_call
        }
        try:
            # Pickled to bytes, because classes of the user's files exist only after _restore has
            # run these.
            pickled = pickle.dumps((models, values))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                "the registered model or source cannot be sent to ranks in other processes: define "
                f"its class or its opener at the top level of a module ({describe_error(error)})"
            ) from error
        return _restore, (files, pickled)


def _restore(files: list[Path], pickled: bytes) -> ModelSource:
    for path in files:
        registry.load_model_code(path)
    models, values = pickle.loads(pickled)
    registry.registered.models_by_call.update(models)
    return ModelSource(*values)


def read_config(folder: Path, model_config: ModelConfig) -> HFConfig:
    """Read and check ``config.json`` in ``folder``, with the overrides of ``model_config``.

    The class of the architecture that it names declares its entries.
    """
    path = folder / "config.json"
    entries = read_entries(folder, model_config.hf_overrides)
    architectures, trusted = architectures_of(entries, path), model_config.trust_remote_code
    named = not ENCODER_DECODERS.isdisjoint(architectures)
    declared = named or entries.get("is_encoder_decoder") is True
    if declared and not registry.is_known(architectures):
        raise UnsupportedModelError(
            f"{printable_name(architectures[0])} of {printable(path)} is an encoder-decoder, and "
            "the engine runs decoders and encoders only: no encoder-decoder can run here yet"
        )
    impl = registry.settled_impl(architectures, model_config.model_impl, entries.get("auto_map"))
    entries |= {"model_impl": impl, "trusted_folder": str(folder) if trusted else None}
    config_class = registry.config_class(architectures, impl)
    entries.pop("max_model_len", None)  # a file's own would exceed its positions unnoticed
    if model_config.max_model_len is not None:
        entries["max_model_len"] = model_config.max_model_len
    with registry.blamed_on(config_class):
        config = parse_config(config_class, entries, path)
    decodes = hasattr(model_class(architectures, impl), "compute_logits")
    if decodes and not getattr(config, "is_causal", True):  # null and 0 are false in transformers
        raise UnsupportedModelError(
            f"is_causal of {printable(path)} is {shorten(getattr(config, 'is_causal', None))}: "
            "tokens attend to later ones, and decoders here attend to earlier ones only: take a "
            "model that generates, or set is_causal in hf_overrides"
        )
    limit = config.context_length
    if limit and model_config.max_model_len and model_config.max_model_len > limit:
        raise UnsupportedModelError(
            f"max_model_len {model_config.max_model_len} exceeds the {limit} positions of "
            f"{printable(path)}: lower it, or set rope scaling in hf_overrides"
        )
    return config


def build_model(
    config: HFConfig,
    dtype: torch.dtype,
    device: torch.device,
    rules: Rules | None = None,
    tensors: int | None = None,
) -> vLLMModule:
    """Build the architecture of ``config``: parameters on meta, to be loaded onto ``device``.

    For ``tensors``, see :meth:`ModelSource.build`.
    """
    from vllm_module.layers.fusion import fuse  # needs kernels, which a plan of files does not

    build: Any = model_class(config.architectures, config.model_impl)
    config_class = registry.config_class(config.architectures, config.model_impl)
    if not isinstance(config, config_class):
        config = config_class(**config.model_dump(exclude_unset=True))
    with _default_dtype_lock:
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with device, _fewer_parameters(config, tensors), registry.blamed_on(build):
                try:
                    model: vLLMModule = build(config)
                    list(model.modules())  # fails if one has not called nn.Module's constructor
                except AttributeError as error:
                    if "config.json" not in str(error):  # the message of HFConfig
                        raise
                    advice = (
                        f"; {build.__name__} has no config_class: set it to a subclass of HFConfig "
                        "that declares the entry, or the name of it in the file"
                    ) * (config_class is HFConfig)
                    raise CheckpointFormatError(
                        f"{config.architectures[0]} cannot be built: {error}{advice}"
                    ) from None
            if rules is not None:
                quantize(model, rules)  # first, because rules name layers of every stage
            if (stage := surrounding_stage.get()) is not None and stage.size > 1:
                from vllm_module.build.stages import divide

                divide(model, stage)
            fuse(model)
            return model
        finally:
            torch.set_default_dtype(default)


@contextmanager
def _fewer_parameters(config: HFConfig, tensors: int | None) -> Iterator[None]:
    """Raise if the block makes far more parameters than ``tensors`` checkpoint tensors can fill.

    A tensor may fill several parameters, or none, so the limit is generous.
    """
    if tensors is None:
        yield
        return
    most, made, thread = 2 * tensors + 100, 0, threading.get_ident()

    def count(module: torch.nn.Module, name: str, parameter: object) -> None:
        nonlocal made
        if threading.get_ident() != thread:  # the hook is called for all threads of the process
            return
        made += 1
        if made > most:
            raise CheckpointFormatError(
                f"config.json describes a larger model than the checkpoint: more than {most} "
                f"parameters (num_hidden_layers is {config.num_hidden_layers}), and the checkpoint "
                f"has {tensors} tensors. Check that they belong together."
            )

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _secondary_sources(
    model_config: ModelConfig, config: HFConfig
) -> tuple[tuple[str, Source], ...]:
    """Find the sources in the model's ``secondary_weights``, with the paths of their modules."""
    cls = model_class(config.architectures, config.model_impl)
    declared: Any = getattr(cls, "secondary_weights", None)
    if declared is None:
        return ()
    with registry.blamed_on(cls):
        named = declared(config)
    pairs = named.items() if isinstance(named, Mapping) else ((None, named),)
    found = []
    for path, name in pairs:
        if not isinstance(path, str) or not isinstance(name, str) or path.endswith("."):
            raise UnsupportedModelError(
                f"{cls.__name__}.secondary_weights should map the path of a module, such as "
                f"'vision_tower', to a folder, hub id or URL, got {shorten(named)}"
            )
        directory, token = model_config.download_dir, model_config.hf_token
        found.append((path, find_source(name, download_dir=directory, token=token)))
    return tuple(found)


def _parameter_dtype(
    model_config: ModelConfig, config: HFConfig, source: Source | None
) -> torch.dtype:
    """Return the requested dtype, else config.json's, else that of a tensor in one of _DTYPES.

    Without a source, it is float32.
    """
    name: str | None = model_config.dtype
    if name == "auto":
        name = config.dtype or config.torch_dtype
    if not name:
        dtypes: list[torch.dtype] = []
        if source is not None:
            with open_weights(source) as checkpoint:
                # Files of safetensors have float32 first; transformers reads them by name.
                kind = getattr(checkpoint, "load_format", None)  # a source of a user has none
                order = sorted if kind == "safetensors" else list
                dtypes = [checkpoint[each].dtype for each in order(checkpoint)]
        # The first tensor may be position ids. If no dtype is one of _DTYPES, it is refused by
        # name.
        taken = [*(dtype for dtype in dtypes if dtype in _DTYPES), *dtypes, torch.float32]
        name = str(taken[0])
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if dtype not in _DTYPES:
        raise UnsupportedModelError(
            f"dtype {printable_name(name)} is none that a model runs in: choose float32, float16 "
            "or bfloat16"
        )
    assert isinstance(dtype, torch.dtype)
    return dtype


def number_of_tensors(weights: Mapping[str, Weight]) -> int:
    """Return the number of tensors that this rank loads, before its model is built."""
    if not isinstance(weights, ShardedState):
        return len(weights)
    group, ranks = tensor_parallel_group(), weights.manifest.tensor_parallel_size
    # Another number of ranks is refused later, when the model exists.
    return len(weights.of_rank(group.rank if group.size == ranks else 0))
