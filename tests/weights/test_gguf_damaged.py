"""GGUF files that break the format, or have what no model has: one error names the file."""

from __future__ import annotations

import re
import runpy
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from vllm_module import ModelConfig
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
from vllm_module.weights.source import find_source

# Pytest's importlib mode has no imports between test files.
ONE: Any = runpy.run_path(str(Path(__file__).with_name("gguf_by_hand.py")))
written, model, logits, header = (ONE[name] for name in ("written", "model", "logits", "header"))


@pytest.fixture(scope="module")
def whole(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file with a tensor of each kind: in floats of three types, and in blocks."""
    kinds = {"attn_q": "Q4_0", "attn_k": "F16", "attn_v": "BF16", "token_embd": "Q8_0"}
    path = tmp_path_factory.mktemp("whole") / "model.gguf"
    written.write(path, model, lambda name: kinds.get(name.split(".")[-2], "F32"))
    return path


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
        tmp_path / "m.gguf", model, change=lambda w: w.add_tensor("blk.0.ffn_other.weight", extra)
    )
    with pytest.raises(UnexpectedWeightError, match=r"blk\.0\.ffn_other\.weight"):
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
    keys_of_heads = small_file(path, "deepseek2", {}, blk__0__attn_k_b=(12, 4))  # ik_llama.cpp's
    message = r"'blk\.0\.attn_k_b\.weight' should have the dimensions heads, .* is \[12, 4\]"
    with pytest.raises(CheckpointFormatError, match=message):
        open_checkpoint(keys_of_heads)
    keys = {"attention.head_count": 1, "block_count": 1, "context_length": 8}
    many = small_file(path, "llama", keys, token_embd=(2, 8), rope_freqs=(70_000,))
    with open_checkpoint(many) as checkpoint:
        (file,) = checkpoint._files
        with pytest.raises(CheckpointFormatError, match="at most 65536 floats"):
            file.floats(file.rope_tensors["rope_freqs.weight"])
