"""Connections that do not finish their TLS handshake are few, at every port, and shut out nobody."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl

import pytest
from tests.serving import not_ended, serves_grpc_itself, serving, wait_until, walls

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")

TOKEN = "0123456789abcdef0123456789abcdef"
ROBOTS = """
[robots.arm]
model = "seen"
listen = "127.0.0.1:0"

[robots.acting]
model = "seen"
speaks = "act"
listen = "127.0.0.1:0"
"""
MODELS = {"seen": {"factory": "tests.robot_models:seen", "max_batch": 32}}
HELLO = b"\x16\x03\x01\x3f\xff\x01\x00\x3f\xfb"  # the beginning of a long ClientHello


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def ports(tmp_path_factory, folder):
    listen = {"http": "127.0.0.1:0", "grpc": "127.0.0.1:0"}
    with serving(tmp_path_factory.mktemp("server"), MODELS, more=ROBOTS, **listen, **walls(folder, TOKEN)) as running:
        with running.connect() as client:
            told = client.status()["server"]
        rpc = {"grpc": told["grpc"]} if serves_grpc_itself() else {}
        yield {"http": told["http"], **rpc, **told["robots"]}


def joined(where):
    host, port = where.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=30)


def is_greeted(where, folder, protocol):
    """Whether a client's handshake succeeds, and the server has something to say to it."""
    context = ssl.create_default_context(cafile=folder / "cert.pem")
    context.set_alpn_protocols([protocol])
    with context.wrap_socket(joined(where), server_hostname="localhost") as client:
        if protocol == "h2":
            client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        else:
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return client.recv(10) != b""


def test_handshakes_that_do_not_go_on_are_few_at_every_port_and_let_clients_in(ports, folder):
    def all_are_greeted():
        return all(is_greeted(where, folder, "h2" if port == "grpc" else "http/1.1") for port, where in ports.items())

    with contextlib.ExitStack() as closing:
        peers = {port: [closing.enter_context(joined(where)) for _ in range(400)] for port, where in ports.items()}
        for peer in [one for some in peers.values() for one in some[::2]]:
            with contextlib.suppress(OSError):
                peer.sendall(HELLO)
        assert all_are_greeted()
        for port, some in peers.items():
            wait_until(lambda some=some: not_ended(some) <= 256, 8.0, f"{port} has ended the oldest handshakes")
        assert all_are_greeted()
        for port, some in peers.items():
            wait_until(lambda some=some: not_ended(some) == 0, 30.0, f"{port} has ended all after a while")
    assert all_are_greeted()
