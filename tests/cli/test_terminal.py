"""What a terminal or a shell does to the program: signals, closed streams, limits, odd arguments.

The program runs in a process of its own where a signal, a stream or a limit belongs to a process.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module.cli.output import describe_refusal, is_refusal

Run = Callable[..., Any]

# The program, in which an action runs when a module is imported: a moment that no clock decides.
PROGRAM = """
import atexit, os, signal, sys, threading, time
from vllm_module.cli import entry, main

def interrupt():
    signal.raise_signal(signal.SIGINT)

def dropped():
    class Dropped:
        def __del__(self):
            interrupt()  # Python prints what is raised here, and goes on
    Dropped()

def replaced():
    try:
        interrupt()
    except KeyboardInterrupt:
        raise SystemError("initialization failed")

def twice():
    try:
        interrupt()
    finally:
        interrupt()

def cleaning_up_forever():
    entry._CLEANUP_SECONDS = 0.01  # the test does not wait longer
    try:
        interrupt()
    finally:
        threading.Event().wait()

def beside_a_thread():
    threading.Thread(target=threading.Event().wait).start()
    interrupt()

def through_exec():
    exec("interrupt()", globals())

def at_exit():
    atexit.register(interrupt)

def handled():
    entry._CLEANUP_SECONDS = 100  # more than the rest takes
    try:
        interrupt()
    except KeyboardInterrupt:
        atexit.register(lambda: signal.getitimer(signal.ITIMER_REAL)[0] and os._exit(3))

def in_the_background():
    interrupt()

def terminate():
    signal.raise_signal(signal.SIGTERM)

class Hook:
    def find_spec(self, name, path=None, target=None):
        if name == moment:
            sys.meta_path.remove(self)
            globals()[action]()

action, moment = os.environ["ACTION"], os.environ["MOMENT"]
if action == "in_the_background":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.meta_path.insert(0, Hook())
sys.exit(main())
"""
INTERRUPTED = (130, "error: interrupted\n")
SIGNALS = {
    "interrupt": INTERRUPTED,
    "dropped": INTERRUPTED,
    "replaced": INTERRUPTED,
    "twice": INTERRUPTED,
    "cleaning_up_forever": INTERRUPTED,
    "beside_a_thread": INTERRUPTED,
    "through_exec": INTERRUPTED,
    "at_exit": (0, ""),
    "handled": (0, ""),
    "in_the_background": (0, ""),
    "terminate": (-15, ""),
}


def signalled(action: str, moment: str, *arguments: str) -> tuple[int, str]:
    """Return the exit code and standard error of the program with an action at a moment."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=os.environ | {"ACTION": action, "MOMENT": moment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(("action", "expected"), SIGNALS.items(), ids=SIGNALS)
def test_a_signal_in_the_middle_of_a_command(
    folder: Path, action: str, expected: tuple[int, str]
) -> None:
    """Ctrl-C prints one line and the exit code is 130, whatever the program does at that moment."""
    assert signalled(action, "vllm_module.weights.checkpoint", "inspect", str(folder)) == expected


ENDS = [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGHUP, -1)]


@pytest.mark.parametrize(("sent", "code"), ENDS)
def test_a_signal_leaves_no_temporary_folder(sent: signal.Signals, code: int) -> None:
    """What a command wrote for a URL is removed, however the command is ended."""
    program = """
import os, signal, sys
from vllm_module.cli import app, entry
from vllm_module.weights.written_folder import new_folder
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, which may run the tests, has it ignored
def run(arguments):
    print(new_folder("a model"), flush=True)
    os.kill(os.getpid(), int(sys.argv[1]))
    signal.pause()
app.run = run
sys.exit(entry.main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(int(sent))],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == code
    assert not Path(done.stdout.strip()).exists()


@pytest.mark.parametrize(("sent", "code"), ENDS)
def test_a_signal_leaves_nothing_of_a_folder_that_is_written(
    folder: Path, tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    """Where shard had written a part of it under another name, there are no files afterwards."""
    program = """
import os, signal, sys
from pathlib import Path
from vllm_module.cli import entry
from vllm_module.weights.safetensors_writer import SafetensorsWriter
signal.signal(signal.SIGHUP, signal.SIG_DFL)
def write(self, name, tensor):
    print([path.name for path in Path(out).parent.rglob("*.safetensors")], flush=True)
    os.kill(os.getpid(), int(sent))
