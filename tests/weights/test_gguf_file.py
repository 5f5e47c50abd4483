"""GGUF files that gguf-py writes, whole and split; compared with the library's own values."""

from __future__ import annotations

import pickle
import runpy
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from vllm_module import ModelConfig
from vllm_module.build.model_source import ModelSource
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError
from vllm_module.weights import open_checkpoint
from vllm_module.weights.gguf.names import ARCHITECTURES, ROPE_TENSORS, renamed, stored_name

# Pytest's importlib mode has no imports between test files.
ONE: Any = runpy.run_path(str(Path(__file__).with_name("gguf_by_hand.py")))
written, IDS, model, logits = (ONE[name] for name in ("written", "IDS", "model", "logits"))
header, config_of = (ONE[name] for name in ("header", "config_of"))


@pytest.fixture(scope="module")
def whole(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file with a tensor of each kind: in floats of three types, and in blocks."""
    kinds = {"attn_q": "Q4_0", "attn_k": "F16", "attn_v": "BF16", "token_embd": "Q8_0"}
    path = tmp_path_factory.mktemp("whole") / "model.gguf"
    written.write(path, model, lambda name: kinds.get(name.split(".")[-2], "F32"))
    return path


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
            if name.endswith(("attn_q.weight", "token_embd.weight")):
                kind = "q4_0" if "attn_q" in name else "q8_0"
                blocks = checkpoint[f"{stored}_{kind}"].read()
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


def test_rows_that_are_not_asked_for_are_not_read(whole: Path, model: Any, tmp_path: Path) -> None:
    """Of an embedding in blocks, and of a gate, which is dequantized, the rows asked for are."""
    with open_checkpoint(whole) as checkpoint:
        table = checkpoint["model.embed_tokens.weight_q8_0"]
        target = torch.empty(24, 4, 34, dtype=torch.uint8)
        table.narrow(0, 48, 24).read_into(target)
        assert checkpoint.bytes_read == 24 * 4 * 34
        assert torch.equal(target, table.read()[48:72])
        begin, end = table.byte_range
        assert end - begin == 96 * 4 * 34 == sum(run.nbytes for run in table.runs())
    packed = gguf.quants.quantize(torch.randn(4, 128).numpy(), gguf.GGMLQuantizationType.Q8_0)
    expected = torch.tensor(gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0))

    def with_gate(writer: gguf.GGUFWriter) -> None:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor("blk.0.ffn_gate_inp.weight", packed, raw_dtype=kind)

    path = tmp_path / "gate.gguf"
    written.write(path, model, change=with_gate)
    with open_checkpoint(path) as checkpoint:
        gate = checkpoint["model.layers.0.block_sparse_moe.gate.weight"]
        target = torch.empty(2, 128, dtype=torch.bfloat16)
        gate.narrow(0, 1, 2).read_into(target)
        assert checkpoint.bytes_read == 2 * 4 * 34
        assert torch.equal(target, expected[1:3].bfloat16())
        assert torch.equal(gate.read(), expected)
        for dim, size in enumerate(gate.shape):
            part = gate.narrow(dim, 1, size - 2).narrow(dim, -1, 1)
            assert torch.equal(part.read(), expected.narrow(dim, size - 2, 1))
        with pytest.raises(ValueError, match="is not inside dim"):
            gate.narrow(0, 1, gate.shape[0])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_names_are_the_librarys(architecture: str) -> None:
    """gguf-py calls what each name is mapped to by this name too."""
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, 3)
    # This version's table of deepseek2 lacks them; that of GLM-4.5's architecture has them.
    further = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM4_MOE, 3)
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
        found = (further if "nextn" in component else names).get_name(known)
        assert found == f"blk.2.{component}", known
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


def test_a_first_part_has_perhaps_no_tensors(model: Any, tmp_path: Path) -> None:
    """As of llama-gguf-split and convert_hf_to_gguf.py with ``--no-tensor-first-split``."""
    written.write(tmp_path / "m.gguf", model, split_max_tensors=6, small_first_shard=True)
    parts = sorted(tmp_path.iterdir())
    assert [len(gguf.GGUFReader(path).tensors) for path in parts] == [0, 6, 6]
    expected = written.logits(model, IDS)
    torch.testing.assert_close(logits(tmp_path), expected, rtol=0, atol=1e-4)


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
