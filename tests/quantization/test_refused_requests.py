"""Requests that are refused: without the library, after loading, and on the command line."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module import LoadConfig, get_model
from vllm_module.errors import UnsupportedModelError, WeightReadError
from vllm_module.quantization import EightBitMethod, quantize, rules_for

_refusing = runpy.run_path(str(Path(__file__).with_name("refusing.py")))
ATTENTION = _refusing["ATTENTION"]
ask = _refusing["ask"]
first = _refusing["first"]
refuse = _refusing["refuse"]
scaled = _refusing["scaled"]


@pytest.mark.parametrize("module", ["compressed_tensors", "compressed_tensors.quantization"])
def test_the_library_that_reads_a_layout_is_missing(
    published: Any, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    """Without compressed-tensors its layout is refused, and the error says what to install."""
    ours, theirs = published("fp8-block"), published("ct-channel-dynamic")
    for name in list(sys.modules):
        if name == module or name.startswith(f"{module}."):
            monkeypatch.setitem(sys.modules, name, None)
    message = refuse(theirs, UnsupportedModelError)
    assert "pip install 'compressed-tensors>=0.13'" in message
    assert get_model(model_config=ask(ours)).load_report.ok


def test_quantizing_after_loading(full_precision: Any) -> None:
    """A loaded model cannot be quantized: an error says so, and the model runs as before."""
    model: Any = get_model(model_config=ask(full_precision))
    ids = full_precision.ids
    before = model(ids, torch.arange(len(ids)))
    rules = rules_for("fp8_per_channel", None)
    assert rules is not None
    with pytest.raises(RuntimeError, match="is loaded: quantize it before it is"):
        quantize(model, rules)
    assert torch.equal(model(ids, torch.arange(len(ids))), before)
    for module in model.modules():
        assert not isinstance(getattr(module, "quant_method", None), EightBitMethod)


def test_kv_cache_scales_after_loading(full_precision: Any) -> None:
    """A loaded model gets no KV cache scales, because no load would fill them."""
    model: Any = get_model(model_config=ask(full_precision))
    stored = {"quant_method": "fp8", "kv_cache_scheme": "static", "ignored_layers": ["re:.*"]}
    rules = rules_for(None, stored)
    assert rules is not None
    with pytest.raises(RuntimeError, match="is loaded: quantize it before it is"):
        quantize(model, rules)
    model.check_ready()


@pytest.mark.parametrize("command", ["load", "plan", "generate"])
@pytest.mark.parametrize(
    ("layout", "asked", "reason"),
    [
        ("fp8-block", "fp8_per_channel", "quantized already, by 'fp8'"),
        ("fp8-block", "compressed-tensors", "quantized already, by 'fp8'"),
        ("ct-channel-dynamic", "fp8", "quantized already, by 'compressed-tensors'"),
        ("full", "compressed-tensors", "config.json has no quantization_config"),
    ],
)
def test_the_command_line_refuses_in_one_line(
    published: Any,
    full_precision: Any,
    run: Any,
    command: str,
    layout: str,
    asked: str,
    reason: str,
) -> None:
    """``--quantization`` that contradicts config.json exits with 1 and a message of one line."""
    source = full_precision if layout == "full" else published(layout)
    options = ["--prompt-ids", "1"] if command == "generate" else []
    result = run(command, source.folder, "--quantization", asked, *options)
    assert result.code == 1
    assert result.out == ""
    assert reason in result.err
    assert repr(asked) in result.err
    assert "Traceback" not in result.err
    assert len(result.err.strip().splitlines()) == 1


def test_the_command_line_refuses_values_by_name(published: Any, edited: Any, run: Any) -> None:
    """A scale that is NaN makes ``load`` exit with 1, name the scale and say where it is."""
    name = f"{ATTENTION}.k_proj.weight_scale"
    broken = edited(published("ct-tensor-dynamic"), scaled(name, first(float("nan"))))
    result = run("load", broken.folder, "--device", "cpu")
    assert result.code == 1
    assert "Traceback" not in result.err
    refusal, folder, outcome = result.err.strip().splitlines()
    assert "qkv_proj.weight_scale (slot 'k_proj')" in refusal
    assert folder == f"The checkpoint is in {broken.folder}."
    assert outcome.startswith("Nothing that the model held before was overwritten")


def test_a_progress_bar_changes_no_refusal(published: Any, edited: Any) -> None:
    """With a progress bar, which needs a plan first, the same checkpoint is refused."""
    name = f"{ATTENTION}.k_proj.weight_scale"
    broken = edited(published("ct-tensor-dynamic"), scaled(name, first(float("nan"))))
    with pytest.raises(WeightReadError, match="k_proj"):
        get_model(model_config=ask(broken), load_config=LoadConfig(show_progress=True))
