"""Engines with requests of their own that share their experts, each a process.

They give the tokens of one engine that has all experts. Its tokens are compared with transformers'
in ``tests/models`` and ``tests/runtime``.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from vllm_module import LLM, SamplingParams
from vllm_module.config import EngineConfig

TESTS = Path(__file__).parents[1]
PIPELINE = runpy.run_path(str(TESTS / "distributed" / "test_pipeline.py"))
free_port = runpy.run_path(str(TESTS / "support.py"))["free_port"]
write = PIPELINE["write"]
KINDS = ("mixtral", "deepseek-v3", "qwen3-next")
PROMPTS = [each["prompt_token_ids"] for each in PIPELINE["PROMPTS"]]
# Few pages and tokens in a step: prompts are cut into chunks, and sequences are preempted.
TIGHT = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16}


LIMIT = 300.0  # seconds; no test depends on its length
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["vllm_module", "vllm_module.runtime.llm"])


class One:
    """One engine in a process."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.connection, theirs = PROCESSES.Pipe()
        script = str(Path(__file__).with_name("one_of_engines.py"))
        given = {"ARGUMENTS": (theirs, str(folder), settings)}
        self.process = PROCESSES.Process(target=runpy.run_path, args=(script, given, "engine"))
        self.process.start()
        theirs.close()

    def send(self, name: str, *arguments: Any, **options: Any) -> None:
        self.connection.send((name, arguments, options))

    def hear(self) -> Any:
        assert self.connection.poll(LIMIT), "the engine says nothing"
        return self.connection.recv()

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        self.send(name, *arguments, **options)
        return self.hear()

    def close(self) -> None:
        """Let the engine close; it does once the others do, too."""
        self.connection.send(None)


@contextmanager
def engines(folder: Path, size: int = 2, of_each: Any = None, **settings: Any) -> Iterator[Any]:
    """Start engines; ``of_each`` has settings of their own."""
    common = {"data_parallel_size": size, "data_parallel_rpc_port": free_port(), **settings}
    found = []
    try:
        for rank in range(size):
            own = {} if of_each is None else of_each[rank]
            found.append(One(folder, {**common, "data_parallel_rank": rank, **own}))
        yield found
    finally:
        for each in found:
            each.process.kill()
            each.process.join()
            each.connection.close()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("shared")
    return {name: write(base / name, name, **PIPELINE["MODELS"][name]) for name in KINDS}


