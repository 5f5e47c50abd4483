"""GGUF files that gguf-py writes, whole, split and damaged; configurations from their metadata."""

from __future__ import annotations

import json
import pickle
import re
import runpy
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from vllm_module import ModelConfig, get_model
from vllm_module.build.held import plan_from
from vllm_module.build.model_source import ModelSource
from vllm_module.errors import (
    CheckpointFormatError,
    MissingWeightError,
    UnexpectedWeightError,
    UnsupportedModelError,
)
from vllm_module.weights import open_checkpoint
from vllm_module.weights.gguf import file as gguf_file
from vllm_module.weights.gguf.names import ARCHITECTURES, ROPE_TENSORS, renamed, stored_name
from vllm_module.weights.source import find_source

written = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("gguf_models.py"))))
SMALL = {**written.CONFIGS["llama"], "num_hidden_layers": 1}
IDS = torch.arange(2, 14)


@pytest.fixture(scope="module")
def model() -> Any:
    """The model that most files here hold."""
    return written.new_model(SMALL)


@pytest.fixture(scope="module")
def whole(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file with a tensor of each kind: in floats of three types, and in blocks."""
    kinds = {"attn_q": "Q4_0", "attn_k": "F16", "attn_v": "BF16", "token_embd": "Q8_0"}
    path = tmp_path_factory.mktemp("whole") / "model.gguf"
    written.write(path, model, lambda name: kinds.get(name.split(".")[-2], "F32"))
    return path


def logits(path: Path, **config: Any) -> torch.Tensor:
    built = get_model(model_config=ModelConfig(model=str(path), dtype="float32", **config))
    with torch.inference_mode():
        computed: torch.Tensor = built.compute_logits(built(IDS, torch.arange(len(IDS))))
    return computed


# What is in a file


def test_values_are_the_librarys(whole: Path) -> None:
    """Each tensor has gguf-py's values, whole and in parts, and its bytes are counted."""
    reader = gguf.GGUFReader(whole)
    library = {each.name: each for each in reader.tensors}
    with open_checkpoint(whole) as checkpoint:
        assert len(checkpoint) == len(library)
        assert checkpoint.nbytes == sum(int(each.n_bytes) for each in library.values())
        assert checkpoint["model.layers.0.self_attn.k_proj_pairs.weight"].dtype == torch.float16
        assert checkpoint["model.layers.0.self_attn.v_proj.weight"].dtype == torch.bfloat16
        for name, tensor in library.items():
            stored = renamed(name, ARCHITECTURES["llama"])
            if name.endswith("attn_q.weight"):
                blocks = checkpoint[f"{stored}_q4_0"].read()
                assert np.array_equal(blocks.flatten(1).numpy(), tensor.data)
                continue
            handle = checkpoint[stored]
            expected = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
            read = handle.read()
            assert handle.shape == read.shape
            assert torch.equal(read.float(), expected)
            for dim, size in enumerate(handle.shape):
                part = handle.narrow(dim, 1, size - 2).narrow(dim, -2, 1)
                assert torch.equal(part.read().float(), expected.narrow(dim, size - 3, 1))
            with pytest.raises(ValueError, match="is not inside dim"):
                handle.narrow(0, 1, handle.shape[0])


def test_rows_that_are_not_asked_for_are_not_read(whole: Path) -> None:
    """Of an embedding in blocks, a rank reads the bytes of its rows alone."""
    with open_checkpoint(whole) as checkpoint:
        table = checkpoint["model.embed_tokens.weight"]
        target = torch.empty(24, 128, dtype=torch.bfloat16)
        table.narrow(0, 48, 24).read_into(target)
        assert checkpoint.bytes_read == 24 * 4 * 34
        assert torch.equal(target, table.read()[48:72].bfloat16())
        begin, end = table.byte_range
        assert end - begin == 96 * 4 * 34 == sum(run.nbytes for run in table.runs())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_names_are_the_librarys(architecture: str) -> None:
    """gguf-py calls what each name is mapped to by this name too."""
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, 3)
    tables = {**ARCHITECTURES[architecture].layer}
    for component, theirs in tables.items():
        full = f"blk.2.{component}.{'bias' if component == 'exp_probs_b' else 'weight'}"
        name = renamed(full, ARCHITECTURES[architecture])
        again = stored_name(name.replace("*", "3"), ARCHITECTURES[architecture])
        assert again == full
        last = "" if component in ("attn_sinks", "exp_probs_b") else ".weight"
        assert name == f"model.layers.2.{theirs}{last}"
        known = name.removesuffix(".weight").replace(".*.", ".").removesuffix("_pairs")
        known = known.removesuffix("_bias")  # of e_score_correction_bias
        assert names.get_name(known) == f"blk.2.{component}", known
    for component in ("token_embd", "output_norm", "output"):
        name = renamed(f"{component}.weight", ARCHITECTURES[architecture])
        assert stored_name(f"{name}_q4_k", ARCHITECTURES[architecture]) == f"{component}.weight"
        assert names.get_name(name.removesuffix(".weight")) in (component, None)
    known = {gguf.TENSOR_NAMES[each] for each in gguf.MODEL_TENSORS[arch]}
    assert {f"{each}.weight" for each in known if each.startswith("rope_")} <= ROPE_TENSORS


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0"])
def test_any_rows_and_columns_of_a_transposed_weight_are_read(tmp_path: Path, kind: str) -> None:
    """Keys that are stored transposed, head by head, are those of transformers, and cut as they."""
    model = written.new_model(written.CONFIGS["deepseek2"])
    path = written.write(tmp_path / "m.gguf", model, lambda name: kind)
    both = model.state_dict()["model.layers.0.self_attn.kv_b_proj.weight"].unflatten(0, (4, -1))
    expected = both[:, :32].flatten(0, 1)
    with open_checkpoint(path) as checkpoint:
        handle = checkpoint["model.layers.0.self_attn.k_b_proj.weight"]
        assert handle.shape == expected.shape == (128, 64)
        assert torch.equal(handle.read().float(), expected)
        for rows, columns in (((32, 32), (0, 64)), ((31, 34), (7, 9)), ((127, 1), (63, 1))):
            cut, part = handle, expected
            for dim, (first, length) in ((1, columns), (0, rows)):
                cut, part = cut.narrow(dim, first, length), part.narrow(dim, first, length)
            assert torch.equal(cut.read().float(), part)
            into = torch.empty(part.shape)
            cut.narrow(0, 0, len(part)).read_into(into)
            assert torch.equal(into, part)
        with pytest.raises(ValueError, match="is not inside dim"):
            handle.narrow(0, 100, 29)


