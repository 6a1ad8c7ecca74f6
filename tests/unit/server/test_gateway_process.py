"""The gateway as the supervisor starts it: its messages, its end, what it leaves out."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from jurybox.server.settings.endpoints import CannotListen, listen
from tests import preloaded


class Gateway:
    """A started gateway and this end of its control pipe."""

    def __init__(self, folder: object, *, http: str = "", grpc: str = "") -> None:
        self.process, self.control_pipe = preloaded.spawned("jurybox.server.gateway")
        self.control_pipe.send(
            "configure", address=f"ipc://{folder}/engine", http=http, grpc=grpc, log_level="warning", log_format="json"
        )

    def hear(self) -> dict[str, Any]:
        message = self.control_pipe.receive(30.0)
        assert message is not None
        return message

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture
def gateway(tmp_path) -> Iterator[Gateway]:
    gateway = Gateway(tmp_path, http="127.0.0.1:0")
    yield gateway
    gateway.end()


def test_it_prints_its_port_answers_without_a_server_ignores_the_terminal_and_stops_on_request(gateway):
    ready = gateway.hear()
    assert (ready["kind"], ready["http"]) == ("ready", f"127.0.0.1:{ready['port']}")
    answer = httpx.get(f"http://{ready['http']}/health/live", timeout=20.0)
    assert answer.status_code == 503
    assert "no answer from ipc://" in answer.json()["reasons"][0]
    assert "server" not in answer.headers
    status = Path(f"/proc/{gateway.process.pid}/status").read_text()
    ignored = int(re.search(r"SigIgn:\s*(\w+)", status)[1], 16)
    assert all(ignored >> (number - 1) & 1 for number in (signal.SIGINT, signal.SIGTERM)), "the supervisor hears those"
    gateway.control_pipe.send("nonsense")  # an unknown order has no effect
    assert httpx.get(f"http://{ready['http']}/version", timeout=20.0).status_code == 200
    gateway.control_pipe.send("stop")
    assert gateway.process.wait(30) == 0


def test_it_ends_with_its_supervisor_even_with_connected_clients(gateway):
    ready = gateway.hear()
    with socket.create_connection(("127.0.0.1", ready["port"])) as idle:
        idle.sendall(b"GET /health HTTP/1.1\r\n")  # and never the rest
        gateway.control_pipe.close()
        assert gateway.process.wait(30) == 0


@pytest.mark.parametrize("setting", ["http", "grpc"])
def test_a_port_in_use_is_named_with_the_setting(tmp_path, setting):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gateway = Gateway(tmp_path, **{setting: f"127.0.0.1:{taken.getsockname()[1]}"})
        try:
            failed = gateway.hear()
            assert failed["kind"] == "failed"
            assert f"port {taken.getsockname()[1]} is in use" in failed["reason"]
            assert f"server.{setting}" in failed["reason"]
            assert gateway.process.wait(30) == 3
        finally:
            gateway.end()


def test_grpc_alone_answers_health_and_lists_its_services_without_a_server(tmp_path):
    gateway = Gateway(tmp_path, grpc="127.0.0.1:0")
    try:
        ready = gateway.hear()
        assert (ready["kind"], ready["http"]) == ("ready", "")
        with grpc.insecure_channel(ready["grpc"]) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            answer = health.Check(health_pb2.HealthCheckRequest(), timeout=20.0, wait_for_ready=True)
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(grpc.RpcError) as unknown:
                health.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=20.0)
            assert unknown.value.code() == grpc.StatusCode.NOT_FOUND
            services = ProtoReflectionDescriptorDatabase(channel).get_services()
            assert {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= set(services)
            gateway.control_pipe.send("stop")
            assert gateway.process.wait(30) == 0
    finally:
        gateway.end()


def test_a_host_that_is_not_ours_cannot_be_listened_on():
    with pytest.raises(CannotListen, match=r"cannot listen on http://192\.0\.2\.1:0"):
        listen("192.0.2.1:0", "server.http")  # an address reserved for documentation (RFC 5737)


def test_it_listens_on_ipv6():
    if not socket.has_ipv6:
        pytest.skip("this Python has no IPv6")
    try:
        listener = listen("[::1]:0", "server.http")
    except CannotListen:
        pytest.skip("this host has no ::1")
    with listener:
        assert listener.getsockname()[0] == "::1"


def test_a_supervisor_that_dies_before_it_configures_is_noticed():
    process, control_pipe = preloaded.spawned("jurybox.server.gateway")
    control_pipe.close()
    assert process.wait(30) == 0


def test_it_never_imports_torch():
    code = (
        "import sys, json, jurybox.server.gateway.process\n"
        "heavy = ('torch', 'typer', 'grpc', 'jurybox.server.settings.config')\n"
        "print(json.dumps([name for name in heavy if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
