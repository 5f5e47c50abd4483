"""OlmoHybrid keeps the laws of loading, and loads files of other names than transformers writes."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import ModelConfig, WeightLoadError, get_model
from vllm_module.models.olmo_hybrid import OlmoHybridForCausalLM
from vllm_module.testing import LAWS, model_configs

CASES = runpy.run_path(str(Path(__file__).with_name("configurations.py")))
UNEQUAL = CASES["CONFIGS"]["olmo-hybrid"] | {"linear_value_head_dim": 12}
SIZES = [32, 32, 96]  # features of queries, keys and values


@pytest.mark.parametrize("law", LAWS)
def test_olmohybrid_keeps_the_law(law) -> None:
    """Whatever the configuration and however many ranks share it, the law holds."""
    law(OlmoHybridForCausalLM, model_configs("OlmoHybridForCausalLM"))


@pytest.fixture(scope="module")
def theirs() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**UNEQUAL)).eval()


def load(folder: Path, tensors: dict[str, torch.Tensor], theirs: Any) -> Any:
    theirs.config.architectures = ["OlmoHybridForCausalLM"]
    theirs.config.save_pretrained(folder)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    return get_model(model_config=ModelConfig(model=str(folder), dtype="float32"))


@pytest.mark.parametrize("whole", [False, True])
def test_published_names(whole: bool, theirs: Any, tmp_path: Path) -> None:
    """Convolutions of different sizes, each a tensor or all one; predictors are skipped."""
    tensors = {"mtp.norm.weight": torch.ones(64)}
    for name, tensor in theirs.state_dict().items():
        apart = [name.replace("conv1d", f"{part}_conv1d") for part in "qkv"]
        split = "conv1d" in name and not whole
        tensors |= zip(apart, tensor.split(SIZES), strict=True) if split else [(name, tensor)]
    model, ids = load(tmp_path, tensors, theirs), torch.arange(20)
    with torch.no_grad():
        logits = model.compute_logits(model(ids, ids))
        torch.testing.assert_close(logits, theirs(input_ids=ids[None]).logits[0])
    assert model.load_report is not None
    assert set(model.load_report.skipped) == {"mtp.norm.weight"}


def test_equal_parts_of_different_convolutions_are_refused(theirs: Any, tmp_path: Path) -> None:
    """transformers 5.23 writes them so; no entry of the file says where one ends."""
    theirs.save_pretrained(tmp_path)
    with pytest.raises(
        WeightLoadError, match=r"q_conv1d\.weight: expected shape \[32, 1, 4\], got \[54"
    ):
        get_model(model_config=ModelConfig(model=str(tmp_path), dtype="float32"))
