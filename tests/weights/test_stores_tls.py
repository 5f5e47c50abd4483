"""Web servers over TLS: whose certificate is accepted, and how long a handshake may take."""

from __future__ import annotations

import datetime
import ipaddress
import runpy
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from vllm_module.weights.stores import http_client, http_connection
from vllm_module.weights.stores.client import BusyError, RefusedError
from vllm_module.weights.stores.place import parse

servers: Any = runpy.run_path(str(Path(__file__).with_name("stores_server.py")))
HANDSHAKE = b"\x16\x03\x03\x40\x00"  # begins a record of 16384 bytes


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("https_proxy", "http_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def certificate(folder: Path, address: str) -> Path:
    """Write a certificate of ``address``, signed by itself, and its key to one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a test")])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), False
        )
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8
    pem = serialization.Encoding.PEM
    path = folder / "certificate.pem"
    path.write_bytes(
        made.public_bytes(pem) + key.private_bytes(pem, form, serialization.NoEncryption())
    )
    return path


@pytest.mark.parametrize(
    ("address", "trusted", "message"),
    [
        ("127.0.0.1", True, None),
        ("127.0.0.1", False, "certificate is not valid .*self.signed"),
        ("127.0.0.2", True, "certificate is not valid .*mismatch"),
    ],
)
def test_a_certificate_is_checked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    address: str,
    trusted: bool,
    message: str | None,
) -> None:
    """One that is trusted and of this host is accepted, and no other."""
    path = certificate(tmp_path, address)
    (tmp_path / "file").write_bytes(b"0123456789")
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(path))
    with servers["serving"](tmp_path) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path)
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
        client = http_client.web_client(parse(f"https://127.0.0.1:{server.server_port}"))
        view = bytearray(4)
        if message is None:
            for begin in (0, 3):  # the second over the same connection
                assert client.read("file", begin, memoryview(view)).version.size == 10
                assert bytes(view) == b"0123456789"[begin : begin + 4]
        else:
            with pytest.raises(RefusedError, match=message):
                client.read("file", 0, memoryview(view))
            assert not server.requests
        client.close()


def dripping(listener: socket.socket, begun: threading.Event) -> None:
    """Begin a handshake, and send a byte of it now and then until the client has gone."""
    connection = listener.accept()[0]
    pause = threading.Event()
    with connection:
        try:
            connection.sendall(HANDSHAKE)
            begun.set()
            for _ in range(1000):
                connection.sendall(b"\0")
                pause.wait(0.005)
        except OSError:
            pass


@pytest.mark.parametrize("by", ["the deadline", "closing"])
def test_a_handshake_that_comes_byte_by_byte_is_ended(
    monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """It does not take longer than a request may, and ends when its store is closed."""
    if by == "the deadline":
        monkeypatch.setattr(http_connection, "_REQUEST_SECONDS", 0.05)
    begun = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(2) as executor:
        executor.submit(dripping, listener, begun)
        client = http_client.web_client(parse(f"https://127.0.0.1:{listener.getsockname()[1]}"))
        begin = time.monotonic()
        reading = executor.submit(client.read, "file", 0, memoryview(bytearray(4)))
        assert begun.wait(5)
        if by == "closing":
            client.close()
        error = reading.exception(timeout=5)
        assert isinstance(error, BusyError)
        assert ("the store was closed" if by == "closing" else "did not end in 0.05") in str(error)
        assert time.monotonic() - begin < 2


def test_a_server_that_stops_in_a_handshake_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silence has a limit of its own, far below that of a request."""
    # So that the test need not wait for half a minute.
    monkeypatch.setattr(http_connection, "_STALL_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as executor:
        client = http_client.web_client(parse(f"https://127.0.0.1:{listener.getsockname()[1]}"))
        reading = executor.submit(client.read, "file", 0, memoryview(bytearray(4)))
        with listener.accept()[0]:
            try:
                assert isinstance(reading.exception(timeout=5), BusyError)
            finally:
                client.close()
