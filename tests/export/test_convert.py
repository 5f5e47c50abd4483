"""A converted checkpoint has the bits of an online load, and what is not quantized is copied."""

from __future__ import annotations

import json
import runpy
import shutil
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CompressedTensorsConfig,
)

from vllm_module import ModelConfig, QuantizationConfig, get_model
from vllm_module.export.compressed import _undone, convert
from vllm_module.parameters.stored_order import StoredOrder
from vllm_module.quantization import QuantizableLayer
from vllm_module.weights import open_checkpoint
from vllm_module.weights.safetensors_writer import SafetensorsWriter, Stored

# Pytest's importlib mode has no imports between test files.
CONVERTING: Any = runpy.run_path(str(Path(__file__).with_name("converting.py")))
FILE_BYTES, CASES, stored, entries, converted = (
    CONVERTING[name] for name in ("FILE_BYTES", "CASES", "stored", "entries", "converted")
)


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {n: t.detach().contiguous().reshape(-1).view(torch.uint8) for n, t in named}


def as_online(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Name words as an online layer of four bits does, which does not hold its weight's shape."""
    return {
        name.replace(".weight_packed", ".weight"): tensor
        for name, tensor in found.items()
        if not name.endswith(".weight_shape")
    }


@pytest.mark.parametrize("case", CASES)
def test_a_load_gives_the_bits_of_an_online_load(
    converted: Callable[[str], tuple[Path, Path]], case: str
) -> None:
    """Weights, scales and all else are equal; nothing is quantized again."""
    original, folder = converted(case)
    online = get_model(model_config=ModelConfig(model=str(original), quantization=CASES[case][1]))
    loaded = get_model(model_config=ModelConfig(model=str(folder)))
    wanted, found = bits(online), as_online(bits(loaded))
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    layers = [each for each in loaded.modules() if isinstance(each, QuantizableLayer)]
    assert any(each.is_quantized for each in layers)
    assert not any(each.conversions for each in layers)


@pytest.mark.parametrize("scheme", ["fp8_per_channel", "int4_per_group"])
def test_a_dtype_that_only_the_tensors_say_stays(
    checkpoint: Callable[..., Path], tmp_path: Path, scheme: Any
) -> None:
    """Scales in float32 are before them in the new files; transformers finds the old one, too."""
    original, asked = tmp_path / "original", QuantizationConfig(scheme=scheme, group_size=8)
    shutil.copytree(checkpoint("qwen2"), original)
    config = entries(original)
    assert config.pop("dtype") == "bfloat16"
    (original / "config.json").write_text(json.dumps(config))
    convert(ModelConfig(model=str(original), quantization=asked), tmp_path / "out")
    online = get_model(model_config=ModelConfig(model=str(original), quantization=asked))
    wanted = bits(online)
    found = as_online(bits(get_model(model_config=ModelConfig(model=str(tmp_path / "out")))))
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    theirs = [AutoConfig.from_pretrained(tmp_path / "out").dtype]
    theirs += [AutoModelForCausalLM.from_pretrained(original).dtype]
    assert theirs == [torch.bfloat16, torch.bfloat16]


def test_the_dtype_is_that_which_transformers_finds(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Norms in float32, which are first in a file, do not make a model of 16 bits one of 32."""
    original = tmp_path / "original"
    theirs: Any = AutoModelForCausalLM.from_pretrained(checkpoint("qwen2"), dtype=torch.bfloat16)
    theirs.model.norm.float()
    theirs.save_pretrained(original)
    config = entries(original)
    del config["dtype"]
    (original / "config.json").write_text(json.dumps(config))
    convert(ModelConfig(model=str(original), quantization="fp8"), tmp_path / "out")
    wanted = AutoModelForCausalLM.from_pretrained(original).dtype
    assert str(wanted) == f"torch.{entries(tmp_path / 'out')['dtype']}" == "torch.bfloat16"


def test_what_is_not_quantized_is_copied(
    converted: Callable[[str], tuple[Path, Path]],
) -> None:
    """Other tensors keep bits, dtype and names; ignored layers are listed, tied heads too."""
    original, folder = converted("several schemes")
    before, after = stored(original), stored(folder)
    quantized = {name for name in after if f"{name}_scale" in after}
    assert after.keys() == before.keys() | {f"{name}_scale" for name in quantized}
    for name in before.keys() - quantized:
        assert after[name].dtype == before[name].dtype
        assert torch.equal(after[name], before[name])
    written = entries(folder)["quantization_config"]
    linear = {f"model.layers.{layer}.self_attn.o_proj" for layer in (0, 1)} | {"lm_head"}
    assert {*written["ignore"]} == linear | {"model.embed_tokens"}  # and no norm
    strategies = {each["weights"]["strategy"]: each for each in written["config_groups"].values()}
    assert strategies["channel"]["targets"] == ["Linear"] or len(strategies) == 2
    assert (folder / "tokenizer.json").exists()
    assert "lm_head" in entries(converted("tied, per tensor")[1])["quantization_config"]["ignore"]


@pytest.mark.parametrize("scheme", ["fp8_per_channel", "int4_per_group"])
def test_what_the_model_skips_is_copied(tmp_path: Path, scheme: Any) -> None:
    """transformers' model has a pooler, which embeddings do not need: it finds the original's."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("bert", **sizes, intermediate_size=128, vocab_size=32)
    original = AutoModel.from_config(config)
    original.save_pretrained(tmp_path / "base")
    quantization = QuantizationConfig(scheme=scheme, group_size=32)
    convert(ModelConfig(model=str(tmp_path / "base"), quantization=quantization), tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs, report = AutoModel.from_pretrained(
            tmp_path / "out",
            dtype=torch.float32,
            quantization_config=CompressedTensorsConfig(dequantize=True),
            output_loading_info=True,
        )
    assert not report["missing_keys"]
    assert torch.equal(theirs.pooler.dense.weight, original.pooler.dense.weight)
    assert torch.equal(theirs.pooler.dense.bias, original.pooler.dense.bias)


def test_layers_for_images_are_copied(tmp_path: Path) -> None:
    """The whole model of transformers finds all its weights, by its own names of the modules."""
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64}
    images = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    images |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=images)
    original = AutoModelForImageTextToText.from_config(config)
    original.save_pretrained(tmp_path / "base")
    assert any(name.startswith("vision_tower.") for name in stored(tmp_path / "base"))
    settings = ModelConfig(model=str(tmp_path / "base"), quantization="fp8_per_channel")
    convert(settings, tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs, report = AutoModelForImageTextToText.from_pretrained(
            tmp_path / "out",
            dtype=torch.float32,
            quantization_config=CompressedTensorsConfig(dequantize=True),
            output_loading_info=True,
        )
    assert not report["missing_keys"]
    before, after = original.state_dict(), theirs.state_dict()
    kept = [name for name in before if "language_model.layers" not in name]
    assert len(kept) > 20
    assert all(torch.equal(after[name], before[name]) for name in kept)


def test_layers_that_predict_further_tokens_are_copied(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Other engines speculate with them; they are listed as not quantized."""
    base, further = tmp_path / "base", "model.layers.2"
    shutil.copytree(checkpoint("deepseek-v3"), base)
    tensors = stored(base)
    further_tensors = {
        f"{further}.eh_proj.weight": torch.rand(64, 128).bfloat16(),
        f"{further}.enorm.weight": torch.rand(64).bfloat16(),
    }
    save_file(tensors | further_tensors, base / "model.safetensors", {"format": "pt"})
    described = entries(base) | {"num_nextn_predict_layers": 1, "num_hidden_layers": 2}
    (base / "config.json").write_text(json.dumps(described))
    convert(ModelConfig(model=str(base), quantization="fp8_per_channel"), tmp_path / "out")
    found, ignored = stored(tmp_path / "out"), entries(tmp_path / "out")["quantization_config"]
    assert all(torch.equal(found[name], each) for name, each in further_tensors.items())
    assert f"{further}.eh_proj" in ignored["ignore"]
    assert f"{further}.enorm" not in ignored["ignore"]


def test_files_have_an_index_and_can_be_mapped(
    converted: Callable[[str], tuple[Path, Path]],
) -> None:
    """No file is larger than asked, and each tensor begins at a multiple of its element's size."""
    _, folder = converted("per channel")
    paths = sorted(folder.glob("*.safetensors"))
    assert len(paths) > 1
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    sizes: Counter[Path] = Counter()
    with open_checkpoint(folder) as opened:
        for name, path, entry in opened.headers():
            sizes[path] += opened[name].nbytes
            assert entry.begin % entry.dtype.itemsize == 0, name
            assert index["weight_map"][name] == path.name
        assert index["metadata"]["total_size"] == opened.nbytes
    assert max(sizes.values()) <= FILE_BYTES


def test_two_files_have_an_index_and_one_has_none(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """transformers finds the tensors of both, and a reader of one file needs no index."""
    config = ModelConfig(model=str(checkpoint("llama")), quantization="fp8")
    whole = convert(config, tmp_path / "one")
    assert [each.name for each in sorted((tmp_path / "one").glob("model*"))] == [
        "model.safetensors"
    ]
    convert(config, tmp_path / "two", file_bytes=whole.written * 3 // 4)
    files = {each.name for each in (tmp_path / "two").glob("*.safetensors")}
    assert files == {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    index = json.loads((tmp_path / "two" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == files
    assert stored(tmp_path / "two").keys() == stored(tmp_path / "one").keys()


def test_a_file_lies_as_that_of_safetensors(tmp_path: Path) -> None:
    """Wide dtypes are before narrow ones, so that each tensor can be mapped."""
    kinds = {"a": torch.uint8, "b": torch.float32, "c": torch.bfloat16, "d": torch.int64}
    tensors = {name: torch.ones(3, dtype=dtype) for name, dtype in kinds.items()}
    stored = {name: Stored(each.dtype, tuple(each.shape)) for name, each in tensors.items()}
    with SafetensorsWriter(tmp_path / "ours", stored, aligned=True) as file:
        for name, tensor in tensors.items():
            file.write(name, tensor)
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_one_layer_is_in_memory_at_a_time(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer's weight is freed before the next layer is loaded."""
    loaded: list[weakref.ref[torch.Tensor]] = []
    process = QuantizableLayer._process_quantized

    def counting(self: QuantizableLayer) -> None:
        assert [each for each in loaded if each() is not None] == []
        loaded.append(weakref.ref(self.weight))
        process(self)

    monkeypatch.setattr(QuantizableLayer, "_process_quantized", counting)
    config = ModelConfig(model=str(checkpoint("llama")), quantization="fp8")
    result = convert(config, tmp_path / "out")
    assert len(loaded) == 8
    assert len(result.quantized) == 14
    written = sum(tensor.nbytes for tensor in stored(tmp_path / "out").values())
    assert result.written == written


def test_the_command_writes_it(
    checkpoint: Callable[..., Path],
    run: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """convert reports what it did; the result loads, and a folder in use is wrong usage."""
    out = tmp_path / "out"
    code, text, error = run(
        "convert", checkpoint("llama"), "--quantization", "fp8", "--out", out, "--json"
    )
    assert code == 0, error
    assert len(json.loads(text)["quantized"]) == 14
    assert json.loads(text)["bytes_written"] == sum(t.nbytes for t in stored(out).values())
    assert run("load", out)[0] == 0
    given = {each.name for each in checkpoint("llama").iterdir()}
    small = {name for name in given if ".safetensors" not in name}
    assert "generation_config.json" in small
    assert small <= {each.name for each in out.iterdir()}
    assert {each.name for each in checkpoint("llama").iterdir()} == given
    code, _, error = run("convert", checkpoint("llama"), "--quantization", "fp8", "--out", out)
    assert code == 2
    assert "no empty folder" in error
    code, text, _ = run("convert", checkpoint("qwen2"), "--quantization", "fp8", "--out", out / "b")
    assert code == 0
    assert "14 layers quantized" in text
    tied = json.loads((out / "b" / "config.json").read_text())["quantization_config"]
    assert "lm_head" in tied["ignore"]  # for readers that would look for its scales
    neither = run("convert", checkpoint("llama"), "--out", tmp_path / "c")
    assert (neither[0], "give --quantization SCHEME or --adapter DIR" in neither[2]) == (2, True)
    monkeypatch.setenv("HOME", str(tmp_path))  # whose ~ a shell leaves in --out=~/out
    assert run("convert", checkpoint("llama"), "--quantization=fp8", "--out=~/out")[0] == 2
    both = ("--quantization", "fp8", "--adapter", tmp_path)
    code, _, error = run("convert", checkpoint("llama"), *both, "--out", tmp_path / "c")
    assert (code, "give only one of --quantization and --adapter" in error) == (2, True)
    options = ("--quantization", "int4_per_group", "--group-size", 8, "--ignore", "o_proj")
    names = json.loads(
        run("convert", checkpoint("llama"), *options, "--out", tmp_path / "d", "--json")[1]
    )["quantized"]
    assert len(names) == 12
    assert not any("o_proj" in name or name == "lm_head" for name in names)
    config = json.loads((tmp_path / "d" / "config.json").read_text())["quantization_config"]
    assert [each["weights"]["group_size"] for each in config["config_groups"].values()] == [8]
    code, _, error = run("convert", checkpoint("llama"), *options[:3], 12, "--out", tmp_path / "e")
    assert (code, "a multiple of 8, got 12" in error) == (2, True)
    eight_bits = ("--quantization", "fp8", "--group-size", 64)  # which it would not change
    code, _, error = run("convert", checkpoint("llama"), *eight_bits, "--out", tmp_path / "e")
    assert (code, "--group-size: it is for --quantization int4" in error) == (2, True)
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize(
    "order",
    [
        StoredOrder(pairs=(0, 6)),
        StoredOrder(pairs=(1, 8)),
        StoredOrder(groups=(0, (3, 1), (0, 0))),
        StoredOrder(groups=(1, (1, 5), (0, 0)), pairs=(0, 12)),
    ],
)
def test_what_was_put_in_order_is_written_as_it_was(order: StoredOrder) -> None:
    """The order is undone, also where doing it twice is another order."""
    stored = torch.arange(12.0 * 24).view(12, 24)
    held = order.restore(stored)
    assert not torch.equal(order.restore(held), stored)
    assert torch.equal(_undone(order, held), stored)
