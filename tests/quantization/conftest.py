"""Tiny checkpoints in published 8-bit layouts, written by the code of those who publish them.

``published(name)`` gives one of them by its name in :data:`EXPORTS`:

- ``fp8-*``: transformers' fine-grained FP8 (DeepSeek-V3's and Qwen3-FP8's layout; without blocks it
  is the spelling of Mistral's checkpoints): its modules, quantizing operation and
  ``save_pretrained``.
- ``ct-*``: compressed-tensors' own configuration, scales, compressor and ``save_pretrained``.
- ``vllm-*``: vLLM's and AutoFP8's layout per tensor. Nothing that is installed writes it: the
  tensors are compressed-tensors', under the names that vLLM documents.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from transformers.utils import logging

from vllm_module.cli import main

Tensors = dict[str, torch.Tensor]

TINY: dict[str, Any] = {
    "vocab_size": 130,  # padded to 192
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
QWEN3 = {"model_type": "qwen3", **TINY}
LLAMA = {
    "model_type": "llama",
    **TINY,
    "num_key_value_heads": 1,  # two ranks hold copies of it
    "tie_word_embeddings": True,
    "attention_bias": True,
    "mlp_bias": True,
}
# Blocks of 128 by 128 fit into what each of two ranks keeps.
WIDE = QWEN3 | {"hidden_size": 256, "intermediate_size": 256, "head_dim": 128}
WIDE["num_hidden_layers"] = 1
# Blocks of 64 rows end within the last of o_proj and down_proj alone.
UNEVEN = QWEN3 | {"hidden_size": 96, "head_dim": 64}


@dataclass(frozen=True)
class Published:
    """A checkpoint in a published layout, and what its publisher's code makes of it.

    Attributes:
        config: the entries of the model's configuration.
        ids: a prompt; float32 logits of it, ``[tokens, vocab]``, follow:
        logits: by the weights that the publisher's code dequantizes from the files.
        all_quantized: by the publisher's model, which quantizes activations too; where it runs.

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


