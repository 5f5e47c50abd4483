"""Plant small faults in the product one by one, and count those that the tests catch, by room.

    make survivors COUNT=40 SEED=1

A fault is drawn (``faults.py``), planted in a worktree of the last commit, and the tests that reach
its line are run there, those of its room first: those of 25 s, and if all pass those of 75 s more.
Faults of lines that no test reaches in its own process are not drawn: programs that tests start,
and loops that are compiled, are not seen. What survives is written to build/survivors.jsonl.
Many survivors change nothing but speed, a message or a refusal's words: read each.

Before the first search all tests run once, to know which reach which line: twice as long as
``make test``. The knowledge is that of a commit, and is kept in build/survivors until
``make clean``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import sqlite3
import subprocess
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree

from faults import Fault, faults, planted

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "survivors"
TREE, IMPORTED = BUILD / "tree", BUILD / "path"
KNOWN = BUILD / "reached.db"
COVERAGE = f"""
[run]
source =
    {TREE}/vllm_module
    {TREE}/models
    {TREE}/kernels
data_file = {KNOWN}
"""
# Seconds of tests, and their most, of the first run and the second.
RUNS = (25.0, 60), (75.0, 250)
OF_A_FILE = 6  # most tests of one file are the most of all, divided by this
OVER = 30.0  # seconds that a run may take beyond three times its tests'
COMPILED = "compiled_", "torch_threads"  # files of loops: numba compiles their functions


def prepare() -> None:
    """Make the worktree, and find out which tests reach which lines."""
    if KNOWN.exists():
        return
    IMPORTED.mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "worktree", "prune"], cwd=ROOT, check=True)
    command = ["git", "worktree", "add", "--quiet", "--detach", "--force", str(TREE)]
    subprocess.run(command, cwd=ROOT, check=True)
    # The package that is installed is that of the checkout.
    (IMPORTED / "vllm_module").symlink_to(TREE / "vllm_module")
    settings = BUILD / "coveragerc"
    settings.write_text(COVERAGE)
    command = [
        sys.executable, "-P", "-m", "pytest", "-q", "-n", "3", "-p", "no:cacheprovider", "--cov",
        f"--cov-config={settings}", "--cov-context=test", "--cov-report=",
        f"--junitxml={BUILD / 'seconds.xml'}", "tests",
    ]  # fmt: skip
    subprocess.run(command, cwd=TREE, check=False, env=environment())


def environment() -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": str(IMPORTED), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip


class Reached:
    """Which tests reach a line, and how long each takes."""

    def __init__(self) -> None:
        self._data = sqlite3.connect(f"file:{KNOWN}?mode=ro", uri=True)
        self._names = dict(self._data.execute("select id, context from context"))
        self._seconds: dict[str, float] = {}
        for case in ElementTree.parse(BUILD / "seconds.xml").iter("testcase"):
            name = f"{case.get('classname')}::{case.get('name')}"
            self._seconds[name] = float(case.get("time") or 0)

    def tests_of(self, file: str, line: int) -> set[str]:
        """Return the tests that reach a line of a file."""
        query = (
            "select context_id, numbits from line_bits join file on file.id = file_id "
            "where path = ?"
        )
        found = set[str]()
        for context, bits in self._data.execute(query, (str(TREE / file),)):
            byte, bit = divmod(line, 8)
            if byte < len(bits) and bits[byte] >> bit & 1:
                found.add(self._names[context].partition("|")[0])
        return found - {""}  # the context of an import

    def seconds(self, test: str) -> float:
        file, _, name = test.partition("::")
        return self._seconds.get(f"{file[:-3].replace('/', '.')}::{name}", 1.0)

    def chosen(
        self, tests: Iterable[str], room: str, limit: float, most: int
    ) -> tuple[list[str], float]:
        """Return some of the tests, those of a room and the fastest first, and their seconds."""
        chosen, total, of_file = list[str](), 0.0, Counter[str]()
        ordered = sorted(tests, key=lambda test: (f"/{room}/" not in test, self.seconds(test)))
        for test in ordered:
            file, seconds = test.partition("::")[0], self.seconds(test)
            too_long = bool(chosen) and total + seconds > limit
            if too_long or of_file[file] >= max(4, most // OF_A_FILE):
                continue
            chosen.append(test)
            total += seconds
            of_file[file] += 1
            if len(chosen) == most:
                break
        return chosen, total


def fails(tests: list[str], limit: float) -> bool:
    """Run tests in a child; return whether one fails, or they take longer than they may."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setpgid(0, 0)
            log = os.open(BUILD / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.chdir(TREE)
            os.environ |= environment()
            sys.dont_write_bytecode = True
            sys.path.insert(0, str(IMPORTED))
            import pytest

            # Modules that the parent has imported are not changed by pytest.
            warnings = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
            options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
            os.write(writing, bytes([int(pytest.main([*options, *warnings, *tests]))]))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    done, _, _ = select.select([reading], [], [], limit)
    code = os.read(reading, 1) if done else b""
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reading)
    return code != b"\0"


