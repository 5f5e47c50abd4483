"""Which interface gloo is told to use between hosts, beside what iproute2 says."""

from __future__ import annotations

import ipaddress
import json
import shutil
import subprocess

import pytest

from vllm_module.cli import interfaces


def own_addresses() -> dict[str, str]:
    """Return the interfaces of this machine's addresses, as ``ip`` lists them."""
    if shutil.which("ip") is None:
        pytest.skip("there is no 'ip' (iproute2) to compare with")
    done = subprocess.run(["ip", "-j", "addr"], capture_output=True, text=True, check=True)
    found = {
        address["local"]: link["ifname"]
        for link in json.loads(done.stdout)
        for address in link["addr_info"]
        if address["scope"] == "global"
    }
    if not found:
        pytest.skip("this machine has no address but the loopback's")
    return found


def test_a_name_that_leads_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian's 127.0.1.1, to which no other host can connect."""
    for known in ({"127.0.1.1"}, set()):
        monkeypatch.setattr(interfaces, "_addresses_of_name", lambda known=known: known)
        for address, name in own_addresses().items():
            assert interfaces.interface_to(address, 29501) == name


def test_a_name_that_leads_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo finds the interface itself."""
    monkeypatch.setattr(interfaces, "_addresses_of_name", lambda: set(own_addresses()))
    for address in own_addresses():
        assert interfaces.interface_to(address, 29501) == ""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "no such host"])
def test_hosts_without_an_interface(host: str) -> None:
    assert interfaces.interface_to(host, 29501) == ""


def test_addresses_of_this_name() -> None:
    assert all(
        ipaddress.ip_address(each.partition("%")[0]) for each in interfaces._addresses_of_name()
    )
