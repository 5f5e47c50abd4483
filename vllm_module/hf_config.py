"""Hugging Face's ``config.json``: its entries, their types, ranges and defaults.

:class:`HFConfig` has the entries that layers and several models read. A model's file subclasses it
for the entries of its architecture, and sets ``config_class`` of its model.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from vllm_module.base.messages import printable, shorten
from vllm_module.errors import CheckpointFormatError
from vllm_module.rope_parameters import DynamicRope, all_rope_parameters
from vllm_module.weights.regular_file import is_there
from vllm_module.weights.strict_json import read_json

# Of sizes and counts. Products of three of them still fit into 64 bits.
Size = Annotated[int, Field(gt=0, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
# Of experts, and of layers that are only named: tables have an entry for each.
NumExperts = Annotated[int, Field(gt=0, le=2**12)]
NumNamed = Annotated[int, Field(ge=0, le=2**12)]
# Inputs of a causal convolution before a recurrence.
ConvKernel = Annotated[int, Field(ge=2, le=8)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


def _listed_limits(value: Any) -> Any:
    """Return the least and greatest step of a file, in which transformers 5 spells infinity out."""
    if value is None:
        return 0.0, inf
    if not isinstance(value, list):
        return value
    return tuple(inf if each == {"__float__": "Infinity"} else each for each in value)


def _ordered_limits(value: tuple[float, float]) -> tuple[float, float]:
    if not 0 <= value[0] <= value[1] or value[0] == inf:
        raise PydanticCustomError(
            "limits", "Input should be a least step from 0, finite, and a greatest one"
        )
    return value


# Of the steps of a recurrence, the least and the greatest.
TimeStepLimit = Annotated[
    tuple[float, float], BeforeValidator(_listed_limits), AfterValidator(_ordered_limits)
]

# Names that hub files give to the most positions of a sequence, besides max_position_embeddings.
_POSITIONS = (
    "n_positions",
    "max_sequence_length",
    "max_seq_length",
    "max_seq_len",
    "seq_length",
    "seq_len",
    "model_max_length",
    "max_target_positions",
)

# Where a file has these beside those of its text model, they say which class is built, and whether
# its head is tied.
_OF_THE_WHOLE = "architectures", "tie_word_embeddings"

C = TypeVar("C", bound="HFConfig")


class HFConfig(BaseModel):
    """A checkpoint's ``config.json``; each entry is an attribute.

    A subclass declares further entries, each with its type and, if files may lack it, its default.
    Values are not converted: ``"5"`` is no number and ``"false"`` is no bool. Entries that are not
    declared here or in a subclass are kept as they are. Reading an entry that is not there raises
    an ``AttributeError`` that names it.

    Attributes:
        attribute_map: from the name of an entry here to its name in the file, for files that use
            another: ``{"hidden_size": "n_embd"}``.
        nested_config: the entry that holds the entries of the text model, such as
            ``"text_config"``. Those that are not null replace entries of the same name outside
            it, but for ``architectures`` and ``tie_word_embeddings``. ``attribute_map`` applies to
            them too.
        head_dim: ``hidden_size / num_attention_heads`` unless given.
        num_key_value_heads: ``num_attention_heads`` unless given.
        max_position_embeddings: the most positions without rope scaling, by any of its names.
        layer_types: ``"full_attention"`` or ``"sliding_attention"`` for each layer.
        stored_rotary_pairs: q_proj and k_proj are stored with the halves of each head in turns,
            feature by feature, as q_proj_pairs and k_proj_pairs. Hugging Face's files never have
            it: it is written for checkpoints of llama.cpp and Mistral, and only models with Llama's
            attention take it.
        max_model_len: the most tokens of a sequence that the model is built for. It is not an
            entry of the file: :class:`~vllm_module.config.ModelConfig` has it. Unless given there,
            it is the length that the file declares.
        model_impl: whose model is built. It is not an entry of the file either.
        trusted_folder: where code of the checkpoint may be run from; ``None`` if it may not be run.
            No entry of the file sets it.

    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, protected_namespaces=())

    attribute_map: ClassVar[Mapping[str, str]] = {}
    nested_config: ClassVar[str | None] = None

    architectures: list[str] = Field(min_length=1)
    hidden_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    vocab_size: Size
    num_key_value_heads: Size | None = None
    head_dim: Annotated[int, Field(gt=0, le=2**16)] | None = None
    max_position_embeddings: Size | None = None
    sliding_window: Size | None = None
    sliding_window_pattern: Size | None = None
    use_sliding_window: bool | None = None
    max_window_layers: Count | None = None
    layer_types: list[str] | None = None
    tie_word_embeddings: bool = False
    stored_rotary_pairs: bool = False
    dtype: str | None = None
    torch_dtype: str | None = None
    max_model_len: Size | None = None
    model_impl: Literal["auto", "native", "transformers"] = "auto"
    trusted_folder: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _use_our_names(cls, entries: Any) -> Any:
        """Lift the entries of the text model, and give entries the names that are declared here."""
        if not isinstance(entries, Mapping):
            return entries
        entries = dict(entries)
        if cls.nested_config is not None and cls.nested_config in entries:
            nested = entries[cls.nested_config]
            if not isinstance(nested, Mapping):
                raise ValueError(f"{cls.nested_config} should be an object, got {shorten(nested)}")
            taken = {name: value for name, value in nested.items() if value is not None}
            kept = {name: entries[name] for name in _OF_THE_WHOLE if entries.get(name) is not None}
            entries |= taken | kept
        for name, stored in cls.attribute_map.items():
            if stored in entries:
                value = entries[stored]
                if entries.get(name) is None:
                    entries[name] = value
                elif value not in (None, entries[name]):
                    raise ValueError(
                        f"{stored} and {name} are the same entry, and differ: "
                        f"{shorten(value)} and {shorten(entries[name])}"
                    )
        if entries.get("max_position_embeddings") is None:
            limits = [entries[name] for name in _POSITIONS if type(entries.get(name)) is int]
            entries.pop("max_position_embeddings", None)
            entries |= {"max_position_embeddings": min(limits)} if limits else {}
        return entries

    @model_validator(mode="after")
    def _fill_and_check(self) -> HFConfig:
        """Fill in what follows from other entries; check what no single entry shows."""
        if self.head_dim is None and self.hidden_size < self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is less than num_attention_heads "
                f"{self.num_attention_heads}, and there is no head_dim"
            )
        for name, limit in self._limits().items():
            if type(limit) is not int or limit < 1:
                raise ValueError(f"{name} should be a number of positions, got {shorten(limit)}")
        # By vars(), because the fields are frozen.
        filled: dict[str, Any] = vars(self)
        if self.head_dim is None:
            filled["head_dim"] = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            filled["num_key_value_heads"] = self.num_attention_heads
        ropes = all_rope_parameters(self)
        if self.max_model_len is None and self.max_position_embeddings is not None:
            # Dynamic scaling changes all frequencies, so longer sequences are by request only.
            dynamic = any(isinstance(rope, DynamicRope) for rope in ropes)
            declared = self.max_position_embeddings if dynamic else self.context_length
            filled["max_model_len"] = declared
        return self

    @property
    def context_length(self) -> int | None:
        """The most positions the model was made for, with rope scaling; ``None`` if unlimited."""
        limit = self.max_position_embeddings
        if limit is None:
            return None
        scaled = [rope.longest(limit) for rope in all_rope_parameters(self)]
        return min([*scaled, *self._limits().values()])

    def _limits(self) -> dict[str, Any]:
        """Return the limits of positions that have another name than max_position_embeddings."""
        extra = self.__pydantic_extra__ or {}
        return {name: extra[name] for name in _POSITIONS if extra.get(name) is not None}

    def __getattr__(self, name: str) -> Any:
        extra = object.__getattribute__(self, "__pydantic_extra__") or {}
        if name in extra:
            return extra[name]
        raise AttributeError(f"config.json has no {name!r}")


