from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors import safe_open

from vllm_module.weights.file_bytes import FileBytes
from vllm_module.weights.gguf import file as gguf_file
from vllm_module.weights.gguf import small_files
from vllm_module.weights.source import find_source

Run = Callable[..., Any]
_Q8_0 = gguf.GGMLQuantizationType.Q8_0


def test_one_line_stands_for_all_layers(run: Run, folder: Path) -> None:
    """A line stands for the same tensor of all layers; --all prints a line for each tensor."""
    folded, every = run("inspect", folder), run("inspect", folder, "--all")
    assert folded.code == every.code == 0
    assert "Qwen3ForCausalLM (supported)" in folded.out
    assert "\nmodel.layers.{0..2}.self_attn.q_proj.weight  " in folded.out
    assert "layers.1.self_attn.q_proj" not in folded.out
    for layer in range(3):
        assert f"\nmodel.layers.{layer}.self_attn.q_proj.weight  " in every.out
    assert "total: 36 tensors" in folded.out
    assert "\x1b" not in folded.out + every.out  # no colours in a pipe


def test_json_has_what_the_headers_say(run: Run, folder: Path) -> None:
    """Every tensor is listed as the safetensors library reads it."""
    found = run("inspect", folder, "--json").json
    expected = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.offset_keys():
                expected[name] = (file.get_slice(name).get_shape(), path.name)
    assert {t["name"]: (t["shape"], t["file"]) for t in found["tensors"]} == expected
    assert found["architecture"]["architectures"] == ["Qwen3ForCausalLM"]
    assert found["architecture"]["supported"] is True
    total = {key: found["total"][key] for key in ("tensors", "bytes")}
    assert found["dtypes"] == {"bfloat16": total}
    assert sum(of["bytes"] for of in found["files"].values()) == found["total"]["bytes"]
    assert found["total"]["bytes"] == 2 * found["total"]["elements"]
    for tensor in found["tensors"]:
        begin, end = tensor["byte_range"]
        assert end - begin == tensor["bytes"]


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}, "modelopt NVFP4"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"},
            "auto-round auto_round:auto_gptq",
        ),
    ],
)
def test_how_a_checkpoint_is_quantized(
    run: Run, edited: Callable[..., Path], entries: dict[str, Any], named: str
) -> None:
    """The method and the format that config.json names are among the entries."""
    folder = edited(lambda tensors: None, quantization_config=entries)
    assert f"quantization={named}\n" in run("inspect", folder).out
    assert run("inspect", folder, "--json").json["architecture"]["quantization"] == named


