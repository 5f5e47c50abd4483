"""The manifest of a sharded state: what a load may ask of it, and which files it takes."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_module import ModelConfig, QuantizationConfig
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError
from vllm_module.weights.checkpoint import LocalFiles
from vllm_module.weights.safetensors import SafetensorsFile
from vllm_module.weights.sharded_state import (
    ShardedState,
    cutting_entries,
    quantization_settings,
    read_manifest,
)
from vllm_module.weights.source import find_source

# Entries of config.json that change which part of a tensor a rank has, or in what order.
CUTTING: dict[str, Any] = {
    "hidden_size": 8, "intermediate_size": 8, "vocab_size": 8, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 4, "stored_rotary_pairs": True, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "n_shared_experts": 1, "v_head_dim": 4,
    "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "q_lora_rank": 8,
    "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
}  # fmt: skip
FIELDS: dict[str, Any] = {
    "format_version": 1, "library_version": "0", "architectures": ["A"], "tensor_parallel_size": 2,
    "enable_expert_parallel": False, "dtype": "bfloat16", "config": {}, "quantization": None,
}  # fmt: skip


def write(folder: Path, **changes: Any) -> dict[str, Any]:
    """Write a state of two ranks, of which the first has two files; return its manifest."""
    ranks: list[list[dict[str, Any]]] = [[], []]
    for rank, part in ((0, 0), (0, 1), (1, 0)):
        path = folder / f"model-rank-{rank}-part-{part}.safetensors"
        save_file({f"w{part}": torch.full((2,), float(10 * rank + part))}, path)
        with closing(SafetensorsFile(path)) as file:
            fingerprint = file.fingerprint().hex()
        ranks[rank].append({"size": path.stat().st_size, "fingerprint": fingerprint})
    manifest = {**FIELDS, "ranks": ranks, **changes}
    (folder / "sharded_state.json").write_text(json.dumps(manifest))
    return manifest


def found(folder: Path) -> Any:
    return read_manifest(folder)


def config(**entries: Any) -> Any:
    return SimpleNamespace(architectures=["A"], **entries)


@pytest.mark.parametrize("name", CUTTING)
def test_every_entry_by_which_tensors_are_cut_is_compared(tmp_path: Path, name: str) -> None:
    """Another value, and an entry that is new or gone, needs other files; others may change."""
    value = CUTTING[name]
    assert cutting_entries(config(**CUTTING, rope_theta=3)) == CUTTING
    write(tmp_path, config=CUTTING)
    settle: Any = found(tmp_path).settle
    asked = ModelConfig(model=str(tmp_path))
    assert settle(asked, config(**CUTTING, rope_theta=3)).dtype == "bfloat16"
    other = not value if isinstance(value, bool) else value + 1
    for wrong in (other, None):
        with pytest.raises(UnsupportedModelError, match=f"with {name} {value!r}, and {wrong}"):
            settle(asked, config(**{**CUTTING, name: wrong}))
    write(tmp_path, config={key: each for key, each in CUTTING.items() if key != name})
    with pytest.raises(UnsupportedModelError, match=f"written with {name} None"):
        found(tmp_path).settle(asked, config(**CUTTING))


@pytest.mark.parametrize(
    ("held", "asked", "got"),
    [
        ({}, {"dtype": "auto"}, {"dtype": "bfloat16", "quantization": None}),
        ({}, {"dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        ({}, {"dtype": "float16"}, "dtype 'bfloat16', and 'float16'"),
        ({"dtype": "float16"}, {}, {"dtype": "float16"}),
        ({}, {"enable_expert_parallel": True}, "enable_expert_parallel False, and True"),
        ({"enable_expert_parallel": True}, {}, "enable_expert_parallel True, and False"),
        ({"enable_expert_parallel": True}, {"enable_expert_parallel": True}, {}),
        ({"architectures": ["B"]}, {}, r"architectures \['B'\], and \['A'\]"),
        ({"architectures": ["A", "B"]}, {}, "architectures"),
        ({}, {"quantization": "fp8"}, "quantization None, and {'scheme': 'fp8_per_tensor'}"),
        ({"quantization": {"scheme": "fp8_per_tensor"}}, {}, {"quantization": "fp8_per_tensor"}),
        (
            {"quantization": {"scheme": "fp8_per_tensor"}}, {"quantization": "fp8"},
            {"quantization": "fp8_per_tensor"},
        ),
        (
            {"quantization": {"scheme": "fp8_per_tensor"}}, {"quantization": "fp8_per_channel"},
            "quantization {'scheme': 'fp8_per_tensor'}, and {'scheme': 'fp8_per_channel'}",
        ),
        ({"quantization": "config.json"}, {"quantization": "fp8"}, {"quantization": "fp8"}),
        ({"quantization": "config.json"}, {}, {"quantization": None}),
    ],
)  # fmt: skip
def test_what_a_load_asks_for_is_what_was_written(
    tmp_path: Path, held: dict[str, Any], asked: dict[str, Any], got: Any
) -> None:
    """What it leaves open is filled in; what differs is refused with both values."""
    write(tmp_path, **held)
    settle = found(tmp_path).settle
    model = ModelConfig(model=str(tmp_path), **asked)
    if isinstance(got, str):
        with pytest.raises(UnsupportedModelError, match=f"was written with {got}"):
            settle(model, config())
        return
    settled = settle(model, config())
    assert {name: getattr(settled, name) for name in got} == got
    assert settled.model == str(tmp_path)


def test_settings_of_quantization_have_one_spelling() -> None:
    """A name, its older spelling, and an object with the same settings are equal."""
    assert quantization_settings(None) is None
    assert quantization_settings("fp8") == {"scheme": "fp8_per_tensor"}
    assert quantization_settings("int8") == {"scheme": "int8"}
    assert quantization_settings(QuantizationConfig(scheme="fp8_per_channel")) == {
        "scheme": "fp8_per_channel"
    }


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"format_version": 2}, "format_version should be 1"),
        ({"format_version": 0}, "format_version should be 1"),
        ({"format_version": True}, "format_version should be 1"),
        ({"format_version": 1.0}, "format_version should be 1"),
        ({"format_version": None}, "format_version should be 1"),
        ({"tensor_parallel_size": 1}, "files of 1 ranks"),
        ({"tensor_parallel_size": 3}, "files of 3 ranks"),
        ({"tensor_parallel_size": 0}, "is damaged"),
        ({"tensor_parallel_size": "2"}, "is damaged"),
        ({"dtype": "float64"}, "is damaged"),
        ({"enable_expert_parallel": 0}, "is damaged"),
        ({"architectures": "A"}, "is damaged"),
        ({"config": None}, "is damaged"),
        ({"quantization": {"scheme": "none such"}}, "is damaged"),
        ({"quantization": "fp8"}, "is damaged"),
        ({"other": 1}, "is damaged"),
        ({"ranks": [[], []]}, "files of 2 ranks, and lists those of 0"),
        ({"ranks": [[{"size": 1, "fingerprint": "0" * 64}], []]}, "lists those of 1"),
        ({"ranks": [[{"size": -1, "fingerprint": "0" * 64}]] * 2}, "is damaged"),
        ({"ranks": [[{"size": 1, "fingerprint": "0" * 63}]] * 2}, "is damaged"),
        ({"ranks": [[{"size": 1, "fingerprint": "G" * 64}]] * 2}, "is damaged"),
    ],
)
def test_a_damaged_manifest_is_refused(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    write(tmp_path, **changes)
    with pytest.raises(CheckpointFormatError, match=rf"sharded_state\.json.*{problem}"):
        found(tmp_path)


def test_a_manifest_is_looked_for_where_it_may_be(tmp_path: Path) -> None:
    """By default it is found if it is there; for another format it is not looked for."""
    with pytest.raises(CheckpointFormatError, match="holds no sharded state"):
        found(tmp_path)
    manifest = write(tmp_path)
    assert found(tmp_path).model_dump() == manifest
    (tmp_path / "config.json").write_text("{}")
    for load_format in ("auto", "layered", "sharded_state"):
        source: Any = find_source(str(tmp_path), load_format=load_format)
        assert source.load_format == "sharded_state"
    other: Any = find_source(str(tmp_path), load_format="safetensors")
    assert other.load_format == "safetensors"


def test_each_rank_has_its_own_files_and_no_others(tmp_path: Path) -> None:
    """Files are opened when a rank is asked for, and compared with the manifest."""
    manifest = write(tmp_path)
    state = ShardedState(LocalFiles(tmp_path))
    assert (state.nbytes, state.bytes_read) == (0, 0)
    assert {name: handle.read().tolist() for name, handle in state.of_rank(0).items()} == {
        "w0": [0, 0], "w1": [1, 1],
    }  # fmt: skip
    assert (state.nbytes, state.bytes_read) == (16, 16)
    assert state.of_rank(1)["w0"].read().tolist() == [10, 10]
    assert (state.nbytes, state.bytes_read) == (24, 24)
    assert sorted(state) == ["w0", "w1"]
    assert state.of_rank(1) is state.of_rank(1)
    before = state.fingerprint
    state.close()
    second = tmp_path / "model-rank-1-part-0.safetensors"
    data = second.read_bytes()
    for changed, problem in (
        (data + b"\0", f"should have {len(data)} bytes, .* has {len(data) + 1}"),
        (data[:-1], f"should have {len(data)} bytes, .* has {len(data) - 1}"),
        (data[:-1] + b"\1", "should have the fingerprint"),
        (None, "is not there, and sharded_state.json lists it for rank 1"),
    ):
        second.unlink()
        if changed is not None:
            second.write_bytes(changed)
        state = ShardedState(LocalFiles(tmp_path))
        assert state.fingerprint == before
        assert state.of_rank(0)["w1"].read().tolist() == [1, 1]
        with pytest.raises(CheckpointFormatError, match=problem):
            state.of_rank(1)
        state.close()
        second.write_bytes(data)
    (tmp_path / "sharded_state.json").write_text(json.dumps({**manifest, "library_version": "1"}))
    assert ShardedState(LocalFiles(tmp_path)).fingerprint != before


def test_a_refused_file_of_a_rank_is_closed_and_so_are_those_before_it(tmp_path: Path) -> None:
    """No descriptor is left while somebody holds the error; the other ranks can be read."""
    write(tmp_path)
    first, second = (tmp_path / f"model-rank-0-part-{part}.safetensors" for part in range(2))
    for changed in (first, second):
        data = changed.read_bytes()
        for other in (data + b"\0", data[:-1], data[:-1] + bytes([data[-1] ^ 1]), None):
            changed.unlink()
            if other is not None:
                changed.write_bytes(other)
            with closing(ShardedState(LocalFiles(tmp_path))) as state:
                before = len(os.listdir("/proc/self/fd"))
                with pytest.raises(CheckpointFormatError, match=changed.name) as refused:
                    state.of_rank(0)
                assert len(os.listdir("/proc/self/fd")) == before
                del refused
                assert state.of_rank(1)["w0"].read().tolist() == [10, 10]
            changed.write_bytes(data)
