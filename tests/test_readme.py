"""The README's code is run, and its claim about transformers is checked."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from safetensors.torch import load_file, save_file

from vllm_module.build import registry
from vllm_module.testing import (
    LAWS,
    assert_sharding_equivalent,
    random_weights,
    write_checkpoint,
)

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_model_of_the_readme_loads_at_every_size(capsys: pytest.CaptureFixture[str]) -> None:
    """The README's code runs as printed and prints what the README says it prints."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    shown = re.search(r"```text\n(.*?)```", README, re.DOTALL)
    assert shown is not None
    namespace: dict[str, Any] = {"__name__": "readme"}
    for block in blocks[:3]:
        exec(compile(block, "README.md", "exec", dont_inherit=True), namespace)
    assert capsys.readouterr().out == shown.group(1)
    assert len(blocks[0].splitlines()) < 35
    assert len(blocks[2].splitlines()) <= 10
    before = settings.get_current_profile_name()
    settings.register_profile("readme", settings.get_profile(before), max_examples=5)
    settings.load_profile("readme")
    for law in LAWS:
        namespace["test_my_model_keeps_the_law"](law)
    settings.load_profile(before)


def test_the_mistake_of_the_readme_is_reported_as_shown() -> None:
    """A forgotten reduction fails with the message and the draws that the README shows."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    shown = re.findall(r"```text\n(.*?)```", README, re.DOTALL)[1]
    wrong = blocks[0].replace(
        "inner, hidden, bias=False)", "inner, hidden, bias=False, reduce_results=False)"
    )
    assert wrong != blocks[0]
    namespace: dict[str, Any] = {"__name__": "readme"}
    for block in (wrong, "import torch", blocks[2]):
        exec(compile(block, "README.md", "exec", dont_inherit=True), namespace)
    with pytest.raises(AssertionError) as failed:
        namespace["test_my_model_keeps_the_law"](assert_sharding_equivalent)
    lines = [f"AssertionError: {failed.value}", *"\n".join(failed.value.__notes__).splitlines()]
    lines = [line.partition("  #")[0] for line in lines if line.startswith(("Assertion", "Draw"))]
    # How far outputs differ depends on the last bits of a matmul.
    assert [re.sub(r"0\.\d+", "x", line) for line in lines] == [
        re.sub(r"0\.\d+", "x", line) for line in shown.splitlines()
    ]


def test_the_models_own_file_speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model that the README registers loads by its own names of entries, and generates."""
    # Replaced: what a process registers stays, because no user needs to take it back.
    monkeypatch.setattr(registry, "registered", registry.Registrations())
    block = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[3]
    namespace: dict[str, Any] = {"__name__": "readme"}
    exec(compile(block, "README.md", "exec", dont_inherit=True), namespace)
    config = {
        "architectures": ["ScaledForCausalLM"], "n_embd": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 32, "dtype": "float32",
        "logit_scale": 2.0,
    }  # fmt: skip
    parsed = namespace["ScaledConfig"](**config)
    weights = random_weights(namespace["ScaledForCausalLM"](parsed).expected_weights(), seed=0)
    assert "lm_head.weight" not in weights
    write_checkpoint(tmp_path, weights, config=config)
    with namespace["LLM"](str(tmp_path), device="cpu", kv_cache_memory_bytes=1 << 18) as llm:
        (output,) = llm.generate({"prompt_token_ids": [1, 2, 3]}, use_tqdm=False)
    assert output.error is None
    assert len(output.outputs[0].token_ids) == 16


def test_transformers_warns_of_a_missing_weight_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The table's claim: a missing weight is random, and the model runs."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING):
        one, two = (LlamaForCausalLM.from_pretrained(tmp_path) for _ in range(2))
    queries = [model.model.layers[0].self_attn.q_proj.weight for model in (one, two)]
    assert not torch.equal(*queries)
    assert torch.isfinite(one(torch.tensor([[1, 2, 3]])).logits).all()