# Each with the method that it is of, and its own names for entries.
_QUANTIZATION_FILES: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("hf_quant_config.json", "modelopt", {}),
    ("quantize_config.json", "gptq", {}),
    ("quant_config.json", "awq", {"w_bit": "bits", "q_group_size": "group_size"}),
)


def read_entries(folder: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``folder``'s ``config.json``, with ``overrides``; none is checked.

    Raises ``CheckpointFormatError`` if there is no such file or it holds no JSON object.
    """
    path = folder / "config.json"
    if not is_there(path):
        raise CheckpointFormatError(
            f"{printable(folder)} has no config.json: expected a folder in Hugging Face layout "
            "with config.json beside the .safetensors files"
        )
    entries = read_json(path, folder)
    if overrides:
        entries = overridden(entries, overrides, path)
    if entries.get("quantization_config") is None:
        entries |= _quantization_beside(folder, entries)
    return entries


def overridden(
    stored: Mapping[str, Any], overrides: Mapping[str, Any], path: Path
) -> dict[str, Any]:
    """Return the entries of the file at ``path`` with ``overrides``.

    Those of ``text_config`` are replaced one by one, by the entries that ``overrides`` has in its
    own ``text_config``, or else beside it.
    """
    entries = _replaced(stored, overrides, path)
    text, within = stored.get("text_config"), overrides.get("text_config", {})
    if isinstance(text, Mapping) and isinstance(within, Mapping):
        rope = text.get("rope_parameters")
        names = overrides.keys() & {*text, *(rope if isinstance(rope, Mapping) else ())}
        outer = {name: overrides[name] for name in names - {"architectures", "model_type"}}
        entries["text_config"] = _replaced(text, {**outer, **within}, path)
    return entries


def _replaced(
    stored: Mapping[str, Any], overrides: Mapping[str, Any], path: Path
) -> dict[str, Any]:
    entries = {**stored, **overrides}
    rope = entries.get("rope_parameters")
    if isinstance(rope, Mapping) and "rope_parameters" not in overrides:
        # transformers 5 writes rope_theta and others there, where they go before those beside it.
        for kind, its in rope.items():
            if isinstance(its, Mapping) and (names := sorted(its.keys() & overrides.keys())):
                raise CheckpointFormatError(
                    f"hf_overrides has {', '.join(names)}, which {printable(path)} has for each "
                    f"layer type, such as {shorten(kind)}: override rope_parameters as a whole"
                )
        entries["rope_parameters"] = {k: overrides.get(k, v) for k, v in rope.items()}
    return entries


def _quantization_beside(folder: Path, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``quantization_config`` of the files that say it for a config.json without one.

    ModelOpt writes hf_quant_config.json; AutoGPTQ wrote quantize_config.json, and AutoAWQ
    quant_config.json, before config.json had the entry. MLX calls it ``quantization``, and
    compressed-tensors called it ``compression_config``.
    """
    if isinstance(compressed := entries.get("compression_config"), Mapping):
        return {"quantization_config": {"quant_method": "compressed-tensors", **compressed}}
    if isinstance(entries.get("quantization"), Mapping):
        return {"quantization_config": entries["quantization"]}
    for name, method, names in _QUANTIZATION_FILES:
        if is_there(path := folder / name):
            given = read_json(path, folder)
            return {
                "quantization_config": {"quant_method": method}
                | {names.get(entry, entry): value for entry, value in given.items()}
            }
    return {}


def quantization_file(folder: Path, overrides: Mapping[str, Any]) -> Path | None:
    """Return the file that says ``quantization_config`` for config.json; ``None`` if none does."""
    path = folder / "config.json"
    entries = {**read_json(path, folder), **overrides} if is_there(path) else {}
    if entries.get("quantization_config") is not None:
        return None
    if not entries or isinstance(entries.get("quantization"), Mapping):
        return None
    files = (folder / name for name, _, _ in _QUANTIZATION_FILES)
    return next(filter(is_there, files), None)


def architectures_of(entries: Mapping[str, Any], path: Path) -> list[str]:
    """Return the names of architectures in ``entries``, those of the file at ``path``."""
    names = entries.get("architectures")
    if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
        return names
    came = f"got {shorten(names)}" if "architectures" in entries else "it is missing"
    raise CheckpointFormatError(
        f"{printable(path)} does not describe a model: architectures should be a list with at "
        f"least 1 name, such as ['LlamaForCausalLM'], {came}"
    )


def parse_config(cls: type[C], entries: Mapping[str, Any], path: Path) -> C:
    """Check ``entries`` as ``cls`` declares them; ``path`` is named in messages.

    Raises ``CheckpointFormatError`` that names each entry that is refused.
    """
    try:
        return cls.model_validate(dict(entries))
    except ValidationError as error:
        stored = {name: its for name, its in cls.attribute_map.items() if its in entries}
        lacks = {name: its for name, its in cls.attribute_map.items() if name not in entries}
        errors = error.errors()
        problems = "; ".join(_problem(each, stored | lacks) for each in errors)[:1000]
    if any(each["type"] == "missing" for each in errors):
        problems += (
            ". If this file has other names for them, attribute_map of the model's config_class "
            "should say which"
        )
    raise CheckpointFormatError(f"{printable(path)} does not describe a model: {problems}")


def _problem(problem: ErrorDetails, stored: Mapping[str, str]) -> str:
    """Name one entry that is refused, what was expected and what came."""
    if not problem["loc"]:  # a check of HFConfig, whose message names the entry
        return problem["msg"].removeprefix("Value error, ")
    first, *rest = problem["loc"]
    name = ".".join(map(str, (stored.get(str(first), first), *rest)))
    if problem["type"] == "missing":
        return f"{name} is missing"
    expected = problem["msg"].replace("Input should", "should", 1)
    return f"{name} {expected}, got {shorten(problem['input'])}"
