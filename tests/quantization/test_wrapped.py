"""Quantized checkpoints through the wrapper of transformers' models, as in models of ours."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from vllm_module import ModelConfig, get_model
from vllm_module.build.model_source import ModelSource
from vllm_module.distributed import run_ranks
from vllm_module.errors import UnsupportedModelError, WeightLoadError
from vllm_module.quantization import QuantizableKVCache, QuantizableLayer

_HERE = Path(__file__).parent
bnb = SimpleNamespace(**runpy.run_path(str(_HERE / "bnb_checkpoints.py")))
packed = SimpleNamespace(**runpy.run_path(str(_HERE / "test_packed_checkpoints.py")))
publishing = bnb.publishing

# No model of ours has these types, or not these names of experts.
bnb.MODELS["smollm3"] = {"model_type": "smollm3", **bnb.TINY}
MIXTRAL = {
    **packed.QWEN3, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip

LAYOUTS = "fp8-block", "ct-channel-static", "ct-kv-cache-llama", "ct-several-groups"
PACKED = "gptq-act-order", "awq-skipped", "ct-int4-with-zeros", "ct-int8-tensor-static"
BITSANDBYTES = "nf4-nested", "int8"


@pytest.fixture(scope="module")
def stored(
    published: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Any]:
    """Return the checkpoint of a name; each is written once."""
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name in LAYOUTS:
            return published(name)
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            if name in PACKED:
                config, make, quantization = packed.CHECKPOINTS[name]
                made[name] = packed.packing.publish(folder, config, make, quantization)
            else:
                model, kind = ("gpt2", "int8") if name == "gpt2" else ("smollm3", name)
                made[name] = bnb.publish(folder, model, kind)
        return made[name]

    return get


def load(folder: Path) -> Any:
    config = ModelConfig(
        model=str(folder), dtype="float32", model_impl="transformers", max_model_len=64
    )
    return get_model(model_config=config)


@torch.inference_mode()
def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model.compute_logits(model(ids, torch.arange(len(ids))))


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.at_length), 2])
@pytest.mark.parametrize("name", [*LAYOUTS, *PACKED, *BITSANDBYTES])
def test_logits_are_those_of_the_weights_multiplied_out(
    stored: Callable[[str], Any], name: str, size: int
) -> None:
    """What our methods of quantization read gives the publisher's logits, on any ranks."""
    checkpoint = stored(name)

    def work(rank: int) -> torch.Tensor:
        model = load(checkpoint.folder)
        layers = [each for each in model.modules() if isinstance(each, QuantizableLayer)]
        assert any(each.is_quantized for each in layers)
        return logits(model, checkpoint.ids)

    for computed in run_ranks(size, work):
        torch.testing.assert_close(computed, checkpoint.logits, rtol=0, atol=1e-4)


def test_scales_of_keys_and_values_reach_the_layers_that_attend(
    stored: Callable[[str], Any],
) -> None:
    """A checkpoint stores them where transformers' module attends, above our layer."""
    model = load(stored("ct-kv-cache-llama").folder)
    layers = [each for each in model.modules() if isinstance(each, QuantizableKVCache)]
    assert len(layers) == 2
    tensors = stored_tensors(stored("ct-kv-cache-llama").folder)
    for number, layer in enumerate(layers):
        for name in ("k_scale", "v_scale"):
            expected = tensors[f"model.layers.{number}.self_attn.{name}"]
            torch.testing.assert_close(layer.get_parameter(name).data, expected.view(1))


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all files of a checkpoint."""
    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for each in files for name, tensor in each.items()}


@pytest.mark.parametrize("size", [1, 2])
def test_experts_that_transformers_renames_keep_their_scales(tmp_path: Path, size: int) -> None:
    """Scales of blocks follow the names of their weights; products are those of the values."""
    model = publishing.randomized(MIXTRAL)
    model.save_pretrained(tmp_path)
    held, wide = stored_tensors(tmp_path), {}
    for name, tensor in list(held.items()):
        if ".experts." in name:
            blocks = tensor.unflatten(0, (-1, 16)).unflatten(2, (-1, 32))
            scale = blocks.abs().amax((1, 3), keepdim=True) / 448
            values = (blocks / scale).to(torch.float8_e4m3fn)
            held[name] = values.flatten(2).flatten(0, 1)
            held[f"{name}_scale_inv"] = scale[:, 0, :, 0].clone()
            wide[name] = (values.float() * scale).flatten(2).flatten(0, 1)
    (tmp_path / "plain").mkdir()
    entries = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "plain" / "config.json").write_text(json.dumps(entries))
    save_file(held | wide, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    entries["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [16, 32],
        "modules_to_not_convert": ["self_attn", "gate"],
    }
    (tmp_path / "config.json").write_text(json.dumps(entries))
    for path in tmp_path.glob("*.safetensors*"):
        path.unlink()
    save_file(held, tmp_path / "model.safetensors", {"format": "pt"})
    ids = publishing.prompt(MIXTRAL["vocab_size"])
    library = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "plain")
    with torch.inference_mode():
        expected = library(ids[None]).logits[0]
    for computed in run_ranks(size, lambda rank: logits(load(tmp_path), ids)):
        torch.testing.assert_close(computed, expected, rtol=0, atol=1e-4)


def test_a_layer_that_is_not_replaced_takes_no_quantized_weight(
    stored: Callable[[str], Any],
) -> None:
    """GPT-2's ``Conv1D`` stays transformers' own: what a checkpoint has beside it is listed."""
    with pytest.raises(WeightLoadError, match=r"c_attn\.SCB: Conv1D has no 'SCB'"):
        load(stored("gpt2").folder)


@pytest.mark.parametrize(
    "method",
    [
        "aqlm", "bitnet", "eetq", "fp_quant", "higgs", "hqq", "quanto",
        "quark", "spqr", "torchao", "vptq", "of_next_year",
    ],
)  # fmt: skip
def test_other_methods_are_refused_by_name(
    stored: Callable[[str], Any], tmp_path: Path, method: str
) -> None:
    """What only transformers' quantizers convert is refused before weights are looked for."""
    config = json.loads((stored("int8").folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=f"quantized by '{method}'"):
        ModelSource.find(
            ModelConfig(model=str(tmp_path), model_impl="transformers"), load_format="dummy"
        )


@pytest.mark.parametrize("scheme", ["fp8", "int4_per_group", "bitsandbytes"])
def test_a_model_that_no_scheme_changes_is_refused(tmp_path: Path, scheme: Any) -> None:
    """Falcon's linear layers are of a class of its own, and stayed in full precision unnoticed."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
    config = transformers.AutoConfig.for_model("falcon", **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    get_model(model_config=ModelConfig(model=str(tmp_path)))
    with pytest.raises(UnsupportedModelError, match=r"has no effect on .*FalconLinear"):
        get_model(model_config=ModelConfig(model=str(tmp_path), quantization=scheme))
