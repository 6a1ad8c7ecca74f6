"""SIGSTOP of engine, relay and gateway: replaced when they hang, but not if all processes were stopped."""

from __future__ import annotations

import os
import signal
import time

import httpx
import numpy as np
import pytest
from tests.faults.conftest import MODELS
from tests.faults.test_killed_gateway import ready
from tests.serving import serving, wait_until

from jurybox.client import connect

TIMEOUT = 5.0  # seconds
X = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.fixture
def server(tmp_path, nothing_left):
    transports = {"tcp": "127.0.0.1:0", "http": "127.0.0.1:0"}
    with serving(tmp_path, MODELS, engine_timeout=TIMEOUT, **transports) as running:
        yield running


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
