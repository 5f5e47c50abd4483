from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module import ModelConfig, get_model, tensor_parallel
from vllm_module.cli.output import grouped
from vllm_module.distributed import run_ranks
from vllm_module.report import fold

Run = Callable[..., Any]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_the_bytes_planned_are_the_bytes_loaded(run: Run, folder: Path, tp_size: int) -> None:
    """The bytes in a plan's byte ranges are the values that each rank loads."""
    plan = run("plan", folder, "--tp", tp_size, "--json").json
    row_bytes = {
        tensor["name"]: tensor["shape"][-1] * 2
        for tensor in run("inspect", folder, "--json").json["tensors"]
    }
    for rank in plan["ranks"]:
        with tensor_parallel(rank=rank["rank"], size=tp_size):
            model = get_model(model_config=ModelConfig(model=str(folder)))
        parts = defaultdict(list)
        for read in rank["reads"]:
            begin, end = read["byte_range"]
            raw = (folder / read["file"]).read_bytes()[begin:end]
            each, stride = read["bytes"] // read["pieces"], row_bytes[read["name"]]
            pieces = [raw[i * stride :][:each] for i in range(read["pieces"])]
            kept = torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.bfloat16)
            parts[read["parameter"]].append(kept.view(read["shape"]))
        assert set(parts) <= set(dict(model.named_parameters()))
        for name, parameter in model.named_parameters():
            # The slots are in order, and padding follows. A rank may hold nothing but padding.
            planned = torch.cat([*parts[name], parameter[:0]])
            assert torch.equal(planned, parameter[: len(planned)])
            assert not parameter[len(planned) :].any()
        assert rank["bytes_read"] == sum(read["bytes"] for read in rank["reads"])


def test_slots_of_a_fused_parameter(run: Run, folder: Path) -> None:
    """The table shows each projection, the range of its bytes, its parameter and its slot."""
    result = run("plan", folder, "--tp", 2)
    assert result.code == 0
    by_rank = result.out.split("rank 1 of 2")
    for slot, begin, end, of in (("q_proj", 1024, 2048, 2048), ("k_proj", 512, 1024, 1024)):
        (line,) = [line for line in by_rank[1].splitlines() if f".{slot}." in line]
        assert line.split()[0] == f"model.layers.{{0..2}}.self_attn.{slot}.weight"
        assert f"{begin}:{end} of {of}" in line
        assert line.split()[-2:] == ["model.layers.{0..2}.self_attn.qkv_proj.weight", slot]
    (line,) = [line for line in by_rank[1].splitlines() if "o_proj" in line]
    assert "32 x 32 in 32:2048 of 2048" in line
    every = run("plan", folder, "--tp", 2, "--all").out
    assert "model.layers.1.self_attn.q_proj.weight" in every
    assert "\x1b" not in result.out + every


def test_predicted_memory(run: Run, folder: Path) -> None:
    """Device memory is that of parameters and buffers; only casts and copies to CUDA are staged."""
    plans = {
        dtype: run("plan", folder, "--tp", 2, "--dtype", dtype, "--json").json["ranks"]
        for dtype in ("bfloat16", "float32")
    }
    for dtype, ranks in plans.items():
        config = ModelConfig(model=str(folder), dtype=dtype)  # type: ignore[arg-type]
        models = run_ranks(2, lambda _, c=config: get_model(model_config=c))  # type: ignore[misc]
        for model, rank in zip(models, ranks, strict=True):
            storages = {
                t.untyped_storage().data_ptr(): t.nbytes
                for t in (*model.parameters(), *model.buffers())
            }
            assert rank["device_bytes"] == sum(storages.values())
    assert all(rank["staging_bytes"]["cpu"] == 0 for rank in plans["bfloat16"])
    assert all(rank["staging_bytes"]["cpu"] > 0 for rank in plans["float32"])
    assert all(rank["staging_bytes"]["cuda"] > 0 for rank in plans["bfloat16"])


def test_problems_are_listed_and_the_exit_code_says_so(
    run: Run, edited: Callable[..., Path]
) -> None:
    """The message and the JSON name missing, unexpected and misshapen tensors."""

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.self_attn.q_proj.weight"]
        tensors["model.extra.weight"] = torch.zeros(1)
        tensors["model.norm.weight"] = torch.zeros(7)

    path = edited(damage)
    result = run("plan", path, "--tp", 2)
    assert result.code == 1
    assert "rank 1 of 2" in result.out
    assert result.err.startswith("error: Qwen3ForCausalLM refuses this checkpoint.\n")
    for name in ("layers.1.self_attn.q_proj.weight", "model.extra.weight", "model.norm.weight"):
        assert name in result.err
    assert "Traceback" not in result.err
    found = run("plan", path, "--json")
    assert found.code == 1
    assert found.json["missing"] == [
        [
            "model.layers.1.self_attn.q_proj.weight",
            "expected shape [32, 32], slot 'q_proj' of qkv_proj.weight",
        ]
    ]
    assert [name for name, _ in found.json["unexpected"]] == ["model.extra.weight"]
    assert [name for name, _ in found.json["misshapen"]] == ["model.norm.weight"]


def test_skipped_tensors_are_named_with_their_rule(run: Run, edited: Callable[..., Path]) -> None:
    """A skipped tensor is listed, and the exit code is 0."""

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.rotary_emb.inv_freq"] = torch.zeros(4)

    path = edited(add)
    result = run("plan", path)
    assert result.code == 0
    assert "skipped 1: rotary frequencies are computed from the configuration" in result.out
    assert list(run("plan", path, "--json").json["skipped"]) == ["model.rotary_emb.inv_freq"]


def test_a_group_with_different_numbers_of_experts() -> None:
    """Layers with different numbers of experts are one group, which two patterns cover exactly."""
    names = [f"layers.{i}.experts.{j}.w" for i, most in ((0, 2), (1, 4)) for j in range(most)]
    other = "layers.0.experts.0.scale"
    assert grouped([*names, other], lambda name: name, len) == [names, [other]]
    assert fold(names) == ["layers.0.experts.{0..1}.w", "layers.1.experts.{0..3}.w"] or fold(
        names
    ) == ["layers.{0..1}.experts.{0..1}.w", "layers.1.experts.{2..3}.w"]
