"""``--quantization`` of plan, load and generate."""

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
    """The plan's device memory is that of the loaded model's tensors; its bytes are those read."""
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
    """There is a line for quantizing only if something is quantized."""
    assert "not quantized yet" not in run("plan", folder).out
    result = run("plan", folder, "--quantization", "fp8_per_channel")
    assert "cut in 1" not in result.out
    assert "  whole, quantized  " in result.out
    assert "\nnot quantized yet, at the peak  " in result.out


@pytest.mark.parametrize("scheme", SCHEMES)
def test_generate_with_it(run: Run, folder: Path, scheme: str) -> None:
    """A quantized model generates the same tokens each time."""
    ids = ("--prompt-ids", "1,2,3", "--max-new-tokens", 4, "--quantization", scheme)
    result = run("generate", folder, *ids)
    assert result.code == 0
    assert result.out == run("generate", folder, *ids).out


def test_blocks_that_do_not_fit_are_refused(run: Run, folder: Path) -> None:
    """The message names the layer, the slot and the numbers."""
    result = run("load", folder, "--quantization", "fp8_per_block")
    assert result.code == 1
    assert result.err.startswith("error: model.layers.0.self_attn.qkv_proj cannot be held in")
    assert "ends inside a scale block of 128" in result.err
    assert "Traceback" not in result.err


def test_a_scheme_that_does_not_exist_is_wrong_usage(run: Run, folder: Path) -> None:
    """The message lists the schemes."""
    result = run("load", folder, "--quantization", "fp4")
    assert result.code == 2
    assert "fp8_per_channel" in result.err


@pytest.mark.parametrize(
    ("option", "value", "meant"),
    [
        ("--dtype", "bf16", "'bfloat16'"),
        ("--dtype", "fp16", "'float16'"),
        ("--dtype", "FLOAT16", "'float16'"),
        ("--quantization", "fp8_per_chanel", "'fp8_per_channel'"),
        ("--dtype", "x", None),
    ],
)
def test_a_value_that_is_no_choice_is_compared_with_the_choices(
    run: Run, folder: Path, option: str, value: str, meant: str | None
) -> None:
    """The message begins with the value, and names the choice that is most like it."""
    result = run("load", folder, option, value)
    assert result.code == 2
    assert result.err.startswith(f"error: Invalid value for '{option}': '{value}' is not one of ")
    assert ("Did you mean" in result.err) == (meant is not None)
    assert f"Did you mean {meant}?\n" in result.err or meant is None