def test_a_gate_without_its_dimension_of_one_has_it_again(tmp_path: Path) -> None:
    """llama.cpp drops the first dimension of Qwen2-MoE's gate of the shared expert."""
    keys = {"general.architecture": (8, struct.pack("<Q", 8) + b"qwen2moe")}
    data = header(keys, [("blk.0.ffn_gate_inp_shexp.weight", [64], 0, 0)])
    (tmp_path / "m.gguf").write_bytes(data)
    with open_checkpoint(tmp_path) as checkpoint:
        ((name, handle),) = checkpoint.items()
    assert name == "model.layers.0.mlp.shared_expert_gate.weight"
    assert handle.shape == (1, 64)


# Files of several parts


@pytest.fixture(scope="module")
def split(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model in several parts, as gguf-py splits it."""
    folder = tmp_path_factory.mktemp("split")
    written.write(folder / "model.gguf", model, split_max_tensors=4)
    assert len(list(folder.glob("model-*-of-*.gguf"))) == 3
    return folder


def test_parts_are_found_from_any_of_them(split: Path, model: Any) -> None:
    """The folder and each part stand for the whole model."""
    expected = written.logits(model, IDS)
    for path in (split, *split.iterdir()):
        torch.testing.assert_close(logits(path), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("part", "key", "value", "message"),
    [
        (2, "split.count", 4, "split.count should be 3, and is 4"),
        (2, "split.no", 0, "split.no should be 1, and is 0"),
        (1, "split.tensors.count", 13, "is 13, and its 3 files have 12 tensors"),
    ],
)
def test_parts_of_another_model_are_refused(
    split: Path, tmp_path: Path, part: int, key: str, value: int, message: str
) -> None:
    """The numbers in the metadata of the parts have to fit."""
    for path in split.iterdir():
        data = bytearray(path.read_bytes())
        if f"-0000{part}-" in path.name:
            at = data.index(key.encode()) + len(key) + 4
            data[at : at + 2] = value.to_bytes(2, "little")
        (tmp_path / path.name).write_bytes(data)
    with pytest.raises(CheckpointFormatError, match=message):
        open_checkpoint(tmp_path)


def test_a_missing_part_and_several_models_are_refused(split: Path, tmp_path: Path) -> None:
    """A part that is not there is named; of several models in a folder one has to be chosen."""
    parts = sorted(split.iterdir())
    for path in (parts[0], parts[2]):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(CheckpointFormatError, match=r"00002-of-00003\.gguf is not there"):
        open_checkpoint(tmp_path)
    (tmp_path / "other.gguf").write_bytes(b"")
    with pytest.raises(CheckpointFormatError, match=r"several models.*other\.gguf"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointFormatError, match=r"split.count should be 1, and is 3"):
        open_checkpoint((tmp_path / parts[0].name).rename(tmp_path / "renamed.gguf"))
    with pytest.raises(CheckpointFormatError, match=r"holds no \*.gguf file"):
        open_checkpoint(Path(__file__).parent, "gguf")
    with pytest.raises(CheckpointFormatError, match=r"absent\.gguf is not a file"):
        open_checkpoint(tmp_path / "absent.gguf")


def test_other_formats_go_before(whole: Path, tmp_path: Path) -> None:
    """In a folder with safetensors files too, these are taken, unless GGUF is asked for."""
    from safetensors.torch import save_file

    (tmp_path / "model.gguf").write_bytes(whole.read_bytes())
    assert len(open_checkpoint(tmp_path)) == 12
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    assert len(open_checkpoint(tmp_path)) == 1
    assert len(open_checkpoint(tmp_path, "gguf")) == 12


# Damaged files


def header(
    keys: Mapping[str, Any] | None = None,
    tensors: list[tuple[str, list[int], int, int]] | None = None,
    *,
    data: int = 256,
    counts: tuple[int, int] | None = None,
    magic: bytes = b"GGUF",
    version: int = 3,
) -> bytes:
    """Return a file written by hand, by the format's description."""

    def text(value: str | bytes) -> bytes:
        value = value.encode() if isinstance(value, str) else value
        return struct.pack("<Q", len(value)) + value

    keys = {"general.architecture": (8, text("llama")), **(keys or {})}
    tensors = [("a", [32, 2], 0, 0)] if tensors is None else tensors
    out = magic + struct.pack("<IQQ", version, *(counts or (len(tensors), len(keys))))
    for key, (kind, value) in keys.items():
        out += text(key) + struct.pack("<I", kind) + value
    for name, sizes, kind, offset in tensors:
        out += text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
    return out + bytes(-len(out) % 32) + bytes(data)


def test_a_file_written_by_hand_is_read(tmp_path: Path) -> None:
    """The smallest file, in both versions of the format, has its tensor; so do all value types."""
    numbers = {
        f"k{kind}": (kind, struct.pack(f"<{code}", 1)) for kind, code in enumerate("BbHhIif")
    }
    numbers |= {"flag": (7, b"\1"), "list": (9, struct.pack("<IQ3q", 11, 3, 1, -2, 3))}
    numbers |= {"texts": (9, struct.pack("<IQQ", 8, 2, 1) + b"x" + struct.pack("<Q", 0))}
    for version in (2, 3):
        (tmp_path / "m.gguf").write_bytes(header(numbers, version=version))
        with open_checkpoint(tmp_path) as checkpoint:
            assert checkpoint["a"].shape == (2, 32)
            assert not checkpoint["a"].read().any()


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "should begin with 'GGUF'"),
    "magic": (header(magic=b"GGML"), "should begin with 'GGUF', and begins with b'GGML'"),
    "lfs": (b"version https://git-lfs", "Git LFS pointer"),
    "version-1": (header(version=1), "expected version 2 or 3 .* got version 1"),
    "big-endian": (header(version=3 << 24), "got a big-endian file"),
    "keys": (header(counts=(1, 2**63)), "should have 9223372036854775808 keys"),
    "more-keys": (header(counts=(1, 1000)), "its header should have .* bytes from byte"),
    "tensors": (header(counts=(2**40, 1)), "should have 1099511627776 tensors"),
    "long-name": (header(tensors=[("a" * 1025, [32], 0, 0)]), "1 to 1024 characters"),
    "no-name": (header(tensors=[("", [32], 0, 0)]), "1 to 1024 characters"),
    "dims-0": (header(tensors=[("a", [], 0, 0)]), "dimensions should be 1 to 4, and is 0"),
    "dims-5": (header(tensors=[("a", [1] * 5, 0, 0)]), "dimensions should be 1 to 4, and is 5"),
    "size-0": (header(tensors=[("a", [0, 2], 0, 0)]), "sizes of 1 and more"),
    "too-large": (header(tensors=[("a", [2**62, 2**62], 0, 0)]), "sizes of 1 and more"),
    "no-such-type": (header(tensors=[("a", [32], 5, 0)]), "a number that ggml has, and is 5"),
    "type": (header(tensors=[("blk.0.b", [256], 15, 0)]), "'blk.0.b' is of type Q8_K, which is"),
    "half-a-block": (header(tensors=[("a", [48], 8, 0)]), "whole blocks of 32 values .* is 48"),
    "not-at-the-start": (header(tensors=[("a", [32], 0, 32)]), "hole after the header"),
    "overlap": (
        header(tensors=[("a", [32], 0, 0), ("b", [32], 0, 64)]),
        "'b' overlaps 'a': it should begin at byte 128 of the data, and begins at 64",
    ),
    "hole": (
        header(tensors=[("a", [8], 0, 0), ("b", [8], 0, 64)]),
        "'b' leaves a hole after 'a': it should begin at byte 32",
    ),
    "misaligned": (header(tensors=[("a", [9], 0, 0), ("b", [8], 0, 36)]), "begin at byte 64"),
    "offset": (header(tensors=[("a", [32], 0, 2**63)]), "hole after the header"),
    "twice": (header(tensors=[("a", [8], 0, 0), ("a", [8], 0, 32)]), "two tensors 'a'"),
    "cut-off": (header(data=255), "should end at byte .*: it was cut off"),
    "more-data": (header(data=320), "it should end with its last tensor at byte"),
    "key-type": (header({"k": (13, b"")}), "'k' of the metadata is of type 13"),
    "nested": (header({"k": (9, struct.pack("<IQ", 9, 0))}), "is one of type 9"),
    "array": (header({"k": (9, struct.pack("<IQ", 0, 2**40))}), "1099511627776 elements in 'k'"),
    "short-array": (header({"k": (9, struct.pack("<IQ", 10, 999))}), "7992 bytes from byte"),
    "bool": (header({"k": (7, b"\2")}), "a bool that is neither 0 nor 1"),
    "utf-8": (header({"k": (8, struct.pack("<Q", 1) + b"\xff")}), "is not UTF-8"),
    "long-text": (header({"k": (8, struct.pack("<Q", 2**62))}), "4611686018427387904 bytes"),
    "alignment": (header({"general.alignment": (4, struct.pack("<I", 24))}), "a power of two"),
    "alignment-0": (header({"general.alignment": (4, struct.pack("<I", 0))}), "a power of two"),
    "same-name": (
        header(tensors=[("output.weight", [8], 0, 0), ("lm_head.weight", [8], 0, 32)], data=64),
        "two tensors would be called 'lm_head.weight'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_breaks_the_format_is_refused(tmp_path: Path, name: str) -> None:
    """One error names the file, what was expected and what came; nothing is read of the data."""
    data, message = BAD[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointFormatError, match=message) as error:
        open_checkpoint(path)
    assert str(error.value).startswith(str(path))


def test_a_key_that_comes_twice_is_refused(tmp_path: Path) -> None:
    """Which of the two values holds would be a guess."""
    data = header({"k1": (0, b"\1"), "k2": (0, b"\2")}).replace(b"k2", b"k1")
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(CheckpointFormatError, match="metadata has 'k1' twice"):
        open_checkpoint(tmp_path)


def test_a_header_that_ends_early_is_refused_wherever_it_ends(whole: Path, tmp_path: Path) -> None:
    """A file that is cut off anywhere is refused, never read in part."""
    data, path = whole.read_bytes(), tmp_path / "m.gguf"
    for end in [*range(0, 400, 7), *range(400, len(data), 9973), len(data) - 1]:
        path.write_bytes(data[:end])
        with pytest.raises(CheckpointFormatError):
            open_checkpoint(path)


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    """The message has the architecture, and those that have names."""
    (tmp_path / "m.gguf").write_bytes(header().replace(b"llama", b"mamba"))
    with pytest.raises(UnsupportedModelError, match=r"is 'mamba', .* expected one of llama, qwen2"):
        find_source(str(tmp_path))
    with open_checkpoint(tmp_path) as checkpoint:
        assert [*checkpoint] == ["a"]  # to be listed


def test_a_tensor_that_no_model_has_is_unexpected(model: Any, tmp_path: Path) -> None:
    """A name without a translation stays as it is, and the load refuses it."""
    extra = np.zeros(8, dtype=np.float32)
    path = written.write(
        tmp_path / "m.gguf", model, change=lambda w: w.add_tensor("blk.0.ffn_gate.3.weight", extra)
    )
    with pytest.raises(UnexpectedWeightError, match=r"blk\.0\.ffn_gate\.3\.weight"):
        logits(path)


@pytest.mark.parametrize(
    ("name", "lost", "listed"),
    [
        ("llama", ["blk.0.attn_q.weight", "blk.1.attn_q.weight"], "blk.{0..1}.attn_q.weight"),
        ("qwen3moe", ["blk.1.ffn_up_exps.weight"], "blk.1.ffn_up_exps.weight"),
        ("gpt-oss", ["blk.0.attn_sinks.weight"], "blk.0.attn_sinks.weight"),
        ("deepseek2", ["blk.1.attn_k_b.weight"], "blk.1.attn_k_b.weight"),
        ("llama", ["output_norm.weight"], "output_norm.weight"),
    ],
)
def test_a_missing_tensor_is_named_as_the_file_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, lost: list[str], listed: str
) -> None:
    """The refusal of a load and of a plan has the file and llama.cpp's name of the tensor."""
    add = gguf.GGUFWriter.add_tensor

    def add_others(writer: Any, full: str, *arguments: Any, **options: Any) -> None:
        if full not in lost:
            add(writer, full, *arguments, **options)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add_others)
    path = written.write(tmp_path / "m.gguf", written.new_model(written.CONFIGS[name]))
    message = re.escape(f"{path} should have {listed}: download it again")
    with pytest.raises(MissingWeightError, match=message):
        logits(path)
    source = ModelSource.find(ModelConfig(model=str(path)))
    with source.open() as checkpoint:
        report = plan_from(source.build(torch.device("cpu")), checkpoint).report
    with pytest.raises(MissingWeightError, match=message):
        report.raise_if_refused("model", touched=False)


