"""Two hosts, each a network namespace, joined by a link: ``two_hosts.py DIRECTORY``.

Run under ``unshare --map-root-user --net --mount``, so that nothing stays behind. Runs
``over_a_link.py`` on both, cuts the link while it works, and writes ``codes.json``; exits with 77
and says why where the namespaces cannot be made.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import time
from pathlib import Path

start_torchrun = runpy.run_path(str(Path(__file__).parents[1] / "support.py"))["start_torchrun"]
NETWORK = """
mount -t tmpfs tmpfs /run
ip netns add other
ip link add here type veth peer name there netns other
ip link set lo up
ip addr add 10.99.0.1/24 dev here
ip link set here up
ip -n other link set lo up
ip -n other addr add 10.99.0.2/24 dev there
ip -n other link set there up
ip netns exec other true
"""


def main(directory: Path) -> None:
    for command in NETWORK.strip().splitlines():
        done = subprocess.run(command.split(), capture_output=True, text=True)
        if done.returncode:
            sys.stdout.write(f"{command}: {done.stderr}")
            sys.exit(77)
    script = Path(__file__).with_name("over_a_link.py")
    common = {"hosts": 2, "address": "10.99.0.1", "port": 29500, "interval": 4}
    agents = [
        start_torchrun(4, script, directory, **common, GLOO_SOCKET_IFNAME="here"),
        start_torchrun(
            4, script, directory, **common, host=1, GLOO_SOCKET_IFNAME="there",
            within=("ip", "netns", "exec", "other"),
        ),
    ]  # fmt: skip
    try:
        end = time.time() + 60
        while len(list(directory.glob("loading*"))) < 4 and time.time() < end:
            time.sleep(0.05)
        subprocess.run(["ip", "link", "set", "here", "down"], check=True)
        (directory / "cut").write_text(str(time.time()))
        while len(list(directory.glob("rank*.json"))) < 4 and time.time() < end:
            time.sleep(0.05)
        codes = [agent.wait(timeout=20) for agent in agents]
        (directory / "codes.json").write_text(json.dumps(codes))
    finally:
        for agent in agents:
            agent.kill()
            sys.stdout.write(agent.communicate()[0])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
