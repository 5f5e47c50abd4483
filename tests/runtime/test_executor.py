"""The ranks of an engine run the same steps and end together."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import DeviceConfig, LoadConfig, ModelConfig
from vllm_module.base import waiting
from vllm_module.config import EngineConfig
from vllm_module.errors import (
    CheckpointFormatError,
    MissingWeightError,
    ModelNotReadyError,
    RankError,
    UnexpectedWeightError,
)
from vllm_module.kernels.matmul import linear
from vllm_module.runtime.cache.page_pool import PagePool
from vllm_module.runtime.engine import Engine
from vllm_module.runtime.ranks import executor as executors
from vllm_module.runtime.ranks import group, processes
from vllm_module.runtime.ranks.executor import Executor
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.scheduler import Scheduler
from vllm_module.runtime.step_inputs import StepInputs
from vllm_module.testing import write_checkpoint
from vllm_module.weights import buckets

HERE = Path(__file__).parent
PAGE = 16
FOLLOWING = runpy.run_path(str(HERE / "following.py"))
SUPPORT = runpy.run_path(str(HERE.parent / "support.py"))
Weights = dict[str, torch.Tensor]
CONFIG = AutoConfig.for_model(
    "qwen3",
    architectures=["Qwen3ForCausalLM"],
    vocab_size=130,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=12,
    num_key_value_heads=6,
    head_dim=16,
    max_position_embeddings=512,
    tie_word_embeddings=False,
)


def weights(seed: int) -> Weights:
    torch.manual_seed(seed)
    state: Weights = AutoModelForCausalLM.from_config(CONFIG).state_dict()
    return {name: tensor * (1 if "norm" in name else 8) for name, tensor in state.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("executor") / "checkpoint", weights(0), config=CONFIG.to_dict()
    )


def executor(folder: Path, size: int, **config: Any) -> Executor:
    return Executor(
        ModelConfig(model=str(folder)),
        LoadConfig(),
        DeviceConfig(device="cpu"),
        EngineConfig(tensor_parallel_size=size, **{"kv_cache_memory_bytes": 1 << 23, **config}),
    )


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Executor]:
    made = executor(folder, 1)
    made.start(256)
    yield made
    made.close()


@pytest.fixture(scope="module")
def engines() -> Iterator[list[Executor]]:
    """The engine with worker processes, if there is one: a process can have only one."""
    engines: list[Executor] = []
    yield engines
    close_all(engines)


def close_all(engines: list[Executor]) -> None:
    while engines:
        engines.pop().close()


@pytest.fixture
def no_engine(engines: list[Executor]) -> None:
    """Close the engine that another test has left, and with it the process group."""
    close_all(engines)


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start ranks as outside of tests, so that what they print is captured."""
    monkeypatch.setattr(processes, "multiprocessing", multiprocessing)


def started(engines: list[Executor], folder: Path, size: int) -> Executor:
    """Return the engine that is running if it has this size; otherwise start one."""
    if not engines or engines[0].size != size:
        close_all(engines)
        engines.append(executor(folder, size))
        engines[0].start(256)
    return engines[0]


@pytest.fixture
def shared(engines: list[Executor], folder: Path) -> Executor:
    """Two ranks, for tests that leave them running with the checkpoint's weights."""
    return started(engines, folder, 2)


@pytest.fixture
def ended(
    engines: list[Executor], folder: Path, request: pytest.FixtureRequest
) -> Iterator[Executor]:
    """As many ranks as the test names. The test ends them."""
    yield started(engines, folder, request.param)
    close_all(engines)


