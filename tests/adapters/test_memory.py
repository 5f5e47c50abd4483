"""Many adapters on disk and few in memory: each request has its own, read again when needed.

``make laws`` sets ``AT_LENGTH``: then there are 1,000 on disk, 8 in memory, and 10,000 requests.
"""

from __future__ import annotations

import gc
import json
import os
import random
import runpy
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import get_peft_model_state_dict
from transformers import AutoModelForCausalLM

from vllm_module import LLM, LoRARequest, SamplingParams
from vllm_module.errors import WeightReadError

SUPPORT = runpy.run_path(str(Path(__file__).with_name("support.py")))
adapt, small_model = SUPPORT["adapt"], SUPPORT["small_model"]
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
AT_LENGTH = bool(os.environ.get("AT_LENGTH"))
COUNT, TOKENS = 1000 if AT_LENGTH else 20, 5
IN_MEMORY, REQUESTS = (8, 10_000) if AT_LENGTH else (3, 80)
PARAMS = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
PROMPTS = [[(7 * i + 3 * j) % 60 for j in range(20)] for i in range(3)]
TARGETS = [["q_proj", "v_proj"], ["o_proj", "gate_proj", "embed_tokens"], ["k_proj", "lm_head"]]
Expected = Callable[[str | None, int], list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model, and beside it adapters of several ranks."""
    path = tmp_path_factory.mktemp("memory")
    small_model("llama", path / "base")
    for number in range(COUNT):
        model = AutoModelForCausalLM.from_pretrained(path / "base", dtype=torch.float32)
        settings = {"target_modules": TARGETS[number % 3], "r": 1 + number % 5, "lora_alpha": 16}
        adapt(model, path / f"a{number}", number, **settings)
    return path


def greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def expected(folder: Path) -> Expected:
    """Return what transformers and PEFT generate with an adapter, or without one."""

    @cache
    def tokens(name: str | None) -> list[list[int]]:
        base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
        model = base if name is None else peft.PeftModel.from_pretrained(base, folder / name).eval()
        return [greedy(model, prompt) for prompt in PROMPTS]

    return lambda name, prompt: tokens(name)[prompt]


def load(folder: Path, **settings: Any) -> LLM:
    return LLM(
        str(folder / "base"),
        **{"kv_cache_memory_bytes": 1 << 20, "dtype": "float32", "block_size": 4} | settings,
    )


def answer(llm: LLM, prompt: int, name: str | None) -> list[int]:
    (output,) = llm.generate([PROMPTS[prompt]], PARAMS, use_tqdm=False, lora_request=[name])
    assert output.error is None
    return list(output.outputs[0].token_ids)


def held_by_process() -> tuple[int, int]:
    """Return the bytes of this process that are in memory, and its open files."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))


class Watched:
    """Counts what an engine reads; each step's adapters are in memory, and few are."""

    def __init__(self, llm: LLM, most: int) -> None:
        self.read: list[int] = []
        worker, run, load = (
            llm.executor.worker,
            llm.engine.execute,
            llm.executor.worker.load_adapter,
        )

        def execute(inputs: Any, *rest: Any) -> Any:
            held = set(worker._adapters)
            assert {*inputs.adapters.values()} <= held
            assert len(held) <= most
            assert held == {each.number for each in llm.list_adapters() if each.in_memory}
            return run(inputs, *rest)

        def load_adapter(number: int, *given: Any) -> Any:
            self.read.append(number)
            return load(number, *given)

        llm.engine.execute = execute
        worker.load_adapter = load_adapter


@pytest.mark.parametrize(
    "settings",
    [{}, {"async_scheduling": True}, {"kv_cache_memory_bytes": 1 << 16, "swap_space": 0.001}],
    ids=["plain", "asynchronous", "preempted"],
)
def test_drawn_requests(folder: Path, expected: Expected, settings: dict[str, Any]) -> None:
    """Few of all adapters are in memory and 2 in a step; each request is as PEFT answers.

    Neither memory nor open files grow with the requests.
    """
    draw = random.Random(str(settings))
    names = [f"a{number}" for number in range(COUNT)]
    with load(folder, max_loras=2, max_cpu_loras=IN_MEMORY, **settings) as llm:
        if "swap_space" in settings:
            llm.engine.scheduler.pool.num_pages = 11
            llm.engine.scheduler.pool.reset()
        for name in names:
            llm.load_adapter(name, folder / name)
        assert sum(each.in_memory for each in llm.list_adapters()) == IN_MEMORY
        watched, left = Watched(llm, most=IN_MEMORY), REQUESTS
        half: tuple[int, int] | None = None
        while left:
            if half is None and left < REQUESTS // 2:
                half = held_by_process()
            count = min(left, draw.randrange(1, 16))
            left -= count
            asked = [
                (draw.randrange(len(PROMPTS)), draw.choice([None, *names])) for _ in range(count)
            ]
            outputs = llm.generate(
                [PROMPTS[prompt] for prompt, _ in asked],
                PARAMS,
                use_tqdm=False,
                lora_request=[name for _, name in asked],
            )
            for (prompt, name), output in zip(asked, outputs, strict=True):
                assert list(output.outputs[0].token_ids) == expected(name, prompt), (name, prompt)
        assert len(watched.read) > REQUESTS // 3
        assert half is not None
        grown, opened = (now - before for now, before in zip(held_by_process(), half, strict=True))
        assert opened <= 0
        assert grown < 16 << 20, f"{grown} bytes more after the second half of the requests"
        assert ("swap_space" in settings) == (llm.engine.scheduler.preemptions > 0)


def test_two_ranks(folder: Path, expected: Expected) -> None:
    with load(folder, max_loras=1, max_cpu_loras=1, tensor_parallel_size=2) as llm:
        for number in range(4):
            llm.load_adapter(f"a{number}", folder / f"a{number}")
        names = ["a0", None, "a3", "a0", "a2"]
        outputs = llm.generate([PROMPTS[0]] * 5, PARAMS, use_tqdm=False, lora_request=names)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        assert tokens == [expected(name, 0) for name in names]
        assert len(llm.executor.worker._adapters) == 1


def test_least_recently_used(folder: Path, expected: Expected) -> None:
    """The adapter that was used longest ago leaves; pages that it has computed are found again."""
    with load(folder, max_loras=1, max_cpu_loras=2) as llm:
        for name in ("a0", "a1"):
            llm.load_adapter(name, folder / name)
        numbers = {each.name: each.number for each in llm.list_adapters()}
        watched = Watched(llm, most=2)
        assert answer(llm, 0, "a0") == expected("a0", 0)
        llm.load_adapter("a2", folder / "a2")  # a1 leaves
        assert [each.in_memory for each in llm.list_adapters()] == [True, False, True]
        llm.load_adapter("a3", folder / "a3")  # a0 leaves
        assert [each.in_memory for each in llm.list_adapters()] == [False, False, True, True]
        watched.read.clear()
        (output,) = llm.generate([PROMPTS[0]], PARAMS, use_tqdm=False, lora_request="a0")
        assert watched.read == [numbers["a0"]]
        assert output.num_cached_tokens == 16
        assert list(output.outputs[0].token_ids) == expected("a0", 0)
        assert output.outputs[0].weight_versions == [("0/a0@0", TOKENS)]
        assert answer(llm, 0, "a1") == expected("a1", 0)
        llm.unload_adapter("a0")
        llm.unload_adapter("a2")  # in memory or not
        assert [each.name for each in llm.list_adapters()] == ["a1", "a3"]
        assert answer(llm, 1, "a3") == expected("a3", 1)


@pytest.mark.parametrize("early", [False, True])
def test_running_adapters_stay(folder: Path, expected: Expected, early: bool) -> None:
    """One that is loaded between two steps drops none that a running request uses."""
    with load(folder, max_loras=1, max_cpu_loras=1, async_scheduling=early) as llm:
        llm.load_adapter("a0", folder / "a0")
        prompt = {"prompt_token_ids": PROMPTS[0], "adapter": "a0"}
        stream = llm.serve([prompt], PARAMS, every_token=True)
        next(stream)
        llm.load_adapter("a1", folder / "a1")
        assert [each.in_memory for each in llm.list_adapters()] == [True, True]
        watched = Watched(llm, most=2)
        *_, (_, output) = stream
        assert list(output.outputs[0].token_ids) == expected("a0", 0)
        assert watched.read == []
        llm.load_adapter("a2", folder / "a2")  # now both leave
        assert [each.in_memory for each in llm.list_adapters()] == [False, False, True]
        assert answer(llm, 0, "a1") == expected("a1", 0)


def test_updated_adapters_stay(folder: Path, expected: Expected, tmp_path: Path) -> None:
    """What was updated is in no file: it is not dropped, and others are, as many as before."""
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    new = adapt(base, tmp_path, 99, target_modules=TARGETS[0], r=1, lora_alpha=16)
    weights = {name: each.clone() for name, each in get_peft_model_state_dict(new).items()}
    wanted = greedy(new, PROMPTS[0])
    assert wanted != expected("a0", 0)
    with load(folder, max_loras=1, max_cpu_loras=1) as llm:
        for number in range(3):
            llm.load_adapter(f"a{number}", folder / f"a{number}")
        llm.update_adapter("a0", weights)  # which was not in memory
        Watched(llm, most=2)
        for name in ("a1", "a2", "a1"):
            assert answer(llm, 0, name) == expected(name, 0)
            assert answer(llm, 0, "a0") == wanted
        assert [each.in_memory for each in llm.list_adapters()] == [True, True, False]


def test_changed_files(folder: Path, expected: Expected, tmp_path: Path) -> None:
    """Requests of adapters whose files are others, or gone, end; the rest of the step goes on."""
    for name in ("a0", "a1", "a2"):
        shutil.copytree(folder / name, tmp_path / name)
    with load(folder, max_loras=2, max_cpu_loras=2) as llm:
        for name in ("a0", "a1", "a2", "a3"):
            source = tmp_path if name != "a3" else folder
            llm.load_adapter(name, source / name)
        assert [each.in_memory for each in llm.list_adapters()] == [False, False, True, True]
        # Another adapter with the same names, shapes and sizes.
        shutil.copy(folder / "a5" / "adapter_config.json", tmp_path / "other.json")
        config = json.loads((tmp_path / "a0/adapter_config.json").read_text()) | {"lora_alpha": 8}
        (tmp_path / "a0" / "adapter_config.json").write_text(json.dumps(config))
        shutil.rmtree(tmp_path / "a1")
        names = [None, "a0", "a3", "a1", "a0"]
        outputs = llm.generate([PROMPTS[1]] * 5, PARAMS, use_tqdm=False, lora_request=names)
        errors = {index: output.error or "" for index, output in enumerate(outputs)}
        assert "the adapter 'a0' in" in errors[1]
        assert "have changed since it was loaded" in errors[1]
        assert "have changed" in errors[4]
        assert "adapter_config.json" in errors[3]
        for index in (0, 2):
            tokens = list(outputs[index].outputs[0].token_ids)
            assert (errors[index], tokens) == ("", expected(names[index], 1))
        assert not llm.engine.scheduler.running
        assert not llm.engine.requests
        # Loaded again, it is another one, which finds no pages of the first.
        llm.unload_adapter("a0")
        llm.load_adapter("a0", tmp_path / "a0")
        model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
        theirs = peft.PeftModel.from_pretrained(model, tmp_path / "a0").eval()
        assert answer(llm, 1, "a0") == greedy(theirs, PROMPTS[1])


def test_another_number_of_ranks(folder: Path, expected: Expected, tmp_path: Path) -> None:
    """They are read again, now or when they are used; not if one was updated or is another now."""
    shutil.copytree(folder / "a1", tmp_path / "a1")
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    new = adapt(base, tmp_path / "new", 99, target_modules=TARGETS[0], r=1, lora_alpha=16)
    with load(folder, max_loras=1, max_cpu_loras=2) as llm:
        for name, path in (("a0", folder), ("a2", folder), ("a1", tmp_path)):
            llm.load_adapter(name, path / name)
        assert [each.in_memory for each in llm.list_adapters()] == [False, True, True]
        stream = llm.serve(
            [{"prompt_token_ids": PROMPTS[0], "adapter": "a2"}], PARAMS, every_token=True
        )
        next(stream)
        llm.reshard(2)
        assert [each.in_memory for each in llm.list_adapters()] == [False, True, True]
        *_, (_, output) = stream
        assert list(output.outputs[0].token_ids) == expected("a2", 0)
        for name in ("a0", "a1"):
            assert answer(llm, 1, name) == expected(name, 1)
        shutil.copytree(folder / "a1", tmp_path / "a1", dirs_exist_ok=True)
        before = llm.executor
        with pytest.raises(WeightReadError, match="have changed since it was loaded"):
            llm.reshard(1)
        llm.unload_adapter("a1")
        llm.update_adapter("a0", get_peft_model_state_dict(new))
        with pytest.raises(ValueError, match="'a0' was updated"):
            llm.reshard(1)
        assert llm.executor is before
        assert answer(llm, 1, "a0") == greedy(new, PROMPTS[1])


def test_asked_by_path(folder: Path, expected: Expected) -> None:
    """Adapters of requests with a path are loaded when they are asked for, and few stay."""
    names = [f"a{number}" for number in range(6)]
    asked = [LoRARequest(name, 1 + at, str(folder / name)) for at, name in enumerate(names)]
    with load(folder, max_loras=1, max_cpu_loras=2) as llm:
        outputs = llm.generate([PROMPTS[2]] * 6, PARAMS, use_tqdm=False, lora_request=asked)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        assert tokens == [expected(name, 2) for name in names]
        assert sum(each.in_memory for each in llm.list_adapters()) == 2


def test_fewer_than_a_step_has(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"max_cpu_loras should be max_loras \(8\) or more, got 7"):
        load(folder, max_cpu_loras=7)
