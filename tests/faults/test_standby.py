"""A standby process replaces one that was killed, and its own death has no effect."""

import os
import signal
from pathlib import Path

import httpx
import numpy as np
import pytest
from tests.faults.conftest import MODELS, leaving_nothing
from tests.serving import children_of, line_of, serving, wait_until

from jurybox.client import connect

X = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.fixture(scope="module", params=["forked", pytest.param("started", marks=pytest.mark.runs)])
def server(request, tmp_path_factory):
    open_to = dict.fromkeys(("http", "grpc", "tcp"), "127.0.0.1:0")
    folder = tmp_path_factory.mktemp("server")
    with leaving_nothing(), pytest.MonkeyPatch.context() as patch:
        if request.param == "started":
            patch.setattr("tests.preloaded.wanted", False)
        with serving(folder, MODELS, standby=True, **open_to) as running:
            yield running


def processes(server, role: str = "engine") -> set[int]:
    """The serving one and the waiting one; one that is dead has no command line."""
    found = {pid: line_of(pid) for pid in children_of(server.process.pid)}
    return {pid for pid, line in found.items() if f"jurybox.server.{role}".encode() in line}


def serving_and_waiting(server, client) -> tuple[int, int]:
    wait_until(lambda: len(processes(server)) == 2, 60, "a process on standby")
    engine = client.status()["engines"][0]["pid"]
    (waiting,) = processes(server) - {engine}
    return engine, waiting


def test_a_standby_replaces_a_killed_engine_and_another_one_is_started(server):
    with server.connect() as client:
        model = client.model("affine", rows=2)
        engine, waiting = serving_and_waiting(server, client)
        os.kill(engine, signal.SIGKILL)
        np.testing.assert_array_equal(model.infer(X, timeout=60), 2 * X + 1)
        assert client.status()["engines"][0]["pid"] == waiting
        assert serving_and_waiting(server, client)[0] == waiting


def test_a_standby_replaces_a_killed_gateway(server):
    wait_until(lambda: len(processes(server, "gateway")) == 2, 60, "a process on standby")
    gateway = server.pids()["gateway"]
    (waiting,) = processes(server, "gateway") - {gateway}
    with connect(f"grpc://{server.listening('grpc')}", timeout=60) as client:
        model = client.model("affine", rows=2)
        os.kill(gateway, signal.SIGKILL)
        wait_until(lambda: server.pids()["gateway"] == waiting, 60, "another gateway")
        wait_until(lambda: healthy(server), 60, "health")
        np.testing.assert_array_equal(model.infer(X, timeout=60), 2 * X + 1)
    wait_until(lambda: len(processes(server, "gateway")) == 2, 60, "another process on standby")


def test_a_standby_replaces_a_killed_relay(server):
    wait_until(lambda: len(processes(server, "relay")) == 2, 60, "a process on standby")
    relay = server.pids()["relay"]
    (waiting,) = processes(server, "relay") - {relay}
    with connect(f"tcp://{server.listening('tcp')}", timeout=60) as client:
        model = client.model("affine", rows=2)
        os.kill(relay, signal.SIGKILL)
        np.testing.assert_array_equal(model.infer(X, timeout=60), 2 * X + 1)
    assert server.pids()["relay"] == waiting


def healthy(server) -> bool:
    try:
        return httpx.get(f"http://{server.listening('http')}/health", timeout=20).status_code == 200
    except httpx.TransportError:
        return False


def test_the_death_of_a_standby_has_no_effect_and_the_next_engine_starts_without_it(server):
    with server.connect() as client:
        model = client.model("affine", rows=2)
        engine, waiting = serving_and_waiting(server, client)
        os.kill(waiting, signal.SIGKILL)
        os.kill(engine, signal.SIGKILL)
        np.testing.assert_array_equal(model.infer(X, timeout=60), 2 * X + 1)
        assert client.status()["engines"][0]["pid"] not in (engine, waiting)


def test_no_client_keeps_waiting_for_a_server_that_stops_or_dies(server):
    with server.connect() as client:
        serving_and_waiting(server, client)
    children = set(children_of(server.process.pid))
    assert server.stop() == 0
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