class Result(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


def randomized(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a model with weights, norms and biases large enough for a wrong one to show."""
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
    """Return the logits of transformers, which reads ``folder`` and dequantizes it, in float32."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.filterwarnings("ignore", "You passed `quantization_config`")
        # It asks for accelerate, and for models on the CPU it does without.
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
    """Have transformers replace layers by its FP8 ones, quantize their weights and save."""
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
        if name.endswith("activation_scale"):  # which its code reads, and never makes
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
    """Return one group of compressed-tensors' configuration."""
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
    """Return compressed-tensors' scale of a weight, by the least and greatest of what shares it."""
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
    """Fill in every scale of a model that has a configuration applied: what a run shows it."""
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
    """Have compressed-tensors quantize a model, compress it and save it.

    ``as_written``: config.json has the groups and targets given here; else those that the library
    works out of the model, as LLM Compressor has it do.
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
        # In 16 bits, as the scale may be stored, it would round the product.
        scale = wide[f"{name}.weight_scale"].float()
        part = {"weight": wide[f"{name}.weight"], "weight_scale": scale}
        wide[f"{name}.weight"] = FloatQuantizationCompressor.decompress(part, scheme)["weight"]
    logits = dense_logits(config, wide)
    if len(groups) == 1 and dtype == torch.float32:  # transformers dequantizes all by one scheme
        theirs = refer(folder, quantization_config=CompressedTensorsConfig(dequantize=True))
        torch.testing.assert_close(logits, theirs, rtol=0, atol=1e-5)
    return replace(made, logits=logits)


@torch.no_grad()
def dense_logits(config: dict[str, Any], tensors: Tensors) -> torch.Tensor:
    """Return the float32 logits of transformers' model with these weights; scales are left out."""
    model = randomized(config)
    wide = {name: tensor.float() for name, tensor in tensors.items() if "_scale" not in name}
    lacking, unknown = model.load_state_dict(wide, strict=False)
    assert not unknown
    assert lacking == (["lm_head.weight"] if config["tie_word_embeddings"] else [])
    model.tie_weights()
    return model(prompt(config["vocab_size"])[None]).logits[0]


@torch.no_grad()
def by_hand(folder: Path, source: Published, scheme: str, shape: tuple[int, ...]) -> Published:
    """Write what compressed-tensors made under vLLM's names: scales are scalars, or of one.

    The reference is a full-precision model with weights that compressed-tensors' ``dequantize``
    makes of what is written.
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


_MIXED = (  # an exact name goes before a pattern, and that before a class
    group(["Linear"], "tensor", "static"),
    group(["re:.*self_attn.*"], "channel", "token"),
    group(["re:.*mlp.*"], "block", "group", [16, 32]),
    group(["model.layers.1.mlp.down_proj", "model.layers.0.self_attn.o_proj"], "tensor", "token"),
)

EXPORTS: dict[str, Callable[..., Published]] = {
    "fp8-block": partial(by_transformers, config=QWEN3, block=(16, 32)),
    "fp8-block-128": partial(by_transformers, config=WIDE, block=(128, 128)),
    "fp8-block-llama-tied": partial(by_transformers, config=LLAMA, block=(16, 32)),
    "fp8-block-skipped": partial(
        by_transformers,
        config=QWEN3,
        block=(32, 16),
        skipped=["lm_head", "model.layers.1.mlp", "o_proj"],
    ),
    "fp8-tensor-dynamic-mistral-names": partial(by_transformers, config=QWEN3, block=None),
    "fp8-tensor-static-mistral-names": partial(
        by_transformers, config=LLAMA, block=None, activations="static"
    ),
}

_CT: dict[str, tuple[dict[str, Any], tuple[dict[str, Any], ...], dict[str, Any]]] = {
    "ct-tensor-dynamic": (QWEN3, (group(["Linear"], "tensor", "token"),), {}),
    "ct-tensor-static": (QWEN3, (group(["Linear"], "tensor", "static"),), {}),
    "ct-tensor-static-llama-tied": (LLAMA, (group(["Linear"], "tensor", "static"),), {}),
    "ct-tensor-weights-only": (QWEN3, (group(["Linear"], "tensor"),), {"as_written": False}),
    "ct-channel-dynamic": (QWEN3, (group(["Linear"], "channel", "token"),), {}),
    "ct-channel-static": (QWEN3, (group(["Linear"], "channel", "static"),), {}),
    "ct-channel-dynamic-llama-tied": (LLAMA, (group(["Linear"], "channel", "token"),), {}),
    "ct-channel-head-too": (QWEN3, (group(["Linear"], "channel", "token"),), {"ignore": ()}),
    "ct-tensor-head-too": (QWEN3, (group(["Linear"], "tensor", "token"),), {"ignore": ()}),
    "ct-channel-16-bit-scales": (
        QWEN3,
        (group(["Linear"], "channel", "token"),),
        {"dtype": torch.bfloat16},
    ),
    "ct-block": (QWEN3, (group(["Linear"], "block", "group", [16, 32]),), {}),
    "ct-block-128": (WIDE, (group(["Linear"], "block", "group", [128, 128]),), {}),
    "ct-block-uneven": (UNEVEN, (group(["Linear"], "block", "group", [64, 32]),), {}),
    "ct-ignored-by-pattern": (
        QWEN3,
        (group(["Linear"], "channel", "token"),),
        {
            "ignore": (
                "re:.*lm_head",
                r"re:model\.layers\.0\.mlp\..*",
                "model.layers.1.mlp.down_proj",
            )
        },
    ),
    "ct-ignored-as-worked-out": (
        QWEN3,
        (group(["Linear"], "channel", "token"),),
        {"ignore": ("lm_head", "re:.*layers.1.self_attn.*"), "as_written": False},
    ),
    "ct-kv-cache": (QWEN3, (group(["Linear"], "tensor", "static"),), {"kv_cache": True}),
    "ct-kv-cache-llama": (LLAMA, (group(["Linear"], "channel", "token"),), {"kv_cache": True}),
    "ct-several-groups": (QWEN3, _MIXED, {}),
}


def _of_ct(name: str, folder: Path) -> Published:
    config, groups, options = _CT[name]
    return by_compressed_tensors(folder, config, *groups, **options)


EXPORTS |= {name: partial(_of_ct, name) for name in _CT}

BY_HAND = {
    "vllm-tensor-static": ("ct-tensor-static", "static", ()),
    "vllm-tensor-static-llama-tied": ("ct-tensor-static-llama-tied", "static", (1,)),
    "vllm-tensor-dynamic": ("ct-tensor-static", "dynamic", ()),
}
NAMES = (*EXPORTS, *BY_HAND)


@pytest.fixture(params=NAMES)
def layout(request: pytest.FixtureRequest) -> str:
    """Each of the names in turn."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def _quiet() -> Iterator[None]:
    """Draw no progress bars; torch has one thread, which two simulated ranks would fight over."""
    logging.disable_progress_bar()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TQDM_DISABLE", "1")
        yield
    torch.set_num_threads(before)
    logging.enable_progress_bar()


@pytest.fixture(scope="session")
def published(_quiet: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Published]:
    """Give the checkpoint of a name in NAMES, made once."""
    made: dict[str, Published] = {}

    def get(name: str) -> Published:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            if name in BY_HAND:
                source, scheme, shape = BY_HAND[name]
                made[name] = by_hand(folder, get(source), scheme, shape)
            else:
                made[name] = EXPORTS[name](folder)
        return made[name]

    return get


@pytest.fixture(scope="session")
def full_precision(_quiet: None, tmp_path_factory: pytest.TempPathFactory) -> Published:
    """A checkpoint that is not quantized, as transformers saves it."""
    folder = tmp_path_factory.mktemp("full-precision")
    model = randomized(QWEN3)
    model.save_pretrained(folder)
    ids = prompt(QWEN3["vocab_size"])
    with torch.no_grad():
        return Published(folder, QWEN3, ids, model(ids[None]).logits[0])


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Published]:
    """Copy a checkpoint into one file, with other tensors and another ``quantization_config``."""

    def copy(
        source: Published,
        tensors: Callable[[Tensors], object] = len,
        quantization: Any = ...,
        **entries: Any,
    ) -> Published:
        stored = source.tensors
        tensors(stored)
        folder = tmp_path / "edited"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        save_file(stored, folder / "model.safetensors")
        config = json.loads((source.folder / "config.json").read_text())
        if quantization is not ...:
            config["quantization_config"] = quantization
        config.get("quantization_config") and config["quantization_config"].update(entries)
        (folder / "config.json").write_text(json.dumps(config))
        return replace(source, folder=folder)

    return copy


@pytest.fixture(scope="session")
def calibrated() -> Callable[[torch.Tensor, QuantizationArgs], torch.Tensor]:
    """Give compressed-tensors' scale of a weight."""
    return weight_scale


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    """Run the command line in this process, without a terminal or torchrun around it."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: object) -> Result:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Result(code, *capsys.readouterr())

    return call
