"""The code of three publishers, which writes tiny checkpoints in their 8-bit layouts.

- ``by_transformers``: transformers' fine-grained FP8, by its modules, quantizing operation and
  ``save_pretrained``. It is the layout of DeepSeek-V3 and Qwen3-FP8, and without blocks that of
  Mistral's checkpoints.
- ``by_compressed_tensors``: compressed-tensors' configuration, scales, compressor and
  ``save_pretrained``.
- ``by_hand``: the layout of vLLM and AutoFP8 per tensor. No installed library writes it, so the
  tensors are compressed-tensors', under the names that vLLM documents.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import FloatQuantizationCompressor, ModelCompressor
from compressed_tensors.modeling import register_key_hook, register_value_hook
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    apply_quantization_config,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import (
    calculate_qparams,
    maybe_pad_tensor_for_block_quant,
)
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    FineGrainedFP8Config,
    PreTrainedModel,
)
from transformers.quantizers import quantizer_finegrained_fp8
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Published:
    """A checkpoint in a published layout, and logits that the publisher's code computes from it.

    Attributes:
        config: the entries of the model's configuration.
        ids: the token ids of a prompt.
        logits: float32 logits of the prompt, ``[tokens, vocab]``, with weights that the publisher's
            code dequantizes from the files.
        all_quantized: the same by the publisher's model, which also quantizes activations; ``None``
            if it does not run on a CPU.

    """

    folder: Path
    config: dict[str, Any]
    ids: torch.Tensor
    logits: torch.Tensor
    all_quantized: torch.Tensor | None = None

    @property
    def tensors(self) -> Tensors:
        stored: Tensors = {}
        for file in self.folder.glob("*.safetensors"):
            stored |= load_file(file)
        return stored


def randomized(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a model whose weights, norms and biases are so large that a wrong one shows."""
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), dtype=dtype, attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        plain = name.endswith("bias") or "embed_tokens" in name or "lm_head" in name
        scale = 1.0 if "norm" in name else 0.5 if plain else 0.15
        parameter.data.normal_(0, scale, generator=generator)
    return model.eval()


def prompt(vocab: int) -> torch.Tensor:
    ids = torch.randint(vocab, (24,), generator=torch.Generator().manual_seed(1))
    ids[:2] = torch.tensor([0, vocab - 1])
    return ids


@torch.no_grad()
def refer(folder: Path, **how: Any) -> torch.Tensor:
    """Return the float32 logits of transformers, which loads ``folder`` and dequantizes it."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.filterwarnings("ignore", "You passed `quantization_config`")
        # transformers asks for accelerate, but does not need it for a model on the CPU.
        patch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", **how
        )
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    return model.eval()(prompt(model.config.vocab_size)[None]).logits[0]


@torch.no_grad()
def by_transformers(
    folder: Path,
    config: dict[str, Any],
    block: tuple[int, int] | None,
    activations: str = "dynamic",
    skipped: list[str] | None = None,
) -> Published:
    """Let transformers replace layers by its FP8 layers, quantize their weights and save."""
    model = randomized(config)
    wide = dict(model.state_dict())
    quantizer = FineGrainedFP8HfQuantizer(
        FineGrainedFP8Config(
            weight_block_size=block, activation_scheme=activations, modules_to_not_convert=skipped
        ),
        pre_quantized=False,
    )
    quantizer._process_model_before_weight_loading(model)
    quantize = quantizer.get_quantize_ops()
    made: Tensors = {}
    for name, tensor in wide.items():
        wanted = quantizer.param_needs_quantization(model, name)
        made |= quantize.convert({name: tensor}) if wanted else {name: tensor}
    for number, (name, parameter) in enumerate(model.state_dict().items()):
        if name.endswith("activation_scale"):  # transformers reads it, and never computes it
            made[name] = torch.tensor(0.01 + 0.001 * number)
        elif name.endswith("weight_scale_inv") and made[name].numel() == 1:
            made[name] = made[name].view(parameter.shape)
    model.load_state_dict(made, assign=True)
    model.tie_weights()
    model.config.quantization_config = quantizer.quantization_config
    model.hf_quantizer = quantizer
    model.save_pretrained(folder, max_shard_size="60KB")
    logits = refer(folder, quantization_config=FineGrainedFP8Config(dequantize=True))
    return Published(folder, config, prompt(config["vocab_size"]), logits)


def group(
    targets: list[str], strategy: str, activations: str = "none", block: list[int] | None = None
) -> dict[str, Any]:
    """Return one entry of ``config_groups`` in compressed-tensors' configuration."""
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = fp8 | {"strategy": strategy, "dynamic": False}
    if block is not None:
        weights["block_structure"] = block
    inputs: dict[str, dict[str, Any] | None] = {
        "none": None,
        "token": fp8 | {"strategy": "token", "dynamic": True},
        "group": fp8 | {"strategy": "group", "dynamic": True, "group_size": 32},
        "static": fp8 | {"strategy": "tensor", "dynamic": False},
    }
    return {"targets": targets, "weights": weights, "input_activations": inputs[activations]}


KV_CACHE = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
KV_CACHE["dynamic"] = False


