"""Quantized checkpoints written by other libraries: the bytes and their meaning are kept."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.fbgemm_fp8 import FbgemmFp8Linear

from vllm_module import ModelConfig, get_model, vLLMModule
from vllm_module.distributed import run_ranks
from vllm_module.errors import WeightLoadError
from vllm_module.parameters import BasevLLMParameter

WITHIN = 1e-4  # of each logit, in float32, as in tests/models

compute = runpy.run_path(str(Path(__file__).parents[1] / "models" / "one_rank.py"))["compute"]

# Files store each of these scales under either name.
SPELLINGS = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
SPELLINGS |= {theirs: ours for ours, theirs in SPELLINGS.items()}


def load(checkpoint: Any) -> vLLMModule:
    return get_model(model_config=ModelConfig(model=str(checkpoint.folder), dtype="float32"))


@torch.inference_mode()
def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model.compute_logits(model(ids, torch.arange(len(ids))))


def kept(model: vLLMModule) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the rank's part of each checkpoint tensor, with the tensor's name."""
    for path, parameter in model.named_parameters():
        assert isinstance(parameter, BasevLLMParameter) or "norm" in path
        above, _, attr = path.rpartition(".")
        if ".attn." in path:  # KV cache scales, which are stored beside it
            above = above.removesuffix(".attn")
        if not isinstance(parameter, BasevLLMParameter):
            yield path, parameter.data
            continue
        for slot in parameter.slots:
            name = f"{above.rpartition('.')[0]}.{slot}" if slot else above
            yield f"{name}.{attr}", parameter.region(slot)


def shard(name: str, tensor: torch.Tensor, rank: int, size: int, config: Any) -> torch.Tensor:
    """Return the part of a tensor that a rank should hold: rows, or columns of a row layer."""
    layer = name.split(".")[-2]
    replicated = layer in ("k_proj", "v_proj") and config["num_key_value_heads"] == 1
    if tensor.dim() == 0 or tensor.numel() == 1 or "norm" in name or replicated:
        return tensor
    if layer in ("embed_tokens", "lm_head"):
        rows = -(-config["vocab_size"] // 64) * 64 // size
        return tensor[rank * rows : (rank + 1) * rows]
    if layer in ("o_proj", "down_proj"):
        cut = tensor.dim() == 2 and tensor.shape[1] > 1
        return tensor.chunk(size, 1)[rank] if cut else tensor
    return tensor.chunk(size, 0)[rank]


def attr_is_scale(name: str) -> bool:
    return name.endswith((".weight_scale", ".weight_scale_inv"))


def assert_bytes(model: vLLMModule, checkpoint: Any, rank: int, size: int) -> set[torch.dtype]:
    """Check each tensor of a model against the file's, and return the dtypes."""
    stored, dtypes = checkpoint.tensors, set()
    for name, held in kept(model):
        source = name
        if name not in stored:
            above, _, attr = name.rpartition(".")
            source = f"{above}.{SPELLINGS.get(attr, attr)}"
        if source not in stored:
            assert name == "lm_head.weight"  # tied
            assert checkpoint.config["tie_word_embeddings"]
            continue
        expected = shard(source, stored.pop(source), rank, size, checkpoint.config)
        if expected.dtype == torch.bfloat16:  # float32 has every 16-bit number
            expected = expected.float()
        assert held.dtype == expected.dtype, name
        held, expected = held.reshape(-1).contiguous(), expected.reshape(-1).contiguous()
        if attr_is_scale(name) and expected.numel() == 1:  # of all channels
            expected = expected.repeat(held.numel())
        assert torch.equal(held.view(torch.uint8), expected.view(torch.uint8)), name
        dtypes.add(held.dtype)
    assert stored.keys() == set()
    return dtypes


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.at_length), 2])
def test_bytes_are_kept_and_mean_the_same(
    published: Callable[[str], Any], layout: str, size: int
) -> None:
    """Weights and scales have the file's bytes, and the logits are the publisher's."""
    checkpoint = published(layout)

    def work(rank: int) -> torch.Tensor:
        model = load(checkpoint)
        dtypes = assert_bytes(model, checkpoint, rank, size)
        assert dtypes == {torch.float32, torch.float8_e4m3fn}
        return logits(model, checkpoint.ids)

    for computed in run_ranks(size, work):
        torch.testing.assert_close(computed, checkpoint.logits, rtol=0, atol=WITHIN)


