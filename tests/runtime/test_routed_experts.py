"""The experts that outputs name are those that transformers' routers choose for the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import LLM, SamplingParams
from vllm_module.errors import UnsupportedModelError
from vllm_module.layers.fused_moe import FusedMoE
from vllm_module.runtime.ranks.executor import Executor

_SIZES = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "head_dim": 8,
        "mlp_only_layers": [1], "decoder_sparse_step": 1,
    },
    "llama": {},
}  # fmt: skip
TOP = {"mixtral": 2, "qwen3_moe": 3}
PROMPTS = [[(7 * i + j * j) % 60 for j in range(18 + i)] for i in range(3)]
Models = dict[str, tuple[Path, Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    made = {}
    for kind, entries in FAMILIES.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **_SIZES | entries))
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, 0.3)
        folder = tmp_path_factory.mktemp("routed") / kind
        model.eval().save_pretrained(folder)
        made[kind] = folder, model
    return made


def engine(folder: Path, **options: Any) -> LLM:
    return LLM(
        str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True,
        **{
            "kv_cache_memory_bytes": 1 << 20, "max_model_len": 64, "block_size": 4,
            "max_num_seqs": 4, "enable_return_routed_experts": True,
        } | options,
    )  # fmt: skip


@torch.no_grad()
def theirs(model: Any, tokens: list[int], top: int) -> np.ndarray[Any, Any]:
    """Return the experts of each token but the last, ascending: ``[tokens - 1, layers, top]``."""
    logits = model(torch.tensor([tokens[:-1]]), output_router_logits=True).router_logits
    chosen = [each.reshape(len(tokens) - 1, -1).topk(top).indices for each in logits]
    return torch.stack(chosen, 1).sort().values.numpy()


def check(
    llm: LLM, models: Models, kind: str, prompts: list[list[int]] = PROMPTS, **settings: Any
) -> int:
    """Check all outputs; return how many tokens of prompts were not computed."""
    given = {"temperature": 1, "seed": 3, "n": 2, "max_tokens": 12, "ignore_eos": True} | settings
    params = SamplingParams(**given)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(asked, params, use_tqdm=False)
    for output in outputs:
        assert output.error is None
        assert len(output.outputs) == params.n
        for sample in output.outputs:
            tokens = [*output.prompt_token_ids, *sample.token_ids]
            routed = sample.routed_experts
            assert routed is not None
            assert routed.dtype == np.int16
            np.testing.assert_array_equal(
                np.sort(routed), theirs(models[kind][1], tokens, TOP[kind])
            )
    return sum(output.num_cached_tokens or 0 for output in outputs)


@pytest.mark.parametrize("kind", TOP)
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 7},
        {"async_scheduling": True, "enable_prefix_caching": False},
    ],
)
def test_they_are_those_of_transformers(models: Models, kind: str, options: dict[str, Any]) -> None:
    """In chunks, for several samples of a prompt, and of cached pages, whoever computed them."""
    with engine(models[kind][0], **options) as llm:
        assert check(llm, models, kind) == 0
        longer = [[*prompt, 5, *PROMPTS[0]] for prompt in PROMPTS]
        cached = check(llm, models, kind), check(llm, models, kind, longer)
        assert (min(cached) >= 48) == llm.executor.worker.caches_prefixes


@pytest.mark.parametrize("caching", [False, True])
def test_samples_that_end_before_others(models: Models, caching: bool) -> None:
    """Of several samples any may end at any token, also the first one at its first token."""
    llm = engine(models["mixtral"][0], enable_prefix_caching=caching, max_num_seqs=8)
    with llm:
        for seed in range(8):
            stops = list(range(seed % 2, 60, 2))  # a token in two ends its sample
            check(llm, models, "mixtral", n=4, seed=seed, max_tokens=4, stop_token_ids=stops)


@pytest.mark.parametrize("swap", [0.0, 0.001])
def test_after_preemptions(models: Models, swap: float) -> None:
    """Pages are short: sequences start over, from pages that are still cached, or are swapped."""
    page = 3 * 2 * 2 * 4 * 8 * 4  # layers, K and V, heads, tokens, size of a head, bytes
    with engine(models["mixtral"][0], kv_cache_memory_bytes=20 * page, swap_space=swap) as llm:
        for _ in range(3):
            check(llm, models, "mixtral")
        assert llm.engine.scheduler.preemptions


def test_on_two_ranks_and_on_another_number(models: Models) -> None:
    """Each rank routes all tokens; a running request goes on with other ranks."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    with engine(models["qwen3_moe"][0], **options) as llm:
        check(llm, models, "qwen3_moe")
        outputs = llm.serve([{"prompt_token_ids": PROMPTS[0]}], params, every_token=True)
        _, first = next(outputs)
        assert first.outputs[0].routed_experts is None, "it comes with the end"
        llm.reshard(1)
        *_, (_, last) = outputs
        routed = last.outputs[0].routed_experts
        tokens = [*PROMPTS[0], *last.outputs[0].token_ids]
        np.testing.assert_array_equal(
            np.sort(routed), theirs(models["qwen3_moe"][1], tokens, TOP["qwen3_moe"])
        )
        check(llm, models, "qwen3_moe")


def test_layers_write_into_memory_that_graphs_capture(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there before the cache is, and with it the graphs of a GPU."""
    start, written = Executor.start, []

    def starting(executor: Executor, *arguments: Any) -> Any:
        experts = [each for each in executor.worker.model.modules() if isinstance(each, FusedMoE)]
        written.extend(each.routed.data_ptr() for each in experts)
        return start(executor, *arguments)

    monkeypatch.setattr(Executor, "start", starting)
    with engine(models["mixtral"][0]) as llm:
        check(llm, models, "mixtral")
        experts = [e for e in llm.executor.worker.model.modules() if isinstance(e, FusedMoE)]
        assert [each.routed.data_ptr() for each in experts] == written


def test_without_the_setting_nothing_is_kept(models: Models) -> None:
    folder, _ = models["mixtral"]
    with engine(folder, enable_return_routed_experts=False) as llm:
        (output,) = llm.generate([{"prompt_token_ids": [1, 2]}], use_tqdm=False)
        assert output.outputs[0].routed_experts is None
        assert llm.engine.scheduler.routed is None


def test_what_has_no_experts_is_refused(models: Models) -> None:
    with pytest.raises(UnsupportedModelError, match="no layers of that kind"):
        engine(models["llama"][0])
    for name, value in (("pipeline_parallel_size", 2), ("enable_torch_compile", True)):
        with pytest.raises(ValueError, match=f"does not go with {name}"):
            engine(models["mixtral"][0], **{name: value})
