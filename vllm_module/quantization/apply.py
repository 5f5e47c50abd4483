from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from vllm_module.errors import ShardingError, UnsupportedModelError
from vllm_module.module import vLLMModule
from vllm_module.quantization.eight_bit import EightBitMethod
from vllm_module.quantization.kv_cache import QuantizableKVCache
from vllm_module.quantization.method import QuantizableLayer
from vllm_module.quantization.rules import Rules, matches
from vllm_module.quantization.scheme import Scheme


def quantize(model: vLLMModule, rules: Rules) -> None:
    """Have the layers of ``model``, which is not loaded yet, hold their weights as ``rules`` say.

    A fused layer goes by the names of its parts. A head that is tied to the embedding stays as it
    is.

    Raises:
        UnsupportedModelError: parts of one layer differ, or a target that the user wrote is not
            there.
        ShardingError: a block of a weight would belong to two ranks or parts.

    """
    if any(
        module.load_state.loaded for module in model.modules() if isinstance(module, vLLMModule)
    ):
        raise RuntimeError(f"{type(model).__name__} is loaded: quantize it before it is")
    modules = dict(model.named_modules())
    layers = {path: each for path, each in modules.items() if isinstance(each, QuantizableLayer)}
    holders = Counter(id(p) for each in modules.values() for p in each._parameters.values())
    chosen: dict[str, Scheme] = {}
    used: set[str] = set()
    for path, layer in layers.items():
        if holders[id(layer.weight)] == 1:
            targets, scheme = _decide(path, layer, rules)
            used |= targets
            if scheme is not None:
                chosen[path] = scheme
    _demand_effect(model, rules, used, modules.keys() - layers.keys())
    methods = {scheme: EightBitMethod(scheme) for scheme in chosen.values()}
    for path, scheme in chosen.items():
        try:
            layers[path].quantize(methods[scheme])
        except ShardingError as error:
            advice = ""
            if scheme.online:
                advice = (
                    ". Leave the layer out (ignore), or take another weight_block_size or scheme"
                )
            raise ShardingError(f"{path} cannot be held in {scheme}: {error}{advice}") from None
    for module in modules.values():
        if isinstance(module, QuantizableKVCache) and rules.kv_cache:
            module.create_kv_scales()


def _decide(path: str, layer: QuantizableLayer, rules: Rules) -> tuple[set[str], Scheme | None]:
    """Return the one scheme of a layer and of the parts that it fuses, and who decided that."""
    above = path.rpartition(".")[0]
    parts = [f"{above}.{slot}".lstrip(".") for slot in layer.shard_names]
    found = {part: rules.rule_of(part, path) for part in parts} or {path: rules.rule_of(path)}
    if len({scheme for _, scheme in found.values()}) > 1:
        said = "; ".join(f"{part}: {of or 'not quantized'}" for part, (_, of) in found.items())
        raise UnsupportedModelError(
            f"{path} fuses parts that are not quantized alike: {said}. Quantize all of them in one "
            "way or none"
        )
    return {target for target, _ in found.values()}, next(iter(found.values()))[1]


def _demand_effect(model: vLLMModule, rules: Rules, used: set[str], others: Iterable[str]) -> None:
    """Refuse targets of the user that decide nothing, and leave nothing alone either."""
    schemes = dict(rules.rules)
    for target in rules.demanded:
        ignored = schemes[target] is None and any(matches(target, name) for name in others)
        if target not in used and not ignored:
            raise UnsupportedModelError(
                f"quantization: {target!r} has no effect on {type(model).__name__}: name layers as "
                "the checkpoint does, parts of fused ones too; or write re: and a regular "
                "expression; tied heads are never quantized, and the first rule that fits decides"
            )
