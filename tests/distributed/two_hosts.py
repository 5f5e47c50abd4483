"""Two hosts, each a network namespace, joined by a link: ``two_hosts.py DIRECTORY``.

Run it under ``unshare --map-root-user --net --mount``, which removes the namespaces at the end.
It runs ``over_a_link.py`` on both hosts, cuts the link while their ranks work, and writes the
exit codes to ``codes.json``. Where namespaces cannot be made it prints why and exits with 77.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

wait_until = runpy.run_path(str(Path(__file__).parents[1] / "support.py"))["wait_until"]
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
# The same with addresses of IPv6 alone between the hosts; no time is spent on duplicates.
NETWORK_OF_IPV6 = NETWORK.replace("10.99.0.1/24 dev here", "fd00::1/64 dev here nodad").replace(
    "10.99.0.2/24 dev there", "fd00::2/64 dev there nodad"
)


def main(directory: Path) -> None:
    for command in NETWORK.strip().splitlines():
        done = subprocess.run(command.split(), capture_output=True, text=True)
        if done.returncode:
            sys.stdout.write(f"{command}: {done.stderr}")
            sys.exit(77)
    script = str(Path(__file__).with_name("over_a_link.py"))
    others = ("ip", "netns", "exec", "other")
    hosts = [
        subprocess.Popen(
            [*within, sys.executable, script, str(directory), str(host)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface},
        )
        for host, (within, interface) in enumerate([((), "here"), (others, "there")])
    ]

    def are_working() -> bool:
        assert all(host.poll() is None for host in hosts), "a host ended early"
        return len(list(directory.glob("working*"))) == 4

    try:
        wait_until(are_working, "all ranks work")
        subprocess.run(["ip", "link", "set", "here", "down"], check=True)
        (directory / "cut").write_text(str(time.time()))
        codes = [host.wait() for host in hosts]  # each ends its ranks, if they hang
        (directory / "codes.json").write_text(json.dumps(codes))
    finally:
        for host in hosts:
            host.kill()
            sys.stdout.write(host.communicate()[0])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
