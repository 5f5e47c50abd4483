"""Tiny models whose products and attention run in the loops for a CPU: transformers' tokens."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_module import LLM, SamplingParams
from vllm_module.kernels.matmul import code_rows_matmul, compiled_floats, linear
from vllm_module.kernels.matmul.products import Products
from vllm_module.runtime.ranks import executor

pytest.importorskip("numba")
STEPS = 32  # as in conftest.py
NAMES = "gpt2", "llama", "gemma2", "mixtral", "deepseek-v3", "qwen3-next", "mamba2", "bamba"


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_transformers(
    name: str, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of any size and dtype are for the loops here, and up to eight rows at once."""
    checkpoint, kinds = tiny(name), set()
    multiply = code_rows_matmul._multiply

    def counted(kind: int, ordered: bool) -> Any:
        kinds.add(kind)
        return multiply(kind, ordered)

    # Tiny weights gain nothing, and clocks of this machine would decide.
    monkeypatch.setattr(linear, "_LARGE_WEIGHT", 1)
    chosen = Products(floats=range(1, 9), pages=True)
    monkeypatch.setattr(executor, "fastest_for", lambda *_, **__: chosen)
    monkeypatch.setattr(code_rows_matmul, "_multiply", counted)
    prompts = [{"prompt_token_ids": ids} for ids in checkpoint.reference.prompts]
    asked = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 128}
    with LLM(str(checkpoint.folder), max_num_seqs=4, max_num_batched_tokens=7, **options) as llm:
        outputs = llm.generate(prompts, asked, use_tqdm=False)
    assert [list(each.outputs[0].token_ids) for each in outputs] == checkpoint.reference.tokens
    assert kinds == {compiled_floats.FLOAT32}
