"""The rope settings of a ``config.json``, read and checked in one place.

transformers 5 writes them into ``rope_parameters``, once for all layers or once for each layer
type. transformers 4 writes ``rope_scaling``, and some settings beside it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

_Size = Annotated[int, Field(gt=0, lt=2**31)]
_Positive = Annotated[float, Field(ge=1e-6, lt=2**31)]  # so that frequencies stay finite
_NotNegative = Annotated[float, Field(ge=0, lt=2**31)]

# By a setting's name: the path of the entry that gives it, and the value.
_Found = dict[str, tuple[str, Any]]


class RopeParameters(BaseModel):
    """The settings that every ``rope_type`` has; by themselves they are those of ``default``.

    Attributes:
        rope_type: by its name in transformers 5.
        rope_theta: the base of the frequencies.
        partial_rotary_factor: share of a head's features that are rotated.
        rotary_dim: the number of these features; goes before the share.
        max_position_embeddings: most positions, without scaling; some files give no limit.

    """

    # Strict, because the entries are used as they are in the file: "false" is not true.
    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    rope_type: str
    rope_theta: Annotated[float, Field(ge=1, le=1e30)] = 10000.0
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 1.0
    rotary_dim: _Size | None = None
    max_position_embeddings: _Size | None = None

    def longest(self, limit: int) -> int:
        """Return the most positions that the scaling allows.

        ``limit`` is ``max_position_embeddings``. For llama3 and longrope it is the scaled length
        already.
        """
        return limit


class LinearRope(RopeParameters):
    """``linear``: positions are divided by ``factor``."""

    factor: _Positive

    def longest(self, limit: int) -> int:
        """Return ``limit``, multiplied by the factor."""
        return max(1, int(limit * self.factor))


class DynamicRope(LinearRope):
    """``dynamic`` (NTK): the base grows with the length, by ``factor``."""

    max_position_embeddings: _Size


class ProportionalRope(LinearRope):
    """``proportional``: features that are not rotated count for the frequencies of the others."""

    factor: _Positive = 1.0


class ExtendedRope(RopeParameters):
    """What yarn and longrope share.

    Attributes:
        factor: of the longest over the original length; that of the lengths unless given.
        attention_factor: factor on cosines and sines; by a formula of ``factor`` unless given.

    """

    factor: _Positive | None = None
    original_max_position_embeddings: Annotated[int, Field(gt=1, lt=2**31)]  # its log divides
    attention_factor: _Positive | None = None

    @model_validator(mode="after")
    def _has_a_factor(self) -> ExtendedRope:
        if self.factor is None and self.max_position_embeddings is None:
            raise ValueError("factor is missing, and there is no max_position_embeddings")
        return self

    @property
    def extension(self) -> float:
        """The factor, whether it is given or not."""
        if self.factor is None:
            assert self.max_position_embeddings is not None
            return self.max_position_embeddings / self.original_max_position_embeddings
        return self.factor


class YarnRope(ExtendedRope):
    """``yarn`` (arXiv:2309.00071). ``mscale`` and ``mscale_all_dim`` are DeepSeek-V2's.

    ``attn_factor`` multiplies the ``attention_factor`` that the formula gives, as in vLLM.
    transformers does not read it. DeepSeek-R1-0528-Qwen3-8B has it.
    """

    rope_theta: Annotated[float, Field(gt=1, le=1e30)] = 10000.0
    attn_factor: _Positive = 1.0
    beta_fast: _Positive = 32.0
    beta_slow: _Positive = 1.0
    mscale: _NotNegative | None = None
    mscale_all_dim: _NotNegative | None = None
    truncate: bool = True

    @model_validator(mode="after")
    def _slow_is_no_faster(self) -> YarnRope:
        if self.beta_slow > self.beta_fast:  # Kimi K2's are equal
            raise ValueError(
                f"beta_slow: expected at most beta_fast {self.beta_fast}, got {self.beta_slow}"
            )
        return self

    def longest(self, limit: int) -> int:
        """Return the original length, multiplied by the factor."""
        if self.factor is None:
            return limit
        return max(1, int(self.original_max_position_embeddings * self.factor))


class Llama3Rope(RopeParameters):
    """``llama3``: low frequencies are divided by ``factor``, and high ones are kept."""

    factor: _Positive
    original_max_position_embeddings: _Size
    low_freq_factor: _Positive
    high_freq_factor: _Positive

    @model_validator(mode="after")
    def _low_below_high(self) -> Llama3Rope:
        low, high = self.low_freq_factor, self.high_freq_factor
        if low >= high:  # the formula divides by the difference
            raise ValueError(
                f"low_freq_factor: expected less than high_freq_factor {high}, got {low}"
            )
        return self


class LongRope(ExtendedRope):
    """``longrope`` (arXiv:2402.13753): each frequency is divided by a factor of its own.

    ``short_mscale`` and ``long_mscale`` are Phi-3.5-MoE's, and go before ``attention_factor``.
    """

    short_factor: list[_Positive]
    long_factor: list[_Positive]
    short_mscale: _Positive | None = None
    long_mscale: _Positive | None = None

    @model_validator(mode="after")
    def _lists_are_alike(self) -> LongRope:
        short, long = len(self.short_factor), len(self.long_factor)
        if short != long:
            raise ValueError(f"short_factor: expected as many as long_factor's {long}, got {short}")
        return self


_TYPES: dict[str, type[RopeParameters]] = {
    "default": RopeParameters,
    "dynamic": DynamicRope,
    "linear": LinearRope,
    "llama3": Llama3Rope,
    "longrope": LongRope,
    "proportional": ProportionalRope,
    "yarn": YarnRope,
}
# Entries of config.json that give a setting which the object lacks; the first that is there.
_BESIDE = {
    "rope_theta": ("rope_theta", "rotary_emb_base", "global_rope_theta"),  # GPT-NeoX, ModernBERT
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct"),
    "rotary_dim": ("rotary_dim",),
    "original_max_position_embeddings": ("max_position_embeddings",),
}


def rope_parameters(config: Any, layer_type: str | None = None) -> RopeParameters:
    """Return the rope settings of all layers, or of those of one type.

    Entries that are ``None`` are absent.

    Args:
        config: has the entries of ``config.json`` as attributes.
        layer_type: as in ``layer_types``, such as ``full_attention``. Settings that all layers
            share are those of every type.

    Raises:
        ValueError: an entry has a wrong type or value, or there are no settings for
            ``layer_type``. The message names the entry, what was expected and what came.

    """
    found = _by_layer_type(config, layer_type)
    name = None if None in found else layer_type
    if name in found:
        return _checked(config, *found[name])
    wanted = f"an object for {layer_type}" if layer_type else "settings that all layers share"
    given = ", ".join(map(str, found)) or "none"
    raise ValueError(f"rope_parameters: expected {wanted}, got settings by layer type: {given}")


def all_rope_parameters(config: Any) -> list[RopeParameters]:
    """Return the rope settings of every layer type; at least one.

    Raises ``ValueError`` as :func:`rope_parameters` does.
    """
    return [_checked(config, path, found) for path, found in _by_layer_type(config).values()]


def _by_layer_type(
    config: Any, layer_type: str | None = None
) -> dict[str | None, tuple[str, _Found]]:
    """Return the path of each object with settings, and these, by layer type; ``None`` is all."""
    scaling, parameters = (
        _found(name, getattr(config, name, None)) for name in ("rope_scaling", "rope_parameters")
    )
    path, given = ("rope_scaling", scaling) if scaling else ("rope_parameters", parameters)
    named = getattr(config, "layer_types", None)
    named = named if isinstance(named, list | tuple) else ()  # other values are not checked here
    types = {name for name in (*named, layer_type) if isinstance(name, str)}
    local = _beside(config, "rope_theta", "rope_local_base_freq", "local_rope_theta")
    if by_type := _objects_by_type(given, types):
        if local:  # of sliding attention, which a file may leave out
            by_type.setdefault("sliding_attention", (path, {}))
        return {
            name: (of, (local if name == "sliding_attention" else {}) | _found(of, value))
            for name, (of, value) in by_type.items()
        }
    if _objects_by_type(parameters, types):
        raise ValueError(
            "rope_scaling: expected none, because rope_parameters has an object for each layer "
            f"type, got {sorted(scaling)}"
        )
    given = {
        **{name: parameters[name] for name in _BESIDE if name in parameters},
        **given,
        **_beside(config, "original_max_position_embeddings", "original_max_position_embeddings"),
    }
    if not local:
        return {None: (path, given)}
    # In Gemma 3 the scaling is that of full attention only; in ModernBERT it is for both.
    scaled = {} if getattr(config, "rope_local_base_freq", None) is not None else given
    return {"full_attention": (path, given), "sliding_attention": (path, scaled | local)}


def _objects_by_type(found: _Found, types: set[str]) -> _Found:
    """Return the objects for one layer type each, if there are any.

    They are named in ``layer_types``, as in transformers, or there is nothing else.
    """
    if types.isdisjoint(found) and not all(isinstance(v, Mapping) for _, v in found.values()):
        return {}
    return {k: v for k, v in found.items() if k in types or isinstance(v[1], Mapping)}


def _found(path: str, value: object) -> _Found:
    """Return the settings of the object at ``path``."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{path}: expected an object, got {reprlib.repr(value)}")
    return {name: (f"{path}.{name}", entry) for name, entry in value.items() if entry is not None}


