"""Connections to this host never use the proxy of http_proxy, and errors of others name it."""

from __future__ import annotations

import contextlib
import select
import socket

import pytest

from jurybox.client import ServerGone, connect
from jurybox.client.remote.grpc_channel import open_channel

NAMES = ("grpc_proxy", "https_proxy", "http_proxy", "HTTP_PROXY", "HTTPS_PROXY")


@pytest.fixture
def proxy(monkeypatch):
    """A proxy that every variable names: a socket that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        for name in NAMES:
            monkeypatch.setenv(name, f"http://user:secret@127.0.0.1:{listening.getsockname()[1]}")
        yield listening


@contextlib.contextmanager
def listener(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        made = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"{host} does not exist here")
    with made:
        yield made, made.getsockname()[1]


def reached(*sockets):
    """The first of these that somebody connects to."""
    ready, _, _ = select.select(sockets, [], [], 30)
    return ready[0]


@pytest.mark.parametrize("scheme", ["grpc", "grpcs"])
@pytest.mark.parametrize(("host", "bound"), [("127.0.0.1",) * 2, ("localhost", "127.0.0.1"), ("[::1]", "::1")])
def test_a_channel_to_this_host_uses_no_proxy(proxy, scheme, host, bound):
    with listener(bound) as (server, port), open_channel(f"{scheme}://{host}:{port}") as channel:
        channel.unary_unary("/any/Call").future(b"", timeout=30, wait_for_ready=True)
        assert reached(server, proxy) is server


def test_an_exporter_of_traces_on_this_host_uses_no_proxy(proxy, monkeypatch):
    tracing = pytest.importorskip("jurybox.client.tracing")
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        with listener("127.0.0.1") as (server, port):
            monkeypatch.setenv(name, f"http://localhost:{port}")
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
            exporter = tracing.exporter()
            exporter.export([])
            assert reached(server, proxy) is server
            exporter.shutdown()
            monkeypatch.delenv(name)


@pytest.mark.parametrize("scheme", ["grpc", "grpcs"])
def test_an_error_of_another_host_names_the_proxy_without_its_password(proxy, scheme):
    with pytest.raises(ServerGone, match=r"to the proxy 127\.0\.0\.1:\d+: .* no_proxy=192\.0\.2\.1$") as raised:
        connect(f"{scheme}://192.0.2.1:7", timeout=0.5)
    assert reached(proxy) is proxy
    assert "secret" not in str(raised.value) and "user" not in str(raised.value)


def test_an_error_does_not_name_a_proxy_that_is_not_used(proxy, monkeypatch):
    monkeypatch.setenv("no_proxy", "example.com,192.0.2.1")
    with pytest.raises(ServerGone) as raised:
        connect("grpc://192.0.2.1:7", timeout=0.3)
    assert "proxy" not in str(raised.value)
    assert not select.select([proxy], [], [], 0)[0]
