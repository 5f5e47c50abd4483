"""--quantization: what plan predicts, load does, and generate runs on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_module import ModelConfig, get_model, tensor_parallel

Run = Callable[..., Any]
SCHEMES = ["fp8_per_tensor", "fp8_per_channel", "int8_per_channel_weight_only"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_memory_planned_is_memory_taken(run: Run, folder: Path, scheme: str) -> None:
    """The plan's device memory is what the loaded model's tensors have, and so are bytes read."""
    plan = run("plan", folder, "--tp", 2, "--quantization", scheme, "--json").json
    load = run("load", folder, "--tp", 2, "--quantization", scheme, "--json", "--device", "cpu")
    full = run("plan", folder, "--tp", 2, "--json").json
    for rank, planned in enumerate(plan["ranks"]):
        with tensor_parallel(rank=rank, size=2):
            config = ModelConfig(model=str(folder), quantization=scheme)
            model = get_model(model_config=config)
        tensors = (*model.parameters(), *model.buffers())
        assert planned["device_bytes"] == sum(tensor.nbytes for tensor in tensors)
        assert planned["device_bytes"] < full["ranks"][rank]["device_bytes"]
        assert planned["bytes_read"] == load.json["ranks"][rank]["bytes_read"]
        assert planned["bytes_read"] == full["ranks"][rank]["bytes_read"]
        largest = max(read["bytes"] for read in planned["reads"] if "_proj" in read["name"])
        assert largest <= planned["quantizing_bytes"] <= 4 * largest
        assert full["ranks"][rank]["quantizing_bytes"] == 0


def test_the_table_says_that_something_is_being_quantized(run: Run, folder: Path) -> None:
    """The column is there where it has something to say."""
    assert "quantizing" not in run("plan", folder).out
    result = run("plan", folder, "--quantization", "fp8_per_channel")
    assert "quantizing" in result.out
    assert "tensors being quantized" in result.out


@pytest.mark.parametrize("scheme", SCHEMES)
def test_generate_runs_on_it(run: Run, folder: Path, scheme: str) -> None:
    """A quantized model answers, the same each time."""
    ids = ("--prompt-ids", "1,2,3", "--max-new-tokens", 4, "--quantization", scheme)
    result = run("generate", folder, *ids)
    assert result.code == 0
    assert result.out == run("generate", folder, *ids).out


def test_quantized_ranks_generate(run: Run, folder: Path) -> None:
    """Ranks in processes of their own quantize what is theirs, and answer."""
    ids = ("--prompt-ids", "1,2,3", "--max-new-tokens", 4, "--quantization", "fp8_per_channel")
    result = run("generate", folder, *ids, "--tp", 2)
    assert (result.code, result.out.count(",")) == (0, 3)


def test_blocks_that_do_not_fit_are_refused_in_words(run: Run, folder: Path) -> None:
    """One line names the layer, the part, and the numbers."""
    result = run("load", folder, "--quantization", "fp8_per_block")
    assert result.code == 1
    assert result.err.startswith("error: model.layers.0.self_attn.qkv_proj cannot be held in")
    assert "ends inside a scale block of 128" in result.err
    assert "Traceback" not in result.err


def test_a_scheme_that_does_not_exist_is_wrong_usage(run: Run, folder: Path) -> None:
    """The message lists those that do."""
    result = run("load", folder, "--quantization", "fp4")
    assert result.code == 2
    assert "fp8_per_channel" in result.err