def _beside(config: Any, name: str, *entries: str) -> _Found:
    """Return the setting ``name`` as the first of these entries that is there gives it."""
    for entry in entries:
        if (value := getattr(config, entry, None)) is not None:
            return {name: (entry, value)}
    return {}


def _checked(config: Any, path: str, found: _Found) -> RopeParameters:
    """Return the settings as a model of their ``rope_type``."""
    for name, entries in _BESIDE.items():
        found = _beside(config, name, *entries) | found
    found |= _beside(config, "max_position_embeddings", "max_position_embeddings")
    rope_type = _rope_type(path, found)
    values = {name: value for name, (_, value) in found.items()}
    try:
        return _TYPES[rope_type].model_validate(values | {"rope_type": rope_type})
    except ValidationError as error:
        problem = error.errors()[0]
    if not problem["loc"]:  # a comparison of two settings, which names them
        raise ValueError(f"{path}.{problem['msg'].removeprefix('Value error, ')}")
    name, *inside = map(str, problem["loc"])
    entry, _ = found.get(name, (f"{path}.{name}", None))
    if problem["type"] == "missing":
        raise ValueError(f"{entry} is missing: rope_type {rope_type!r} needs it")
    wanted = problem["msg"].removeprefix("Input should be ")
    wanted = f"a number {wanted}" if wanted.startswith(("greater", "less")) else wanted
    entry += "".join(f"[{index}]" for index in inside)
    raise ValueError(f"{entry}: expected {wanted}, got {reprlib.repr(problem['input'])}")


def _rope_type(path: str, found: _Found) -> str:
    """Return the ``rope_type`` by its name of today."""
    # "type" is the older spelling.
    entry, given = found.get("rope_type") or found.get("type") or (f"{path}.rope_type", None)
    # So is "su". Early files of Phi-3 call longrope "yarn" too.
    if given == "su" or (given == "yarn" and "long_factor" in found):
        return "longrope"
    if given is None and "factor" not in found:
        return "default"
    if isinstance(given, str) and given in _TYPES:
        return given
    got = "none beside a factor" if given is None else reprlib.repr(given)
    raise ValueError(f"{entry}: expected one of {', '.join(_TYPES)}, got {got}")