# Configurations


def config_of(path: Path) -> Any:
    return json.loads((find_source(str(path)).folder / "config.json").read_text())


def test_a_source_is_a_folder_of_its_own_for_all_processes(whole: Path) -> None:
    """The folder has the configuration; a pickled source leads to the same folder and file."""
    source = ModelSource.find(ModelConfig(model=str(whole)))
    assert source.folder != whole.parent
    again = pickle.loads(pickle.dumps(source))
    assert again.folder == source.folder
    assert {*again.open()} == {*source.open()}
    assert not {each.name for each in whole.parent.iterdir()} - {"model.gguf"}
    assert source.config.dtype == "bfloat16"  # some weights are in blocks


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")]
)
def test_the_dtype_is_that_of_the_weights(
    model: Any, tmp_path: Path, kind: str, dtype: str
) -> None:
    """A model runs in the dtype its weights are stored in, bfloat16 if they are in blocks."""
    path = written.write(tmp_path / "m.gguf", model, lambda name: kind)
    config = config_of(path)
    assert config["dtype"] == dtype
    assert "quantization_config" not in config


def llama3_factors(theta: float = 10000.0, count: int = 16) -> np.ndarray[Any, Any]:
    """Return what llama.cpp's converter writes for Llama 3.1's scaling, by its formula."""
    factors = []
    for at in range(count):
        wavelength = 2 * np.pi * theta ** (2 * at / (2 * count))
        low, high = 64 / 1.0, 64 / 4.0
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(8.0)
        else:
            smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / 8.0 + smooth))
    return np.array(factors, dtype=np.float32)


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A file with Llama 3.1's factors, and transformers' model with its four settings."""
    config = {**SMALL, "max_position_embeddings": 512, "rope_parameters": LLAMA3}
    model = written.new_model(config)
    path = tmp_path_factory.mktemp("scaled") / "model.gguf"
    written.write(path, model, change=lambda w: w.add_tensor("rope_freqs.weight", llama3_factors()))
    return path, model


def test_factors_on_frequencies_are_used(scaled: tuple[Path, Any]) -> None:
    """rope_freqs.weight gives the rotary embedding that Llama 3.1's settings give."""
    path, model = scaled
    torch.testing.assert_close(logits(path), written.logits(model, IDS), rtol=0, atol=1e-4)