def weight_scale(weight: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    """Return compressed-tensors' scales of a weight, from the minimum and maximum of each block."""
    if args.strategy == "tensor":
        return calculate_qparams(*weight.aminmax(), args)[0]
    if args.strategy == "channel":
        return calculate_qparams(weight.amin(1, True), weight.amax(1, True), args)[0]
    assert args.strategy == "block"
    tall, wide = args.block_structure
    padded = maybe_pad_tensor_for_block_quant(weight, args.block_structure)
    blocks = padded.view(padded.shape[0] // tall, tall, -1, wide)
    return calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args)[0]


@torch.no_grad()
def calibrate(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Set every scale of a model with an applied configuration, by a run on ``ids``."""
    seen: dict[tuple[nn.Module, str], list[torch.Tensor]] = {}
    hooks = []

    def see(name: str, module: nn.Module, value: Any) -> None:
        seen.setdefault((module, name), []).append(value[0] if name == "input_scale" else value)

    quantized = [m for m in model.modules() if hasattr(m, "quantization_scheme")]
    for module in quantized:
        module.quantization_enabled = False
        if hasattr(module, "weight_scale"):
            args = module.quantization_scheme.weights
            module.weight_scale.copy_(weight_scale(module.weight, args))
        if hasattr(module, "input_scale"):
            hooks.append(module.register_forward_pre_hook(partial(see, "input_scale")))
        if hasattr(module, "k_scale"):
            hooks.append(register_key_hook(module, partial(see, "k_scale")))
            hooks.append(register_value_hook(module, partial(see, "v_scale")))
    model(ids[None])
    for hook in hooks:
        hook.remove()
    for (module, name), values in seen.items():
        least, most = torch.cat([value.flatten() for value in values]).aminmax()
        args = module.quantization_scheme.input_activations
        module.get_parameter(name).copy_(calculate_qparams(least, most, args)[0])
    for module in quantized:
        del module.quantization_enabled


@torch.no_grad()
def by_compressed_tensors(
    folder: Path,
    config: dict[str, Any],
    *groups: dict[str, Any],
    ignore: tuple[str, ...] = ("lm_head",),
    kv_cache: bool = False,
    dtype: torch.dtype = torch.float32,
    as_written: bool = True,
) -> Published:
    """Let compressed-tensors quantize a model, compress it and save it.

    With ``as_written``, config.json has the groups and targets given here; else those that the
    library derives from the model, as in LLM Compressor.
    """
    entries = QuantizationConfig(
        config_groups={f"group_{number}": one for number, one in enumerate(groups)},
        ignore=list(ignore),
        kv_cache_scheme=KV_CACHE if kv_cache else None,
        format="float-quantized",
    )
    model = randomized(config, dtype)
    ids = prompt(config["vocab_size"])
    apply_quantization_config(model, entries, show_progress=False)
    calibrate(model, ids)
    all_quantized = model(ids[None]).logits[0]
    quantized = {
        name: module.quantization_scheme
        for name, module in model.named_modules()
        if hasattr(module, "weight_scale")
    }
    compressor = ModelCompressor.from_pretrained_model(model)
    if as_written:
        compressor.quantization_config = entries
    compressor.compress_model(model)
    model.save_pretrained(folder, max_shard_size="60KB")
    compressor.update_config(str(folder))
    made = Published(folder, config, ids, torch.empty(0), all_quantized)
    wide = made.tensors
    for name, scheme in quantized.items():
        # A scale may be stored in 16 bits, in which the product would be rounded.
        scale = wide[f"{name}.weight_scale"].float()
        part = {"weight": wide[f"{name}.weight"], "weight_scale": scale}
        wide[f"{name}.weight"] = FloatQuantizationCompressor.decompress(part, scheme)["weight"]
    logits = dense_logits(config, wide)
    if len(groups) == 1 and dtype == torch.float32:  # transformers supports one scheme only
        theirs = refer(folder, quantization_config=CompressedTensorsConfig(dequantize=True))
        torch.testing.assert_close(logits, theirs, rtol=0, atol=1e-5)
    return replace(made, logits=logits)


@torch.no_grad()
def dense_logits(config: dict[str, Any], tensors: Tensors) -> torch.Tensor:
    """Return the float32 logits of transformers' model with these weights, without scales."""
    model = randomized(config)
    wide = {name: tensor.float() for name, tensor in tensors.items() if "_scale" not in name}
    lacking, unknown = model.load_state_dict(wide, strict=False)
    assert not unknown
    assert lacking == (["lm_head.weight"] if config["tie_word_embeddings"] else [])
    model.tie_weights()
    return model(prompt(config["vocab_size"])[None]).logits[0]


@torch.no_grad()
def by_hand(folder: Path, source: Published, scheme: str, shape: tuple[int, ...]) -> Published:
    """Write the tensors of ``source``, from compressed-tensors, under vLLM's names.

    ``shape`` is that of a scale: ``()`` or ``(1,)``. The logits are those of a full-precision model
    with the weights dequantized by compressed-tensors.
    """
    config = json.loads((source.folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": scheme,
        "ignored_layers": ["lm_head"],
    }
    stored = {
        name: tensor.reshape(shape).clone() if name.endswith("_scale") else tensor
        for name, tensor in source.tensors.items()
        if scheme == "static" or not name.endswith("input_scale")
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors")
    args = QuantizationArgs(num_bits=8, type="float", strategy="tensor")
    wide = {
        name: dequantize(tensor, stored[f"{name}_scale"], args=args)
        if tensor.dtype == torch.float8_e4m3fn
        else tensor
        for name, tensor in stored.items()
    }
    return replace(source, folder=folder, logits=dense_logits(source.config, wide))
