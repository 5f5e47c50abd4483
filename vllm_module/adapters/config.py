"""``adapter_config.json`` of PEFT: which modules an adapter is for, with which rank and scale."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field

from vllm_module.adapters.expressions import Expression, ModuleName
from vllm_module.base.messages import printable, shorten
from vllm_module.config import Settings
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError
from vllm_module.weights.strict_json import read_json

CONFIG_FILE = "adapter_config.json"


def _checked_pattern(pattern: str) -> str:
    """Return a regular expression; raise ``ValueError`` for one that has no bound of its time."""
    Expression(pattern)
    return pattern


_Pattern = Annotated[str, AfterValidator(_checked_pattern)]
_Path = Annotated[str, Field(pattern=r"^[\w.]*$", max_length=1000)]
_Rank = Annotated[int, Field(gt=0, le=2**16, strict=True)]
_MAX_ALPHA = 3.4e38  # scales are float32
_Alpha = Annotated[float, Field(allow_inf_nan=False, strict=True, ge=-_MAX_ALPHA, le=_MAX_ALPHA)]
_Index = Annotated[int, Field(ge=0, strict=True)]
_Names = Annotated[frozenset[str], Field(max_length=100_000)]


class AdapterConfig(Settings):
    """A LoRA adapter's settings, by PEFT's names.

    Entries that change what an adapter computes, and that are not computed here, are refused by
    name; so are entries that are unknown, unless they are null, false or empty.

    Attributes:
        r, lora_alpha: rank and numerator of the scale, where no pattern says otherwise.
        rank_pattern, alpha_pattern: others, by a regular expression for the end of a module's name.
        use_rslora: the scale is ``alpha / sqrt(rank)`` instead of ``alpha / rank``.
        target_modules: ends of modules' names, or one regular expression for whole names, or
            ``"all-linear"``.
        exclude_modules: the same, for modules that are not adapted.
        target_parameters: parameters, such as the weight of all experts, that are adapted as well.
        layers_to_transform: numbers of the only layers that are adapted, if not all are.
        layers_pattern: names before these numbers; by default the first number of a name counts.
        fan_in_fan_out: the base stores its weights transposed; A and B are stored as ever.
        peft_version: the PEFT that wrote the adapter; ``None`` if a file does not say.
        base_model_name_or_path, base_digest: the model that it was made for; the second is what
            ``vllm-module digest`` prints of all of its tensors, and no entry of PEFT's.

    """

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())

    peft_type: Literal["LORA"] = "LORA"
    r: _Rank
    lora_alpha: _Alpha
    rank_pattern: dict[_Pattern, _Rank] = {}
    alpha_pattern: dict[_Pattern, _Alpha] = {}
    use_rslora: Annotated[bool, Field(strict=True)] = False
    target_modules: _Names | _Pattern | None = None
    exclude_modules: _Names | _Pattern | None = None
    target_parameters: _Names | None = None
    layers_to_transform: list[_Index] | _Index | None = None
    layers_pattern: Annotated[list[_Path], Field(max_length=100)] | _Path | None = None
    fan_in_fan_out: Annotated[bool, Field(strict=True)] = False
    peft_version: str | None = "0.19.1"
    base_model_name_or_path: str | None = None
    base_digest: str | None = None

    def rank(self, *names: str) -> int:
        """Return the rank of the adapter of the module that has any of these names."""
        found: int = self._of_pattern(self._ranks, names, self.r)
        return found

    def scale(self, *names: str, rank: int | None = None) -> float:
        """Return the factor of B @ A, for the module of these names; ``rank`` is that of its A."""
        alpha = self._of_pattern(self._alphas, names, self.lora_alpha)
        rank = self.rank(*names) if rank is None else rank
        return float(alpha / (math.sqrt(rank) if self.use_rslora else rank))

    def check_same(self, other: AdapterConfig) -> None:
        """Raise ``UnsupportedModelError`` if ``other`` has settings that compute something else."""
        differ = [
            name
            for name in {*AdapterConfig.model_fields} - _OF_ORIGIN
            if getattr(self, name) != getattr(other, name)
        ]
        if differ:
            values = [f"{name} {getattr(other, name)} for {getattr(self, name)}" for name in differ]
            raise UnsupportedModelError(
                f"an update in place keeps an adapter's settings, and {CONFIG_FILE} has "
                f"{shorten(', '.join(values))}: unload the adapter, and load this one"
            )

    def targets_parameter(self, *names: str) -> bool:
        """Tell whether the parameter that has any of these names is adapted by itself."""
        return any(_ends_in(name, self.target_parameters or ()) for name in names)

    def targets_weight(self, *names: str) -> bool:
        """Tell whether the weight of the module with any of these names is adapted by itself."""
        return self.targets_parameter(*(f"{name}.weight" for name in names))

    def refuse_old_experts(self, *names: str) -> None:
        """Raise ``UnsupportedModelError`` if A and B may be of the transposed parameter.

        PEFT before 0.19.1 took the rows of experts' weights ``[experts, output, input]`` for their
        inputs. Where both are as many, no shape tells.
        """
        version = re.match(r"(\d+)\.(\d+)\.(\d+)", self.peft_version or "")
        if version is not None and tuple(map(int, version.groups())) >= (0, 19, 1):
            return
        if self.targets_parameter(*names):
            raise UnsupportedModelError(
                f"{names[0]} has as many outputs as inputs, and peft_version is "
                f"{shorten(self.peft_version)}: before 0.19.1, PEFT made A and B of the transposed "
                f"weight there. Load the adapter with the PEFT that made it, and {_MERGE}; or set "
                "the entry, if the experts' A are along their inputs"
            )

    def targets(self, *names: str) -> bool:
        """Tell whether the module of these names is adapted, by PEFT's rules; not "all-linear"."""
        excluded = any(self._fits("exclude_modules", name) for name in names)
        return not excluded and any(map(self._is_target, names))

    def _is_target(self, module: str) -> bool:
        modules = self.target_modules
        if not modules:
            return False
        if isinstance(modules, frozenset) and module in modules:
            return True  # a whole name, which layers_to_transform does not change
        chosen = isinstance(modules, str) or self._is_chosen_layer(module)
        return chosen and self._fits("target_modules", module)

    def _fits(self, setting: str, module: str) -> bool:
        """Tell whether a setting with names, or with an expression, has this module."""
        names = getattr(self, setting)
        if not isinstance(names, str):
            return _ends_in(module, names or ())
        return bool(names) and self._expressions[setting].fits(ModuleName(module))

    @cached_property
    def _expressions(self) -> dict[str, Expression]:
        given = {name: getattr(self, name) for name in ("target_modules", "exclude_modules")}
        return {name: Expression(each) for name, each in given.items() if isinstance(each, str)}

    @cached_property
    def _ranks(self) -> list[tuple[Expression, int]]:
        return [
            (Expression(each, behind_a_dot=True), value)
            for each, value in self.rank_pattern.items()
        ]

    @cached_property
    def _alphas(self) -> list[tuple[Expression, float]]:
        return [
            (Expression(each, behind_a_dot=True), value)
            for each, value in self.alpha_pattern.items()
        ]

    def _of_pattern(
        self, patterns: Sequence[tuple[Expression, Any]], names: Sequence[str], default: Any
    ) -> Any:
        end = ".weight" if self.targets_weight(*names) else ""  # PEFT takes the parameter's name
        tried = [ModuleName(name + end) for name in names]
        return next((value for each, value in patterns if any(map(each.fits, tried))), default)

    def _is_chosen_layer(self, module: str) -> bool:
        chosen = self.layers_to_transform
        if chosen is None or chosen == []:
            return True
        patterns = self.layers_pattern or r"[^.]*"
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            before = r".*?\." if pattern == r"[^.]*" else r"(?:^|.*?\.)"
            found = re.match(rf"{before}{pattern}\.(\d+)\.", module)
            if found is not None:
                number = int(found.group(1))
                return number in ([chosen] if isinstance(chosen, int) else chosen)
        return False