def test_a_configuration_beside_the_file_goes_first(
    scaled: tuple[Path, Any], tmp_path: Path
) -> None:
    """Entries of config.json are taken, but for those that say how the file stores weights."""
    path, model = scaled
    beside = tmp_path / "model.gguf"
    beside.symlink_to(path)
    config = model.config.to_dict()
    config |= {
        "architectures": ["LlamaForCausalLM"],
        "rms_norm_eps": 0.5,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    entries = config_of(beside)
    assert entries["rms_norm_eps"] == 0.5
    assert entries["stored_rotary_pairs"] is True
    assert entries["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": None}, "which rope_scaling of .*config.json does not give"),
        ({"rope_parameters": {**LLAMA3, "factor": 32.0}}, "from 1 to 8, which rope_scaling"),
        ({"quantization_config": {"quant_method": "fp8"}}, "has a quantization_config, and the"),
    ],
)
def test_a_configuration_that_contradicts_the_file_is_refused(
    scaled: tuple[Path, Any], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    """Factors that the entry does not give, and another quantization, are refused."""
    path, model = scaled
    (tmp_path / "model.gguf").symlink_to(path)
    config = {**model.config.to_dict(), **change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointFormatError, match=message):
        find_source(str(tmp_path / "model.gguf"))


def scaling_of(tmp_path: Path, model: Any, change: Callable[[gguf.GGUFWriter], object]) -> Any:
    return config_of(written.write(tmp_path / "m.gguf", model, change=change)).get("rope_scaling")


def test_rope_scalings_are_read(model: Any, tmp_path: Path) -> None:
    """Linear and YaRN scaling come from keys, longrope from tensors; factors of 1 are none."""

    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.0)

    def yarn(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(16)

    def longrope(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_orig_ctx_len(16)
        writer.add_rope_scaling_attn_factors(1.5)
        for name, value in (("long", 2.0), ("short", 1.0)):
            factors = np.full(16, value, dtype=np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)

    assert scaling_of(tmp_path, model, linear) == {"rope_type": "linear", "factor": 2.0}
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    assert scaling_of(tmp_path, model, yarn) == expected
    assert scaling_of(tmp_path, model, longrope) == {
        "rope_type": "longrope",
        "long_factor": [2.0] * 16,
        "short_factor": [1.0] * 16,
        "original_max_position_embeddings": 16,
        "attention_factor": 1.5,
    }
    ones = np.ones(16, dtype=np.float32)
    assert scaling_of(tmp_path, model, lambda w: w.add_tensor("rope_freqs.weight", ones)) is None

    def both(writer: gguf.GGUFWriter) -> None:
        yarn(writer)
        writer.add_tensor("rope_freqs.weight", ones)

    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight has a factor"):
        scaling_of(tmp_path, model, both)


def test_a_key_that_is_needed_and_missing_is_named(model: Any, tmp_path: Path) -> None:
    """Without config.json, the key and the file are in the message."""
    path = written.write(tmp_path / "m.gguf", model)
    path.write_bytes(path.read_bytes().replace(b"llama.block_count", b"llama.block_c0unt"))
    with pytest.raises(CheckpointFormatError, match=r"the metadata has no llama\.block_count"):
        config_of(path)


def test_a_scaling_without_a_type_is_linear(model: Any, tmp_path: Path) -> None:
    """A factor alone is linear scaling, as llama.cpp takes it, also by the older key."""
    for add in (
        lambda writer: writer.add_rope_scaling_factor(4.0),
        lambda writer: writer.add_float32("llama.rope.scale_linear", 4.0),
    ):
        assert scaling_of(tmp_path, model, add) == {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize("key", ["attn_factor", "yarn_beta_fast", "yarn_ext_factor"])
def test_a_setting_of_scaling_that_is_not_taken_is_refused(
    model: Any, tmp_path: Path, key: str
) -> None:
    """What scores would be multiplied by, or which frequencies change, is not ignored."""
    with pytest.raises(UnsupportedModelError, match=rf"llama\.rope\.scaling\.{key} is 2\.5"):
        scaling_of(tmp_path, model, lambda w: w.add_float32(f"llama.rope.scaling.{key}", 2.5))

    def beside_factors(writer: gguf.GGUFWriter) -> None:
        writer.add_float32(f"llama.rope.scaling.{key}", 2.5)
        writer.add_tensor("rope_freqs.weight", llama3_factors())

    with pytest.raises(UnsupportedModelError, match=rf"{key} is 2\.5"):
        scaling_of(tmp_path, model, beside_factors)


@pytest.mark.parametrize(
    "change",
    [
        {"low_freq_factor": 4.0},
        {"factor": 0},
        {"factor": [8.0]},
        {"rope_theta": "10000"},
        {"rope_type": "longrope", "long_factor": 8},
    ],
)
def test_a_scaling_that_has_no_value_is_another_one(
    scaled: tuple[Path, Any], tmp_path: Path, change: dict[str, Any]
) -> None:
    """Entries that the formula cannot take do not give the factors of the file."""
    path, model = scaled
    (tmp_path / "model.gguf").symlink_to(path)
    config = {**model.config.to_dict(), "rope_parameters": {**LLAMA3, **change}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointFormatError, match="which rope_scaling of"):
        find_source(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("inside", "above", "accepted"),
    [
        ({"rope_theta": 5e5}, {}, True),
        ({}, {"rope_theta": 5e5}, True),  # as Llama 3.1's files, by transformers 4
        ({"rope_theta": 5e5}, {"rope_theta": 1e4}, True),
        ({"rope_theta": 1e4}, {"rope_theta": 5e5}, False),
        ({}, {"rope_theta": 5.1e5}, False),
        ({}, {}, False),  # 10,000
    ],
)
@pytest.mark.parametrize("entry", ["rope_scaling", "rope_parameters"])
def test_factors_are_compared_with_the_base_wherever_it_stands(
    tmp_path: Path, entry: str, inside: dict[str, float], above: dict[str, float], accepted: bool
) -> None:
    """The base of the entry goes before that of the file, and each before the default."""
    model = written.new_model(SMALL)
    factors = llama3_factors(5e5)
    path = written.write(
        tmp_path / "m.gguf", model, change=lambda w: w.add_tensor("rope_freqs.weight", factors)
    )
    scaling = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    config = {name: value for name, value in config.items() if not name.startswith("rope_")}
    (tmp_path / "config.json").write_text(
        json.dumps({**config, **above, entry: {**scaling, **inside}})
    )
    if accepted:
        find_source(str(path))
        return
    with pytest.raises(CheckpointFormatError, match="which rope_scaling of"):
        find_source(str(path))


def small_file(
    path: Path, architecture: str, keys: Mapping[str, int], **tensors: tuple[int, ...]
) -> Path:
    """Write a file with zeros of these shapes, by the names of tensors without ``.weight``."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    for name, shape in tensors.items():
        writer.add_tensor(f"{name.replace('__', '.')}.weight", np.zeros(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_file_of_many_experts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of the file may stand for 65536, each of which takes memory; all are counted."""
    monkeypatch.setattr(gguf_file, "_MOST_TENSORS", 7)
    shapes = {f"blk__{layer}__ffn_gate_exps": (4, 1, 1) for layer in range(2)}
    with pytest.raises(CheckpointFormatError, match=r"the 4 experts of .*blk\.1.* more than 7 ten"):
        open_checkpoint(small_file(tmp_path / "m.gguf", "qwen3moe", {}, **shapes))


def test_tensors_of_other_dimensions_are_refused(tmp_path: Path) -> None:
    """Embeddings, experts and factors have the dimensions and sizes that models have."""
    path, layer = tmp_path / "m.gguf", "blk__0__ffn_gate_exps"
    with pytest.raises(CheckpointFormatError, match=r"token_embd\.weight should have 2 dim"):
        find_source(str(small_file(path, "llama", {}, token_embd=(8,))))
    for keys, shape, count in (
        ({}, (8,), "at most 65536"),
        ({}, (70_000, 1, 1), "at most 65536"),
        ({"expert_count": 4}, (5, 1, 1), "4"),
    ):
        message = rf"'blk\.0\.ffn_gate_exps\.weight' should have the weights of {count} experts"
        with pytest.raises(CheckpointFormatError, match=message):
            open_checkpoint(small_file(path, "qwen3moe", keys, **{layer: shape}))
    keys = {"attention.head_count": 1, "block_count": 1, "context_length": 8}
    many = small_file(path, "llama", keys, token_embd=(2, 8), rope_freqs=(70_000,))
    with open_checkpoint(many) as checkpoint:
        (file,) = checkpoint._files
        with pytest.raises(CheckpointFormatError, match="at most 65536 floats"):
            file.floats(file.rope_tensors["rope_freqs.weight"])


def test_dummy_weights_take_the_configuration_of_the_file(
    model: Any, whole: Path, tmp_path: Path
) -> None:
    """Values are made where weights are floats; those of blocks are refused by name."""
    path = written.write(tmp_path / "m.gguf", model)
    source = ModelSource.find(ModelConfig(model=str(path)), "dummy")
    with source.open() as dummy, open_checkpoint(path) as stored:
        assert {*dummy} == {*stored}
    with pytest.raises(UnsupportedModelError, match=r"blocks in .*model\.gguf"):
        ModelSource.find(ModelConfig(model=str(whole)), "dummy")
