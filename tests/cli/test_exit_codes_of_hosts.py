"""The exit code of a command on several hosts, by what became of a host's ranks."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException

from vllm_module.cli import hosts
from vllm_module.cli.output import CommandError


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that launches ranks, which are not started: torch's agent tells of them."""
    monkeypatch.setattr(os, "environ", dict(os.environ))  # the launcher writes into it
    monkeypatch.setattr(hosts, "_log", logging.getLogger("not.torchs"))  # nor is torch's log ended
    options, watch = hosts.HostOptions(nnodes=2, master_port=29999), SimpleNamespace()

    def launch(ended: Any) -> int:
        def run(agent: LocalElasticAgent, role: str = "") -> Any:
            if isinstance(ended, BaseException):
                raise ended
            failures = {n: SimpleNamespace(exitcode=code) for n, code in ended.items()}
            return SimpleNamespace(failures=failures)

        # Ranks that a signal ends take seconds to start.
        monkeypatch.setattr(LocalElasticAgent, "run", run)
        # Without hosts there is nothing to watch.
        return hosts._launch(options, ["load", "model"], 2, 5.0, watch)  # type: ignore[arg-type]

    return launch


@pytest.mark.parametrize(
    ("ended", "code"), [({}, 0), ({0: 1}, 1), ({1: 2}, 2), ({0: 1, 1: 2}, 2), ({0: 2, 1: 1}, 2)]
)
def test_ranks_that_end(launched: Callable[..., int], ended: dict[int, int], code: int) -> None:
    """The largest code of a rank is that of the command."""
    assert launched(ended) == code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_a_signal_ends(launched: Callable[..., int], number: int) -> None:
    """As a shell has it: 128 and the signal's number."""
    command = ["sh", "-c", f"sh -c 'kill -{int(number)} $$'; exit $?"]
    # What runs the tests may ignore signals, which processes inherit, as nohup does with SIGHUP.
    shell = subprocess.run(
        command, check=False, preexec_fn=lambda: signal.signal(number, signal.SIG_DFL)
    ).returncode
    assert launched(SignalException("ended", signal.Signals(number))) == shell == 128 + number


@pytest.mark.parametrize(
    ("ended", "problem"),
    [
        ({1: -signal.SIGKILL}, "rank 1 on this host was ended by SIGKILL"),
        ({0: 0, 3: -signal.SIGSEGV}, "rank 3 on this host was ended by SIGSEGV"),
        ({2: 1, 0: -signal.SIGBUS}, "rank 0 on this host was ended by SIGBUS"),
    ],
)
def test_a_rank_that_a_signal_ends_is_named(
    launched: Callable[..., int], ended: dict[int, int], problem: str
) -> None:
    with pytest.raises(CommandError, match=problem):
        launched(ended)
