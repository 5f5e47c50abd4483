"""Random tensors of linear layers in published layouts, with the entries that config.json has.

The layouts are those of the publishers: AutoGPTQ, AutoAWQ, compressed-tensors, vLLM's FP8, FBGEMM,
ModelOpt and gpt-oss.
Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

from typing import Any

import torch

GROUP, BLOCK = 32, 16
ROUTERS = ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
Tensors = dict[str, torch.Tensor]


def compressed_tensors(
    form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": group},
    }


def numbers(bits: int, kind: str, strategy: str, **entries: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, **entries}


TOKENS: dict[str, Any] = {"strategy": "token", "dynamic": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {
        "quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False,
    },
    "awq": {
        "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True,
        "version": "gemm",
    },
    "fp8-block": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK] * 2,
        "modules_to_not_convert": ROUTERS,
    },
    "fp8-static": {
        "quant_method": "fp8", "activation_scheme": "static", "modules_to_not_convert": ROUTERS,
    },
    "fp8-channel": compressed_tensors(
        "float-quantized", numbers(8, "float", "channel"), numbers(8, "float", **TOKENS)
    ),
    "fp8-fbgemm": {
        "quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0,
        "modules_to_not_convert": ["lm_head"],
    },
    "fp8-modelopt": {
        "quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN",
        "ignore": ["lm_head"],
    },
    "int8-channel": compressed_tensors(
        "int-quantized", numbers(8, "int", "channel"), numbers(8, "int", **TOKENS)
    ),
    "int4-group": compressed_tensors(
        "pack-quantized", numbers(4, "int", "group", group_size=GROUP)
    ),
    "int4-group-zeros": compressed_tensors(
        "pack-quantized", numbers(4, "int", "group", group_size=GROUP) | {"symmetric": False}
    ),
    "int4-channel": compressed_tensors("pack-quantized", numbers(4, "int", "channel")),
    "mxfp4": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"
        ],
    },
}  # fmt: skip


def quantized(layout: str, shape: torch.Size, generator: torch.Generator) -> Tensors:
    """Return random tensors by their names in a layer, whose weight has the shape ``shape``.

    It is ``[output, input]``, and of experts in MXFP4 ``[experts, input, output]``.
    """
    if layout == "mxfp4":
        blocks = (shape[0], shape[2], shape[1] // 32)
        drawn = torch.randint(256, (*blocks, 16), generator=generator)
        scales = torch.randint(100, 140, blocks, generator=generator)
        return {"_blocks": drawn.to(torch.uint8), "_scales": scales.to(torch.uint8)}
    rows, columns = shape
    groups = columns // GROUP

    def words(*shape: int) -> torch.Tensor:  # eight codes each
        drawn = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator)
        return drawn.int()

    def factors(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (torch.rand(shape, generator=generator) + 0.5).to(dtype)

    half = torch.float16
    weight = torch.randn(rows, columns, generator=generator)
    if layout == "gptq":
        return {
            "qweight": words(columns // 8, rows),
            "qzeros": torch.full((groups, rows // 8), 0x77777777, dtype=torch.int32),  # symmetric
            "scales": factors(groups, rows, dtype=half),
            "g_idx": torch.arange(columns, dtype=torch.int32) // GROUP,
        }
    if layout == "awq":
        return {
            "qweight": words(columns, rows // 8),
            "qzeros": words(groups, rows // 8),
            "scales": factors(groups, rows, dtype=half),
        }
    if layout.startswith("int4"):
        zeros = {"weight_zero_point": words(rows // 8, groups)} if "zeros" in layout else {}
        return {
            "weight_packed": words(rows, columns // 8),
            "weight_scale": factors(rows, 1 if "channel" in layout else groups, dtype=half),
            "weight_shape": torch.tensor([rows, columns]),
            **zeros,
        }
    if layout == "int8-channel":
        return {"weight": (weight * 40).to(torch.int8), "weight_scale": factors(rows, 1)}
    weight = weight.to(torch.float8_e4m3fn)
    if layout == "fp8-block":
        counts = [-(-features // BLOCK) for features in shape]
        return {"weight": weight, "weight_scale_inv": factors(*counts)}
    if layout in ("fp8-channel", "fp8-fbgemm"):
        return {"weight": weight, "weight_scale": factors(rows, 1)}
    if layout == "fp8-modelopt":
        return {"weight": weight, "weight_scale": factors(rows)}
    assert layout == "fp8-static"
    return {"weight": weight, "weight_scale": factors(), "input_scale": factors()}
