"""What no conversion writes: the refusal says why, and nothing is left."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_module import ModelConfig, QuantizationConfig
from vllm_module.build import registry
from vllm_module.errors import (
    MissingWeightError,
    ShardingError,
    UnsupportedModelError,
    WeightReadError,
)
from vllm_module.export.compressed import convert
from vllm_module.export.folder import FolderExistsError, new_folder
from vllm_module.export.merged import merge
from vllm_module.export.sharded_state import shard
from vllm_module.models.llama import LlamaForCausalLM

# Pytest's importlib mode has no imports between test files.
GGUF: Any = runpy.run_path(str(Path(__file__).parents[1] / "weights" / "gguf_models.py"))
CONVERTING: Any = runpy.run_path(str(Path(__file__).with_name("converting.py")))
converted, entries, stored = (CONVERTING[name] for name in ("converted", "entries", "stored"))


class Renaming(LlamaForCausalLM):
    """Its checkpoint has other names."""

    def load_weights(self, weights: Any) -> set[str]:
        return super().load_weights([(n.removeprefix("x."), w) for n, w in weights])


def test_what_cannot_be_written_is_refused(
    checkpoint: Callable[..., Path],
    converted: Callable[[str], tuple[Path, Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each refusal says why, and leaves nothing."""
    out = tmp_path / "out"

    def refused(folder: Path, quantization: Any, match: str) -> None:
        with pytest.raises(UnsupportedModelError, match=match):
            convert(ModelConfig(model=str(folder), quantization=quantization), out)

    refused(checkpoint("gpt2"), "fp8", r"h\.0\.attn\.c_attn stores its weight as \[input, output\]")
    refused(checkpoint("phi3"), "fp8", "stores 2 fused layers as one tensor with one scale each")
    refused(converted("per channel")[1], "compressed-tensors", "is quantized already")
    refused(checkpoint("llama"), "compressed-tensors", "has no quantization_config")
    every = QuantizationConfig(scheme="fp8_per_tensor", ignore=("re:.*",))
    nf4 = QuantizationConfig(scheme="bitsandbytes", ignore=("lm_head", "down_proj"))
    refused(checkpoint("llama"), nf4, r"gate_up_proj is held in NF4.*no layout for")
    refused(checkpoint("llama"), every, "no layer of LlamaForCausalLM is quantized")
    monkeypatch.setitem(registry.registered.models_by_call, "RenamingForCausalLM", Renaming)
    renamed = tmp_path / "renamed"
    shutil.copytree(checkpoint("llama"), renamed)
    config = entries(renamed) | {"architectures": ["RenamingForCausalLM"]}
    (renamed / "config.json").write_text(json.dumps(config))
    refused(renamed, "fp8", r"Renaming.* overrides load_weights")
    shard(ModelConfig(model=str(checkpoint("llama"))), 1, tmp_path / "state")
    with pytest.raises(UnsupportedModelError, match="quantization None"):
        convert(ModelConfig(model=str(tmp_path / "state"), quantization="fp8"), out)
    with pytest.raises(ValueError, match="quantization should name a scheme"):
        convert(ModelConfig(model=str(checkpoint("llama"))), out)
    odd = QuantizationConfig(scheme="fp8_per_block", weight_block_size=(7, 7))
    with pytest.raises(ShardingError, match="weight_block_size"):
        convert(ModelConfig(model=str(checkpoint("llama")), quantization=odd), out)
    assert not out.exists()


def test_damaged_checkpoints_are_refused_and_nothing_is_left(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """A missing tensor is found before anything is written, a NaN when its layer is quantized."""
    tensors = stored(checkpoint("llama"))
    folder = tmp_path / "damaged"
    folder.mkdir()
    (folder / "config.json").write_text((checkpoint("llama") / "config.json").read_text())
    config = ModelConfig(model=str(folder), quantization="fp8")
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name] = tensors[name].clone()
    tensors[name][3, 2] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightReadError, match=r"layers\.1\.self_attn\.qkv_proj.*slot 'k_proj'"):
        convert(config, tmp_path / "out")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(MissingWeightError, match=name.replace(".", r"\.")):
        convert(config, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("stored_rotary_pairs", "stores the rows of queries and keys in the"),
        ("stored_experts_apart", "stores gate and up of experts apart"),
        ("stored_kv_b_apart", "stores keys and values of latents apart"),
    ],
)
def test_rows_in_the_order_of_other_formats_are_refused(
    checkpoint: Callable[..., Path], tmp_path: Path, entry: str, message: str
) -> None:
    """What llama.cpp stores otherwise has no place in a folder that other programs read."""
    config = ModelConfig(
        model=str(checkpoint("llama")), quantization="fp8", hf_overrides={entry: True}
    )
    with pytest.raises(UnsupportedModelError, match=message):
        convert(config, tmp_path / "out")


