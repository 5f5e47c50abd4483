"""Quantize a tiny model by the library of a format, which saves it and says what it stands for.

``python quantizers.py LIBRARY FOLDER`` runs in an interpreter that has the library; this package
need not be there. For each case it writes a folder, as the library does, and beside it
``CASE.safetensors`` with the weights that the library's own code reads from that folder (AutoAWQ's:
that it was about to store), and the scales of the KV cache that it has calibrated.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

Tensors = dict[str, torch.Tensor]

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "attention_bias": True,
    "tie_word_embeddings": False,
}
# What a model of whole blocks of 128, on two ranks as well, has instead.
BLOCKS = {"hidden_size": 256, "num_key_value_heads": 4, "head_dim": 64}
# What a model of experts has beside these sizes.
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "attention_bias": False,
}
_GPTQ: dict[str, Any] = {"bits": 4, "group_size": 32, "desc_act": False, "sym": False}
_AWQ: dict[str, Any] = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
_INT4: dict[str, Any] = {"format": "auto_round", "bits": 4, "group_size": 32, "sym": True}
_FEW = {"model.layers.0.mlp.down_proj": {"bits": 16}, "model.layers.1.mlp.down_proj": {"bits": 8}}

# The settings of each checkpoint, by the library that writes it.
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "gptqmodel": {
        "gptq": _GPTQ,
        "gptq-symmetric": _GPTQ | {"group_size": 64, "sym": True},
        "gptq-act-order": _GPTQ | {"desc_act": True},
        "gptq-8-bits-one-group": _GPTQ | {"bits": 8, "group_size": -1, "desc_act": True},
        "gptq-3-bits": _GPTQ | {"bits": 3},
        "gptq-2-bits": _GPTQ | {"bits": 2, "desc_act": True, "sym": True},
        "gptq-v2": _GPTQ | {"format": "gptq_v2"},
        "gptq-planes": _GPTQ | {"format": "gptq_p"},
        "gptq-dynamic": _GPTQ | {"dynamic": {
            r"-:model\.layers\.0\.mlp\..*": {},
            r"+:.*\.down_proj": {"bits": 8, "group_size": 64, "sym": True},
        }},
        "gptq-head": _GPTQ | {"lm_head": True},
        "gptq-experts": _GPTQ,
        "awq": {"bits": 4, "group_size": 32, "method": "awq", "format": "gemm"},
    },
    "awq": {
        "gemm": _AWQ,
        "gemm-64": _AWQ | {"q_group_size": 64},
        "gemv": _AWQ | {"version": "GEMV"},
        "gemv-64": _AWQ | {"version": "GEMV", "q_group_size": 64},
    },
    "auto_round": {
        "auto-round": _INT4,
        "auto-round-with-zeros": _INT4 | {"sym": False},
        "auto-round-8-bits": _INT4 | {"bits": 8, "group_size": -1},
        "auto-round-3-bits": _INT4 | {"bits": 3},
        "auto-round-2-bits-with-zeros": _INT4 | {"bits": 2, "sym": False},
        "auto-round-mixed": _INT4 | {"layer_config": _FEW},
        "auto-round-mixed-with-zeros": _INT4 | {"sym": False, "layer_config": _FEW},
        "auto-round-for-gptqmodel": _INT4 | {"format": "auto_round:gptqmodel", "sym": False},
        "auto-round-as-gptq-with-zeros": _INT4 | {"format": "auto_round:auto_gptq", "sym": False},
        "auto-round-head": _INT4 | {"layer_config": {"lm_head": {"bits": 4}}},
        "auto-round-experts": _INT4,
        "as-int8": {"format": "llm_compressor", "scheme": "INT8_W8A8"},
        "as-int4": _INT4 | {"format": "llm_compressor", "sym": False},
        "as-gptq": _INT4 | {"format": "auto_gptq", "sym": False},
        "as-awq": _INT4 | {"format": "auto_awq", "sym": False},
    },
    "modelopt": {
        "fp8": {"config": "FP8_DEFAULT_CFG"},
        "fp8-cache": {"config": "FP8_DEFAULT_CFG", "cache": "FP8_KV_CFG"},
        "nvfp4": {"config": "NVFP4_DEFAULT_CFG"},
        "nvfp4-cache": {"config": "NVFP4_DEFAULT_CFG", "cache": "FP8_KV_CFG"},
        "nvfp4-weights": {"config": "W4A16_NVFP4_CFG"},
        "nvfp4-mlp": {"config": "NVFP4_MLP_ONLY_CFG"},
        "fp8-experts": {"config": "FP8_DEFAULT_CFG"},
        "nvfp4-experts": {"config": "NVFP4_DEFAULT_CFG"},
        "mxfp8": {"config": "MXFP8_DEFAULT_CFG"},
        "fp8-channels": {"config": "FP8_PER_CHANNEL_PER_TOKEN_CFG"},
        "fp8-channels-experts": {"config": "FP8_PER_CHANNEL_PER_TOKEN_CFG"},
        "fp8-blocks": {"config": "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG"},
    },
}  # fmt: skip


def model_of(case: str) -> Any:
    """Return the model that is quantized in a case, with weights that nobody has set."""
    if case.endswith("-experts"):
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | EXPERTS))
    return LlamaForCausalLM(LlamaConfig(**SIZES | (BLOCKS if case.endswith("-blocks") else {})))


def dense(folder: Path, case: str) -> None:
    """Save a model of random weights in full precision, and a tokenizer.

    Some groups have no negative numbers, no positive ones, or zeros only.
    """
    torch.manual_seed(0)
    model = model_of(case).bfloat16()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.1)
        if name.endswith("_proj.weight"):
            parameter.data[0].abs_()
            parameter.data[1].abs_().neg_()
            parameter.data[2, :64] = 0
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{at}": at for at in range(128)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "w0", "eos_token": "w1", "pad_token": "w1"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


def prompts() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, SIZES["vocab_size"], (16, 64), generator=generator)


def by_gptqmodel(source: Path, folder: Path, settings: dict[str, Any]) -> Tensors:
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    quantizer = GPTQModel.load(str(source), QuantizeConfig(**settings), backend=BACKEND.TORCH)
    ids = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in prompts().tolist()]
    quantizer.quantize(ids, batch_size=4)
    quantizer.save(str(folder))
    # In bfloat16, the model's own type, it would round the scales, which are stored in float16.
    how = {"backend": BACKEND.TORCH, "device": "cpu", "dtype": torch.float16}
    model, wide = GPTQModel.load(str(folder), **how).model, {}
    for name, layer in model.named_modules():
        if hasattr(layer, "qweight"):
            layer.scales = layer.scales.float()  # weights have their precision
            if settings.get("method") == "awq":
                operands = layer.qweight, layer.qzeros, layer.scales, layer.bits, layer.group_size
                wide[f"{name}.weight"] = dequantize_gemm(*operands).T
            else:
                wide[f"{name}.weight"] = layer.dequantize_weight().T
    return wide


def by_awq(source: Path, folder: Path, settings: dict[str, Any]) -> Tensors:
    from awq import AutoAWQForCausalLM
    from awq.modules.linear import WQLinear_GEMM, WQLinear_GEMV

    wide: dict[int, torch.Tensor] = {}
    of_kind = WQLinear_GEMM if settings["version"] == "GEMM" else WQLinear_GEMV
    packing = of_kind.from_linear

    def keep(linear: nn.Linear, *arguments: Any, **named: Any) -> Any:
        layer = packing(linear, *arguments, **named)
        wide[id(layer)] = linear.weight.data.clone()
        return layer

    of_kind.from_linear = keep
    model = AutoAWQForCausalLM.from_pretrained(str(source), device_map="cpu")
    model.quantize(None, settings, prompts().tolist(), max_calib_samples=16, max_calib_seq_len=64)
    model.save_quantized(str(folder))
    of_kind.from_linear = packing
    return {
        f"{name}.weight": wide[id(layer)]
        for name, layer in model.model.named_modules()
        if id(layer) in wide
    }


def by_auto_round(source: Path, folder: Path, settings: dict[str, Any]) -> Tensors:
    from auto_round import AutoRound
    from auto_round.export.export_to_awq.utils import dequantize_gemm
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    settings = {"scheme": "W4A16"} | copy.deepcopy(settings)
    form = settings.pop("format")
    rounding = AutoRound(
        str(source), **settings, iters=2, nsamples=16, seqlen=64, batch_size=4,
        dataset=list(prompts().split(1)), device_map="cpu", low_cpu_mem_usage=False,
    )  # fmt: skip
    rounding.quantize_and_save(str(folder), format=form)
    (written,) = folder.iterdir()
    for file in written.iterdir():
        file.rename(folder / file.name)
    written.rmdir()
    quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
    if form == "llm_compressor":
        return by_compressed_tensors(folder, quantization)
    # Its layers for a CPU do not read all of its formats, so each is read by its reference.
    packing = quantization.get("packing_format", form)
    of_zeros_minus_one = packing in ("auto_round:auto_gptq", "auto_gptq")
    kind = (qlinear_torch_zp if of_zeros_minus_one else qlinear_torch).QuantLinear
    wide, shapes = dict[str, torch.Tensor](), load_file(source / "model.safetensors")
    stored = load_file(folder / "model.safetensors")
    for name in [each.removesuffix(".qweight") for each in stored if each.endswith(".qweight")]:
        outputs, inputs = shapes[f"{name}.weight"].shape
        words, zeros, scales = (stored[f"{name}.{of}"] for of in ("qweight", "qzeros", "scales"))
        group = inputs // len(scales)
        if packing.endswith("awq"):
            weight = dequantize_gemm(words, zeros, scales.float(), 4, group)
        else:
            layer = kind(words.shape[0] * 32 // inputs, group, inputs, outputs, bias=False)
            layer.qweight, layer.qzeros, layer.scales = words, zeros, scales.float()
            weight = layer(torch.eye(inputs))
        wide[f"{name}.weight"] = weight.T
    return wide


def by_compressed_tensors(folder: Path, quantization: dict[str, Any]) -> Tensors:
    """Return what the library that defines this format reads from a folder."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = QuantizationConfig.model_validate(quantization)
    compressor: Any = BaseCompressor.get_value_from_registry(config.format)
    layers: dict[str, Tensors] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        layer, _, attr = name.rpartition(".")
        # In 16 bits it would round each weight.
        layers.setdefault(layer, {})[attr] = tensor.float() if attr.endswith("scale") else tensor
    return {
        f"{name}.weight": compressor.decompress(parts, config.config_groups["group_0"])["weight"]
        for name, parts in layers.items()
        if "weight_scale" in parts
    }