def _ends_in(module: str, names: Container[str]) -> bool:
    """Tell whether a name is one of these, or ends in one of them behind a dot."""
    parts = module.split(".")
    return any(".".join(parts[first:]) in names for first in range(len(parts)))


# What only training reads, or what is written for people.
_WITHOUT_EFFECT = frozenset(
    (
        "auto_mapping",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    )
)
# What is not computed here, and why. PEFT takes an empty object for one with defaults.
_NOT_COMPUTED = {
    "alora_invocation_tokens": "it adds to the tokens behind these alone",
    "arrow_config": "it chooses among other adapters for each token",
    "bias": "biases of the base are replaced",
    "kasa_config": "it changes the base's weights, and has a diagonal between A and B",
    "layer_replication": "layers of the base are used several times",
    "lora_bias": "B has a bias",
    "modules_to_save": "whole weights replace those of the base",
    "monteclora_config": "its file has tensors beside A and B",
    "trainable_token_indices": "rows of the embedding are replaced",
    "use_bdlora": "A or B is stored as blocks of a diagonal",
    "use_dora": "its weights are normalized by column",
    "use_qalora": "the inputs of A are averages of groups",
    "velora_config": "its file has tensors beside A and B",
}
_EMPTY_IS_ON = frozenset(name for name in _NOT_COMPUTED if name.endswith("_config")) | {
    "use_bdlora"
}
# How A and B began. Others than these change the base's weights, too, so that the sum stays.
_HARMLESS_BEGINNINGS = frozenset(("gaussian", "eva", "orthogonal", "mica"))
# What says where an adapter comes from, and not what it computes.
_OF_ORIGIN = {"base_model_name_or_path", "base_digest", "peft_version"}
_MERGE = "merge the adapter into its base model with PEFT's merge_and_unload()"


