"""``--nnodes``: a command on two hosts, which are two processes on this machine, in two folders."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer
from transformers import AutoModelForCausalLM

from vllm_module.cli import host_watch
from vllm_module.cli import hosts as on_hosts
from vllm_module.cli.hosts import HostOptions
from vllm_module.cli.options import RankOptions
from vllm_module.cli.output import CommandError

Run = Callable[..., Any]
SUPPORT = runpy.run_path(str(Path(__file__).parents[1] / "support.py"))
free_port = SUPPORT["free_port"]
PROMPT = [1, 2, 3]
IMPATIENT = f"""
from vllm_module.cli import host_watch
host_watch.SILENCE, host_watch.GRACE = 2, 1
{on_hosts.START}
"""


def start(folder: Path, command: str, *words: object) -> subprocess.Popen[str]:
    """Start a host: a process in a folder of its own, which has the checkpoint as ``model``."""
    return subprocess.Popen(
        [sys.executable, "-c", on_hosts.START, command, "model", *map(str, words)],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def two_folders(folder: Path, tmp_path: Path) -> list[Path]:
    for host in range(2):
        shutil.copytree(folder, tmp_path / str(host) / "model")
    return [tmp_path / "0", tmp_path / "1"]


def test_tokens_of_two_hosts_are_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    """Host 0 prints the tokens, host 1 nothing, and both end with code 0."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    whole = model.generate(torch.tensor([PROMPT]), max_new_tokens=6, do_sample=False)
    words = ("--prompt-ids", "1,2,3", "--max-new-tokens", 6, "--dtype", "float32", "--json")
    words += ("--device", "cpu", "--tp", 2, "--nnodes", 2, "--master-port", free_port())
    places = two_folders(folder, tmp_path)
    options = [{"log": place / "err", "out": place / "out", "folder": place} for place in places]
    processes = [
        SUPPORT["start_command"]("generate", "model", *words, "--node-rank", host, **options[host])
        for host in range(2)
    ]
    for each in processes:
        each.join(SUPPORT["LIMIT"])
    ended = [[(place / name).read_text() for name in ("out", "err")] for place in places]
    assert [each.exitcode for each in processes] == [0, 0], ended
    found = json.loads(ended[0][0])
    assert found["tensor_parallel_size"] == 2
    assert found["completions"][0]["ids"] == whole[0, len(PROMPT) :].tolist()
    assert ended[1][0] == ""
    assert "host 1 of 2 asks for host 0 at 127.0.0.1:" in ended[1][1]