def step(lengths: list[int], counts: list[int]) -> StepInputs:
    """Compute the last ``counts`` tokens of sequences of ``lengths``, each on its own pages."""
    inputs = StepInputs([], [], [], lengths, [0], [], [], 16, [], max(counts))
    page = 0
    for index, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        pages = list(range(page, page + -(-length // PAGE)))
        page += 16
        places = range(length - count, length)
        inputs.input_ids += [(7 * place + index) % 130 for place in places]
        inputs.positions += places
        inputs.slot_mapping += [pages[place // PAGE] * PAGE + place % PAGE for place in places]
        inputs.table_rows.append(index)
        inputs.new_pages.append((index, 0, pages))
        inputs.query_start_loc.append(len(inputs.input_ids))
        inputs.rows.append(len(inputs.input_ids) - 1)
    return inputs


PREFILL = step([3, 16, 33], [3, 16, 33])


def logits(made: Executor) -> torch.Tensor:
    return made.run(PREFILL).clone()


def wait_until_gone(pids: list[int]) -> None:
    SUPPORT["wait_until"](lambda: not alive(pids), f"{pids} end")


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if is_alive(pid)]


def is_alive(pid: int) -> bool:
    try:
        # A zombie has ended; not every system removes those whose parent is dead.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def workers() -> list[int]:
    return [process.pid for process in multiprocessing.active_children() if process.pid is not None]


def test_two_ranks_compute_what_one_computes(alone: Executor, shared: Executor) -> None:
    """Logits of prompts, of their chunks and of the tokens after them do not depend on the size."""
    assert (shared.rank, shared.size) == (0, 2)
    for inputs in (
        PREFILL,
        step([4, 17, 34], [1, 1, 1]),
        step([5, 40, 35, 7], [1, 23, 1, 7]),
        step([6, 41, 36, 8], [1, 1, 1, 1]),
    ):
        expected = alone.run(inputs)
        assert expected.abs().max() > 0.5
        torch.testing.assert_close(shared.run(inputs), expected, rtol=0, atol=1e-4)


def served(made: Executor, overlapped: bool) -> tuple[list[Any], int]:
    """Return the tokens and the logprob of requests, and how many steps were launched early."""
    early = 0

    def execute(inputs: StepInputs, sampled: torch.Tensor | None = None) -> torch.Tensor:
        nonlocal early
        early += bool(inputs.num_sampled)
        return made.run(inputs, sampled)

    scheduler = Scheduler(PagePool(40, PAGE), PagePool(0, PAGE), 8, 100)
    engine = Engine(execute, scheduler, 130, 256, wait=made.wait, async_scheduling=overlapped)
    requests = []
    for index in range(5):
        params = SamplingParams(seed=index, temperature=0.5, max_tokens=9 + index, logprobs=0)
        requests.append(engine.add(str(index), [index, 3, 5], params))
        engine.step()
    while engine.requests:
        engine.step()
    assert all(request.error is None for request in requests)
    sequences = [request.sequences[0] for request in requests]
    return [(each.output, each.cumulative_logprob) for each in sequences], early


def test_ranks_get_the_tokens_of_steps_that_are_launched_early(
    alone: Executor, shared: Executor
) -> None:
    """Only the first rank chooses tokens; the next step begins on every rank with these."""
    expected, none_early = served(alone, False)
    assert none_early == 0
    for made in (alone, shared):
        tokens, early = served(made, True)
        assert early > 9
        assert [ids for ids, _ in tokens] == [ids for ids, _ in expected]
        for (_, got), (_, wanted) in zip(tokens, expected, strict=True):
            assert got == pytest.approx(wanted, abs=1e-3)


def test_every_rank_keeps_the_block_tables(shared: Executor) -> None:
    """A step that sends no pages computes with those that an earlier one sent to every rank."""
    shared.run(PREFILL)
    decoding = step([4, 17, 34], [1, 1, 1])
    expected = shared.run(decoding).clone()
    shared.run(step([3, 16, 33], [3, 16, 33]))
    decoding.new_pages = []
    assert torch.equal(shared.run(decoding), expected)
    other = step([4, 17, 34], [1, 1, 1])
    other.new_pages = [(row, 0, [page + 16 for page in pages]) for row, _, pages in other.new_pages]
    shared.run(other)
    assert not torch.equal(shared.run(decoding), expected)


def test_one_rank_alone_needs_no_processes(shared: Executor, alone: Executor) -> None:
    """It starts no process, also while another engine runs; and it cannot follow."""
    before = workers()
    assert (alone.rank, alone.size) == (0, 1)
    logits(alone)
    assert workers() == before
    with pytest.raises(RuntimeError, match="rank 0 leads"):
        alone.follow()


def test_pages_are_as_many_as_fit_and_can_be_used(shared: Executor, folder: Path) -> None:
    """The cache has no more pages than all sequences fill; not one page is refused."""
    page = 2 * 2 * 6 * 16 * PAGE * 4  # layers, keys and values, heads, features, tokens, bytes
    assert shared.worker.page_bytes == page // 2
    config = {"kv_cache_memory_bytes": 9 * page, "swap_space": 2 * page / 2**30}
    for most, length, expected in ((2, 60, (8, 2)), (2, 100, (9, 2)), (1, 16, (1, 1))):
        made = executor(folder, 1, max_num_seqs=most, **config)
        assert made.start(length) == expected
        made.close()
    refused = executor(folder, 1, kv_cache_memory_bytes=page - 1)
    with pytest.raises(ValueError, match=f"page of 16 tokens, which takes {page} bytes: raise"):
        refused.start(100)


@pytest.mark.parametrize(("length", "messages"), [(1, 1), (250, 1), (5000, 2)])
def test_a_step_is_told_in_one_message(
    shared: Executor, monkeypatch: pytest.MonkeyPatch, length: int, messages: int
) -> None:
    """A step takes one broadcast, and a large one two."""
    count, broadcast = 0, dist.broadcast

    def counted(*arguments: Any, **keywords: Any) -> Any:
        nonlocal count
        count += 1
        return broadcast(*arguments, **keywords)

    monkeypatch.setattr(dist, "broadcast", counted)
    sequences = -(-length // 256)
    shared.run(step([length // sequences] * sequences, [length // sequences] * sequences))
    assert count == messages


def test_every_rank_multiplies_as_rank_0_chose(
    alone: Executor, shared: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 sends its choice of products with each step, and a rank that obeys uses it."""
    chosen, told, used = linear.Products(few=True), [], []
    monkeypatch.setattr(shared, "products", chosen)
    tell = shared._ranks.tell
    monkeypatch.setattr(
        shared._ranks, "tell", lambda message: (told.append(message), tell(message))
    )
    shared.run(PREFILL)
    assert told == [("run", (PREFILL, chosen))]
    monkeypatch.setattr(alone.worker, "run", lambda _: used.append(linear._products.get()))
    alone._obey(*told[0])
    assert used == [chosen]
    assert linear._products.get() == linear.Products()


def test_products_are_measured_once_and_for_float32_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines of a process share one measurement; a model in bfloat16 needs none."""
    measured = []

    def measure() -> linear.Products:
        measured.append(len(measured))
        return linear.Products(many=True)

    monkeypatch.setattr(executors, "fastest_products", measure)
    executors._fastest_products.cache_clear()
    try:
        for dtype, expected in (("bfloat16", False), ("float32", True), ("float32", True)):
            config = EngineConfig(kv_cache_memory_bytes=1 << 20)
            model = ModelConfig(model=str(folder), dtype=dtype)
            made = Executor(model, LoadConfig(), DeviceConfig(device="cpu"), config)
            assert made.products.many == expected
            made.close()
        assert measured == [0]
    finally:
        executors._fastest_products.cache_clear()


def test_rows_of_codes_are_chosen_for_quantized_models_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products with codes are measured for quantized weights, whatever the model's dtype."""
    monkeypatch.setattr(executors, "fastest_code_rows", lambda threads: 64)
    config = EngineConfig(kv_cache_memory_bytes=1 << 20)
    for dtype, scheme, expected in (
        ("float32", None, 0),
        ("bfloat16", "int8_per_channel_weight_only", 64),
        ("float32", "int8_per_channel_weight_only", 64),
    ):
        model = ModelConfig(model=str(folder), dtype=dtype, quantization=scheme)
        made = Executor(model, LoadConfig(), DeviceConfig(device="cpu"), config)
        assert made.products.codes == expected
        made.close()


@pytest.mark.parametrize("source", [dict, lambda pairs: iter(pairs.items())])
def test_an_update_reaches_all_ranks(
    shared: Executor, folder: Path, tmp_path: Path, source: Callable[[Weights], Any]
) -> None:
    """After an update, of all weights or some, logits equal those of a fresh load."""
    before, new = logits(shared), weights(1)
    shared.update_weights(source(new))
    fresh = executor(write_checkpoint(tmp_path, new, config=CONFIG.to_dict()), 1)
    fresh.start(256)
    torch.testing.assert_close(logits(shared), logits(fresh), rtol=0, atol=1e-4)
    part = {name: tensor for name, tensor in new.items() if "layers.1" in name}
    old = {name: tensor for name, tensor in weights(0).items() if name not in part}
    shared.update_weights(source(old))
    assert not torch.allclose(logits(shared), before, atol=1e-2)
    shared.update_weights(source({name: weights(0)[name] for name in part}))
    torch.testing.assert_close(logits(shared), before, rtol=0, atol=0)


def test_an_update_that_is_refused_is_made_up_for_by_a_whole_checkpoint(shared: Executor) -> None:
    """Each step raises the reason until an update has all weights; the ranks keep running."""
    before = logits(shared)
    wrong = {**weights(1), "model.other.weight": torch.ones(2)}
    with pytest.raises(UnexpectedWeightError, match=r"model\.other\.weight"):
        shared.update_weights(iter(wrong.items()))
    with pytest.raises(ModelNotReadyError, match="broke on UnexpectedWeightError"):
        logits(shared)
    name = "model.norm.weight"
    with pytest.raises(ValueError, match="missing"):
        shared.update_weights({name: weights(0)[name]})
    with pytest.raises(ModelNotReadyError):
        logits(shared)
    shared.update_weights(weights(0))
    torch.testing.assert_close(logits(shared), before, rtol=0, atol=0)


def test_an_update_that_another_rank_refuses_says_which(
    shared: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one rank refuses, the update raises, and no step runs on the mixture of weights."""

    def take(weights: Iterator[Any], whole: bool) -> None:
        deque(weights, maxlen=0)

    with monkeypatch.context() as patch:
        patch.setattr(shared.worker, "update_weights", take)
        wrong = {"model.norm.weight": torch.ones(48), "other": torch.ones(2)}
        with pytest.raises(RankError, match=r"rank 1 of 2 failed: UnexpectedWeightError"):
            shared.update_weights(iter(wrong.items()))
    with pytest.raises(ModelNotReadyError, match="broke on UnexpectedWeightError"):
        logits(shared)
    shared.update_weights(weights(0))
    logits(shared)


def test_an_update_that_one_rank_took_and_another_refused_is_a_mixture(
    shared: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step runs although no rank's own weights are broken."""

    def take(weights: Iterator[Any], whole: bool) -> None:
        deque(weights, maxlen=0)
        shared.worker._took_update = True

    with monkeypatch.context() as patch:
        patch.setattr(shared.worker, "update_weights", take)
        with pytest.raises(RankError, match="rank 1 of 2 failed"):
            shared.update_weights(iter({"other": torch.ones(2)}.items()))
    with pytest.raises(ModelNotReadyError, match="some ranks took an update"):
        logits(shared)
    shared.update_weights(weights(0))
    logits(shared)


def test_a_source_that_breaks_before_anything_came_changes_nothing(shared: Executor) -> None:
    """The error is raised, and the ranks run with the weights that they have."""
    before = logits(shared)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        raise OSError("no trainer")
        yield

    with pytest.raises(OSError, match="no trainer"):
        shared.update_weights(broken())
    torch.testing.assert_close(logits(shared), before, rtol=0, atol=0)


def test_all_ranks_sleep_and_wake_up(shared: Executor) -> None:
    """They wake up with the weights that slept, and reload the checkpoint's."""
    before = logits(shared)
    shared.update_weights(weights(1))
    updated = logits(shared)
    shared.sleep()
    shared.wake_up()
    torch.testing.assert_close(logits(shared), updated, rtol=0, atol=0)
    shared.sleep(level=2)
    assert all(parameter.is_meta for parameter in shared.worker.model.parameters())
    with pytest.raises(ModelNotReadyError, match="updates had changed them"):
        shared.wake_up()
    shared.reload_weights()
    torch.testing.assert_close(logits(shared), before, rtol=0, atol=0)


def test_a_rank_that_cannot_wake_up_says_why(shared: Executor, folder: Path) -> None:
    """An error outside of steps is raised, and the call can be repeated."""
    before = logits(shared)
    shared.reload_weights()
    shared.sleep(level=2)
    config = folder / "model.safetensors"
    hidden = config.rename(folder / "hidden")
    with pytest.raises(ValueError, match="safetensors"):
        shared.wake_up()
    hidden.rename(config)
    shared.wake_up()
    torch.testing.assert_close(logits(shared), before, rtol=0, atol=0)


@pytest.mark.parametrize("ended", [2], indirect=True)
def test_a_worker_that_is_killed_is_named(ended: Executor) -> None:
    """A driver that waits for it in a step raises, and the engine has ended."""
    pids = workers()
    os.kill(pids[0], signal.SIGSTOP)  # the step waits for it
    threading.Timer(0.5, os.kill, (pids[0], signal.SIGKILL)).start()
    named = rf"rank 1 \(pid {pids[0]}\) was killed by signal 9"
    with pytest.raises(RankError, match=named) as raised:
        logits(ended)
    assert raised.value.ranks == (1,)
    assert not alive(pids)
    assert not dist.is_initialized()
    for call in (lambda: logits(ended), ended.sleep, lambda: ended.update_weights(weights(0))):
        with pytest.raises(RankError, match=f"the engine has ended: {named}") as again:
            call()
        assert again.value.ranks == (1,)
    ended.close()


@contextlib.contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Interrupt the main thread, as Ctrl-C does; pytest's workers ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("no_engine")
def test_a_rank_that_hangs_in_a_step_is_named_in_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names it; the step raises after ``step_timeout``, and so does every later call."""
    monkeypatch.setattr(waiting, "SILENCE", 0.2)
    made = executor(folder, 2, step_timeout=0.5)
    made.start(64)
    pids = workers()
    os.kill(pids[0], signal.SIGSTOP)
    named = rf"rank 1 \(pid {pids[0]}\) hangs: the process is stopped(.|\n)*no answer for 0.5 s"
    for call in (lambda: made.run(step([5], [5])), made.check, made.wake_up):
        with pytest.raises(RankError, match=named) as raised:
            call()
        assert raised.value.ranks == (1,)
    (said,) = [each.message for each in caplog.records if "waiting for" in each.message]
    assert said.startswith(f"waiting for rank 1 (pid {pids[0]}): the process is stopped")
    assert not alive(pids)
    made.close()


@pytest.mark.parametrize("method", ["update_weights", "sleep"])
@pytest.mark.parametrize("ended", [2], indirect=True)
def test_ctrl_c_ends_a_call_that_a_rank_does_not_hear(ended: Executor, method: str) -> None:
    """The interrupt is raised while a rank hangs, and no process is left."""
    pids, arguments = workers(), [weights(0)] if method == "update_weights" else []
    os.kill(pids[0], signal.SIGSTOP)
    with interrupted_after(0.3):
        getattr(ended, method)(*arguments)
    assert not alive(pids)
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="the engine has ended: KeyboardInterrupt"):
        ended.check()


@pytest.mark.parametrize("ended", [2], indirect=True)
def test_ctrl_c_between_two_messages_does_not_wait_for_a_rank_that_hangs(
    ended: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt while the next tensor is made tells the others, but not one that hangs."""
    monkeypatch.setattr(buckets, "_LAST_WORDS", 0.2)
    pids = workers()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        os.kill(pids[0], signal.SIGSTOP)
        raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        ended.update_weights(tensors())
    assert not alive(pids)


@pytest.mark.parametrize("ended", [3], indirect=True)
def test_a_worker_that_ends_meanwhile_is_named(ended: Executor) -> None:
    """The other workers end even if the driver calls nothing; its next call raises."""
    pids = workers()
    assert len(pids) == 2
    os.kill(pids[1], signal.SIGTERM)
    wait_until_gone(pids)
    with pytest.raises(RankError, match=rf"rank \d \(pid {pids[1]}\) was killed by signal 15"):
        ended.sleep()


@pytest.mark.usefixtures("no_engine", "spawned")
def test_what_a_worker_raises_in_a_step_is_raised(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The driver names the rank and the error; the worker prints the traceback."""
    made = executor(folder, 2)  # here: capfd captures what it prints
    made.start(64)
    pids, inputs = workers(), step([5], [5])
    inputs.rows = FOLLOWING["Elsewhere"](inputs.rows)
    with pytest.raises(RankError, match=r"^rank 1: IndexError: index 1000000 is") as raised:
        made.run(inputs)
    assert raised.value.ranks == (1,)
    assert not alive(pids)
    printed = capfd.readouterr().err
    assert printed.count("Traceback") == 1
    assert "model_runner.py" in printed


def test_a_message_of_any_length_is_that_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has room for so many bytes: as many are sent, the first ones of a longer message."""
    sent: list[bytes] = []

    class Sent:
        def wait(self, limit: Any) -> None: ...

    def isend(memory: torch.Tensor, **options: Any) -> Sent:
        sent.append(bytes(memory.tolist()))
        return Sent()

    monkeypatch.setattr(group.dist, "isend", isend)
    ranks = object.__new__(group.Ranks)
    ranks.control = None
    room = group._LAST_WORDS
    for length in (0, 1, *range(room // 3 - 6, room // 3), 2000):
        ranks._send_last_words(ValueError("路" * length))  # three bytes each
        text = f"!ValueError{': ' if length else ''}{'路' * length}".encode()
        assert sent[-1] == text[:room].ljust(room, b"\0")
    assert len(text) > room


@pytest.mark.parametrize("ended", [2], indirect=True)
def test_what_the_driver_raises_in_a_step_ends_the_workers(ended: Executor) -> None:
    """The workers, which wait for the driver, end; the driver raises its own error."""
    pids, inputs = workers(), step([5], [5])
    inputs.rows = [10**6]
    with pytest.raises(IndexError, match="index 1000000 is out of bounds"):
        ended.run(inputs)
    assert not alive(pids)
    with pytest.raises(RuntimeError, match="the engine has ended: IndexError: index 1000000"):
        logits(ended)


@pytest.mark.parametrize("ended", [2], indirect=True)
def test_close_ends_everything_however_often(ended: Executor, folder: Path) -> None:
    """A stopped worker ends as well, and torch has its number of threads back."""
    pids = workers()
    os.kill(pids[0], signal.SIGSTOP)
    for _ in range(2):
        ended.close()
        assert not alive(pids)
        assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="the engine has ended: it was closed"):
        ended.start(64)
    threads = torch.get_num_threads()
    torch.set_num_threads(5)  # not 1, of which a rank's part is 1 as well
    try:
        unclosed = executor(folder, 2)
        pids = workers()
        assert torch.get_num_threads() == 2
        del unclosed
        gc.collect()
        assert not alive(pids)
        assert torch.get_num_threads() == 5
        # As in a change from three ranks to two: those that are left have their part.
        larger, smaller = executor(folder, 3), executor(folder, 2)
        assert torch.get_num_threads() == 1
        larger.close()
        assert torch.get_num_threads() == 2
        smaller.close()
        assert torch.get_num_threads() == 5
    finally:
        torch.set_num_threads(threads)


@pytest.mark.usefixtures("no_engine", "spawned")
def test_a_checkpoint_that_is_refused_leaves_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The error of loading is raised, nothing else is printed, and no process is left."""
    with pytest.raises(CheckpointFormatError, match=r"has no config\.json"):
        executor(tmp_path, 2)  # starts no process
    incomplete = weights(0)
    del incomplete["model.norm.weight"]
    with pytest.raises(MissingWeightError, match=r"model\.norm\.weight"):
        executor(write_checkpoint(tmp_path, incomplete, config=CONFIG.to_dict()), 2)
    assert not workers()
    assert not dist.is_initialized()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("device", "message"),
    [("cuda", "3 ranks need a CUDA device each, and there are 2"), ("cuda:1", "is one device")],
)
def test_too_few_devices_are_refused_before_anything_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, device: str, message: str
) -> None:
    """The message gives the numbers."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(multiprocessing, "get_context", None)
    config = EngineConfig(tensor_parallel_size=3)
    with pytest.raises(ValueError, match=message):
        Executor(ModelConfig(model=str(folder)), LoadConfig(), DeviceConfig(device=device), config)


@contextlib.contextmanager
def driver(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A script in its own session, and the process ids of it and its worker."""
    process = subprocess.Popen(
        [sys.executable, str(HERE / "driving.py"), str(folder), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        yield process, list(map(int, process.stdout.readline().split()))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_nothing_is_left_of_a_driver_that_is_ended(folder: Path) -> None:
    """After Ctrl-C only the driver prints a traceback; after a kill no process does.

    This holds while ranks import modules and while one of them is stopped.
    """
    with driver(folder) as (gone, of_gone):
        os.kill(gone.pid, signal.SIGKILL)
        wait_until_gone(of_gone)
        assert gone.communicate()[1] == ""
    with driver(folder, "idle") as (killed, of_killed), driver(folder) as (stepping, importing):
        assert len(of_killed) == len(importing) == 2
        assert killed.stdout is not None
        assert stepping.stdout is not None
        os.killpg(stepping.pid, signal.SIGINT)
        assert stepping.stdout.readline() == "interrupted\n"
        assert not is_alive(importing[1])
        of_stepping = list(map(int, stepping.stdout.readline().split()))
        assert len(of_stepping) == 2
        for process in (stepping, killed):
            assert process.stdout.readline() == "started\n"
        for worker in (of_killed[1], of_stepping[1]):
            os.kill(worker, signal.SIGSTOP)
        os.kill(killed.pid, signal.SIGKILL)
        for _ in range(2):
            os.kill(stepping.pid, signal.SIGINT)
        wait_until_gone([*of_stepping, *of_killed])
        printed = stepping.communicate()[1]
        assert stepping.returncode in (-signal.SIGINT, 130, 1), printed
        assert printed.rstrip().endswith("KeyboardInterrupt"), printed
        assert printed.count("KeyboardInterrupt") == 1, printed  # the driver's own, chained or not
        assert killed.communicate()[1] == ""


def test_ranks_of_torchrun_follow_the_first(folder: Path, tmp_path: Path, alone: Executor) -> None:
    """They follow in a group that is there, joined, or a part of the world; a failure is named."""
    (tmp_path / "checkpoint").symlink_to(folder)
    SUPPORT["torchrun"](2, HERE / "following.py", tmp_path)
    expected = alone.run(FOLLOWING["FIVE"])
    for case in ("joined", "found", "surrounding"):
        computed = torch.load(tmp_path / f"{case}.pt")
        torch.testing.assert_close(computed, expected, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("no_engine")
def test_ranks_meet_after_a_world_that_failed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another library did not get to start in this process holds up no engine."""
    monkeypatch.setattr(dist.distributed_c10d, "_group_count", 0)
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="environment variable"):
        dist.init_process_group("gloo")
    made = executor(folder, 2)
    made.start(64)
    logits(made)
    made.close()