@torch.no_grad()
def by_modelopt(source: Path, folder: Path, settings: dict[str, Any]) -> Tensors:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor
    from modelopt.torch.quantization.utils import update_quant_cfg_with_kv_cache_quant

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    config = copy.deepcopy(getattr(mtq, settings["config"]))
    if "cache" in settings:
        cache = getattr(mtq, settings["cache"])["quant_cfg"]
        config = update_quant_cfg_with_kv_cache_quant(config, cache)
    mtq.quantize(model, config, lambda model: model(prompts()))
    caches = {
        f"{name.rpartition('.')[0]}.{kind}_scale": module.amax.float() / 448
        for name, module in model.named_modules()
        for kind in "kv"
        if name.endswith(f"{kind}_bmm_quantizer") and module.is_enabled
    }
    export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=folder)
    stored, wide = load_file(folder / "model.safetensors"), dict[str, torch.Tensor]()
    for name in [each.removesuffix("_scale") for each in stored if each.endswith("weight_scale")]:
        weight, scale = stored[name], stored[f"{name}_scale"]
        if f"{name}_scale_2" in stored:
            shape = torch.Size([len(weight), weight.shape[1] * 2])
            number = NVFP4QTensor(shape, torch.float32, weight)
            of_all = {"double_scale": stored[f"{name}_scale_2"], "block_sizes": {-1: 16}}
            wide[name] = number.dequantize(torch.float32, scale=scale, **of_all)
        elif scale.dtype == torch.uint8:
            number = MXFP8QTensor(weight.shape, torch.float32, weight)
            wide[name] = number.dequantize(torch.float32, scale=scale)
        else:
            number = FP8QTensor(weight.shape, torch.float32, weight)
            of_all = {"block_sizes": {-1: 128, -2: 128}} if scale.dim() == 4 else {}
            shape = scale.shape[::2] if of_all else (-1, *[1] * (scale.dim() > 0))
            wide[name] = number.dequantize(torch.float32, scale=scale.reshape(shape), **of_all)
    return wide | caches


WRITERS: dict[str, Callable[[Path, Path, dict[str, Any]], Tensors]] = {
    "gptqmodel": by_gptqmodel,
    "awq": by_awq,
    "auto_round": by_auto_round,
    "modelopt": by_modelopt,
}
NAMES = {"awq": "autoawq", "auto_round": "auto-round", "modelopt": "nvidia-modelopt"}


def main(library: str, folder: Path, *only: str) -> None:
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # it fails on two cores otherwise
    for kind in ("dense", "dense-experts", "dense-blocks"):
        dense(folder / kind, kind)
    for case, settings in CASES[library].items():
        if only and case not in only:
            continue
        own = f"dense-{case.rpartition('-')[2]}"
        source = folder / (own if (folder / own).is_dir() else "dense")
        made = folder / case
        made.mkdir()
        wide = WRITERS[library](source, made, settings)
        save_file({n: t.detach().contiguous().clone() for n, t in wide.items()},
                  folder / f"{case}.safetensors")  # fmt: skip
    versions = {each: version(NAMES.get(each, each)) for each in (library, "torch", "transformers")}
    (folder / "versions.json").write_text(json.dumps(versions))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
