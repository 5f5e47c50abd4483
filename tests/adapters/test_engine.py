"""An engine serves adapters: in one batch, on several ranks, cached, preempted and updated."""

from __future__ import annotations

import asyncio
import runpy
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict
from transformers import AutoModelForCausalLM

from vllm_module import LLM, AsyncLLM, BeamSearchParams, LoRARequest, SamplingParams
from vllm_module.build import registry
from vllm_module.errors import WeightLoadError

SUPPORT = runpy.run_path(str(Path(__file__).with_name("support.py")))
adapt, small_model = SUPPORT["adapt"], SUPPORT["small_model"]
TEN = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)
PROMPTS = [[1 + i, 7, 9 + i, 3, 5 + 2 * i][: 2 + i % 4] for i in range(8)]
NAMES = ["a", "b", "c"]
# Of what transformers has renamed since.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
TARGETS = [["q_proj", "v_proj", "down_proj"], ["o_proj", "gate_proj"], ["k_proj", "lm_head"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model, and beside it three adapters of different ranks."""
    path = tmp_path_factory.mktemp("engine")
    small_model("llama", path / "base")
    for number, (name, targets) in enumerate(zip(NAMES, TARGETS, strict=True)):
        model = AutoModelForCausalLM.from_pretrained(path / "base", dtype=torch.float32)
        adapt(model, path / name, number, r=2 + 3 * number, target_modules=targets, lora_alpha=32)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> Callable[[str | None, list[int]], list[int]]:
    """Return what transformers and PEFT generate with an adapter, or without one."""
    from peft import PeftModel

    @cache
    def model(name: str | None) -> Any:
        base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
        return base if name is None else PeftModel.from_pretrained(base, folder / name).eval()

    @torch.no_grad()
    def tokens(name: str | None, prompt: list[int]) -> list[int]:
        ids = list(prompt)
        for _ in range(10):
            ids.append(int(model(name)(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]

    return tokens


def load(folder: Path, **settings: Any) -> LLM:
    return LLM(
        str(folder / "base"),
        **{"kv_cache_memory_bytes": 1 << 20, "dtype": "float32"} | settings,
    )


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with load(folder, tensor_parallel_size=request.param) as llm:
        for name in NAMES:
            llm.load_adapter(name, folder / name)
        yield llm


def generated(llm: LLM, prompts: list[list[int]], names: list[Any]) -> list[list[int]]:
    outputs = llm.generate(prompts, TEN, use_tqdm=False, lora_request=names)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_one_batch(llm: LLM, expected: Callable[..., list[int]]) -> None:
    """Requests of three adapters and of the model itself, each as PEFT answers it."""
    names = [None, "a", "b", "c", "c", "b", None, "a"]
    wanted = [expected(name, prompt) for name, prompt in zip(names, PROMPTS, strict=True)]
    assert generated(llm, PROMPTS, names) == wanted
    assert len({tuple(expected(name, PROMPTS[0])) for name in (None, *NAMES)}) == 4


def test_rows_of_the_base_keep_their_bits(llm: LLM) -> None:
    """Logprobs of the model's own requests are the same beside any adapters (vllm 42008)."""
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, detokenize=False)
    alone: list[Any] = []
    for names in ([None] * 4, [None, "a", "b", None]):
        outputs = llm.generate(PROMPTS[:4], params, use_tqdm=False, lora_request=names)
        alone.append([outputs[i].outputs[0].logprobs for i in (0, 3)])
    assert alone[0] == alone[1]


def test_cached_pages_belong_to_an_adapter(llm: LLM, expected: Callable[..., list[int]]) -> None:
    """A long prompt that one adapter has computed is computed again for another."""
    prompt = [(7 * i + 3) % 60 for i in range(40)]
    for _ in range(2):  # the second time from pages
        for name in (None, *NAMES):
            assert generated(llm, [prompt], [name]) == [expected(name, prompt)]
    outputs = llm.generate([prompt] * 2, TEN, use_tqdm=False, lora_request=["a", None])
    assert [output.num_cached_tokens for output in outputs] == [32, 32]


def test_ways_to_ask(llm: LLM, folder: Path, expected: Callable[..., list[int]]) -> None:
    """By name, by a request of vLLM's form, by the prompt; a wrong one is refused alone."""
    prompt = PROMPTS[5]
    wanted = [expected("b", prompt)]
    assert generated(llm, [prompt], "b") == wanted
    assert generated(llm, [prompt], LoRARequest("b", 5, str(folder / "b"))) == wanted
    (output,) = llm.generate([{"prompt_token_ids": prompt, "adapter": "b"}], TEN, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == wanted[0]
    with pytest.raises(ValueError, match="no adapter is called 'd'; loaded are: 'a', 'b', 'c'"):
        generated(llm, [prompt], "d")
    with pytest.raises(ValueError, match=r"'b' was loaded from .* give it another name"):
        generated(llm, [prompt], LoRARequest("b", 5, str(folder / "a")))
    with pytest.raises(ValueError, match="2 lora_request for 1 prompts"):
        generated(llm, [prompt], ["a", "b"])
    for wrong in (5, [5], object(), "", [""], b""):
        with pytest.raises(ValueError, match="lora_request"):
            generated(llm, [prompt], wrong)
    with pytest.raises(ValueError, match="adapter should be the name"):
        llm.generate([{"prompt_token_ids": prompt, "adapter": 5}], TEN, use_tqdm=False)


def test_loading_and_unloading(
    llm: LLM, folder: Path, tmp_path: Path, expected: Callable[..., list[int]]
) -> None:
    """A refused adapter costs nothing; an unloaded one leaves nothing."""
    with pytest.raises(ValueError, match="called 'a' already"):
        llm.load_adapter("a", folder / "b")
    with pytest.raises(WeightLoadError, match="adapter_config"):
        llm.load_adapter("d", tmp_path)
    small_model("qwen3", tmp_path / "other")
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "other", dtype=torch.float32)
    adapt(other, tmp_path / "d", target_modules=["o_proj"], r=3)
    (tmp_path / "d" / "adapter_config.json").write_text(
        (tmp_path / "d" / "adapter_config.json").read_text().replace('"r": 3', '"r": 2')
    )
    with pytest.raises(WeightLoadError, match="expected shape"):
        llm.load_adapter("d", tmp_path / "d")
    assert sorted(each.name for each in llm.list_adapters()) == NAMES
    llm.load_adapter("again", folder / "a")
    prompts, names = PROMPTS[:3], ["again", "a", None]
    wanted = [expected("a", prompts[0]), expected("a", prompts[1]), expected(None, prompts[2])]
    assert generated(llm, prompts, names) == wanted
    prompt = {"prompt_token_ids": PROMPTS[0], "adapter": "again"}
    stream = llm.serve([prompt], TEN, every_token=True)
    next(stream)
    with pytest.raises(RuntimeError, match="1 requests use the adapter 'again'"):
        llm.unload_adapter("again")
    stream.close()
    llm.unload_adapter("again")
    with pytest.raises(ValueError, match="no adapter is called 'again'"):
        llm.unload_adapter("again")
    assert generated(llm, prompts[1:], names[1:]) == wanted[1:]
    layer = llm.executor.worker.model.model.layers[0].self_attn.qkv_proj
    adapted = {"a", "c"}  # of the three, those with a target here
    assert layer.adapters.weights.keys() == {
        each.number for each in llm.list_adapters() if each.name in adapted
    }


def test_updates(llm: LLM, folder: Path, tmp_path: Path) -> None:
    """New weights of an adapter go in place; versions and cached pages follow."""
    prompt = [(5 * i + 2) % 60 for i in range(40)]
    before = generated(llm, [prompt], "a")
    beside = generated(llm, [prompt] * 2, ["a", "b"])
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    new = adapt(base, tmp_path, 9, r=2, target_modules=TARGETS[0], lora_alpha=32)
    old = {name: each.clone() for name, each in get_peft_model_state_dict(new).items()}
    (layer,) = {name.rpartition(".lora_")[0] for name in old if "1.self_attn.q_proj" in name}
    for wrong, why in (
        ({f"{layer}.lora_A.weight": torch.ones(3, 32)}, "expected shape"),
        ({"model.layers.9.lora_A.weight": torch.ones(2, 32)}, "has no"),
        ({f"{layer}.lora_A.weight": torch.full((2, 32), float("nan"))}, "NaN"),
        ({f"{layer}.lora_A.weight": torch.full((2, 32), float("inf"))}, "infinite"),
    ):
        with pytest.raises(WeightLoadError, match=why):
            llm.update_adapter("a", wrong)
    assert generated(llm, [prompt], "a") == before
    llm.update_adapter("a", old)
    output = llm.generate([prompt], TEN, use_tqdm=False, lora_request="a")[0].outputs[0]
    with torch.no_grad():
        ids = list(prompt)
        for _ in range(10):
            ids.append(int(new(torch.tensor([ids])).logits[0, -1].argmax()))
    assert list(output.token_ids) == ids[40:] != before[0]
    assert output.weight_versions == [("0/a@1", 10)]
    assert generated(llm, [prompt] * 2, ["a", "b"]) == [ids[40:], beside[1]]
    assert {each.name: each.updates for each in llm.list_adapters()} == {"a": 1, "b": 0, "c": 0}
    llm.unload_adapter("a")
    llm.load_adapter("a", folder / "a")
    assert generated(llm, [prompt], "a") == before


@pytest.mark.parametrize("most", [1, 2])
def test_more_adapters_than_a_step_has(
    folder: Path, expected: Callable[..., list[int]], most: int
) -> None:
    """Requests of other adapters wait in turn; none is left out."""
    with load(folder, max_loras=most) as llm:
        for name in NAMES:
            llm.load_adapter(name, folder / name)
        seen = []
        run = llm.engine.execute

        def watched(inputs: Any, *rest: Any) -> Any:
            seen.append(len({*inputs.adapters.values()}))
            return run(inputs, *rest)

        llm.engine.execute = watched
        names = ["a", "b", "c", None, "a", "c", "b", "a"]
        wanted = [expected(name, prompt) for name, prompt in zip(names, PROMPTS, strict=True)]
        assert generated(llm, PROMPTS, names) == wanted
        assert max(seen) == most


def test_preempted(folder: Path, expected: Callable[..., list[int]]) -> None:
    """With too few pages for all, requests start over, each with its adapter."""
    for swap in (0.0, 0.001):
        with load(folder, kv_cache_memory_bytes=1 << 16, block_size=4, swap_space=swap) as llm:
            llm.engine.scheduler.pool.num_pages = 9
            llm.engine.scheduler.pool.reset()
            for name in NAMES:
                llm.load_adapter(name, folder / name)
            names = ["a", "b", None, "c"] * 2
            wanted = [expected(name, prompt) for name, prompt in zip(names, PROMPTS, strict=True)]
            assert generated(llm, PROMPTS, names) == wanted
            assert llm.engine.scheduler.preemptions > 0


def test_samples_and_overlapped_steps(folder: Path) -> None:
    """Samples of a request share its adapter; steps that are launched early have it, too."""
    drawn = SamplingParams(temperature=1, n=3, seed=5, max_tokens=8, detokenize=False)
    found = []
    for early in (False, True):
        with load(folder, async_scheduling=early) as llm:
            llm.load_adapter("a", folder / "a")
            outputs = llm.generate(
                PROMPTS[:3], drawn, use_tqdm=False, lora_request=["a", None, "a"]
            )
            found.append([[list(s.token_ids) for s in each.outputs] for each in outputs])
    assert found[0] == found[1]


def test_beside_an_event_loop(folder: Path, expected: Callable[..., list[int]]) -> None:
    async def answers() -> list[list[int]]:
        async with AsyncLLM(load(folder)) as llm:
            await llm.call(lambda each: each.load_adapter("a", folder / "a"))

            async def answer(name: str | None) -> list[int]:
                prompt = {"prompt_token_ids": PROMPTS[6], "adapter": name}
                last = [each async for each in llm.generate(prompt, TEN)][-1]
                return list(last.outputs[0].token_ids)

            return await asyncio.gather(answer("a"), answer(None))

    got = asyncio.run(asyncio.wait_for(answers(), 120))
    assert got == [expected("a", PROMPTS[6]), expected(None, PROMPTS[6])]


def test_sleep(folder: Path, expected: Callable[..., list[int]]) -> None:
    """Adapters are there after a sleep, at either level."""
    with load(folder) as llm:
        llm.load_adapter("b", folder / "b")
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert generated(llm, [PROMPTS[2]], "b") == [expected("b", PROMPTS[2])]


SCHEMES: dict[str, Any] = {
    "fp8": "fp8_per_channel",
    "int8": "int8_per_channel_weight_only",
    "int4": {"scheme": "int4_per_group", "group_size": 32},
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_base(folder: Path, scheme: str) -> None:
    """A and B stay in the model's dtype beside weights of 8 and 4 bits."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompt = [(3 * i + 1) % 60 for i in range(24)]

    def logprobs(llm: LLM, name: str | None) -> torch.Tensor:
        (output,) = llm.generate([prompt], params, use_tqdm=False, lora_request=name)
        of_tokens = output.prompt_logprobs[1:] if output.prompt_logprobs else []
        return torch.tensor([next(iter(each.values())).logprob for each in of_tokens if each])

    found = []
    for quantization in (SCHEMES[scheme], None):
        with load(folder, quantization=quantization) as llm:
            llm.load_adapter("a", folder / "a")
            found.append((logprobs(llm, None), logprobs(llm, "a")))
    (base, adapted), (exact_base, exact) = found
    error = max((base - exact_base).abs().max(), 1e-6)
    assert (adapted - base).abs().max() > 10 * error
    assert (adapted - exact).abs().max() < 10 * error


OWN = """
from vllm_module.layers import RowParallelLinear
from vllm_module.models.llama import LlamaForCausalLM


class Own(RowParallelLinear):
    def forward(self, x):
        return self.tp_group.all_reduce(x @ self.weight.t())


class IgnoringForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers[:1]:
            if not hasattr(layer, "self_attn"):
                continue  # another pipeline stage has it
            old = layer.self_attn.o_proj
            layer.self_attn.o_proj = Own(old.input.size, old.output.size, bias=False)
"""


@pytest.mark.parametrize(
    "settings",
    [{}, {"async_scheduling": True}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}],
    ids=["one rank", "asynchronous", "two ranks", "two stages"],
)
def test_a_layer_that_ignores_adapters(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """Requests with its adapter end with an error that names the layer; others go on.

    Of two stages, it is in the first: the last one alone would give tokens of half an adapter.
    """
    # Replaced: what a process registers stays, because no user needs to take it back.
    monkeypatch.setattr(registry, "registered", registry.Registrations())
    monkeypatch.setattr(registry, "_from_files", {})
    (tmp_path / "own.py").write_text(OWN)
    own = {
        "model_code": tmp_path / "own.py",
        "hf_overrides": {"architectures": ["IgnoringForCausalLM"]},
    }
    with load(folder, **own, **settings) as llm:
        wanted = generated(llm, PROMPTS[:2], None)
        llm.load_adapter("a", folder / "a")
        llm.load_adapter("b", folder / "b")
        wanted += generated(llm, [PROMPTS[1]], "a")
        prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[1], PROMPTS[2], PROMPTS[3]]
        names = [None, None, "a", "b", "b"]
        for _ in range(2):
            outputs = llm.generate(prompts, TEN, use_tqdm=False, lora_request=names)
            assert [list(output.outputs[0].token_ids) for output in outputs[:3]] == wanted
            for output in outputs[3:]:
                assert output.outputs[0].token_ids == []
                assert "o_proj has an adapter, and its Own does not add" in (output.error or "")
        assert not llm.engine.requests


def test_beams_are_an_adapters(llm: LLM, expected: Callable[..., list[int]]) -> None:
    """A beam of one is what the adapter generates."""
    for name in (None, "b"):
        prompt: Any = {"prompt_token_ids": PROMPTS[5], "cache_salt": "s"}
        prompt |= {} if name is None else {"adapter": name}
        (found,) = llm.beam_search(prompt, BeamSearchParams(1, 10, ignore_eos=True))
        assert found.sequences[0].tokens[len(PROMPTS[5]) :] == expected(name, PROMPTS[5])
