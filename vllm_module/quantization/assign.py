from __future__ import annotations

from collections import Counter

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
    if any(module._filled for module in model.modules() if isinstance(module, vLLMModule)):
        raise RuntimeError(f"{type(model).__name__} is loaded: quantize it before it is")
    names = [name for name, _ in model.named_modules()]
    holders = Counter(
        id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)
    )
    methods: dict[Scheme, EightBitMethod] = {}
    for path, module in model.named_modules():
        if isinstance(module, QuantizableKVCache) and rules.kv_cache:
            module.create_kv_scales()
        if not isinstance(module, QuantizableLayer):
            continue
        above = path.rpartition(".")[0]
        parts = [f"{above}.{slot}".lstrip(".") for slot in module.shard_names]
        names += parts
        if holders[id(module.weight)] > 1:
            continue
        scheme = _scheme(path, parts, rules)
        if scheme is None:
            continue
        try:
            module.quantize(methods.setdefault(scheme, EightBitMethod(scheme)))
        except ShardingError as error:
            advice = (
                ", or leave the layer out (ignore), or take another weight_block_size or scheme"
                if scheme.online
                else ""
            )
            raise ShardingError(f"{path} cannot be held in {scheme}: {error}{advice}") from None
    for target in rules.demanded:
        if not any(matches(target, name) for name in names):
            raise UnsupportedModelError(
                f"quantization: {target!r} is no module of {type(model).__name__}: name one as the "
                "checkpoint does, or write re: and a regular expression"
            )


def _scheme(path: str, parts: list[str], rules: Rules) -> Scheme | None:
    """Return the one scheme of a layer and of the parts that it fuses."""
    schemes = {part: rules.scheme_of(part, path) for part in parts}
    if len({*schemes.values()}) > 1:
        said = "; ".join(f"{part}: {scheme or 'not quantized'}" for part, scheme in schemes.items())
        raise UnsupportedModelError(
            f"{path} fuses parts that are not quantized alike: {said}. Quantize all of them in one "
            "way or none"
        )
    return next(iter(schemes.values())) if parts else rules.scheme_of(path)
