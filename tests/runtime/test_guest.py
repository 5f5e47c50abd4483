"""What a trainer asks of an engine: parts that sleep, and calls on every rank."""

from __future__ import annotations

import asyncio
import re
import runpy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from vllm_module import LLM, AsyncLLM, SamplingParams
from vllm_module.errors import ModelNotReadyError, RankError, WeightLoadError

imported = runpy.run_path(str(Path(__file__).parents[1] / "support.py"))["imported"]

TEN = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)
METHODS = """
import os
import time

import torch


class Methods:
    def where(self, *names, factor=1):
        return self.rank * factor, self.device.type, *names

    def add_to_norm(self, number):
        with torch.no_grad():
            self.model.model.norm.weight.add_(number)
        return float(self.model.model.norm.weight[0])

    def fail(self, rank):
        if self.rank == rank:
            raise KeyError("of this rank")
        return "done"

    def wait(self, rank):
        if self.rank == rank:
            time.sleep(60)

    def die(self, rank):
        if self.rank == rank:
            os._exit(7)


class Colliding(Methods):
    def wake_up(self):
        pass


class Shadowing:
    runner = 5


def rank_of(worker):
    return worker.rank


NUMBER = 5
"""


@pytest.fixture(scope="module")
def state(folder: Path) -> dict[str, torch.Tensor]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return found | {"lm_head.weight": found["lm_head.weight"].flip(0).contiguous()}


