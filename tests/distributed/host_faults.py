"""Two hosts, and a fault of one of them: ``host_faults.py DIRECTORY DRAW``, a draw as JSON.

The hosts are two network namespaces with a link. Run it under ``unshare --map-root-user --net
--mount``. ``DIRECTORY/0`` and ``/1`` are the hosts' folders, with the checkpoints ``model`` and
``other``. What happened is written to ``DIRECTORY/found.json``.
"""

from __future__ import annotations

import http.client
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

TWO_HOSTS = runpy.run_path(str(Path(__file__).with_name("two_hosts.py")))
LIMIT = 60.0  # seconds in which all others have to end; all limits of the product are below
START_LIMIT = 240.0  # seconds until the moment of the fault; a busy machine may take them
TOKENS = 400  # of `generate`; fewer where a link is slow
ADMIN = {"Authorization": "Bearer key", "Content-Type": "application/json"}
# As the command, with a watch that gives up earlier.
COMMAND = """
from vllm_module.cli import host_watch
from vllm_module.cli.hosts import START
host_watch.SILENCE, host_watch.GRACE = 8, 2
exec(START)
"""


class Hosts:
    """The processes of both hosts, found by a variable in their environment."""

    def __init__(self, directory: Path, draw: dict[str, Any]) -> None:
        self.directory, self.draw = directory, draw
        self.started: dict[int, subprocess.Popen[bytes]] = {}
        self.tag = f"{os.getpid()}.{time.time_ns()}"
        self.answers: list[dict[str, Any]] = []  # of a server

    def prepare(self) -> None:
        for host in range(2):
            (self.directory / str(host) / "marks").mkdir()
            for name, size in (("disk", "1m"), ("shm", "64m")):
                place = self.directory / str(host) / name
                place.mkdir()
                run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place))

    def start(self, host: int) -> None:
        folder = self.directory / str(host)
        draw = self.draw
        tmp = str(folder / "disk")
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "TMPDIR": tmp,
            "HOST_OF_DRAW": f"{self.tag}:{host}",
            "MARKS": str(folder / "marks"), "XDG_CACHE_HOME": tmp, "VLLM_MODULE_ADMIN_KEY": "key",
            "PYTHONPATH": f"{self.directory / 'plugin'}:{os.environ.get('PYTHONPATH', '')}",
        }  # fmt: skip
        if draw["way"] == "program":  # torchrun leaves it to gloo, which asks for the host's name
            environment["GLOO_SOCKET_IFNAME"] = ("here", "there")[host]
        within = ("ip", "netns", "exec", "other") if host else ("unshare", "--mount")
        shell = f'mount --bind "{folder / "shm"}" /dev/shm; exec "$@"'
        out = "disk/out" if draw["fault"] == "full disk" else "out"
        with (folder / out).open("wb") as stdout, (folder / "err").open("wb") as stderr:
            self.started[host] = subprocess.Popen(
                [*within, "sh", "-c", shell, "sh", *self._words(host)],
                cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=stdout,
                stderr=stderr, start_new_session=True,
            )  # fmt: skip

    def _words(self, host: int) -> list[str]:
        draw = self.draw
        first = "fd00::1" if draw["ipv6"] else "10.99.0.1"
        meet = {"nnodes": 2, "node-rank": host, "master-addr": first, "master-port": 29501}
        options = [f"--{name}={value}" for name, value in meet.items()]
        if draw["way"] == "program":
            program = str(Path(__file__).with_name("hosts_program.py"))
            each = f"--nproc-per-node={draw['tp'] * draw['pp'] // 2}"
            return [
                *(sys.executable, "-m", "torch.distributed.run", *options, each),
                *("--monitor-interval=0.1", program, json.dumps(draw)),
            ]
        options += ["--device=cpu", "--dtype=float32", f"--timeout={draw['timeout']:g}"]
        options += [f"--tp={draw['tp']}", f"--pp={draw['pp']}"]
        if draw["experts"]:
            options.append("--enable-expert-parallel")
        command = [sys.executable, "-c", COMMAND, draw["way"], "model", *options]
        if draw["way"] == "generate":
            return [*command, "--prompt-ids=1,2,3", f"--max-new-tokens={self.tokens}"]
        return command

    @property
    def tokens(self) -> int:
        return 150 if self.draw["fault"] == "slow link" else TOKENS

    def processes(self, host: int | None = None) -> dict[int, dict[str, str]]:
        """Return the environments of processes of a host, or of both, by process id."""
        found, tag = {}, self.tag + ("" if host is None else f":{host}")
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                pairs = path.read_bytes().split(b"\0")
                given = dict(each.decode().partition("=")[::2] for each in pairs if b"=" in each)
                state = path.with_name("stat").read_text().rpartition(")")[2].split()[0]
                if given.get("HOST_OF_DRAW", "").startswith(tag) and state not in "ZX":
                    found[int(path.parts[2])] = given
        return found

    def signal(self, host: int, number: int, which: str = "host") -> None:
        """Send a signal to all processes of a host, to one rank, or to what started its ranks."""
        if which == "launcher":
            os.kill(self.launcher(host), number)
            return
        for _ in range(3):  # a process may have started another one meanwhile
            for pid, given in self.processes(host).items():
                if which == "host" or "RANK" in given:
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
                    if which == "rank":
                        return

    def launcher(self, host: int) -> int:
        return self.started[host].pid  # `ip`, `unshare` and `sh` become the command

    def text(self, host: int, name: str = "out") -> str:
        for path in (self.directory / str(host) / name, self.directory / str(host) / "disk" / name):
            if path.exists():
                return path.read_text(errors="replace")
        return ""

    def is_over(self, host: int) -> bool:
        return self.started[host].poll() is not None

    def ask(self, path: str, body: dict[str, Any]) -> Iterable[bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", 8000, timeout=LIMIT)
        connection.request("POST", path, json.dumps(body), ADMIN)
        with connection.getresponse() as answer:
            if answer.status != 200:
                raise OSError(f"{answer.status} {answer.read()[:300]!r}")
            yield from answer

    def ask_server(self) -> None:
        """Ask for tokens, one answer after the other; between them, update weights."""
        name, count = "model", 0
        with suppress(OSError, http.client.HTTPException):
            while not (self.directory / "0" / "finish").exists():
                size = 8 if self.draw["moment"] == "updates" else self.tokens // 4
                answer: dict[str, Any] = {"weights": name, "tokens": [], "finish": None}
                self.answers.append(answer)
                body = {
                    "model": "model", "prompt": [1, 2, 3], "max_tokens": size, "temperature": 0,
                    "ignore_eos": True, "stream": True, "return_token_ids": True,
                }  # fmt: skip
                for line in self.ask("/v1/completions", body):
                    data = line.removeprefix(b"data: ").strip()
                    if line.startswith(b"data: {") and (choices := json.loads(data).get("choices")):
                        answer["tokens"] += choices[0].get("token_ids") or []
                        answer["finish"] = choices[0]["finish_reason"] or answer["finish"]
                    elif line.startswith(b"data: {"):
                        answer["error"] = data.decode()
                count += 1
                if self.draw["moment"] == "updates":
                    other = ["model", "other"][count % 2]
                    try:
                        list(self.ask("/update_weights", {"path": other}))
                        name = other
                    except OSError as error:
                        if not str(error).startswith("400"):
                            raise
                        answer["refused"] = str(error)


def run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        sys.stdout.write(f"{' '.join(words)}: {done.stderr}")
        sys.exit(77)


def until(holds: Callable[[], object], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def fail(hosts: Hosts) -> None:
    """Let the fault happen."""
    draw, host = hosts.draw, hosts.draw["host"]
    match draw["fault"]:
        case "kill":
            hosts.signal(host, signal.SIGKILL, draw["which"])
        case "stop":
            hosts.signal(host, signal.SIGSTOP, draw["which"])
        case "^C":
            os.killpg(hosts.started[host].pid, signal.SIGINT)
        case "cut link":
            # A host keeps its address when a cable is cut, but not one of IPv6 when its own
            # interface is switched off; host 0 would not reach its own store any more.
            within = ("-n", "other") if draw["ipv6"] else ()
            run("ip", *within, "link", "set", "there" if draw["ipv6"] else "here", "down")
        case "slow link":
            slow = ("root", "tbf", "rate", "4mbit", "burst", "32k", "latency", "2s")
            run("tc", "qdisc", "add", "dev", "here", *slow)
            run("ip", "netns", "exec", "other", "tc", "qdisc", "add", "dev", "there", *slow)
        case "full disk":
            for name in ("disk", "shm"):
                with (
                    suppress(OSError),
                    (hosts.directory / str(host) / name / "fill").open("wb") as f,
                ):
                    while True:
                        f.write(b"0" * 4096)
                        f.flush()


def wait_for_moment(hosts: Hosts) -> bool:
    """Return whether the moment of the fault has come."""
    moment, folder = hosts.draw["moment"], hosts.directory

    def is_there() -> bool:
        if any(map(hosts.is_over, hosts.started)):
            return True
        if moment == "loading":
            marks = [*(folder / str(hosts.draw["host"]) / "marks").iterdir()]
            return bool(marks)
        if hosts.draw["way"] == "serve":
            if "serving" in hosts.text(0, "err") and not hosts.answers:
                threading.Thread(target=hosts.ask_server, daemon=True).start()
            return len(hosts.answers) > 1 or bool(hosts.answers and hosts.answers[0]["tokens"])
        if hosts.draw["way"] == "generate":
            return hosts.text(0).count(",") > 2
        return hosts.text(0).count("\n") > 1

    if moment != "starting" and not until(is_there, START_LIMIT):
        return False
    time.sleep(hosts.draw["delay"])
    return not any(map(hosts.is_over, hosts.started))


def main(directory: Path, draw: dict[str, Any]) -> None:
    network = TWO_HOSTS["NETWORK_OF_IPV6" if draw["ipv6"] else "NETWORK"]
    for command in network.strip().splitlines():
        run(*command.split())
    hosts, found = Hosts(directory, draw), {}
    hosts.prepare()
    late = draw["host"] if draw["fault"] == "late" else None
    try:
        for host in range(2):
            if host != late:
                hosts.start(host)
        if late is not None:
            time.sleep(draw["delay"])
            hosts.start(late)
        found["came"] = draw["fault"] in ("late", "wrong file") or wait_for_moment(hosts)
        begin, answered = time.time(), len(hosts.answers) + hosts.text(0).count("\n")
        fail(hosts)
        found |= judge_ends(hosts, begin, answered)
    finally:
        for host in hosts.started:
            hosts.signal(host, signal.SIGABRT, "ranks")  # what is left prints where it is
        time.sleep(0.5 if hosts.processes() else 0)
        for host in hosts.started:
            hosts.signal(host, signal.SIGKILL)
    found["codes"] = [each.wait() for _, each in sorted(hosts.started.items())]
    found["out"] = [hosts.text(host) for host in range(2)]
    found["err"] = [hosts.text(host, "err") for host in range(2)]
    found["answers"] = hosts.answers
    (directory / "found.json").write_text(json.dumps(found, indent=1))


def judge_ends(hosts: Hosts, begin: float, answered: int) -> dict[str, Any]:
    """Wait until all that can end has ended; say when, and what is left."""
    draw, host = hosts.draw, hosts.draw["host"]
    seconds: dict[int, float] = {}
    finishing = [draw["fault"] in ("slow link", "full disk", "late", "wrong file")]

    def have_ended(which: Sequence[int]) -> bool:
        for each in which:
            if each not in seconds and hosts.is_over(each):
                seconds[each] = time.time() - begin
        if finishing[0] and draw["way"] != "generate":  # else it goes on forever
            if draw["way"] == "serve" and "serving" in hosts.text(0, "err") and not hosts.answers:
                threading.Thread(target=hosts.ask_server, daemon=True).start()
            if len(hosts.answers) + hosts.text(0).count("\n") > answered + 3:
                finishing[0] = False
                (hosts.directory / "0" / "finish").touch()
                if draw["way"] == "serve":
                    os.killpg(hosts.started[0].pid, signal.SIGINT)
        return len(seconds) == len(which)

    stopped = draw["fault"] == "stop" and draw["which"] == "host"
    others = [1 - host] if stopped else [0, 1]
    ended = until(lambda: have_ended(others), LIMIT + (60 if finishing[0] else 0))
    left = {}
    for each in others:
        until(lambda each=each: not hosts.processes(each), 5)
        left[each] = [given.get("RANK", "no rank") for given in hosts.processes(each).values()]
    if stopped:  # when it goes on, it finds that the others have ended
        hosts.signal(host, signal.SIGCONT)
        ended_too = until(lambda: have_ended([0, 1]), LIMIT)
        until(lambda: not hosts.processes(), 5)
        left[host] = [given.get("RANK", "no rank") for given in hosts.processes(host).values()]
        ended = ended and ended_too
    return {"ended": ended, "seconds": seconds, "left": left}


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