def test_layouts_are_as_published(published: Callable[[str], Any], layout: str) -> None:
    """The files have the names, shapes and dtypes that the publishers document."""
    checkpoint = published(layout)
    tensors = checkpoint.tensors
    quantized = {
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if tensor.dtype == torch.float8_e4m3fn
    }
    assert len(quantized) >= 3
    fp8 = layout.startswith("fp8")
    scale_name, input_name = "weight_scale", "input_scale"
    if fp8:
        scale_name, input_name = "weight_scale_inv", "activation_scale"
    scales = {name for name in tensors if name.endswith((".weight_scale", "_inv"))}
    assert scales == {f"{name}.{scale_name}" for name in quantized}
    static = {name for name in tensors if name.endswith((".input_scale", ".activation_scale"))}
    if "several" not in layout:
        expected = quantized if "static" in layout or layout == "ct-kv-cache" else set()
        assert static == {f"{name}.{input_name}" for name in expected}
    cache = {name for name in tensors if name.endswith(("k_scale", "v_scale"))}
    assert len(cache) == ("kv-cache" in layout) * 2 * checkpoint.config["num_hidden_layers"]
    assert ("lm_head" in quantized) == ("head-too" in layout)


def test_an_input_that_is_quantized_would_show(published: Callable[[str], Any]) -> None:
    """On the CPU activations are not quantized; the publisher quantizes them, which shows."""
    for name in ("ct-tensor-static", "ct-channel-dynamic", "ct-block"):
        checkpoint = published(name)
        computed = logits(load(checkpoint), checkpoint.ids)
        theirs = (checkpoint.all_quantized - checkpoint.logits).abs().max()
        assert theirs > 100 * WITHIN, name
        assert (computed - checkpoint.logits).abs().max() < WITHIN, name


def test_input_scales_change_no_bit_on_the_cpu(published: Callable[[str], Any]) -> None:
    """On the CPU a stored input scale of any size is kept and not used."""
    checkpoint = published("vllm-tensor-static")
    model = load(checkpoint)
    before = logits(model, checkpoint.ids)
    scales = {n: t * 1000 for n, t in checkpoint.tensors.items() if n.endswith("input_scale")}
    assert len(scales) == 14
    model.update_weights(scales)
    assert torch.equal(logits(model, checkpoint.ids), before)


@pytest.mark.parametrize("name", ["fp8-block", "ct-channel-dynamic", "vllm-tensor-dynamic"])
def test_an_error_of_one_percent_in_any_scale_shows(
    published: Callable[[str], Any], name: str
) -> None:
    """An error of 1% in any one scale fails the comparison of logits."""
    checkpoint = published(name)
    model = load(checkpoint)

    def error() -> float:
        return (logits(model, checkpoint.ids) - checkpoint.logits).abs().max().item()

    scales = {n: t for n, t in checkpoint.tensors.items() if "weight_scale" in n}
    assert len(scales) == 14
    for scale_name, scale in scales.items():
        if "q_proj" in scale_name or "k_proj" in scale_name:
            # Qwen3 normalizes queries and keys, which removes a common factor.
            if scale.numel() == 1:
                continue
            noise = 1 + 0.02 * torch.rand_like(scale)
        else:
            noise = torch.tensor(1.01)
        model.update_weights({scale_name: scale * noise})
        assert error() > 3 * WITHIN, scale_name
        model.update_weights({scale_name: scale})
    assert error() < WITHIN


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["ct-kv-cache", "ct-kv-cache-llama"])
def test_kv_cache_scales_cancel_out(published: Callable[[str], Any], name: str, size: int) -> None:
    """Dividing keys and values by stored scales and multiplying again keeps the logits."""
    checkpoint = published(name)
    ids = checkpoint.ids.tolist()
    job = (checkpoint.folder, [ids[:-3]], 4, "float32")
    for computed in run_ranks(size, lambda rank: compute(*job)):
        expected = checkpoint.logits[: len(ids) - 3]
        torch.testing.assert_close(computed["prompt_logits"][0], expected, rtol=0, atol=WITHIN)
        # The steps generate tokens; without the cache these tokens give the same logits.
        model = load(checkpoint)
        tokens = ids[:-3] + computed["tokens"][0]
        again = logits(model, torch.tensor(tokens))[len(ids) - 4 : -1]
        steps = computed["step_logits"][:, 0]
        torch.testing.assert_close(steps, again, rtol=0, atol=WITHIN)


def test_the_stored_method_can_be_requested(published: Callable[[str], Any]) -> None:
    """``quantization`` with the checkpoint's own method changes nothing."""
    for name, method in (("fp8-block", "fp8"), ("ct-block", "compressed-tensors")):
        checkpoint = published(name)
        config = ModelConfig(model=str(checkpoint.folder), quantization=method)
        model = get_model(model_config=config)
        assert torch.equal(logits(model, checkpoint.ids), logits(load(checkpoint), checkpoint.ids))