@pytest.mark.parametrize("theirs", ["out/theirs", "out"])
def test_what_another_process_wrote_meanwhile_stays(tmp_path: Path, theirs: str) -> None:
    """The process that ends last says so, and leaves nothing of its own; also beside a file."""
    out = tmp_path / "out"

    def write() -> None:
        with new_folder(out) as folder:
            (folder / "mine").touch()
            (tmp_path / theirs).parent.mkdir(exist_ok=True)
            (tmp_path / theirs).touch()

    with pytest.raises(FolderExistsError, match="out was written by another process meanwhile"):
        write()
    names = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*"))
    assert names == sorted({"out", theirs})


@pytest.mark.parametrize("target", ["nothing", "empty"])
def test_a_link_is_refused_before_anything_is_written(tmp_path: Path, target: str) -> None:
    """A folder cannot be renamed to a link, even to one that leads to no or to an empty folder."""
    (tmp_path / "empty").mkdir()
    out = tmp_path / "out"
    out.symlink_to(tmp_path / target)
    with pytest.raises(FolderExistsError, match="out exists"), new_folder(out):
        pytest.fail("the work began")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "out"]


MOUNTED = """
import sys
from pathlib import Path
from vllm_module.export.folder import new_folder
with new_folder(Path(sys.argv[1])):
    sys.exit("the work began")
"""


@pytest.mark.skipif(
    shutil.which("unshare") is None or bool(subprocess.run(["unshare", "-rm", "true"]).returncode),
    reason="this user may not mount anything, not even in a namespace of its own",
)
def test_a_mount_point_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """No folder can be renamed to it, as the system says; one in it is written."""
    (tmp_path / "out").mkdir()
    mount, made = f"mount -t tmpfs none {tmp_path}/out", tmp_path / "made"
    made.mkdir()

    def run(command: str) -> str:
        line = ["unshare", "-rm", "sh", "-c", f"{mount} && {command}"]
        done = subprocess.run(line, capture_output=True, text=True, timeout=300)
        return done.stderr.strip()

    assert "busy" in run(f"mv -T {made} {tmp_path}/out")
    program = f"{sys.executable} -c '{MOUNTED}' {tmp_path}/out"
    assert "FolderExistsError" in (text := run(program))
    assert text.endswith("out is where a disk or a volume is mounted: name a folder in it")
    assert run(f"{program}/sub") == "the work began"


@pytest.mark.parametrize("below", ["sub", "sub/deep"])
@pytest.mark.parametrize("kind", ["file", "link to nothing", "folder", "link to a folder"])
def test_what_is_above_and_no_folder_is_named(tmp_path: Path, kind: str, below: str) -> None:
    """Where the system makes no folder, the work does not begin."""
    above = tmp_path / "above"
    if kind == "file":
        above.touch()
    elif kind == "folder":
        above.mkdir()
    else:
        (tmp_path / "folder").mkdir()
        above.symlink_to(tmp_path / ("folder" if kind == "link to a folder" else "nothing"))
    try:
        (above / below).mkdir(parents=True)
    except OSError:
        message = rf"above/{below} cannot be made, because .*/above is no folder: name another"
        with pytest.raises(FolderExistsError, match=message), new_folder(above / below):
            pytest.fail("the work began")
        assert "folder" not in kind
        return
    assert "folder" in kind
    with new_folder(above / below) as folder:
        (folder / "mine").touch()
    assert (above / below / "mine").exists()


def test_where_a_checkpoint_says_that_it_is_quantized(
    converted: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    """The refusal names the file that was read: config.json, ModelOpt's own, or a GGUF file."""

    def refused(path: Path, quantization: Any, match: str) -> None:
        config = ModelConfig(model=str(path), quantization=quantization)
        with pytest.raises(UnsupportedModelError, match=match):
            convert(config, tmp_path / "out")

    folder = converted("per channel")[1]
    refused(folder, "compressed-tensors", r"\(quantization_config of config\.json\): convert the")
    modelopt = tmp_path / "modelopt"
    shutil.copytree(folder, modelopt)
    config = entries(modelopt)
    del config["quantization_config"]
    (modelopt / "config.json").write_text(json.dumps(config))
    said = {"quantization": {"quant_algo": "MXFP8"}}
    (modelopt / "hf_quant_config.json").write_text(json.dumps(said))
    with pytest.raises(UnsupportedModelError, match=r"already \(.*/hf_quant_config\.json\): merge"):
        merge(ModelConfig(model=str(modelopt)), tmp_path / "adapter", tmp_path / "out")
    model = GGUF["new_model"](GGUF["CONFIGS"]["qwen3"])
    file = GGUF["write"](tmp_path / "model.gguf", model, lambda name: "Q8_0")
    refused(file, "fp8", r"by 'gguf' \(its GGUF files have the types of tensors\): leave")
    with pytest.raises(UnsupportedModelError, match=r"model\.gguf is .* \(its GGUF files have"):
        merge(ModelConfig(model=str(file)), tmp_path / "adapter", tmp_path / "out")
