"""Steps with adapters on a simulated device: one graph for each size, of any adapters."""

from __future__ import annotations

import gc
import logging
import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from vllm_module import LLM, SamplingParams
from vllm_module.adapters import slot_bytes
from vllm_module.runtime.ranks.worker import Worker

HERE = Path(__file__)
simulated = runpy.run_path(str(HERE.parents[1] / "runtime/simulated_device.py"))
SimulatedDevice = simulated["SimulatedDevice"]
support = runpy.run_path(str(HERE.with_name("support.py")))
PROMPTS = [[5, 6, 7], [9, 1, 4, 4, 8, 2], [3]]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
Names = list[str | None]


@contextmanager
def engine(folder: Path, device: str, **settings: Any) -> Iterator[LLM]:
    with LLM(
        str(folder), device=device, dtype="float32", skip_tokenizer_init=True, max_model_len=32,
        max_num_seqs=4, max_num_batched_tokens=16, enable_prefix_caching=False, max_loras=2,
        **{"kv_cache_memory_bytes": 1 << 20, **settings},
    ) as llm:  # fmt: skip
        yield llm


def generated(llm: LLM, names: Names) -> list[tuple[list[int], list[float]]]:
    """Return the tokens of each prompt, and their logprobs."""
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=names)
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    found = []
    for output in outputs:
        (one,) = output.outputs
        tokens = list(one.token_ids)
        values = [each[token].logprob for each, token in zip(one.logprobs, tokens, strict=True)]
        found.append((tokens, values))
    return found


def tokens(llm: LLM, names: Names) -> list[list[int]]:
    return [ids for ids, _ in generated(llm, names)]


def graphs(llm: LLM, adapted: bool) -> dict[int, Any]:
    """Return the graphs of steps with adapters, or without, by number of tokens and kind."""
    found = llm.executor.worker.runner._graphs.items()
    return {(decodes, size): each for ((adapts, decodes), size), each in found if adapts == adapted}


def replays(llm: LLM, adapted: bool) -> int:
    return sum(graph.replays for graph in graphs(llm, adapted).values())


def saved(family: str, folder: Path) -> tuple[Path, list[Path]]:
    """Save a model and three adapters of it."""
    base, adapters = folder / "base", [folder / name for name in ("one", "two", "three")]
    _, settings = support["FAMILIES"][family]
    for seed, path in enumerate(adapters):
        support["adapt"](support["small_model"](family, base), path, seed=seed, **settings)
    return base, adapters


