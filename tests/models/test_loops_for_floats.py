"""Tiny models whose products and attention run in the loops for a CPU: transformers' tokens."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from vllm_module import LLM, SamplingParams
from vllm_module.kernels.matmul import code_rows_matmul, compiled_floats, linear
from vllm_module.kernels.matmul.products import Products
from vllm_module.kernels.recording import Recording
from vllm_module.runtime import recorded_steps
from vllm_module.runtime.ranks import executor

pytest.importorskip("numba")
STEPS = 32  # as in conftest.py
CASES = runpy.run_path(str(Path(__file__).with_name("configurations.py")))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in CASES["DISTINCT"] else [pytest.mark.at_length])
        for name in sorted(CASES["CONFIGS"])
    ],
)
def test_tokens_are_those_of_transformers(
    name: str, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of any size are for the loops here, and each model's steps are recorded."""
    checkpoint, kinds = tiny(name), set()
    multiply, again, repeated = code_rows_matmul._multiply, Recording.again, []

    def counted_again(recording: Recording) -> None:
        repeated.append(1)
        again(recording)

    def counted(kind: int, ordered: bool) -> Any:
        kinds.add(kind)
        return multiply(kind, ordered)

    # Tiny weights gain nothing, and clocks of this machine would decide.
    monkeypatch.setattr(linear, "_LARGE_WEIGHT", 1)
    chosen = Products(floats=range(1, 9), pages=True)
    monkeypatch.setattr(executor, "fastest_for", lambda *_, **__: chosen)
    monkeypatch.setattr(code_rows_matmul, "_multiply", counted)
    monkeypatch.setattr(Recording, "again", counted_again)  # to see that steps were recorded
    monkeypatch.setattr(recorded_steps, "_GAIN", 0)  # a busy machine has strange clocks
    prompts = [{"prompt_token_ids": ids} for ids in checkpoint.reference.prompts]
    asked = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 128}
    with LLM(str(checkpoint.folder), max_num_seqs=4, max_num_batched_tokens=7, **options) as llm:
        outputs = llm.generate(prompts, asked, use_tqdm=False)
    assert [list(each.outputs[0].token_ids) for each in outputs] == checkpoint.reference.tokens
    assert kinds == {compiled_floats.FLOAT32}
    assert len(repeated) > STEPS // 2