def test_only_headers_are_read(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither inspect nor plan reads a tensor."""
    monkeypatch.delattr(FileBytes, "read_runs")
    assert run("inspect", folder).code == 0
    assert run("plan", folder, "--tp", 2).code == 0


def test_a_folder_without_config_and_a_single_file(run: Run, folder: Path, tmp_path: Path) -> None:
    """Tensors are listed even if nothing says which model they belong to."""
    file = sorted(folder.glob("*.safetensors"))[0]
    (tmp_path / "model.safetensors").write_bytes(file.read_bytes())
    alone, of_folder = run("inspect", file), run("inspect", tmp_path)
    assert alone.code == of_folder.code == 0
    assert "no config.json" in of_folder.out
    assert run("inspect", file, "--json").json["architecture"] is None


def test_an_unknown_or_damaged_config(run: Run, edited: Callable[..., Path]) -> None:
    """The message says so, and the tensors are still listed."""
    unknown = run("inspect", edited(architectures=["NoSuchForCausalLM"]))
    assert (unknown.code, "NoSuchForCausalLM (not supported)" in unknown.out) == (0, True)
    folder = edited()
    (folder / "config.json").write_text("{")
    damaged = run("inspect", folder)
    assert (damaged.code, "config.json is not valid JSON" in damaged.out) == (0, True)
    assert "total: 36 tensors" in damaged.out
    (folder / "config.json").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    )
    pointer = run("inspect", folder).out
    assert "config.json is a Git LFS pointer, not the file itself; run `git lfs pull`" in pointer


def test_an_architecture_that_only_transformers_has(run: Run, edited: Callable[..., Path]) -> None:
    """It is called neither supported nor unsupported: plan tells whether the wrapper takes it."""
    folder = edited(architectures=["SmolLM3ForCausalLM"], model_type="smollm3")
    assert "SmolLM3ForCausalLM (of transformers, not proven" in run("inspect", folder).out
    architecture = run("inspect", folder, "--json").json["architecture"]
    assert (architecture["supported"], architecture["model_impl"]) == (None, "transformers")
    assert "refused" not in architecture


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"model_type": "bart", "architectures": ["BartForCausalLM"]}, "an encoder-decoder"),
        ({"model_type": "rwkv", "architectures": ["RwkvForCausalLM"]}, "keeps recurrent state"),
        ({"model_type": "next", "architectures": ["SmolLM3ForCausalLM"]}, "no model_type next"),
        (
            {
                "model_type": "own",
                "architectures": ["OwnForCausalLM"],
                "auto_map": {"AutoConfig": "a.B", "AutoModelForCausalLM": "c.D"},
            },
            "--trust-remote-code",
        ),
    ],
)
def test_what_the_wrapper_refuses(
    run: Run, edited: Callable[..., Path], entries: dict[str, Any], reason: str
) -> None:
    """A model that is refused whatever its sizes is called unsupported, with the reason."""
    folder = edited(**entries)
    shown = run("inspect", folder)
    assert f"{entries['architectures'][0]} (not supported: see below)" in shown.out
    assert reason in " ".join(shown.out.split())
    architecture = run("inspect", folder, "--json").json["architecture"]
    assert (architecture["supported"], architecture["model_impl"]) == (False, "transformers")
    assert reason in architecture["refused"]


def test_a_gguf_file_of_an_unknown_architecture(run: Run, tmp_path: Path) -> None:
    """Its tensors are listed by the file's names, with the reason why no model has them."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("blk.0.ssm_in.weight", np.zeros((2, 34), np.uint8), raw_dtype=_Q8_0)
    writer.add_tensor("blk.0.ssm_a", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shown = run("inspect", tmp_path / "m.gguf")
    assert shown.code == 0
    assert "general.architecture is 'mamba', whose tensors have no names here" in shown.out
    assert "blk.0.ssm_a " in shown.out
    assert "total: 2 tensors" in shown.out
    assert run("inspect", tmp_path / "m.gguf", "--json").json["architecture"]["supported"] is False


def test_a_gguf_file_is_parsed_once(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inspecting a file parses its header once, makes no tokenizer of it and reads no tensor."""
    written = runpy.run_path(str(Path(__file__).parents[1] / "weights" / "gguf_models.py"))
    model = written["new_model"](written["CONFIGS"]["llama"])

    def tokenizer(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([f"t{token}" for token in range(96)])
        writer.add_token_merges([])

    path = written["write"](tmp_path / "m.gguf", model, change=tokenizer)
    calls: list[str] = []

    def counted(module: Any, name: str) -> None:
        original = getattr(module, name)

        def call(*arguments: Any) -> Any:
            calls.append(name)
            return original(*arguments)

        monkeypatch.setattr(module, name, call)

    counted(gguf_file, "read_gguf_header")
    counted(small_files, "tokenizer_files")
    shown = run("inspect", path, "--json").json
    assert calls == ["read_gguf_header"]
    assert shown["architecture"]["architectures"] == ["LlamaForCausalLM"]
    assert shown["architecture"]["vocab_size"] == 96
    assert shown["total"]["tensors"] == 21
    find_source(str(path))
    assert calls == ["read_gguf_header"] * 2 + ["tokenizer_files"]


def test_names_cannot_write_to_the_terminal(run: Run, edited: Callable[..., Path]) -> None:
    """Control characters in names of tensors and in config.json are shown as escapes."""

    def rename(tensors: dict[str, object]) -> None:
        tensors["a\x1b[31mb"] = tensors.pop("model.norm.weight")

    result = run("inspect", edited(rename, model_type="c\x1b[31md"))
    assert r"a\x1b[31mb" in result.out
    assert r"c\x1b[31md" in result.out
    assert "\x1b" not in result.out