def assert_same_logits(
    checkpoint: Any, tensors: dict[str, torch.Tensor], entries: Any, folder: Path, size: int
) -> None:
    """Check that ``tensors`` under another quantization_config mean what the publisher's do."""
    config = json.loads((checkpoint.folder / "config.json").read_text())
    config["quantization_config"] = entries
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")

    def work(rank: int) -> torch.Tensor:
        return logits(load(SimpleNamespace(folder=folder)), checkpoint.ids)

    for computed in run_ranks(size, work):
        torch.testing.assert_close(computed, checkpoint.logits, rtol=0, atol=WITHIN)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("layout", "algorithm"),
    [("ct-channel-dynamic", "FP8_PER_CHANNEL_PER_TOKEN"), ("ct-block-128", "fp8_pb_wo")],
)
def test_scales_in_the_shapes_of_modelopt(
    published: Any, tmp_path: Path, layout: str, algorithm: str, size: int
) -> None:
    """Its scales of channels are vectors, and those of blocks have a one after each dimension."""
    checkpoint = published(layout)
    tensors = checkpoint.tensors
    for name in [each for each in tensors if attr_is_scale(each)]:
        rows, columns = tensors[name].shape
        shape = (rows,) if layout == "ct-channel-dynamic" else (rows, 1, columns, 1)
        tensors[name] = tensors[name].reshape(shape)
    entries = {"quant_method": "modelopt", "quant_algo": algorithm}
    assert_same_logits(checkpoint, tensors, entries, tmp_path, size)
    name, scale = next((n, t) for n, t in tensors.items() if n.endswith("up_proj.weight_scale"))
    tensors[name] = scale.reshape(*(each for each in scale.shape if each > 1), -1)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightLoadError, match=f"{re.escape(name)}: expected shape"):
        load(SimpleNamespace(folder=tmp_path))


@pytest.mark.parametrize("size", [1, 2])
def test_fp8_of_fbgemm(published: Any, tmp_path: Path, size: int) -> None:
    """It has the tensors of transformers' layer, and layers that are listed are not quantized."""
    checkpoint = published("ct-channel-dynamic")
    tensors = checkpoint.tensors
    theirs = FbgemmFp8Linear(64, 96, bias=False).state_dict()
    for attr, one in theirs.items():
        layer = "model.layers.0.mlp.up_proj"
        assert (tensors[f"{layer}.{attr}"].dtype, attr) == (one.dtype, attr)
        assert tensors[f"{layer}.{attr}"].shape[1] in (1, checkpoint.config["hidden_size"])
        assert one.shape[1] in (1, 64)
    wide = "model.layers.1.mlp.down_proj"
    scale = tensors.pop(f"{wide}.weight_scale")
    tensors[f"{wide}.weight"] = tensors[f"{wide}.weight"].float() * scale
    entries: dict[str, Any] = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    entries["modules_to_not_convert"] = [wide]
    assert_same_logits(checkpoint, tensors, entries, tmp_path, size)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("layout", ["ct-channel-dynamic", "ct-channel-dynamic-llama-tied"])
def test_fp8_per_channel_without_a_word_of_it(
    published: Any, tmp_path: Path, layout: str, size: int
) -> None:
    """``quant_method: fp8`` with scales ``[output, 1]`` has compressed-tensors' logits.

    The configuration says nothing of channels, so some layers may have one scale.
    """
    checkpoint = published(layout)
    tensors = checkpoint.tensors
    (one,) = (name for name in tensors if name.endswith("0.self_attn.o_proj.weight_scale"))
    tensors[one] = tensors[one].amax().view(())
    config = json.loads((checkpoint.folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    whole = checkpoint.tensors[one]

    def work(rank: int) -> None:
        model, other = load(SimpleNamespace(folder=tmp_path)), load(checkpoint)
        other.update_weights({one: torch.full_like(whole, whole.amax())})
        assert torch.equal(logits(model, checkpoint.ids), logits(other, checkpoint.ids))
        model.update_weights({one: whole})
        computed = logits(model, checkpoint.ids)
        torch.testing.assert_close(computed, checkpoint.logits, rtol=0, atol=WITHIN)

    run_ranks(size, work)
    tensors[one] = whole.view(-1)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightLoadError, match=rf"{one}: expected shape \[\d+, 1\], got \[\d+\]"):
        load(SimpleNamespace(folder=tmp_path))