def _check_beginning(value: Any, where: str) -> None:
    """Raise ``UnsupportedModelError`` if A and B are for a base whose weights PEFT changes.

    PEFT's conversion of such an adapter to one of the unchanged base sets the entry to true.
    """
    if not value or value is True or str(value).lower() in _HARMLESS_BEGINNINGS:
        return
    raise UnsupportedModelError(
        f"{where}: init_lora_weights is {shorten(value)}. With pissa, olora, corda, loftq and "
        "lora_ga, A and B add to weights that PEFT has changed, and here they would be added to "
        "the unchanged ones; no other such value is known. Save the adapter with "
        "save_pretrained(path_initial_model_for_weight_conversion=...), which makes it one of the "
        f"unchanged base, or {_MERGE}; if the base here is the changed one, set the entry to true"
    )


def adapter_config(entries: Mapping[str, Any], where: str) -> AdapterConfig:
    """Return the settings of an adapter, checked.

    Raises ``UnsupportedModelError`` for a kind of adapter that is not computed here, and
    ``CheckpointFormatError`` for entries of a wrong type or outside of their range.
    """
    kind = entries.get("peft_type", "LORA")
    if kind != "LORA":
        raise UnsupportedModelError(
            f"{where}: peft_type is {shorten(kind)}, and LORA is the only kind that is loaded: "
            f"{_MERGE}"
        )
    for name, value in entries.items():
        if name == "init_lora_weights":
            _check_beginning(value, where)
            continue
        off = value is None or (not value and name not in _EMPTY_IS_ON)
        known = name in AdapterConfig.model_fields or name in _WITHOUT_EFFECT
        if off or known or (name, value) == ("bias", "none"):
            continue
        why = f" ({_NOT_COMPUTED[name]})" if name in _NOT_COMPUTED else ""
        raise UnsupportedModelError(
            f"{where}: {printable(name)} is {shorten(value)}, which is not computed here{why}: "
            f"{_MERGE}"
        )
    try:
        return AdapterConfig(**({"peft_version": None} | dict(entries)))
    except ValueError as error:
        told = str(error).replace("a valid frozenset", "a list of names")
        lines = "\n".join(f"  {line}" for line in told.splitlines())
        raise CheckpointFormatError(f"{where} is no configuration of LoRA:\n{lines}") from None


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read and check a folder's ``adapter_config.json``."""
    path = folder / CONFIG_FILE
    return adapter_config(read_json(path, folder), printable(path))
