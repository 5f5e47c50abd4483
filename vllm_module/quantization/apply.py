from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import nn

from vllm_module.core.module import vLLMModule
from vllm_module.errors import ShardingError, UnsupportedModelError
from vllm_module.quantization.bitsandbytes import OnlineNF4Method
from vllm_module.quantization.eight_bit import EightBitMethod
from vllm_module.quantization.kv_cache import QuantizableKVCache
from vllm_module.quantization.method import QuantizableLayer, QuantizeMethod
from vllm_module.quantization.rules import Rules, matches
from vllm_module.quantization.scheme import Scheme


def quantize(model: vLLMModule, rules: Rules) -> None:
    """Give each layer of ``model``, which is not loaded yet, the scheme that ``rules`` have for it.

    Rules name the layers of a checkpoint, so a fused layer is looked up by the names of its slots.
    A layer whose weight is shared with another module, such as a tied head, is not quantized.

    Raises:
        UnsupportedModelError: the slots of one layer have different schemes, a target that the
            user wrote has no effect, or a layer holds its weight in its own way.
        ShardingError: a block of a weight would belong to two ranks or slots.

    """
    if any(_is_loaded(module) for module in model.modules()):
        raise RuntimeError(f"{type(model).__name__} is loaded: quantize it before it is")
    modules = dict(model.named_modules())
    layers = {path: each for path, each in modules.items() if isinstance(each, QuantizableLayer)}
    shared = _shared_parameters(model)
    aliases = [
        (f"{path}.{name}".lstrip("."), f"{path}.{alias}".lstrip("."))
        for path, module in modules.items()
        if isinstance(module, vLLMModule) and not isinstance(module, QuantizableLayer)
        for alias, name in module.weight_aliases.items()
    ]
    schemes: dict[str, Scheme | QuantizeMethod] = {}
    used_targets: set[str] = set()
    for path, layer in layers.items():
        if layer.weight not in shared:
            targets, scheme = _decide(path, layer, rules, aliases)
            used_targets |= targets
            if scheme is not None:
                schemes[path] = scheme
    if rules.demanded:
        others = modules.keys() - layers.keys()
        spelled = [name for path in others for name in _spelled(path, aliases)]
        _demand_effect(model, rules, used_targets, spelled)
    methods = {
        scheme: EightBitMethod(scheme) if isinstance(scheme, Scheme) else scheme
        for scheme in schemes.values()
    }
    for path, scheme in schemes.items():
        try:
            layers[path].quantize(methods[scheme])
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
    for module in modules.values():
        if isinstance(module, QuantizableKVCache) and rules.kv_scales is not None:
            module.create_kv_scales(rules.kv_scales)


def _is_loaded(module: nn.Module) -> bool:
    return isinstance(module, vLLMModule) and bool(module.load_state.loaded)


def _shared_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that several modules hold, such as the weight of a tied head."""
    holders = Counter(
        parameter
        for module in model.modules()
        for _, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    )
    return {parameter for parameter, count in holders.items() if count > 1}


def _spelled(name: str, aliases: Iterable[tuple[str, str]]) -> list[str]:
    """Return ``name`` and its other spellings, in which ``aliases`` replace what it begins with."""
    spellings = [name]
    for begin, alias in aliases:
        spellings += [
            alias + each[len(begin) :] for each in spellings if f"{each}.".startswith(f"{begin}.")
        ]
    return spellings


def _decide(
    path: str, layer: QuantizableLayer, rules: Rules, aliases: Iterable[tuple[str, str]]
) -> tuple[set[str], Scheme | QuantizeMethod | None]:
    """Return the targets that match the layer or its slots, and the one scheme that they give."""
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
    rules = rules.about([*names, *(each for others in spelled.values() for each in others)], path)
    decisions = {
        name: rules.rule_of(name, path if names else "", spelled.get(name, ()))
        for name in names or [path]
    }
    schemes = {scheme for _, scheme in decisions.values()}
    if len(schemes) > 1:
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
        if target not in used and not ignored:
            raise UnsupportedModelError(
                f"quantization: {target!r} has no effect on {type(model).__name__}: name layers as "
                "the checkpoint does, also those that are fused here, or write re: and a regular "
                "expression. A tied head is never quantized, and only the first rule that matches "
                "counts"
            )
