"""Steps that are recorded on a CPU give the tokens of the model, whatever happens in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import LLM, QuantizationConfig, SamplingParams
from vllm_module.kernels.matmul import linear
from vllm_module.kernels.matmul.products import Products
from vllm_module.kernels.recording import Recording
from vllm_module.runtime import recorded_steps
from vllm_module.runtime.ranks import executor

pytest.importorskip("numba")
PROMPTS = [[5, 9, 3], [7], [11, 2, 40, 41, 42]]
NEW = 12
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 64}
SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 8},
    "phi3": {"pad_token_id": 0},
    "gpt_neox": {},
    "mamba2": {"num_attention_heads": 8, "num_heads": 8, "head_dim": 8, "state_size": 8,
               "n_groups": 1},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8,
              "mamba_n_groups": 1},
    "qwen3_next": {"head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
                   "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 0,
                   "layer_types": ["linear_attention", "full_attention"]},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"head_dim": 8, "num_experts": 6, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 32, "norm_topk_prob": True},
}  # fmt: skip


def write(path: Path, family: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **SHAPE | FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(float("norm" in name.lower() and "gemma" not in family), 0.3)
    model.save_pretrained(path)
    return model.eval()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], tuple[Path, Any]]:
    written: dict[tuple[str, int], tuple[Path, Any]] = {}

    def found(family: str = "llama", seed: int = 0) -> tuple[Path, Any]:
        if (family, seed) not in written:
            path = tmp_path_factory.mktemp(family)
            written[family, seed] = path, write(path, family, seed)
        return written[family, seed]

    return found


def expected(model: Any, prompts: list[list[int]] = PROMPTS, count: int = NEW) -> list[list[int]]:
    return [
        model.generate(
            torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False,
            pad_token_id=0, eos_token_id=None,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]  # fmt: skip


def tokens(llm: LLM, prompts: list[list[int]] = PROMPTS, count: int = NEW) -> list[list[int]]:
    asked = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], asked, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in outputs]


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Choose the loops, which tiny weights would not gain from; list what is done again."""
    again, found = Recording.again, list[int]()

    def counted(recording: Recording) -> None:
        found.append(1)
        again(recording)

    monkeypatch.setattr(linear, "_LARGE_WEIGHT", 1)
    chosen = Products(floats=range(1, 9), codes=8, pages=True)
    monkeypatch.setattr(executor, "fastest_for", lambda *_, **__: chosen)
    monkeypatch.setattr(Recording, "again", counted)
    monkeypatch.setattr(recorded_steps, "_GAIN", 0)  # a busy machine has strange clocks
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers(
    family: str, checkpoint: Any, replayed: list[int]
) -> None:
    folder, model = checkpoint(family)
    with LLM(folder, **OPTIONS) as llm:
        for prompts in (PROMPTS, PROMPTS[:1], PROMPTS[:2]):
            replayed.clear()
            assert tokens(llm, prompts) == expected(model, prompts)
            # One token is the prompt's, and three steps come before the first one is done again.
            assert len(replayed) == NEW - 1 - 3


@pytest.mark.parametrize("scheme", ["int8_per_channel_weight_only", "int4_per_group"])
def test_quantized_tokens_are_those_of_steps_without_recordings(
    scheme: str, checkpoint: Any, replayed: list[int]
) -> None:
    folder, _ = checkpoint()
    options = OPTIONS | {"quantization": QuantizationConfig(scheme=scheme, group_size=32)}
    with LLM(folder, enforce_eager=True, **options) as llm:
        plain = tokens(llm)
        assert not replayed
    with LLM(folder, **options) as llm:
        assert tokens(llm) == plain
        assert replayed


def test_requests_that_come_and_go(checkpoint: Any, replayed: list[int]) -> None:
    """Lengths differ, so each number of sequences is met, with other pages and rows."""
    folder, model = checkpoint()
    prompts = [[2 + at] * (1 + at % 7) for at in range(11)]
    counts = [3 + 5 * at % 23 for at in range(11)]
    with LLM(folder, max_num_seqs=4, block_size=4, **OPTIONS) as llm:
        for _ in range(3):
            asked = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in counts]
            given = [{"prompt_token_ids": each} for each in prompts]
            outputs = llm.generate(given, asked, use_tqdm=False)
            for output, prompt, count in zip(outputs, prompts, counts, strict=True):
                found = list(output.outputs[0].token_ids)
                assert [found] == expected(model, [prompt], count)
    assert len(replayed) > 20


def test_weights_that_change(checkpoint: Any, replayed: list[int]) -> None:
    folder, model = checkpoint()
    _, other = checkpoint(seed=1)
    with LLM(folder, **OPTIONS) as llm:
        assert tokens(llm) == expected(model)
        llm.update_weights(other.state_dict())
        assert tokens(llm) == expected(other)
        llm.sleep(level=1)
        llm.wake_up()
        assert tokens(llm) == expected(other)
        llm.reload_weights()
        assert tokens(llm) == expected(model)
    assert len(replayed) == 4 * (NEW - 4)