SafetensorsWriter.write = write
sent, folder, out = sys.argv[1:]
sys.argv[1:] = "shard", folder, "--out", out
sys.exit(entry.main())
"""
    (tmp_path / "there").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", program, str(int(sent)), folder, tmp_path / "there" / "out"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, done.stderr
    assert done.stdout == "['model-rank-0-part-0.safetensors']\n"
    assert list((tmp_path / "there").iterdir()) == []


@pytest.mark.parametrize("moment", ["vllm_module.cli.app", "typer", "torch.nn"])
def test_an_interrupt_of_an_import(folder: Path, moment: str) -> None:
    """The same holds while the program, its command line or torch are imported."""
    assert signalled("interrupt", moment, "load", str(folder)) == INTERRUPTED


CLOSED = "error: standard output is closed: open it, or redirect it to /dev/null\n"
FULL = "error: standard output cannot be written: No space left on device\n"
FULL_FILE = (
    "error: /dev/full cannot be written: No space left on device; free space, or name a place on "
    "another disk\n"
)
NOT_THERE = "error: the folder /not/there does not exist; check the path\n"
NO_FOLDER = "error: the current folder cannot be used: No such file or directory; change to another"
SHELL = {
    "closed output": ("$program inspect $folder >&-", 1, CLOSED),
    "closed output of help": ("$program --help >&-", 1, CLOSED),
    "closed error output": ("$program inspect /not/there 2>&-", 1, ""),
    "everything closed": ("$program inspect $folder <&- >&- 2>&-", 1, ""),
    "full disk": ("$program inspect $folder >/dev/full", 1, FULL),
    "full disk, unbuffered": ("PYTHONUNBUFFERED=1 $program inspect $folder >/dev/full", 1, FULL),
    "full disk, buffered": ("PYTHONUNBUFFERED= $program inspect $folder >/dev/full", 1, FULL),
    "full disk for JSON": ("$program inspect --json $folder >/dev/full", 1, FULL),
    "full disk, at the end": ("$program --version >/dev/full", 1, FULL),
    "full disk for errors": ("$program inspect /not/there 2>/dev/full", 1, ""),
    "full disk for usage errors": ("$program --frob 2>/dev/full", 2, ""),
    "broken pipe": ("set -o pipefail; $program inspect --all $folder | true", 141, ""),
    "broken pipe of help": ("set -o pipefail; $program --help | true", 141, ""),
    "broken pipe of errors": ("$program inspect /not/there 2> >(true)", 1, ""),
    "deleted folder": ("mkdir d; cd d; rmdir ../d; $program inspect x", 1, f"{NO_FOLDER}\n"),
    "no memory for torch": ("ulimit -v 150000; $program plan $folder", 1, "error: out of memory ("),
    "no such folder": ("$program inspect /not/there", 1, NOT_THERE),
}


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
@pytest.mark.parametrize(("line", "code", "expected"), SHELL.values(), ids=SHELL)
def test_streams_and_limits_of_a_shell(
    folder: Path, tmp_path: Path, line: str, code: int, expected: str
) -> None:
    """The exit code tells what happened, and one line does where it can be written."""
    names = f"program='{shlex.quote(sys.executable)} -m vllm_module.cli'; folder={folder}; "
    done = subprocess.run(
        ["bash", "-c", names + line], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(expected)
    assert done.stderr.count("\n") == bool(expected)


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
@pytest.mark.parametrize("words", [("plan", "--html"), ("load", "--trace")], ids=" ".join)
def test_a_full_disk_for_a_file_of_a_command(
    run: Run, folder: Path, words: tuple[str, str]
) -> None:
    """The message is that of a stream, with the name of the file."""
    done = run(words[0], folder, words[1], "/dev/full")
    assert (done.code, done.err) == (1, FULL_FILE)


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "--html"),
        ("plan", "--layout"),
        ("load", "--trace"),
        ("load", "--plot"),
        ("digest", "--out"),
        ("bench", "--plot"),
    ],
    ids=" ".join,
)
def test_a_file_without_a_place_is_refused_before_any_work(
    run: Run, tmp_path: Path, words: tuple[str, str]
) -> None:
    """A folder without a checkpoint does not come to be read."""
    missing = tmp_path / "new" / "a.png"
    done = run(words[0], tmp_path, words[1], missing)
    assert (done.code, done.out) == (2, "")
    assert f"{missing} cannot be written: there is no folder {missing.parent}; make" in done.err
    assert f"value for {words[1]}: " in done.err
    (tmp_path / "a.png").mkdir()
    done = run(words[0], tmp_path, words[1], tmp_path / "a.png")
    assert (done.code, "a.png is a folder: name a file in it" in done.err) == (2, True)


@pytest.mark.parametrize(("command", "option"), [("plan", "--html"), ("digest", "--out")])
def test_a_file_in_the_home_folder(
    run: Run,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    option: str,
) -> None:
    """A shell leaves the ~ of --html=~/plan.html; it is the home folder, as for a checkpoint."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run(command, folder, f"{option}=~/a").code == 0
    assert (tmp_path / "a").is_file()


