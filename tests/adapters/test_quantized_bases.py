"""Adapters beside stored weights of 4 and 8 bits, against PEFT's beside what these stand for."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module import LLM, SamplingParams
from vllm_module.distributed import run_ranks
from vllm_module.errors import UnsupportedModelError

SUPPORT = runpy.run_path(str(Path(__file__).with_name("support.py")))
STORED = runpy.run_path(
    str(Path(__file__).parents[1] / "quantization" / "test_packed_checkpoints.py")
)
packing = STORED["packing"]
BITSANDBYTES = runpy.run_path(
    str(Path(__file__).parents[1] / "quantization" / "bnb_checkpoints.py")
)
GGUF = runpy.run_path(str(Path(__file__).parents[1] / "weights" / "gguf_models.py"))
KINDS = {"gptq-act-order": 2, "awq": 1, "ct-int4-with-zeros": 2, "ct-int8": 1}  # and ranks


@pytest.fixture(scope="module", params=KINDS)
def quantized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Write a quantized model, and an adapter of it; return PEFT's logits, and the number of ranks.

    PEFT's model has the weights that the stored ones stand for.
    """
    path, wide = tmp_path_factory.mktemp(request.param), dict[str, torch.Tensor]()
    config, make, entries = STORED["CHECKPOINTS"][request.param]

    def made(name: str, weight: torch.Tensor) -> Any:
        layer = make(name, weight)
        if layer is not None:
            wide[f"{name}.weight"] = layer.weight
        return layer

    base = packing.publish(path, config, made, entries)
    model = packing.publishing.randomized(config)
    model.load_state_dict(wide, strict=False)
    settings = {"target_modules": "all-linear", "lora_alpha": 2}
    tuned = SUPPORT["adapt"](model.float().eval(), path / "adapter", **settings)
    with torch.no_grad():
        logits = tuned(base.ids[None]).logits[0]
    assert (logits - base.logits).abs().max() > 1
    return base, path / "adapter", logits, KINDS[request.param]


def test_logits_are_those_of_peft(quantized: Any) -> None:
    base, folder, wanted, size = quantized
    load_adapter: Callable[..., Any] = SUPPORT["load_adapter"]

    def ranks(rank: int) -> torch.Tensor:
        model = STORED["load"](base)
        logits: torch.Tensor = SUPPORT["adapted_logits"](
            model, load_adapter(model, folder), base.ids
        )
        return logits

    for logits in run_ranks(size, ranks):
        torch.testing.assert_close(logits, wanted, rtol=0, atol=STORED["WITHIN"])


def test_a_and_b_have_16_bits(quantized: Any) -> None:
    """They have the dtype of the model's products, whatever its weights are stored in."""
    base, folder, wanted, _ = quantized
    model = SUPPORT["load_base"](base.folder, dtype="bfloat16")
    adapter = SUPPORT["load_adapter"](model, folder)
    assert {each.dtype for each in adapter.tensors()} == {torch.bfloat16}
    found = SUPPORT["adapted_logits"](model, adapter, base.ids).float()
    error, moved = (found - wanted).abs().mean(), (wanted - base.logits).abs().mean()
    assert error < moved / 20


@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("size", [1, 4])
def test_a_file_of_llama_cpp(tmp_path: Path, name: str, size: int) -> None:
    """It stores q and k in another order than transformers, which PEFT's adapters have."""
    model, ids = GGUF["new_model"](GGUF["CONFIGS"][name]), torch.arange(3, 48, 5)
    path = GGUF["write"](tmp_path / "model.gguf", model, lambda name: "Q8_0")
    base = GGUF["logits"](model, ids)
    settings = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "lora_alpha": 2}
    tuned = SUPPORT["adapt"](model, tmp_path / "adapter", **settings)
    with torch.no_grad():
        wanted = tuned(ids[None]).logits[0]
    assert (wanted - base).abs().max() > 1

    def ranks(rank: int) -> torch.Tensor:
        model = SUPPORT["load_base"](path)
        adapter = SUPPORT["load_adapter"](model, tmp_path / "adapter")
        logits: torch.Tensor = SUPPORT["adapted_logits"](model, adapter, ids)
        return logits

    for logits in run_ranks(size, ranks):
        torch.testing.assert_close(logits, wanted, rtol=0, atol=STORED["WITHIN"])


def test_codes_are_no_weights_to_merge_into(quantized: Any) -> None:
    """A running engine says which layer is quantized, and goes on."""
    base, folder, *_ = quantized
    with LLM(str(base.folder), kv_cache_memory_bytes=1 << 20, dtype="float32") as llm:
        refuses_to_merge(llm, folder)


def refuses_to_merge(llm: LLM, adapter: Path) -> None:
    def tokens() -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=4, detokenize=False)
        [output] = llm.generate([[5, 9, 2, 41]], params, use_tqdm=False, lora_request="a")
        return list(output.outputs[0].token_ids)

    llm.load_adapter("a", adapter)
    before = tokens()
    with pytest.raises(UnsupportedModelError, match=r"qkv_proj is quantized .*convert --adapter"):
        llm.merge_adapter("a")
    assert tokens() == before


@pytest.mark.parametrize("kind", ["nf4", "int8"])  # a vector of codes, and a matrix of them
def test_codes_of_bitsandbytes(kind: str, tmp_path: Path) -> None:
    """Its codes have the name of a weight in full precision."""
    base = BITSANDBYTES["publish"](tmp_path / "base", "qwen3", kind)
    model = packing.publishing.randomized(BITSANDBYTES["MODELS"]["qwen3"])
    SUPPORT["adapt"](model, tmp_path / "adapter", target_modules=["q_proj"])
    with LLM(str(base.folder), kv_cache_memory_bytes=1 << 20, dtype="float32") as llm:
        refuses_to_merge(llm, tmp_path / "adapter")
