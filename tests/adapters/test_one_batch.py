"""Sixteen adapters of ranks 1 to 64 and the model itself, in one batch of an engine."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any, NamedTuple

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from vllm_module import LLM, SamplingParams
from vllm_module.layers.lora import LayerAdapters
from vllm_module.layers.lora_rows import AdapterRows
from vllm_module.layers.low_rank import LowRank, LowRankPart

SUPPORT = runpy.run_path(str(Path(__file__).with_name("support.py")))
ALL, adapt, small_model = SUPPORT["ALL"], SUPPORT["adapt"], SUPPORT["small_model"]
RANKS = [1, 2, 3, 4, 5, 7, 8, 11, 13, 16, 20, 24, 32, 40, 48, 64]
PARAMS = SamplingParams(
    temperature=0, max_tokens=4, ignore_eos=True, logprobs=0, prompt_logprobs=0, detokenize=False
)
# Every fifth request is the model's own; no two requests of one adapter are neighbors.
NAMES = [f"r{RANKS[(i - i // 5 - 1) * 7 % 16]}" if i % 5 else None for i in range(30)]
PROMPTS = [[(7 * i + 3 * j + i * j) % 60 for j in range(1 + i % 6)] for i in range(30)]
pytestmark = [
    # Of what transformers has renamed since.
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing"),
    # PEFT adds a pattern for the experts, which are no module.
    pytest.mark.filterwarnings("ignore:.*_pattern keys did not match:RuntimeWarning"),
]


class Answer(NamedTuple):
    """The tokens of a request, and the logprobs of those and of its prompt's."""

    tokens: list[int]
    logprobs: torch.Tensor


class Answers(NamedTuple):
    """What an engine answers: all in one batch, and each request alone; and the model's folder."""

    folder: Path
    mixed: list[Answer]
    alone: list[Answer]
    without_adapters: list[Answer]
    adapters_of_steps: set[int]


def generate(llm: LLM, chosen: range, names: list[str | None]) -> list[Answer]:
    prompts = [PROMPTS[i] for i in chosen]
    answers = []
    for output in llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=names):
        tokens = list(output.outputs[0].token_ids)
        ids = [*output.prompt_token_ids[1:], *tokens]
        each = [*(output.prompt_logprobs or ())[1:], *(output.outputs[0].logprobs or ())]
        found = [of[token].logprob for of, token in zip(each, ids, strict=True) if of]
        answers.append(Answer(tokens, torch.tensor(found)))
    return answers


@pytest.fixture(scope="module", params=["llama", "qwen3_moe"])
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    folder, all_of_them = tmp_path_factory.mktemp(request.param), range(len(PROMPTS))
    small_model(request.param, folder / "base")
    for seed, rank in enumerate(RANKS):
        model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
        more = {"rank_pattern": {"k_proj": 9, "down_proj": 5}} if seed % 4 == 3 else {}
        adapt(model, folder / f"r{rank}", seed, **ALL, r=rank, lora_alpha=8, **more)
    settings = {"kv_cache_memory_bytes": 1 << 20, "dtype": "float32", "max_num_seqs": 32}
    with LLM(str(folder / "base"), **settings) as llm:
        without = generate(llm, all_of_them, [None] * len(PROMPTS))
    with LLM(str(folder / "base"), **settings, max_loras=16) as llm:
        for rank in RANKS:
            llm.load_adapter(f"r{rank}", folder / f"r{rank}")
        seen, run = set(), llm.engine.execute

        def watched(inputs: Any, *rest: Any) -> Any:
            seen.add(len({*inputs.adapters.values()}))
            return run(inputs, *rest)

        llm.engine.execute = watched
        mixed = generate(llm, all_of_them, NAMES)
        llm.engine.execute = run
        alone = [generate(llm, range(i, i + 1), [NAMES[i]])[0] for i in all_of_them]
    return Answers(folder, mixed, alone, without, seen)


