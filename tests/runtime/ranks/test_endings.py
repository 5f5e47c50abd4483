"""The ranks of an engine end together, however one of them ends."""

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vllm_module import DeviceConfig, LoadConfig, ModelConfig
from vllm_module.base import waiting
from vllm_module.config import EngineConfig
from vllm_module.errors import CheckpointFormatError, MissingWeightError, RankError
from vllm_module.runtime.ranks import group
from vllm_module.runtime.ranks.executor import Executor
from vllm_module.testing import write_checkpoint
from vllm_module.weights import buckets

# Pytest's importlib mode has no imports between test files.
RANKS: Any = runpy.run_path(str(Path(__file__).with_name("running.py")))
HERE, FOLLOWING, CONFIG = (RANKS[name] for name in ("HERE", "FOLLOWING", "CONFIG"))
weights, executor, step = (RANKS[name] for name in ("weights", "executor", "step"))
logits, wait_until_gone, alive = (RANKS[name] for name in ("logits", "wait_until_gone", "alive"))
is_alive, workers = (RANKS[name] for name in ("is_alive", "workers"))


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
    made = executor(folder, 2, step_timeout=0.5)
    made.start(64)
    monkeypatch.setattr(waiting, "SILENCE", 0.2)  # on a busy machine, the start may take longer
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