def of_one_engine(folder: Path, weights: Path | None = None, **params: Any) -> list[Any]:
    """Return the tokens that an engine with all experts gives."""
    with PIPELINE["engine"](folder, block_size=4) as llm:
        if weights is not None:
            llm.update_weights(load_file(weights))
        asked = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 10, **params}
        outputs = llm.generate(
            [{"prompt_token_ids": each} for each in PROMPTS],
            SamplingParams(**asked),
            use_tqdm=False,
        )
    return [[list(each.token_ids) for each in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def pair(folders: dict[str, Path]) -> Iterator[list[One]]:
    """Two engines of Mixtral with few pages, which tests leave as they found them."""
    with PIPELINE["engine"](folders["mixtral"], block_size=4) as llm:
        pages = {"kv_cache_memory_bytes": 14 * llm.executor.worker.page_bytes}
    with engines(folders["mixtral"], **TIGHT, **pages) as found:
        assert [each.hear() for each in found] == ["ready", "ready"]
        yield found


def check_tokens(folder: Path, first: One, second: One) -> list[Any]:
    """Compare with one engine, where each has requests, or one has none; return greedy tokens."""
    expected = of_one_engine(folder)
    assert len({token for (sample,) in expected for token in sample}) > 8
    assert first.call("generate", PROMPTS) == expected  # the other has nothing
    first.send("generate", PROMPTS[:7])
    second.send("generate", PROMPTS[7:])
    assert first.hear() + second.hear() == expected
    drawn = first.call("generate", PROMPTS, n=2, temperature=1.5, seed=4)
    assert drawn == of_one_engine(folder, n=2, temperature=1.5, seed=4)
    # Rounds are begun for tokens alone, and by all.
    assert 20 < first.call("rounds") == second.call("rounds") < 200
    return expected


def test_engines_give_the_tokens_of_one(pair: list[One], folders: dict[str, Path]) -> None:
    """With unequal requests, chunks and preemption, and one engine without any."""
    kept = [rank[0] for each in pair for rank in each.call("experts")]
    assert kept == [[0, 1, 2], [3, 4]]
    check_tokens(folders["mixtral"], *pair)
    assert pair[0].call("preemptions") > 0


def test_engines_in_loops_compute_each_step_once(folders: dict[str, Path]) -> None:
    """A step that one engine computed again, to record it, would meet the others' next one."""
    pytest.importorskip("numba")
    with engines(folders["mixtral"], **TIGHT, loops=True) as (first, second):
        assert (first.hear(), second.hear()) == ("ready", "ready")
        check_tokens(folders["mixtral"], first, second)


@pytest.mark.parametrize(
    "name", [pytest.param("deepseek-v3", marks=pytest.mark.at_length), "qwen3-next"]
)
def test_ranks_of_engines_share_experts(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Engines of two ranks each, also with states of sequences, and after updates."""
    folder = folders[name]
    with engines(folder, **TIGHT, tensor_parallel_size=2) as (first, second):
        assert (first.hear(), second.hear()) == ("ready", "ready")
        kept = [rank[0] for each in (first, second) for rank in each.call("experts")]
        assert [expert for rank in kept for expert in rank] == [*range(sum(map(len, kept)))]
        assert len(kept) == 4
        expected = check_tokens(folder, first, second)

        other = write(tmp_path / "other", name, seed=8, **PIPELINE["MODELS"][name])
        for each in (first, second):
            each.send("update", str(other / "model.safetensors"))
        assert (first.hear(), second.hear()) == (None, None)
        first.send("generate", PROMPTS[:2])
        second.send("generate", PROMPTS[2:])
        updated = first.hear() + second.hear()
        assert updated == of_one_engine(other) != expected


def test_an_engine_that_sleeps_is_waited_for(pair: list[One], folders: dict[str, Path]) -> None:
    """Steps go on when it wakes up."""
    first, second = pair
    second.call("sleep")
    first.send("generate", PROMPTS)
    assert not first.connection.poll(0.1)
    second.call("wake_up")
    assert first.hear() == of_one_engine(folders["mixtral"])


def test_logits_of_a_launched_step_stay(folders: dict[str, Path]) -> None:
    """Until their tokens are chosen, while another engine begins rounds."""
    with engines(folders["mixtral"], async_scheduling=True) as (first, second):
        assert (first.hear(), second.hear()) == ("ready", "ready")
        second.send("generate", PROMPTS[:1], max_tokens=40)
        found = first.call("generate_late", PROMPTS, max_tokens=5)
        assert found == of_one_engine(folders["mixtral"], max_tokens=5)
        second.hear()


def test_a_fork_leaves_the_engine_to_its_parent(pair: list[One], folders: dict[str, Path]) -> None:
    """It exits without waiting for the other engines, and they go on."""
    assert pair[0].call("fork") == 0
    assert pair[1].call("generate", PROMPTS) == of_one_engine(folders["mixtral"])


def test_what_concerns_all_experts_is_refused(pair: list[One]) -> None:
    """By name, and nothing else is computed for it."""
    before = pair[0].call("rounds")
    for method, *arguments in (
        ["layout"], ["digest"], ["serve_weights"], ["reshard", 2], ["rearrange_experts"],
    ):  # fmt: skip
        answer = pair[0].call(method, *arguments)
        assert f"{method} concerns all experts, and 2 engines share them" in answer
    assert before == pair[1].call("rounds")


def test_an_engine_that_closes_computes_for_the_others(folders: dict[str, Path]) -> None:
    """It ends when they have closed, too."""
    with engines(folders["mixtral"], size=3) as found:
        assert [each.hear() for each in found] == ["ready"] * 3
        found[0].close()
        found[2].close()
        assert found[1].call("generate", PROMPTS) == of_one_engine(folders["mixtral"])
        assert all(each.process.is_alive() for each in found)
        found[1].close()
        assert [each.hear() for each in found] == ["closed"] * 3
        for each in found:
            each.process.join()
            assert each.process.exitcode == 0


def test_an_engine_that_nobody_holds_computes_for_the_others(folders: dict[str, Path]) -> None:
    """As after a function of a script that has made an engine and not closed it."""
    with engines(folders["mixtral"]) as (first, second):
        assert (first.hear(), second.hear()) == ("ready", "ready")
        assert first.call("drop") == "dropped"
        assert second.call("generate", PROMPTS) == of_one_engine(folders["mixtral"])


@pytest.mark.parametrize(
    "how", ["asleep", "interrupt_close", "interrupt_telling", "close_in_a_step"]
)
def test_an_engine_closes_without_waiting(how: str, folders: dict[str, Path]) -> None:
    """One that sleeps or is in a step can take part in none, and Ctrl-C ends the wait."""
    with engines(folders["mixtral"]) as (first, second):
        assert (first.hear(), second.hear()) == ("ready", "ready")
        if how == "asleep":
            first.call("sleep")
        else:
            assert first.call(how) == "it was closed"
        first.close()
        assert first.hear() == "closed"
        answer = second.call("generate", PROMPTS)
        # Maybe found before the call, by the thread that takes part in rounds of others.
        assert answer.startswith("RankError: ")
        assert "engine 0 of 2 (data_parallel_rank 0) has ended" in answer
        second.close()
        assert second.hear() == "closed"


def test_a_step_that_comes_after_the_end_waits_for_nobody(folders: dict[str, Path]) -> None:
    """As where a call has begun, and the thread that takes part in rounds finds the end first."""
    with engines(folders["mixtral"]) as (first, second):
        assert (first.hear(), second.hear()) == ("ready", "ready")
        first.process.kill()
        answer = second.call("step_after_end")
        assert answer.startswith("RankError: the engine has ended: engine 0 of 2")


def test_a_device_waits_for_no_engine_that_has_ended(folders: dict[str, Path]) -> None:
    """Its collectives would never end."""
    with engines(folders["mixtral"]) as (first, second):
        assert (first.hear(), second.hear()) == ("ready", "ready")
        first.send("wait_for_device")
        assert not first.connection.poll(0.3)
        second.process.kill()
        assert "engine 1 of 2 (data_parallel_rank 1) has ended" in first.hear()


@pytest.mark.parametrize(
    "how", ["killed", "killed in steps", "failing", "stopped", "stopped in a step"]
)
def test_an_engine_that_ends_is_named(how: str, folders: dict[str, Path]) -> None:
    """The others end, and say which it was; nothing hangs."""
    limit = 2.0 if how.startswith("stopped") else 300.0
    with engines(folders["mixtral"], step_timeout=limit) as (first, second):
        assert (first.hear(), second.hear()) == ("ready", "ready")
        in_step = "hangs in a step, or has been stopped: no answer for 2 s"
        expected = ["has ended: see what it printed"]
        if how == "killed in steps":
            second.send("generate", PROMPTS, max_tokens=2000)
            first.call("generate", PROMPTS)
        if how == "failing":
            second.call("fail_in_steps")
        elif how == "stopped in a step":
            expected = [in_step]
            second.call("fail_in_steps", stops=True)
        elif how == "stopped":
            # The signal may find it in a round of the others.
            expected = ["takes no part in a step: it hangs", in_step]
            os.kill(second.process.pid, signal.SIGSTOP)
        else:
            second.process.kill()
        answer = first.call("generate", PROMPTS)
        # Maybe found before the step, by the thread that takes part in rounds of others.
        assert answer.startswith("RankError: ")
        who = "engine 1 of 2 (data_parallel_rank 1)"
        assert any(f"{who} {each}" in answer for each in expected)
        if how == "failing":
            assert "a fault of this engine alone" in second.call("generate", PROMPTS)
        first.close()
        assert first.hear() == "closed"


def test_engines_that_differ_are_refused(folders: dict[str, Path]) -> None:
    """Both say in what."""
    other = {"max_num_seqs": 3, "kv_cache_memory_bytes": 1 << 19}
    with engines(folders["mixtral"], of_each=[{}, other]) as found:
        for each in found:
            assert "max_num_seqs: 256 on rank 0; 3 on rank 1" in (answer := each.hear())
            assert "kv_cache_memory_bytes: 1048576 on rank 0; 524288 on rank 1" in answer


def test_models_and_settings_that_share_nothing_are_refused(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Each with what to do."""
    dense = write(tmp_path / "dense", "qwen3")
    with engines(dense) as found:
        for one in found:
            assert "has no experts that engines could share" in one.hear()
    sizes = {"data_parallel_size": 2, "data_parallel_rank": 0}
    with pytest.raises(ValueError, match="give enable_expert_parallel as well"):
        LLM(str(folders["mixtral"]), skip_tokenizer_init=True, device="cpu", **sizes)
    for entries, message in (
        ({"data_parallel_size": 2}, "data_parallel_rank says which"),
        ({"data_parallel_rank": 1}, "expected one below data_parallel_size, 1"),
        (sizes | {"data_parallel_rank": 2}, "expected one below data_parallel_size, 2"),
        (sizes | {"pipeline_parallel_size": 2}, "pipeline_parallel_size: leave one"),
        (sizes | {"distributed_executor_backend": "ray"}, "'ray': leave one"),
        (sizes | {"enable_eplb": True, "enable_torch_compile": True}, "compile: leave one"),
    ):
        with pytest.raises(ValueError, match=message):
            EngineConfig(**entries)