# Two slots: the third adapter takes that of another, and the first one comes back.
ORDER: list[Names] = [
    ["one", None, "two"], [None] * 3, ["two", "one", None], ["one"] * 3, ["three", "one", None],
    [None, "two", "three"], ["one", "two", "one"],
]  # fmt: skip


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("llama", marks=pytest.mark.at_length),  # the other tests have it, too
        "mixtral",
        pytest.param("deepseek_v3", marks=pytest.mark.at_length),
    ],
)
def test_one_graph_replays_steps_of_any_adapters(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tokens are those of a CPU, while adapters change places, and are loaded and updated again."""
    base, adapters = saved(family, tmp_path)
    device, found = SimulatedDevice(), []
    with engine(base, "cpu") as llm:
        for path in adapters:
            llm.load_adapter(path.name, str(path))
        expected = [tokens(llm, names) for names in ORDER]
        all_two = tokens(llm, ["two"] * 3)
    assert len({str(each) for each in expected}) == len(ORDER), "adapters change something"
    with device.serving(1 << 26), engine(base, "cuda") as llm, caplog.at_level(logging.WARNING):
        before = generated(llm, [None] * 3)
        for path in adapters:
            llm.load_adapter(path.name, str(path))
        generated(llm, ORDER[0])
        captured, plain = graphs(llm, True), replays(llm, False)
        assert {decodes for decodes, _ in captured} == {True, False}
        for names in ORDER:
            outputs, steps = generated(llm, names), replays(llm, True)
            found.append([ids for ids, _ in outputs])
            for name, output, of_base in zip(names, outputs, before, strict=True):
                if name is None:  # to the last bit; on a CPU, those of experts depend on other rows
                    near = 0 if family == "llama" else 1e-5
                    assert output[0] == of_base[0]
                    assert output[1] == pytest.approx(of_base[1], rel=0, abs=near)
            assert tokens(llm, names) == found[-1], "when it is repeated"
            count = replays(llm, True) - steps
            assert count == (PARAMS.max_tokens if any(names) else 0), "every step is a graph"
        assert found == expected
        llm.unload_adapter("one")
        llm.load_adapter("one", str(adapters[1]))
        assert tokens(llm, ["one"] * 3) == all_two
        llm.update_adapter("two", load_file(adapters[0] / "adapter_model.safetensors"))
        assert tokens(llm, ["two"] * 3) == expected[3], "graphs read what is updated in place"
        assert graphs(llm, True) == captured, "no graph was captured again"
        assert replays(llm, False) - plain == 2 * PARAMS.max_tokens
    assert "no CUDA graphs" not in caplog.text


def test_graphs_follow_memory_that_grows(tmp_path: Path) -> None:
    """An adapter of a larger rank has larger slots: graphs are captured again, and are right."""
    base, adapters = tmp_path / "base", [tmp_path / "one", tmp_path / "two"]
    for rank, path in zip((4, 20), adapters, strict=True):
        model = support["small_model"]("qwen3", base)
        support["adapt"](model, path, rank, r=rank, target_modules=["q_proj", "down_proj"])
    names: Names = ["one", None, "two"]
    with engine(base, "cpu") as llm:
        for path in adapters:
            llm.load_adapter(path.name, str(path))
        expected = [tokens(llm, ["one", None, "one"]), tokens(llm, names)]
    with SimulatedDevice().serving(1 << 26), engine(base, "cuda") as llm:
        llm.load_adapter("one", str(adapters[0]))
        assert tokens(llm, ["one", None, "one"]) == expected[0]
        captured = graphs(llm, True)
        llm.load_adapter("two", str(adapters[1]))
        assert tokens(llm, names) == expected[1]
        assert tokens(llm, ["one", None, "one"]) == expected[0]
        assert not {*captured.values()} & {*graphs(llm, True).values()}
        assert replays(llm, True) == 2 * PARAMS.max_tokens
    settings = {"max_lora_rank": 32}
    with SimulatedDevice().serving(1 << 26), engine(base, "cuda", **settings) as llm:
        llm.load_adapter("one", str(adapters[0]))
        assert tokens(llm, ["one", None, "one"]) == expected[0]
        captured = graphs(llm, True)
        llm.load_adapter("two", str(adapters[1]))
        assert tokens(llm, names) == expected[1]
        assert graphs(llm, True) == captured, "memory was there from the start"


def test_the_cache_leaves_memory_for_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With max_lora_rank there is less memory for pages, by the bytes of the slots."""
    support["small_model"]("llama", tmp_path)
    left, memory, slots = [], Worker._memory, 0
    monkeypatch.setattr(
        Worker, "_memory", lambda self, *length: left.append(memory(self, *length)) or left[-1]
    )
    for settings in ({}, {"max_lora_rank": 16}):
        with (
            SimulatedDevice().serving(1 << 24),
            engine(tmp_path, "cuda", **settings, kv_cache_memory_bytes=None) as llm,
        ):
            slots = slot_bytes(llm.executor.worker.model, 2, 16)
    assert left[0] - left[1] == slots > 0


@pytest.mark.parametrize("settings", [{"enforce_eager": True}, {"async_scheduling": True}])
def test_without_graphs_and_overlapped(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Steps that replay no graph use slots, too; and so do steps that overlap."""
    base, adapters = saved("llama", tmp_path)
    found = []
    for device in ("cpu", "cuda"):
        with SimulatedDevice().serving(1 << 26), engine(base, device, **settings) as llm:
            for path in adapters:
                llm.load_adapter(path.name, str(path))
            found.append([tokens(llm, names) for names in ORDER])
    assert found[0] == found[1]


def bytes_on_device(others: dict[int, Any]) -> int:
    """Return how much memory the tensors of the simulated device have, without ``others``."""
    gc.collect()
    alive = simulated["_alive"]
    memories = [each.memory.untyped_storage() for n, each in list(alive.items()) if n not in others]
    return sum({each.data_ptr(): each.nbytes() for each in memories}.values())


@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"max_lora_rank": 32}, marks=pytest.mark.at_length)]
)
def test_adapters_sleep(tmp_path: Path, settings: dict[str, Any]) -> None:
    """A sleeping engine has no memory of adapters or slots on the device; updates are kept."""
    base, adapters = saved("llama", tmp_path)
    weights = load_file(adapters[2] / "adapter_model.safetensors")
    names: Names = ["one", None, "two"]
    others = dict(simulated["_alive"])  # of earlier tests, which must not end meanwhile

    def prepare(llm: LLM) -> list[list[int]]:
        for path in adapters[:2]:
            llm.load_adapter(path.name, str(path))
        llm.update_adapter("two", weights)
        return tokens(llm, names)

    with engine(base, "cpu", **settings) as llm:
        expected = prepare(llm)
    with SimulatedDevice().serving(1 << 26), engine(base, "cuda", **settings) as llm:
        tokens(llm, [None] * 3)
        asleep = {}
        for level in (1, 2):
            llm.sleep(level)
            asleep[level] = bytes_on_device(others)
            llm.wake_up()
        assert prepare(llm) == expected
        awake = bytes_on_device(others)
        llm.load_adapter("copy", str(adapters[0]))
        assert bytes_on_device(others) == awake, "it is in host memory until a step needs it"
        llm.unload_adapter("copy")
        for level in (1, 2):
            llm.sleep(level)
            assert bytes_on_device(others) == asleep[level] < awake
            with pytest.raises(RuntimeError, match="the engine sleeps"):
                llm.update_adapter("two", weights)
            with pytest.raises(RuntimeError, match="the engine sleeps"):
                llm.load_adapter("three", str(adapters[2]))
            llm.wake_up()
            assert tokens(llm, names) == expected
            assert tokens(llm, ["two", "one", None]) != expected
        llm.sleep()
        llm.wake_up(tags=["weights"])
        llm.update_adapter("two", weights)
        llm.wake_up(tags=["kv_cache"])
        assert tokens(llm, names) == expected
        llm.sleep()
        llm.unload_adapter("one")
        llm.wake_up()
        assert tokens(llm, ["two", None, "two"])[1:] == expected[1:]
