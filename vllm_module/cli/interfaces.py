"""The network interface by which a host reaches another one."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from pathlib import Path

_ADDRESS_OF = 0x8915  # SIOCGIFADDR of linux/sockios.h: the IPv4 address of an interface


def interface_to(host: str, port: int) -> str:
    """Return the name of the interface that leads to ``host``.

    It is ``""`` where gloo finds it by itself, by the addresses that this host's name has: hosts
    often call themselves 127.0.1.1, and others cannot connect to that. It is also ``""`` for a
    host of this machine alone, and where no interface is found.
    """
    with suppress(OSError):
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing, and chooses the address to send from
            own = probe.getsockname()[0].partition("%")[0]
        if ipaddress.ip_address(own).is_loopback or own in _addresses_of_name():
            return ""
        for _, name in socket.if_nameindex():
            if own in _addresses(name):
                return name
    return ""


def _addresses_of_name() -> set[str]:
    """Return the addresses that the name of this host leads to."""
    with suppress(OSError):
        return {str(each[4][0]) for each in socket.getaddrinfo(socket.gethostname(), None)}
    return set()


def _addresses(interface: str) -> set[str]:
    """Return the addresses of an interface, on Linux; none elsewhere."""
    found = set()
    with suppress(OSError, ImportError):
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = interface.encode().ljust(40, b"\0")
            answer = fcntl.ioctl(any_socket.fileno(), _ADDRESS_OF, request)
        found.add(socket.inet_ntoa(answer[20:24]))  # struct ifreq: the name, then sockaddr_in
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            address, *_, name = line.split()
            if name == interface:
                found.add(str(ipaddress.IPv6Address(int(address, 16))))
    return found
