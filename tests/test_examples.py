"""Each example runs from a clean checkout and prints what it shows."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SUPPORT = runpy.run_path(str(Path(__file__).with_name("support.py")))
PYTHON = os.environ.get("CLIENTS_PYTHON", "")  # see tests/server/test_clients.py
PRINTS = {
    "own_model": r"generated \[(\d+, ){7}\d+\]",
    "online_fp8": r"layers\.0\.mlp\.gate_up_proj\.weight +torch\.float8_e4m3fn",
    "from_trainer": r"before (\[.*\])\nafter  (?!\1)\[",
    "fsdp_to_engine": "\n".join(
        rf"step {step} {kind} \[.*\] equals a load: True"
        for step in range(2)
        for kind in ("bfloat16", "fp8")
    ),
    "policy_and_reference": r"0 is 0\.000 away\n.*-0 is (?!0\.000).*\n.*\nthe reference is 0: True",
    "from_engine": r"^([0-9a-f]{32} \[.*\])\n\1$",
    "own_source": r"one rank read 1\.00 .*\ntwo ranks read 1\.01 ",
}


# Each example is a fork of one program, which has imported what they need, and ends as Python does.
PROGRAM = """
import gc, os, runpy, sys
import tokenizers
import vllm_module.runtime.llm
import vllm_module.testing

results, *scripts = sys.argv[1:]
sys.path.insert(0, os.path.dirname(scripts[0]))
gc.collect()
gc.freeze()  # what is shared by the forks is neither walked nor copied when they end
forks = {}
for script in scripts:
    pid = os.fork()
    if pid == 0:
        for number, kind in (1, "out"), (2, "err"):
            name = f"{os.path.basename(script)}.{kind}"
            os.dup2(os.open(os.path.join(results, name), os.O_CREAT | os.O_WRONLY), number)
        sys.argv = [script]
        runpy.run_path(script, run_name="__main__")
        sys.exit()
    forks[script] = pid
for script, pid in forks.items():
    with open(os.path.join(results, f"{os.path.basename(script)}.code"), "w") as file:
        file.write(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all examples; return the folder of what they have printed."""

    def run(directory: Path) -> None:
        scripts = [str(EXAMPLES / f"{name}.py") for name in PRINTS]
        # From 3.12 on Python warns of forks beside threads; torch has some that do nothing yet.
        warnings = ("-W", "error", "-W", "ignore:This process:DeprecationWarning")
        subprocess.run(
            [sys.executable, *warnings, "-c", PROGRAM, str(directory), *scripts],
            env=os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"},
            check=True,
        )

    directory: Path = SUPPORT["fill_once"](tmp_path_factory.getbasetemp(), "examples", run)
    return directory


@pytest.mark.parametrize("name", PRINTS)
def test_an_example_runs(results: Path, name: str) -> None:
    """The example ends without an error or warning, and shows what its text promises."""
    code, out, err = (
        (results / f"{name}.py.{kind}").read_text() for kind in ("code", "out", "err")
    )
    assert code == "0", err
    assert re.search(PRINTS[name], out), out


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="there is no Ray")
@pytest.mark.parametrize(
    ("name", "needs", "prints"),
    [
        ("ray_data", "pandas", r"^16 of 16 completions equal one rank's$"),
        ("ray_serve", "fastapi", r"^\[(\d+, ){7}\d+\] equals one rank's: True$"),
    ],
)
def test_engines_in_ray(name: str, needs: str, prints: str) -> None:
    """Each makes a cluster of this machine, and gets one rank's tokens."""
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"the example wants ray[data] or ray[serve]: there is no {needs}")
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(prints, done.stdout, re.MULTILINE), done.stdout


@pytest.mark.skipif(not PYTHON, reason="CLIENTS_PYTHON names no interpreter")
def test_trl_trains_what_an_engine_generates(tmp_path: Path) -> None:
    """The reward rises to its most, and the engine has the weights of each of the steps."""
    # Not the root, where models/ and kernels/ would hide packages.
    (tmp_path / "vllm_module").symlink_to(EXAMPLES.parent / "vllm_module")
    done = subprocess.run(
        [PYTHON, EXAMPLES / "grpo.py"],
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"^reward ([\d. ]+)\n.* at most (\S+) apart$", done.stdout, re.MULTILINE)
    assert found, done.stdout
    rewards = [float(each) for each in found[1].split()]
    assert max(rewards[:3]) < 0.6
    assert min(rewards[-5:]) > 0.95
    assert float(found[2]) < 1e-4


def test_every_example_is_listed_and_run() -> None:
    """The folder's README has a line for each example, and there is a test of each above."""
    names = {path.stem for path in EXAMPLES.glob("*.py")} - {"small_checkpoint"}
    listed = re.findall(r"`python examples/(\w+)\.py`", (EXAMPLES / "README.md").read_text())
    assert names == set(listed) == {*PRINTS, "grpo", "ray_data", "ray_serve"}
