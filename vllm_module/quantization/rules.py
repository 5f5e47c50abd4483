"""Rules that give layers a scheme, by the names that a checkpoint has for them, and their use."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import torch
from torch import nn

from vllm_module.base.messages import shorten
from vllm_module.core.module import vLLMModule
from vllm_module.errors import CheckpointFormatError, ShardingError, UnsupportedModelError
from vllm_module.quantization.eight_bit import EightBitMethod
from vllm_module.quantization.kv_cache import KV_SCALES, QuantizableKVCache
from vllm_module.quantization.method import QuantizableLayer, QuantizeMethod
from vllm_module.quantization.online_nf4 import OnlineNF4Method
from vllm_module.quantization.scheme import EVERY_LAYER, Scheme

Rule = tuple[str, Scheme | QuantizeMethod | None]

_LONGEST = 1000  # characters of a pattern
# Four repetitions in a name of about 70 characters can be placed in a million ways.
_WAYS_TO_REPEAT = 32
_MOST_WAYS = 8 * _WAYS_TO_REPEAT**4
# A character, a set of characters, or what is not one; {} and {x} are characters.
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\d*,?\d*\}|.", re.DOTALL)
_REPEATS = ("*", "+", "{")


@dataclass(frozen=True)
class Rules:
    """Pairs of target and scheme (``None``: not quantized); the first that matches a layer counts.

    A method stands for a format that has only one scheme.

    A target is one of:

    - a name, or consecutive components of one: it matches that module and everything below it;
    - ``=`` and a name: it matches that layer alone;
    - ``re:`` and a regular expression, which has to match the beginning of a name;
    - ``Linear``: it matches every layer that can be quantized, but no embedding.

    An embedding is matched only by its own name, or by components that its name ends with.

    Attributes:
        demanded: the targets that the user wrote; each must have an effect.
        are_online: whether the user asked for them; some layer must be quantized then, or be named
            as one that is not.
        kv_scales: what the checkpoint calls the scales for keys and for values, relative to the
            module that has the attention layer; ``None`` if it has none.
        kv_scales_are_optional: whether it may lack both of a layer, which are 1 then.
        experts_may_be_plain: whether experts may be stored in full precision, without a word of it.
        joined: returns the method of a fused layer whose slots have different ones, ``None`` if
            there is none. Without it there never is one.

    """

    rules: tuple[Rule, ...]
    demanded: tuple[str, ...] = ()
    are_online: bool = False
    kv_scales: tuple[str, str] | None = None
    kv_scales_are_optional: bool = False
    experts_may_be_plain: bool = False
    # Not among what ranks compare: it is a function, and follows from the format.
    joined: Callable[[Mapping[str, object]], QuantizeMethod | None] | None = field(
        default=None, repr=False
    )

    @cached_property
    def _by_name(self) -> dict[str, int]:
        """The index of the first rule for each layer that is named alone; there may be many."""
        exact = {at: target[1:] for at, (target, _) in enumerate(self.rules) if target[:1] == "="}
        return {name: at for at, name in reversed(exact.items())}

    @cached_property
    def _others(self) -> list[tuple[int, str]]:
        """The indices and targets of all other rules."""
        return [(at, target) for at, (target, _) in enumerate(self.rules) if target[:1] != "="]

    def checked(self) -> Rules:
        """Return these rules, or raise if a target is an invalid pattern or slow to match."""
        for _, target in self._others:
            checked_target(target)
        return self

    def for_experts(self, dtypes: Mapping[str, torch.dtype]) -> Rules:
        """Return the rules for a checkpoint whose tensors have these dtypes, by name.

        Its experts are in full precision if none of their tensors has integers.
        """
        experts = [dtype for name, dtype in dtypes.items() if ".experts." in name]
        if not experts or not all(dtype.is_floating_point for dtype in experts):
            return self
        return replace(self, rules=(("experts", None), *self.rules))

    def rule_of(self, name: str, fused: str = "", spellings: Iterable[str] = ()) -> Rule:
        """Return the rule for the layer that a checkpoint calls ``name``.

        By its aliases it may also call it one of ``spellings``. ``fused`` is the path of the layer
        that has it as a slot, if there is one. A target may name that layer instead, but a pattern
        may not: patterns are written for the checkpoint's names, and ``.*v_proj`` would match
        ``qkv_proj``.
        """
        names = [name, *spellings]
        end = len(self.rules)
        first = min(self._by_name.get(each, end) for each in (*names, fused))
        for at, target in self._others:
            if at > first:
                break
            by_path = [fused] if fused and not target.startswith("re:") else []
            if any(matches(target, each) for each in names + by_path):
                return self.rules[at]
        return self.rules[first] if first < end else ("", None)

    def about(self, names: Sequence[str], fused: str) -> Rules:
        """Return the rules without those that match none of the layer's ``names``, nor ``fused``.

        A layer of many experts has many names, and a checkpoint may have a rule for each layer.
        """
        known = {*names, fused}
        text = "\n".join(f".{name}." for name in known)
        kept = [at for name in known if (at := self._by_name.get(name)) is not None]
        kept += [
            at
            for at, target in self._others
            if target == EVERY_LAYER or target.startswith("re:") or f".{target}." in text
        ]
        return replace(self, rules=tuple(self.rules[at] for at in sorted(kept)))

    def naming(self, names: Iterable[str]) -> Rules:
        """Return those rules that name a layer itself, which a checkpoint calls one of ``names``.

        Neither what is above the layer names it, nor a pattern.
        """
        ends = tuple(f".{name}" for name in names)
        kept = (
            rule
            for rule in self.rules
            if any(end.endswith(f".{rule[0].removeprefix('=')}") for end in ends)
        )
        return replace(self, rules=tuple(kept))


def quantize(model: vLLMModule, rules: Rules) -> None:
    """Give each layer of ``model``, which is not loaded yet, the scheme that ``rules`` have for it.

    Rules name the layers of a checkpoint, so a fused layer is looked up by the names of its slots.
    An embedding is quantized only if a rule names it. So are layers that share a weight, such as a
    tied head and its embedding: all of them, if a rule names one.

    Raises:
        UnsupportedModelError: the slots of one layer have different schemes, a target that the
            user wrote has no effect, or a layer holds its weight in its own way.
        ShardingError: a block of a weight would belong to two ranks or slots.

    """
    if any(_is_loaded(module) for module in model.modules()):
        raise RuntimeError(f"{type(model).__name__} is loaded: quantize it before it is")
    modules = dict(model.named_modules())
    layers = {path: each for path, each in modules.items() if isinstance(each, QuantizableLayer)}
    together = _together(model, layers)
    aliases = [  # of inner modules first, whose names those of outer ones begin
        (f"{path}.{name}".lstrip("."), f"{path}.{alias}".lstrip("."))
        for path, module in reversed(modules.items())
        if isinstance(module, vLLMModule) and not isinstance(module, QuantizableLayer)
        for alias, name in module.weight_aliases.items()
    ]
    schemes: dict[str, Scheme | QuantizeMethod] = {}
    used_targets: set[str] = set()
    for path, holders in together.items():
        named_only = layers[path].is_embedding or len(holders) > 1
        decisions = [
            _decide(each, layers[each], rules, aliases, named_only=named_only) for each in holders
        ]
        used_targets |= {target for targets, _ in decisions for target in targets}
        wanted = {scheme for _, scheme in decisions if scheme is not None}
        if len(wanted) > 1:
            raise UnsupportedModelError(
                f"{' and '.join(holders)} are one tensor, which the configuration ties, and are "
                f"not quantized alike: {'; '.join(map(str, wanted))}. Name one of them"
            )
        if wanted:
            schemes[path] = wanted.pop()
    if rules.demanded:
        others = [path for path in modules if path not in layers or layers[path].is_embedding]
        spelled = [name for path in others for name in _spelled(path, aliases)]
        _demand_effect(model, rules, used_targets, spelled)
    if rules.are_online and not rules.demanded and not schemes:
        raise UnsupportedModelError(
            f"quantization has no effect on {type(model).__name__}: its linear layers are of "
            f"classes that are not replaced ({_other_classes(model)}). Leave quantization out"
        )
    methods = {
        scheme: EightBitMethod(scheme) if isinstance(scheme, Scheme) else scheme
        for scheme in schemes.values()
    }
    for path, scheme in schemes.items():
        try:
            layers[path].quantize(methods[scheme])
            for other in together[path][1:]:
                layers[other].share_weight(layers[path])
        except ShardingError as error:
            advice = ""
            if isinstance(scheme, OnlineNF4Method):
                advice = ". Leave the layer out (ignore), or take another scheme"
            elif isinstance(scheme, Scheme) and scheme.online:
                advice = (
                    ". Leave the layer out (ignore), or take another weight_block_size or scheme"
                )
            raise ShardingError(f"{path} cannot be held in {scheme}: {error}{advice}") from None
        except UnsupportedModelError as error:
            raise UnsupportedModelError(
                f"{path} cannot be held in {scheme}: {error}. Leave the layer out (ignore)"
            ) from None
    for path, module in modules.items():
        if isinstance(module, QuantizableKVCache) and rules.kv_scales is not None:
            module.create_kv_scales(rules.kv_scales, optional=rules.kv_scales_are_optional)
            above, _, name = path.rpartition(".")
            if rules.kv_scales == KV_SCALES and isinstance(holder := modules[above], vLLMModule):
                # Older compressed-tensors store the scale of what a projection puts out.
                ends = {f"{scale[0]}_proj.output_scale": f"{name}.{scale}" for scale in KV_SCALES}
                holder.weight_aliases = {**holder.weight_aliases, **ends}


def _other_classes(model: nn.Module) -> str:
    """Return the classes of modules that have a matrix and cannot be quantized, for a message."""
    others = [each for each in model.modules() if not isinstance(each, QuantizableLayer)]
    held = ((type(each).__name__, getattr(each, "weight", None)) for each in others)
    names = {name for name, weight in held if isinstance(weight, torch.Tensor) and weight.dim() > 1}
    return ", ".join(sorted(names)[:4])


def _is_loaded(module: nn.Module) -> bool:
    return isinstance(module, vLLMModule) and bool(module.load_state.loaded)


def _together(
    model: nn.Module, layers: Mapping[str, QuantizableLayer]
) -> dict[str, tuple[str, ...]]:
    """Return the paths of the layers that hold one weight, by the first of them.

    A layer whose parameters are those of another kind of module is left out.
    """
    holders: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for _, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            holders.setdefault(parameter, []).append(module)
    paths = {id(layer): path for path, layer in layers.items()}
    together: dict[str, tuple[str, ...]] = {}
    for layer in layers.values():
        of_weight = [id(each) for own in layer.parameters(False) for each in holders[own]]
        if all(each in paths for each in of_weight):
            held = tuple(dict.fromkeys(paths[each] for each in of_weight))
            together.setdefault(held[0], held)
    return together


def _spelled(name: str, aliases: Iterable[tuple[str, str]]) -> list[str]:
    """Return ``name`` and its other spellings, in which ``aliases`` replace what it begins with."""
    spellings = [name]
    for begin, alias in aliases:
        spellings += [
            alias + each[len(begin) :] for each in spellings if f"{each}.".startswith(f"{begin}.")
        ]
    return spellings


def _decide(
    path: str,
    layer: QuantizableLayer,
    rules: Rules,
    aliases: Iterable[tuple[str, str]],
    *,
    named_only: bool,
) -> tuple[set[str], Scheme | QuantizeMethod | None]:
    """Return the targets that match the layer or its slots, and the one scheme that they give.

    With ``named_only`` they are those that name the layer itself.
    """
    parent = path.rpartition(".")[0]
    beside = layer.stored_beside.get("weight")  # what all slots are called, if not stored apart
    slots = layer.shard_names or ([beside] if beside else [])
    names = [f"{parent}.{slot}".lstrip(".") for slot in slots]
    # An alias of the layer itself, or of what is above it.
    near = [
        (begin, alias)
        for begin, alias in aliases
        if begin == path or f"{path}.".startswith(f"{begin}.") or begin in names
    ]
    spelled = {name: _spelled(name, near) for name in (*names, path)} if near else {}
    own = [each for begin, alias in near if begin == path for each in _spelled(alias, near)]
    known = [*names, *(each for others in spelled.values() for each in others)]
    rules = rules.naming([*known, path]) if named_only else rules.about(known, path)
    decisions = {
        name: rules.rule_of(name, path if names else "", (*spelled.get(name, ()), *own))
        for name in names or [path]
    }
    schemes = {scheme for _, scheme in decisions.values()}
    if len(schemes) > 1 and rules.joined is not None:
        of_slots = [scheme for _, scheme in decisions.values()]
        joined = rules.joined(dict(zip(slots, of_slots, strict=True)))
        schemes = schemes if joined is None else {joined}
    if len(schemes) > 1:
        examples: dict[Scheme | QuantizeMethod | None, str] = {}  # of hundreds of experts
        for name, (_, scheme) in decisions.items():
            examples.setdefault(scheme, name)
        listed = "; ".join(f"{n}: {scheme or 'not quantized'}" for scheme, n in examples.items())
        raise UnsupportedModelError(
            f"{path} fuses layers that are not quantized alike: {listed}. Quantize all of them in "
            "one way or none"
        )
    return {target for target, _ in decisions.values()}, schemes.pop()


def _demand_effect(model: vLLMModule, rules: Rules, used: set[str], others: Iterable[str]) -> None:
    """Refuse the user's targets that match no layer, except to ignore one of the ``others``."""
    schemes = dict(rules.rules)
    for target in rules.demanded:
        ignored = schemes[target] is None and any(matches(target, name) for name in others)
        # Without a name, it stands for no rule among those that are used.
        if not target or (target not in used and not ignored):
            raise UnsupportedModelError(
                f"quantization: {target!r} has no effect on {type(model).__name__}: name layers as "
                "the checkpoint does, also those that are fused here, or write re: and a regular "
                "expression. An embedding, and a head that is tied to it, is quantized only by its "
                "name, and only the first rule that matches counts"
            )