@pytest.mark.parametrize("command", ["inspect", "digest", "plan", "load"])
def test_an_empty_checkpoint_is_not_the_current_folder(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """An unset variable of a shell is one, where the current folder may be another checkpoint."""
    monkeypatch.chdir(folder)
    done = run(command, "")
    assert (done.code, done.out) == (2, "")
    assert "it is empty: is a variable of the shell unset?" in done.err
    assert run(command, ".").code == 0


def test_closed_streams_do_not_become_files() -> None:
    """No file that is opened later gets the number of a closed stream; closed input is empty."""
    code = (
        "import os, sys; from vllm_module.cli.streams import open_standard_streams; "
        "assert open_standard_streams(); assert sys.stdin.read() == ''; "
        "print(os.open(os.devnull, os.O_RDONLY) > 2, file=sys.stderr); print(os.fstat(2).st_rdev)"
    )
    line = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} <&- 2>&-"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{os.stat(os.devnull).st_rdev}\n")


NOT_TEXT = os.fsdecode(b"a\xff\nb\x1b[31m")
ARGUMENTS = [
    [NOT_TEXT],
    [f"--{NOT_TEXT}"],
    ["plan", f"--{NOT_TEXT}"],
    ["plan", "x", NOT_TEXT],
    *([command, f"/tmp/{NOT_TEXT}"] for command in ("inspect", "plan", "load", "chat", "bench")),
    ["inspect", NOT_TEXT],
    ["inspect", "x" * 5000],
    ["inspect", ""],
    ["inspect", "."],
    ["inspect", "/dev/null"],
    ["inspect", "/proc/self/mem"],
    ["load", "x", "--device", NOT_TEXT],
    ["load", "x", "--device", "cuda:99"],
    ["load", "x", "--device", "cuda:99999999999999999999"],
    ["load", "x", "--device", ""],
    ["load", "x", "--dtype", NOT_TEXT],
    ["load", "x", "--tp", NOT_TEXT],
    ["load", "x", "--tp", "1" * 5000],
    ["load", "x", "--timeout", "1e-9"],
    ["load", "x", "--quantization", NOT_TEXT],
    ["generate", "x", "--prompt", NOT_TEXT],
    ["generate", "x", "--prompt-ids", NOT_TEXT],
    ["generate", "x", "--prompt-ids", "1" * 5000],
    ["generate", "x", "--prompt", "a", "--stop", NOT_TEXT],
    ["generate", "x", "--prompt", "a", "--stop", ""],
    ["generate", "x", "--prompt", "a", "--seed", str(2**70)],
    ["generate", "x", "--prompt", "a", "--temperature", "nan"],
    ["generate", "x", "--prompt", "a", "--top-p", "inf"],
    ["generate", "x", "--prompt", "a", "--top-k", str(-(2**70))],
    ["chat", "x", "--system", NOT_TEXT],
    ["demo", "--keep", NOT_TEXT],
    ["demo", "--keep", "/dev/null/x"],
    ["demo", "--checkpoint", f"/tmp/{NOT_TEXT}"],
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda arguments: ascii(arguments)[:60])
def test_odd_arguments(run: Run, arguments: list[str]) -> None:
    """Each is refused with one line, and a usage error with a hint at the help after it."""
    result = run(*arguments)
    assert result.code in (1, 2)
    assert result.out == "" or arguments[0] == "demo"  # which prints a title first
    lines = result.err.removesuffix("\n").split("\n")
    assert lines.pop(0).startswith("error: ")
    assert len(lines) == (result.code == 2)
    assert all(line.startswith("Try: ") for line in lines)
    assert result.err.replace("\n", "").isprintable()


def test_a_lack_of_memory_is_a_refusal() -> None:
    """It is, whether Python or torch finds it, and no other RuntimeError is."""
    errors = []
    for allocate in (lambda: bytearray(1 << 62), lambda: torch.empty(1 << 60, dtype=torch.uint8)):
        with pytest.raises((MemoryError, RuntimeError)) as refused:
            allocate()
        errors.append(refused.value)
    errors.append(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    for error in errors:
        assert is_refusal(error)
        assert describe_refusal(error).startswith("out of memory (")
        assert "\n" not in describe_refusal(error)
    assert not is_refusal(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
