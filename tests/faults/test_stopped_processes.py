"""SIGSTOP of engine, relay and gateway: replaced when they hang, but not if all processes were stopped."""

from __future__ import annotations

import os
import signal
import threading
import time

import httpx
import numpy as np
import pytest
from tests.faults.conftest import MODELS
from tests.faults.test_killed_gateway import ready
from tests.serving import serving, wait_until

from jurybox.client import connect
from jurybox.server.frontend.lanes import DEFAULT_TIMEOUT
from jurybox.server.settings.config import ServerSettings

TIMEOUT = 5.0  # seconds
X = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.fixture
def server(tmp_path, nothing_left):
    transports = {"tcp": "127.0.0.1:0", "http": "127.0.0.1:0"}
    with serving(tmp_path, MODELS, engine_timeout=TIMEOUT, **transports) as running:
        yield running


def scraped(http: str) -> dict[str, float]:
    lines = [line for line in httpx.get(f"{http}/metrics", timeout=10).text.splitlines() if line[:1] != "#"]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_metrics_show_a_hung_engine_and_a_request_in_flight_outlives_its_replacement(server):
    """As /health does, and before the engine is killed."""
    http = f"http://{server.listening('http')}"
    affine = {"inputs": [{"name": "observation", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
    answers = []

    def ask() -> None:  # with the default time-out, as anybody does
        answers.append(httpx.post(f"{http}/v2/models/affine/infer", json=affine, timeout=100).json())

    engine = server.pids()["engine-0"]
    before = scraped(http)
    assert before['jurybox_engine_up{engine="0"}'] == before['jurybox_model_ready{model="affine"}'] == 1
    os.kill(engine, signal.SIGSTOP)
    asking = threading.Thread(target=ask)
    asking.start()
    late = httpx.post(f"{http}/v2/models/affine/infer", json={**affine, "parameters": {"timeout": 200_000}}, timeout=30)
    assert late.status_code == 504
    assert scraped(http)['jurybox_request_timeouts_total{model="affine"}'] == 1
    wait_until(lambda: scraped(http)['jurybox_engine_up{engine="0"}'] == 0, TIMEOUT, "engine_up to be 0")
    assert scraped(http)['jurybox_model_ready{model="affine"}'] == 0
    assert "hangs, killing it" not in server.text() and not ready(http)
    asking.join(60)
    assert answers[0]["outputs"][0]["data"] == [3, 5, 7, 9]
    assert server.pids()["engine-0"] != engine


def test_a_request_outlives_a_replaced_engine_with_default_settings():
    assert ServerSettings().engine_timeout <= DEFAULT_TIMEOUT / 2  # the other half is for the new engine's start


@pytest.mark.slow
def test_stopped_processes_are_replaced_and_their_requests_answered(server, transport):
    http = f"http://{server.listening('http')}"
    pids = server.pids()
    with (
        server.connect(transport=transport) as client,
        connect(f"tcp://{server.listening('tcp')}", timeout=30) as remote,
    ):
        here, there = client.model("affine", rows=2), remote.model("affine", rows=2)
        there.infer(X)
        for role in ("engine-0", "relay", "gateway"):
            os.kill(pids[role], signal.SIGSTOP)
        ticket = here.submit(X, timeout=60)
        np.testing.assert_array_equal(ticket.result(timeout=60).outputs, 2 * X + 1)
        np.testing.assert_array_equal(there.infer(X, timeout=60), 2 * X + 1)
        wait_until(lambda: ready(http), 60, "the gateway")
    assert not set(server.pids().values()) & {pids[role] for role in ("engine-0", "relay", "gateway")}
    assert server.text().count("hangs, killing it") >= 3  # more if the machine gives a process no core for so long


@pytest.mark.slow
def test_a_pause_of_everything_longer_than_anybody_may_be_silent_is_no_outage(server):
    """As `docker pause` does."""
    pids = server.pids()
    http = f"http://{server.listening('http')}"
    with server.connect() as client:
        model = client.model("affine", rows=2)
        for pid in pids.values():
            os.kill(pid, signal.SIGSTOP)
        time.sleep(3 * TIMEOUT)
        for pid in pids.values():
            os.kill(pid, signal.SIGCONT)
        np.testing.assert_array_equal(model.infer(X, timeout=20), 2 * X + 1)
        time.sleep(2 * TIMEOUT)
        assert httpx.get(f"{http}/health/ready", timeout=10).status_code == 200
    assert server.pids() == pids
    assert "killing" not in server.text()


@pytest.mark.slow
def test_a_supervisor_without_a_core_for_seconds_fails_no_scrape(server):
    http = f"http://{server.listening('http')}"
    assert httpx.get(f"{http}/metrics", timeout=10).status_code == 200
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        for _ in range(3):
            time.sleep(1.0)
            scraped = httpx.get(f"{http}/metrics", timeout=10)
            assert scraped.status_code == 200, scraped.text
            assert "jurybox_requests_total" in scraped.text
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


@pytest.mark.slow
def test_a_model_that_hangs_costs_its_engine_and_no_more(server):
    with server.connect() as client:
        moody, affine = client.model("moody", rows=2), client.model("affine", rows=2)
        hanging = moody.submit(np.full((1, 4), 3_000_000_000, np.float32), timeout=2 * TIMEOUT)
        engine = server.pids()["engine-0"]
        np.testing.assert_array_equal(affine.infer(X, timeout=60), 2 * X + 1)
        assert server.pids()["engine-0"] != engine
        with pytest.raises(TimeoutError):
            hanging.result(timeout=0.1)
        np.testing.assert_array_equal(moody.infer(X, timeout=60), X + 1)