@pytest.fixture(scope="module")
def methods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A module with classes and functions, which every rank can import."""
    path = tmp_path_factory.mktemp("methods") / "methods_of_a_trainer.py"
    with imported(path, METHODS) as module:
        yield module


def load(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), kv_cache_memory_bytes=1 << 20, dtype="float32", **settings)


def tokens(llm: LLM) -> list[int]:
    return llm.generate([[1, 2, 3]], TEN, use_tqdm=False)[0].outputs[0].token_ids


@pytest.fixture(scope="module", params=[1, 2])
def llm(folder: Path, methods: Any, request: pytest.FixtureRequest) -> Iterator[LLM]:
    name = "methods_of_a_trainer.Methods"
    cls = name if request.param == 1 else methods.Methods
    with load(folder, tensor_parallel_size=request.param, worker_extension_cls=cls) as llm:
        yield llm


def test_parts_wake_up_in_order(llm: LLM, state: dict[str, torch.Tensor]) -> None:
    """Weights wake up, are updated and run with the cache only; each refusal names what to do."""
    llm.reload_weights()
    before = tokens(llm)
    new = [59 - before[0]]
    worker = llm.executor.worker
    llm.sleep()
    assert worker.runner is None
    with pytest.raises(RuntimeError, match=r"weights sleep.*tags=\['weights'\]\) first"):
        llm.wake_up(["kv_cache"])
    for tags in (["weight"], ["weights", "scheduling"]):
        with pytest.raises(ValueError, match=r"tags should be of \('weights', 'kv_cache'\), got"):
            llm.wake_up(tags)
    with pytest.raises(ValueError, match="tags should be a list of weights and kv_cache, got"):
        llm.wake_up("weights")
    with pytest.raises(RuntimeError, match="the engine sleeps"):
        llm.update_weights({"lm_head.weight": state["lm_head.weight"]})
    llm.wake_up(["weights"])
    llm.wake_up(["weights"])
    assert worker.runner is None
    with pytest.raises(RuntimeError, match="sleeps already"):
        llm.sleep()
    with pytest.raises(ModelNotReadyError, match=r"KV cache sleeps: wake_up\(tags=\['kv_cache'\]"):
        tokens(llm)
    llm.update_weights({"lm_head.weight": state["lm_head.weight"]})
    with pytest.raises(ModelNotReadyError, match="KV cache sleeps"):
        tokens(llm)
    llm.wake_up(["kv_cache"])
    assert tokens(llm)[:1] == new
    # As trainers on the same device do it: nothing of the old weights is left.
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    with pytest.raises(RuntimeError, match="weights sleep"):
        llm.wake_up(["kv_cache"])
    with pytest.raises(WeightLoadError, match="missing"):
        llm.update_weights({"lm_head.weight": state["lm_head.weight"]})
    llm.update_weights(state)
    assert worker.runner is None
    llm.wake_up(tags=("kv_cache",))
    assert tokens(llm)[:1] == new
    llm.sleep(level=2)
    llm.update_weights(state)  # without a tag, both wake up
    assert tokens(llm)[:1] == new
    llm.reload_weights()
    llm.sleep(level=2)
    llm.wake_up(["weights"])  # the folder has them
    llm.update_weights({"model.norm.weight": state["model.norm.weight"]})
    llm.wake_up()
    assert tokens(llm) == before


def test_sleep_of_an_event_loop(folder: Path, llm: LLM) -> None:
    """Requests end as the mode says before the engine sleeps; awake, it serves again."""

    async def sleeping() -> None:
        beside = AsyncLLM(load(folder))
        async with beside:
            long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
            for mode, reason, count in (("abort", "abort", 200), ("wait", "length", 0)):
                stream = beside.generate({"prompt_token_ids": [1, 2]}, long)
                await anext(stream)
                await beside.sleep(mode=mode)
                assert beside.is_sleeping
                *_, output = [each async for each in stream]
                assert output.outputs[0].finish_reason == reason
                assert (len(output.outputs[0].token_ids) < 200) == bool(count)
                with pytest.raises(ModelNotReadyError, match="the engine sleeps"):
                    await anext(beside.generate({"prompt_token_ids": [1]}, TEN))
                await beside.wake_up(["weights"])
                assert beside.is_sleeping
                await beside.wake_up()
                assert not beside.is_sleeping
            with pytest.raises(ValueError, match="keeps no requests"):
                await beside.sleep(mode="keep")
            assert await beside.reset_prefix_cache(reset_connector=True) is True
            assert await beside.collective_rpc(lambda worker: worker.rank) == [0]
            last = [each async for each in beside.generate({"prompt_token_ids": [1, 2, 3]}, TEN)]
            assert last[-1].outputs[0].token_ids == tokens(llm)

    asyncio.run(asyncio.wait_for(sleeping(), 120))


def test_sleep_keeps_a_pause(folder: Path, llm: LLM) -> None:
    """An engine that its caller has paused computes nothing after a sleep until it resumes."""

    async def sleeping() -> None:
        async with AsyncLLM(load(folder)) as beside:
            await beside.pause()
            await beside.sleep()
            await beside.wake_up()
            assert beside.is_paused
            # The thread is busy, so that it resumes and sleeps later than it was asked to.
            busy = threading.Event()
            held = asyncio.ensure_future(beside.call(lambda llm: busy.wait()))
            await beside.resume()
            asleep = asyncio.ensure_future(beside.sleep())
            await asyncio.sleep(0)  # which has begun
            busy.set()
            await asyncio.gather(held, asleep)
            await beside.wake_up()
            assert not beside.is_paused
            last = [each async for each in beside.generate({"prompt_token_ids": [1, 2, 3]}, TEN)]
            assert last[-1].outputs[0].token_ids == tokens(llm)

    asyncio.run(asyncio.wait_for(sleeping(), 120))


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_of_what_is_half_awake(llm: LLM, level: int) -> None:
    """An engine whose KV cache still sleeps refuses to sleep again, and wakes up unchanged."""
    llm.reload_weights()
    before = tokens(llm)
    llm.sleep(level)
    llm.wake_up(["weights"])
    with pytest.raises(RuntimeError, match="sleeps already"):
        llm.sleep(level)
    assert llm.executor.sleeping == {"kv_cache"}
    llm.wake_up()
    assert tokens(llm) == before


def test_calls_on_every_rank(llm: LLM, methods: Any) -> None:
    """Results come in the order of ranks; an error names its rank, and the engine goes on."""
    ranks = range(llm.executor.size)
    llm.reload_weights()
    before = tokens(llm)
    called = llm.collective_rpc("where", args=("a", 2), kwargs={"factor": 3})
    assert called == [(3 * rank, "cpu", "a", 2) for rank in ranks]
    assert llm.collective_rpc(methods.rank_of, timeout=60) == list(ranks)
    (first, *others) = llm.collective_rpc("add_to_norm", args=[0.5])
    assert others == [first] * len(others)
    assert llm.apply_model(torch.nn.Module.extra_repr) == [""] * len(ranks)
    llm.collective_rpc("add_to_norm", args=[-0.5])
    with pytest.raises(KeyError, match="of this rank"):
        llm.collective_rpc("fail", args=(0,))
    if len(ranks) > 1:
        with pytest.raises(RankError, match=r"rank 1 of 2 failed: KeyError.*of this rank"):
            llm.collective_rpc("fail", args=(1,))
        with pytest.raises(ValueError, match="which they can import"):
            llm.collective_rpc(lambda worker: 5)
    for wrong, problem in (("nothing", "no method 'nothing'"), ("model_dump", "no method")):
        with pytest.raises(ValueError, match=problem):
            llm.collective_rpc(wrong)
    for timeout in (0, -1, float("nan"), float("inf"), "5"):
        with pytest.raises(ValueError, match="timeout should be seconds above 0"):
            llm.collective_rpc("where", timeout=timeout)
    assert tokens(llm) == before


@pytest.mark.parametrize("how", ["wait", "die"])
def test_a_rank_that_does_not_answer_is_named(folder: Path, methods: Any, how: str) -> None:
    """A rank that hangs or dies in a call is named within the timeout, and the engine ends."""
    two = load(folder, tensor_parallel_size=2, worker_extension_cls=methods.Methods)
    with two, pytest.raises(RankError, match="rank 1") as raised:
        two.collective_rpc(how, timeout=1.5, args=(1,))
    assert raised.value.ranks == (1,)
    with pytest.raises(RankError, match="the engine has ended"):
        tokens(two)


@pytest.mark.parametrize(
    ("extension", "problem"),
    [
        ("methods_of_a_trainer.Colliding", "has wake_up, which workers have themselves"),
        ("methods_of_a_trainer.Shadowing", "has runner, which workers have themselves"),
        ("methods_of_a_trainer.NUMBER", "should be a class, got 5"),
        ("methods_of_a_trainer.Nothing", "leads to no class, expected 'package.module.Class'"),
        ("no_such_module.Class", "leads to no class"),
        ("Class", "leads to no class"),
        (5, "worker_extension_cls should"),
    ],
)
@pytest.mark.usefixtures("methods")
def test_wrong_extensions_are_refused(folder: Path, extension: Any, problem: str) -> None:
    """A class with a worker's own name, or no class, is refused by name."""
    with pytest.raises(ValueError, match=re.escape(problem)):
        load(folder, worker_extension_cls=extension)
