"""Scenarios of the command line where each rank is a process, for ``scenarios.py``."""

from __future__ import annotations

import contextlib
import io
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_module.cli import main

loading = runpy.run_path(str(Path(__file__).with_name("loading_together.py")))
die, hang, patience = loading["die"], loading["hang"], loading["patience"]
GENERATE = ("--prompt-ids", "1,2,3", "--max-new-tokens", "4")

SCENARIOS: dict[str, tuple[int, Callable[[Path, int], Any]]] = {}


def scenario(name: str, size: int, *arguments: str, **of_ranks: Any) -> None:
    """Enter a command of ``size`` ranks. ``rank1="tied"`` is its folder; a function, an action."""

    def run(directory: Path, rank: int) -> dict[str, Any]:
        special = of_ranks.get(f"rank{rank}", of_ranks.get("others", "good"))
        timeout = patience(of_ranks.values())
        if timeout == loading["TIMEOUT"] and not callable(special):
            loading["when_reading"](lambda: loading["await_events"](directory))
        if callable(special):
            loading["when_reading"](lambda action=special: action(directory))
        folder = "tied in part" if "tied in part" in of_ranks.values() else "good"
        folder = special if isinstance(special, str) else folder
        command, *options = arguments
        options = [command, str(directory.parent / folder), "--device", "cpu", *options]
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([*options, "--timeout", str(timeout)])
        return {"code": code, "out": out.getvalue(), "err": err.getvalue()}

    SCENARIOS[name] = (size, run)


scenario("command_first_dies", 3, "load", rank0=die)
scenario("command_one_hangs", 2, "generate", *GENERATE, rank1=hang)
scenario("command_all_refuse", 2, "generate", *GENERATE, rank0="damaged", rank1="damaged")
scenario("command_one_refuses", 4, "load", others="tied in part")
scenario("command_one_refuses_first_dies", 3, "load", rank0=die, others="tied in part")
scenario("command_other_config", 3, "generate", *GENERATE, rank1="other config")
scenario("command_other_value_unseen", 3, "load", rank0="other value unseen")