def matches(target: str, name: str) -> bool:
    """Tell whether ``target`` matches the layer ``name``."""
    if target.startswith("="):
        return target[1:] == name
    if target.startswith("re:"):
        return _compiled(target.removeprefix("re:")).match(name) is not None
    return target == EVERY_LAYER or f".{target}." in f".{name}."


@cache  # re keeps 512 patterns, and a checkpoint may have one for each layer
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def checked_target(target: str) -> str:
    """Return ``target``, or raise if it is a pattern that is invalid or slow to match.

    Patterns come from files, and Python's matcher can take exponential time.
    """
    if target.startswith("re:"):
        pattern = target.removeprefix("re:")
        if len(pattern) > _LONGEST:
            raise UnsupportedModelError(
                f"{shorten(target)} has {len(pattern)} characters: expected a pattern of at most "
                f"{_LONGEST}"
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                compiled = re.compile(pattern)
        except (re.error, RecursionError, OverflowError, Warning) as error:
            raise CheckpointFormatError(
                f"{shorten(target)} is not a valid regular expression: {error}"
            ) from None
        # A comment, or a space where spaces do not count, may be between a group and its * or +.
        hidden = compiled.flags & re.VERBOSE or re.search(r"(?<!\\)\(\?(#|[a-zA-Z-]*x)", pattern)
        if hidden or _most_ways(pattern) > _MOST_WAYS:
            raise UnsupportedModelError(
                f"{shorten(target)} could take forever to match: expected at most 4 of * + {{, few "
                "alternatives and optional parts beside them, and no repeated group, comment or "
                "verbose mode"
            )
    return target


def _most_ways(pattern: str) -> float:
    """Return in how many ways a valid pattern may match a name, at most.

    Parts that follow each other multiply; alternatives add up. A repeated group has no limit.
    """
    groups: list[tuple[float, float]] = []  # that are open: ways so far, of the last alternative
    ways, last = 0.0, 1.0
    previous = ""
    for token in _TOKEN.findall(pattern):
        if token == "(":
            groups.append((ways, last))
            ways, last = 0.0, 1.0
        elif token == ")":
            inner = ways + last
            ways, last = groups.pop()
            last *= inner
        elif token == "|":
            ways, last = ways + last, 1.0
        elif token == "?" and previous != "(":
            last *= 1 if previous[:1] in _REPEATS else 2
        elif token[:1] in _REPEATS:
            last *= math.inf if previous == ")" else _WAYS_TO_REPEAT
        previous = token
    return ways + last