def room_of(file: str) -> str:
    parts = Path(file).with_suffix("").parts
    return parts[1] if parts[0] == "vllm_module" else parts[0]


def drawn(seed: int, rooms: list[str], reached: Reached) -> Iterator[tuple[str, Fault, str]]:
    """Yield files, faults and texts with them, the rooms in turns, a line once."""
    draw = random.Random(seed)
    by_room = defaultdict[str, list[tuple[str, Fault]]](list)
    for folder in ("vllm_module", "models", "kernels"):
        for path in sorted((TREE / folder).rglob("*.py")):
            file = str(path.relative_to(TREE))
            linked = file.startswith(("vllm_module/models/", "vllm_module/kernels/"))
            if not linked and not path.name.startswith(COMPILED):
                by_room[room_of(file)] += [(file, each) for each in faults(path.read_text())]
    for found in by_room.values():
        draw.shuffle(found)
    seen = set[tuple[str, int]]()
    turns = [room for room in sorted(by_room) if not rooms or room in rooms]
    while turns:
        for room in [*turns]:
            while by_room[room]:
                file, fault = by_room[room].pop()
                if (file, fault.line) in seen or not reached.tests_of(file, fault.line):
                    continue
                seen.add((file, fault.line))
                if (text := planted((TREE / file).read_text(), fault)) is not None:
                    yield file, fault, text
                    break
            else:
                turns.remove(room)


def is_caught(file: str, line: int, text: str, reached: Reached) -> bool:
    path, left = TREE / file, reached.tests_of(file, line)
    before = path.read_text()
    path.write_text(text)
    try:
        for limit, most in RUNS:
            tests, seconds = reached.chosen(left, room_of(file), limit, most)
            if tests and fails(tests, 3 * seconds + OVER):
                return True
            left -= {*tests}
    finally:
        path.write_text(before)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="*", default=[], help="by default all")
    given = parser.parse_args()
    prepare()
    import torch  # children have it then
    import transformers  # noqa: F401 - the same

    torch.set_num_threads(1)
    reached, start = Reached(), time.monotonic()
    planted, caught = Counter[str](), Counter[str]()
    with (BUILD.parent / "survivors.jsonl").open("a") as out:
        for number, (file, fault, text) in enumerate(drawn(given.seed, given.rooms, reached)):
            if number == given.count:
                break
            planted[room_of(file)] += 1
            if is_caught(file, fault.line, text, reached):
                caught[room_of(file)] += 1
                continue
            line = (TREE / file).read_text().splitlines()[fault.line - 1].strip()
            print(f"survives: {file}:{fault.line} {fault.old!r} -> {fault.new!r} in {line}")
            entry = {"file": file, "in": line, **fault._asdict()}
            out.write(json.dumps(entry) + "\n")
            out.flush()
    print("| room | planted | caught |\n|---|---|---|")
    for room in sorted(planted):
        print(f"| `{room}/` | {planted[room]} | {caught[room]} |")
    print(f"| all | {planted.total()} | {caught.total()} |")
    print(f"{(time.monotonic() - start) / 60:.1f} minutes")


if __name__ == "__main__":  # processes that tests start import this file
    main()