def test_parameters_that_an_extension_replaces(checkpoint: Any, replayed: list[int]) -> None:
    folder, _ = checkpoint()
    _, other = checkpoint(seed=1)

    def replace(worker: Any) -> None:
        for name, weight in other.named_parameters():
            if name.endswith("norm.weight") or "embed" in name:
                *path, last = name.split(".")
                module = worker.model.get_submodule(".".join(path))
                setattr(module, last, torch.nn.Parameter(weight.data.clone(), False))

    with LLM(folder, **OPTIONS) as llm, LLM(folder, enforce_eager=True, **OPTIONS) as plain:
        before = tokens(llm)
        assert replayed
        for each in (llm, plain):
            each.collective_rpc(replace)
        assert tokens(llm) == tokens(plain) != before


def test_a_hook_is_called(checkpoint: Any, replayed: list[int]) -> None:
    folder, model = checkpoint()
    with LLM(folder, **OPTIONS) as llm:
        called: list[int] = []
        layer = llm.executor.worker.model.model.layers[1]
        layer.register_forward_hook(lambda *_: called.append(1))
        assert tokens(llm) == expected(model)
        assert len(called) == NEW
        assert not replayed


@pytest.mark.parametrize("of_all", [False, True])
def test_a_hook_that_comes_after_a_recording_is_called(
    of_all: bool, checkpoint: Any, replayed: list[int]
) -> None:
    """It may come and go between two steps, and may be one of all modules."""
    folder, model = checkpoint()
    called: list[object] = []
    with LLM(folder, **OPTIONS) as llm:
        assert tokens(llm) == expected(model)
        layer = llm.executor.worker.model.model.layers[1]
        replayed.clear()

        def hook(module: Any, *_: Any) -> None:
            called.append(module)

        handle = (register_module_forward_hook if of_all else layer.register_forward_hook)(hook)
        try:
            assert tokens(llm) == expected(model)
        finally:
            handle.remove()
        assert called.count(layer) == NEW
        assert not replayed


def test_memory_is_bounded(
    checkpoint: Any, replayed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recording of three sequences is dropped, which is the largest."""
    folder, model = checkpoint()

    def kept(llm: LLM) -> dict[int, int]:
        runner: Any = llm.executor.worker.runner
        return {key[0]: each.nbytes for key, each in runner._recorded._steps.items()}

    with LLM(folder, **OPTIONS) as llm:
        for count in (1, 3):
            tokens(llm, PROMPTS[:count])
        free = kept(llm)
    assert 0 < free[1] < free[3]
    monkeypatch.setattr(recorded_steps, "_LEAST_BYTES", free[1] + free[3] - 1)
    with LLM(folder, **OPTIONS) as llm:
        for count in (1, 3, 1, 3):
            assert tokens(llm, PROMPTS[:count]) == expected(model, PROMPTS[:count])
        assert kept(llm) == {1: free[1], 3: 0}


def test_a_recording_that_gives_other_bits_is_not_used(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, replayed: list[int]
) -> None:
    """As if the model kept something that no recording sees."""
    folder, model = checkpoint()
    again = Recording.again

    def wrong(recording: Recording) -> None:
        again(recording)
        recording._calls[-1]()
        for each in reversed(recording._held):
            if isinstance(each, torch.Tensor) and each.dtype == torch.float32:
                each.add_(1)
                break

    monkeypatch.setattr(Recording, "again", wrong)
    with LLM(folder, **OPTIONS) as llm:
        assert tokens(llm) == expected(model)
    assert len(replayed) == 1


def test_a_recording_that_takes_as_long_is_not_used(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, replayed: list[int]
) -> None:
    """Nor are steps of more sequences recorded, which gain less; those of fewer are."""
    folder, model = checkpoint()
    with LLM(folder, **OPTIONS) as llm:
        monkeypatch.setattr(recorded_steps, "_GAIN", 1e9)
        assert tokens(llm, PROMPTS[:2]) == expected(model, PROMPTS[:2])
        assert len(replayed) == 2
        monkeypatch.setattr(recorded_steps, "_GAIN", 0)
        assert tokens(llm) == expected(model)
        assert len(replayed) == 2
        assert tokens(llm, PROMPTS[:1]) == expected(model, PROMPTS[:1])
        assert len(replayed) == 2 + NEW - 4


def test_a_recording_that_is_slow_once_is_used(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, replayed: list[int]
) -> None:
    """Another process may have disturbed it; it is compared with the model in the next step."""
    folder, model = checkpoint()
    again = Recording.again

    def first_is_slow(recording: Recording) -> None:
        again(recording)
        monkeypatch.setattr(recorded_steps, "_GAIN", 1e9 if len(replayed) == 1 else 0)

    monkeypatch.setattr(Recording, "again", first_is_slow)
    with LLM(folder, **OPTIONS) as llm:
        assert tokens(llm, PROMPTS[:1]) == expected(model, PROMPTS[:1])
    assert len(replayed) == NEW - 4


def test_ranks_have_none(checkpoint: Any, replayed: list[int]) -> None:
    folder, model = checkpoint()
    with LLM(folder, tensor_parallel_size=2, **OPTIONS) as llm:
        assert tokens(llm) == expected(model)
    assert not replayed