@pytest.mark.at_length
def test_a_host_that_ends(folder: Path, tmp_path: Path) -> None:
    """If its launcher is killed before its rank has joined, the rank ends, and all others do."""
    words = ("--prompt-ids", "1,2,3", "--device", "cpu", "--tp", 2)
    words += ("--nnodes", 2, "--master-port", free_port())
    places = two_folders(folder, tmp_path)
    first = subprocess.Popen(
        [sys.executable, "-c", IMPATIENT, "generate", "model", *map(str, words)],
        cwd=places[0], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    second = start(places[1], "generate", *words, "--node-rank", 1)
    children = Path(f"/proc/{second.pid}/task/{second.pid}/children")
    SUPPORT["wait_until"](children.read_text, "the second host starts its rank")
    (rank,) = children.read_text().split()
    second.kill()
    out, err = first.communicate(timeout=60)
    second.communicate()
    assert (first.returncode, out) == (1, "")
    assert re.search(r"error: host 1 \(.*, process \d+\) has said nothing for 2 s", err)
    SUPPORT["wait_until"](lambda: not Path(f"/proc/{rank}").exists(), "its rank ends")


class Host(threading.Thread):
    """A host whose ranks are not started: what it raised is in ``error``, or ``None``."""

    def __init__(self, port: int, *, tp: int = 2, timeout: float = 20.0, **given: Any) -> None:
        super().__init__()
        self.error: Exception | None = None
        self.options = HostOptions(**{"nnodes": 2, "master_port": port} | given)
        self.tp, self.timeout = tp, timeout
        self.start()

    def run(self) -> None:
        try:
            self.options.start(["load", "model"], RankOptions(self.tp), self.timeout)
        except typer.Exit:
            pass
        except Exception as error:
            self.error = error


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the hosts that go on to start their ranks."""
    found: list[int] = []

    def launch(options: HostOptions, *_: object) -> int:
        found.append(options.node_rank)
        time.sleep(0.5)  # as long as the store has to be there
        return 0

    monkeypatch.setattr(on_hosts, "_launch", launch)
    monkeypatch.setattr(on_hosts, "_TELL", 0.5)  # the hosts here read within milliseconds
    return found


def errors(*hosts: Host) -> list[str]:
    for each in hosts:
        each.join(60)
        assert not each.is_alive()
    return [str(each.error or "") for each in hosts]


def test_hosts_that_are_alike_start(launched: list[int]) -> None:
    """A host that comes early waits, whichever it is."""
    port = free_port()
    early = Host(port, node_rank=1)
    time.sleep(0.3)
    assert errors(early, Host(port, node_rank=0)) == ["", ""]
    assert sorted(launched) == [0, 1]


def test_hosts_that_differ_are_named_on_all(launched: list[int]) -> None:
    """Another number of hosts, and another number of ranks, are told with both numbers."""
    port = free_port()
    for message in errors(Host(port, node_rank=0), Host(port, node_rank=1, nnodes=3, tp=3)):
        assert "has --nnodes 3, and host 0" in message
        assert "has 2: start the same on all hosts" in message
    port = free_port()
    for message in errors(Host(port, node_rank=0), Host(port, node_rank=1, tp=4)):
        assert "has ranks 4, and host 0" in message
    assert launched == []


def test_two_hosts_with_one_number(launched: list[int]) -> None:
    """All hosts are told, and a second host 0 on this machine that the port is taken."""
    port = free_port()
    hosts = [Host(port, node_rank=0, nnodes=3, tp=3)]
    hosts += [Host(port, node_rank=1, nnodes=3, tp=3) for _ in range(2)]
    for message in errors(*hosts):
        assert message.startswith("two hosts have --node-rank 1: ")
        assert f"process {os.getpid()}" in message
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (message,) = errors(Host(port, node_rank=0))
    assert f"127.0.0.1:{port}, where the hosts meet" in message
    assert "cannot be opened: is it free, has another host --node-rank 0" in message
    assert launched == []


def test_hosts_that_do_not_come(launched: list[int]) -> None:
    """They are named within the limit: host 0 that cannot be reached, and another one."""
    begin = time.monotonic()
    port = free_port()
    (message,) = errors(Host(port, node_rank=1, timeout=1.0))
    assert f"127.0.0.1:{port}, where the hosts meet" in message
    assert "did not answer within 1 s: has the command been started there" in message
    port = free_port()
    waiting = [Host(port, node_rank=host, nnodes=4, tp=4, timeout=2.0) for host in (0, 2)]
    for message in errors(*waiting):
        assert message.startswith(f"hosts 1, 3 did not come to 127.0.0.1:{port} within the limit")
    assert time.monotonic() - begin < 20
    assert launched == []


@pytest.mark.parametrize("late", [0.0, 1.9, 2.1, 60.0])
@pytest.mark.parametrize(("number", "told"), [(0, "names"), (2, "names"), (2, None)])
def test_a_host_that_was_paused_beyond_the_limit(
    late: float, number: int, told: str | None
) -> None:
    """It names the hosts that have not come, however late it looks for them."""
    store, hosts = dist.HashStore(), HostOptions(nnodes=4, node_rank=number)
    for each in (0, 2):
        store.set(f"host {each}", "")
    keys = [f"host {each}" for each in range(4)]
    with pytest.raises(CommandError, match=r"^hosts 1, 3 did not come to 127\.0\.0\.1:29501"):
        on_hosts._wait_for(store, hosts, keys, time.monotonic() - late, told)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--nnodes", 2, "--node-rank", 2, "--tp", 2), "it is at most 1, got 2"),
        (("--node-rank", 1, "--tp", 2), "there are 1 host (--nnodes), so it is at most 0"),
        (("--nnodes", 3, "--tp", 4), "4 ranks (--tp times --pp) cannot be spread evenly over 3"),
        (("--nnodes", 2), "1 rank (--tp times --pp) cannot be spread evenly over 2 hosts"),
    ],
)
def test_numbers_that_do_not_fit(
    run: Run, folder: Path, words: tuple[object, ...], message: str
) -> None:
    result = run("load", folder, "--device", "cpu", *words)
    assert result.code == 2
    assert message in result.err


def test_what_does_not_go_with_hosts(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several engines, and processes that torchrun has started, which know their hosts."""
    several = run("serve", folder, "--tp", 2, "--nnodes", 2, "--data-parallel-size", 2)
    assert several.code == 2
    assert "several engines are on one host" in several.err
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    started = run("load", folder, "--device", "cpu", "--nnodes", 2)
    assert started.code == 2
    assert "torchrun has started this process" in started.err


def test_errors_are_the_command_s() -> None:
    """What hosts find out is no bug: it is told without a traceback."""
    error = Host(free_port(), node_rank=1, timeout=0.5)
    errors(error)
    assert isinstance(error.error, CommandError)


def test_a_host_whose_command_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are told its code, and end their ranks; one that ends well stops nobody."""
    ended = threading.Event()
    monkeypatch.setattr(os, "kill", lambda *_: ended.set())  # it would end the tests
    monkeypatch.setattr(host_watch, "BEAT", 0.05)
    monkeypatch.setattr(host_watch, "GRACE", 0.05)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for number in range(3):
        store.set(host_watch.beat_of(number), "0")
    mine = host_watch.HostWatch(store, 0, {1: "one", 2: "two"})
    host_watch.HostWatch(store, 1, {0: "zero", 2: "two"}).end(0)
    other = host_watch.HostWatch(store, 2, {0: "zero", 1: "one"})
    assert not ended.wait(0.5)
    assert mine.found == ""
    other.end(7)
    assert ended.wait(10)
    assert "host 2 (two) has ended with code 7" in mine.found
    assert "error: host 2 (two) has ended with code 7" in capsys.readouterr().err
    begin = time.monotonic()
    mine.end(0)  # of host 0, which waits for none, as both have left
    assert time.monotonic() - begin < host_watch.LINGER / 2


@pytest.mark.parametrize(
    ("left", "named"),
    [
        ((3, 0, None), 1), ((None, 4, 0), 2), ((0, None, 5), 3), ((6, 7, 8), 1), ((0, 0, 9), 3),
        ((None, 8, None), 2), ((-9, None, 0), 1),
    ],
)  # fmt: skip
def test_whichever_host_fails_is_named(
    left: tuple[int | None, ...], named: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before hosts that have ended well or go on, and the first of several."""
    ended = threading.Event()
    monkeypatch.setattr(os, "kill", lambda *_: ended.set())  # it would end the tests
    for name in ("BEAT", "GRACE", "LINGER"):
        monkeypatch.setattr(host_watch, name, 0.05)  # they last for up to ten seconds
    store = dist.HashStore()
    for number, code in enumerate(left, 1):
        store.set(host_watch.beat_of(number), "1" if code is None else f"left {code}")
    watch = host_watch.HostWatch(store, 0, {1: "one", 2: "two", 3: "three"})
    assert ended.wait(10)
    watch.end(1)
    assert f"host {named} " in watch.found
    assert f"has ended with code {left[named - 1]}:" in watch.found


@pytest.fixture(autouse=True)
def exited(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The end of this process by a watch, whose command does not end, is noted in its place."""
    exited = threading.Event()
    # The watch would end pytest: it runs in the tests' own process, which is its command here.
    monkeypatch.setattr(os, "_exit", lambda _: exited.set())
    return exited


def test_ranks_that_do_not_end(monkeypatch: pytest.MonkeyPatch, exited: threading.Event) -> None:
    """They are killed after some seconds, and the command ends that waits outside of Python."""
    kill = os.kill
    # Not the tests' own process, which is the command here.
    monkeypatch.setattr(os, "kill", lambda pid, how: pid == os.getpid() or kill(pid, how))
    for name in ("BEAT", "GRACE", "LINGER"):
        monkeypatch.setattr(host_watch, name, 0.05)  # they last for up to ten seconds
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for number in range(2):
        store.set(host_watch.beat_of(number), "0")
    watch = host_watch.HostWatch(store, 0, {1: "one"})
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as rank:
        kill(rank.pid, signal.SIGSTOP)
        watch.ranks = lambda: [rank.pid]
        store.set(host_watch.beat_of(1), "left 1")
        assert rank.wait(10) == -signal.SIGKILL
    assert exited.wait(10)
    watch.end(1)


class HeldStore:
    """A store whose process runs or is stopped: then no request is answered."""

    def __init__(self) -> None:
        self.running = threading.Event()
        self.running.set()
        self._count = 0

    def __getattr__(self, name: str) -> Any:
        def request(*_: object) -> list[bytes]:
            self.running.wait()
            self._count += 1
            return [b"%d" % self._count]

        return request


@pytest.mark.parametrize(
    ("number", "others", "problem"),
    [
        (1, {0: "zero"}, "host 0 (zero) has said nothing for 0.3 s"),
        (0, {1: "one"}, "this host does not reach its own store, in which the hosts meet"),
    ],
)
def test_a_host_that_is_stopped_with_its_store(
    number: int,
    others: dict[int, str],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is named by the others, whose requests wait without a limit, and they end.

    Host 0 itself cannot reach the store when its address is gone with its link.
    """
    ended, store = threading.Event(), HeldStore()
    monkeypatch.setattr(os, "kill", lambda *_: ended.set())  # it would end the tests
    for name, seconds in {"BEAT": 0.05, "GRACE": 0.05, "SILENCE": 3600.0, "LINGER": 0.2}.items():
        monkeypatch.setattr(host_watch, name, seconds)  # a host may be silent for half a minute
    watch = host_watch.HostWatch(store, number, others)
    assert not ended.wait(0.5)
    store.running.clear()
    monkeypatch.setattr(host_watch, "SILENCE", 0.3)
    assert ended.wait(30)
    assert problem in watch.found
    assert problem.partition(" for ")[0].partition(", in which")[0] in capsys.readouterr().err
    watch.end(1)  # does not wait for the store


def test_a_host_that_goes_on_in_time_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a machine was paused for longer than a host may be silent, and not for long."""
    ended, graced, store = threading.Event(), threading.Event(), HeldStore()
    monkeypatch.setattr(os, "kill", lambda *_: ended.set())  # it would end the tests
    for name, seconds in {"BEAT": 0.05, "GRACE": 77.0, "SILENCE": 0.3, "LINGER": 0.2}.items():
        monkeypatch.setattr(host_watch, name, seconds)  # a host may be silent for half a minute

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout != 77.0:
                return super().wait(timeout)
            before = watch._answered
            store.running.set()
            while watch._answered == before:
                super().wait(0.01)
            graced.set()
            return False

    watch = host_watch.HostWatch(store, 1, {0: "zero"})
    watch._stop = Stop()  # from the next beat on
    store.running.clear()
    assert graced.wait(30)
    assert not ended.wait(0.5)
    assert watch.found == ""
    watch.end(0)