def test_each_is_as_alone(answers: Answers) -> None:
    """What a request shares its batch with changes no token, and no logprob by more than 1e-5."""
    assert answers.adapters_of_steps == {16}
    for mixed, alone in zip(answers.mixed, answers.alone, strict=True):
        assert mixed.tokens == alone.tokens
        torch.testing.assert_close(mixed.logprobs, alone.logprobs, rtol=0, atol=1e-5)


def test_each_is_as_merged(answers: Answers) -> None:
    """Tokens and logprobs are those of transformers, with the adapter merged by PEFT."""
    by_name: dict[str | None, list[int]] = {}
    for index, name in enumerate(NAMES):
        by_name.setdefault(name, []).append(index)
    assert by_name.keys() == {None, *(f"r{rank}" for rank in RANKS)}
    bases: dict[int, torch.Tensor] = {}
    for name, requests in by_name.items():
        model = AutoModelForCausalLM.from_pretrained(answers.folder / "base", dtype=torch.float32)
        base = model.eval()
        for index in requests:
            bases[index] = logprobs_of(base, index, answers.mixed[index].tokens)
        if name is not None:
            adapted: Any = peft.PeftModel.from_pretrained(model, answers.folder / name)
            base = adapted.merge_and_unload().eval()
        for index in requests:
            got = answers.mixed[index]
            wanted = logprobs_of(base, index, got.tokens)
            ids = torch.tensor([*PROMPTS[index], *got.tokens])
            assert wanted[-len(got.tokens) :].argmax(-1).tolist() == got.tokens
            chosen = wanted.gather(1, ids[1:, None])[:, 0]
            torch.testing.assert_close(got.logprobs, chosen, rtol=0, atol=1e-5)
            assert (name is None) == torch.allclose(wanted, bases[index], rtol=0, atol=1e-2)


@torch.no_grad()
def logprobs_of(model: Any, index: int, tokens: list[int]) -> torch.Tensor:
    ids = torch.tensor([[*PROMPTS[index], *tokens]])
    logprobs: torch.Tensor = model(ids).logits[0, :-1].log_softmax(-1)
    return logprobs


def test_rows_of_the_base_keep_their_bits(answers: Answers) -> None:
    """The model's own requests have the tokens and the bits of an engine without adapters."""
    own = [i for i, name in enumerate(NAMES) if name is None]
    assert len(own) == 6
    for index in own:
        mixed, without = answers.mixed[index], answers.without_adapters[index]
        assert mixed.tokens == without.tokens
        assert torch.equal(mixed.logprobs, without.logprobs)


@pytest.mark.parametrize("starts", [[0, 4], [0, 2, 4], [0, 1, 4]])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_of_any_strides_gets_what_is_added(starts: list[int], transposed: bool) -> None:
    """By the formula of LoRA's paper: y + s x A^T B^T, for one adapter, two, or one and none."""
    generator = torch.Generator().manual_seed(0)
    rows = AdapterRows()
    adapters = LayerAdapters(rows)
    made = [[torch.randn(*s, generator=generator) for s in ((2, 8), (6, 2))] for _ in range(2)]
    for number, (a, b) in enumerate(made):
        parts = (LowRankPart(slice(0, 2), slice(0, 6), 0.5),)
        adapters.attach(number, LowRank(a, b, parts, (6,)))
    of_sequence = {at: at for at in range(len(starts) - 1) if starts != [0, 1, 4] or at}
    rows.set(of_sequence, starts, torch.device("cpu"))
    x = torch.randn(4, 8, generator=generator)
    y = torch.randn(2, 6, 2, generator=generator).mT
    y = y if transposed else y.contiguous()
    expected = y.reshape(4, 6).clone()
    for at, number in of_sequence.items():
        (a, b), own = made[number], slice(starts[at], starts[at + 1])
        expected[own] += 0.5 * x[own] @ a.T @ b.T
    computed = adapters.add(x.view(2, 2, 8), y)
    torch.testing.assert_close(computed, expected.view(2, 2, 6))
