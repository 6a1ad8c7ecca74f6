"""Tickets and models that bring their engines down: the server lives, and serves the other models."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tests.faults.conftest import MODELS, leaving_nothing
from tests.serving import children_of, serving, wait_until

from jurybox.client import Error, ModelFailed
from jurybox.server.frontend.readiness import not_ready

X = np.ones((2, 4), np.float32)
KILLER = np.full((1, 4), 668, np.float32)


@pytest.mark.timeout(300)
def test_a_model_that_ends_processes_is_put_in_quarantine_and_the_others_are_served(tmp_path, nothing_left):
    factories = ["tests.models:dies"]
    with serving(tmp_path, MODELS, max_restarts=1, factories=factories) as server, server.connect() as client:
        moody, affine = client.model("moody", rows=2), client.model("affine", rows=2)
        with pytest.raises(ModelFailed, match="'moody' is in quarantine: 2 engines died"):
            moody.infer(KILLER, timeout=200)
        np.testing.assert_array_equal(affine.infer(X, timeout=100), 2 * X + 1)
        # Every request, on every transport, gets this error at once.
        with pytest.raises(ModelFailed, match="in quarantine"):
            moody.infer(X, timeout=20)
        with server.connect() as other, pytest.raises(ModelFailed, match=r"server.load\('moody'\)"):
            other.model("moody").infer(X)
        status = client.status()
        assert {model["name"]: model["state"] for model in status["models"]} == {
            "affine": "ready",
            "moody": "quarantined",
        }
        assert [reason for reason in not_ready(status) if "'moody' is quarantined" in reason]
        assert server.process.poll() is None
        # An engine that dies of something else comes back without it.
        restarts = status["engines"][0]["restarts"]
        os.kill(status["engines"][0]["pid"], signal.SIGKILL)
        wait_until(lambda: client.status()["engines"][0]["restarts"] > restarts, 60)
        np.testing.assert_array_equal(affine.infer(X, timeout=100), 2 * X + 1)
        with pytest.raises(ModelFailed, match="in quarantine"):
            moody.infer(X, timeout=20)
        client.load("moody", timeout=100)
        np.testing.assert_array_equal(client.model("moody").infer(X, timeout=60), X + 1)
        assert not_ready(client.status()) == []
        assert server.text().count("model in quarantine") == 1
        # So is a model whose load ends the process; other models keep serving.
        with pytest.raises(ModelFailed, match="in quarantine"):
            client.load("dies", {"factory": "tests.models:dies"}, timeout=200)
        np.testing.assert_array_equal(affine.infer(X, timeout=100), 2 * X + 1)
        client.unload("dies")
        assert sorted(client.models()) == ["affine", "moody"]
        assert server.process.poll() is None and children_of(server.process.pid)


def fails_alone(model, mood):
    # A batch by itself, since there is no room for more in it; the others wait for each other meanwhile.
    busy = model.submit(np.full((MODELS["moody"]["max_batch"], 4), 500_000, np.float32))
    asked = [model.submit(np.full((1, 4), value, np.float32)) for value in (1, 2, mood, 3, 4)]
    for ticket, value in zip(asked, (1, 2, mood, 3, 4), strict=True):
        if value == mood:
            with pytest.raises(ModelFailed):
                ticket.result(30)
        else:
            np.testing.assert_array_equal(ticket.result(30).outputs, np.full((1, 4), value + 1, np.float32))
    busy.result(30)


@pytest.fixture(scope="module")
def lasting(tmp_path_factory):
    """A server that forgives one death."""
    with leaving_nothing():
        with serving(tmp_path_factory.mktemp("server"), MODELS, max_restarts=1, http="127.0.0.1:0") as running:
            yield running


def test_rows_that_a_model_cannot_compute_fail_alone_in_a_shared_batch(lasting):
    with lasting.connect() as client:
        model = client.model("moody", rows=16)
        for mood in (666, 667):
            fails_alone(model, mood)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_request_that_ends_engines_may_be_repeated(tmp_path, nothing_left):
    with serving(tmp_path, MODELS) as server, server.connect() as client:
        for _ in range(3):
            with pytest.raises(Error):
                client.model("moody", rows=2).infer(KILLER, timeout=200)
        np.testing.assert_array_equal(client.model("affine").infer(X, timeout=100), 2 * X + 1)
        assert server.process.poll() is None


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_ticket_that_kills_every_engine_it_is_sent_to_is_given_up_and_the_server_lives(server, transport):
    with server.connect(transport=transport) as client:
        model = client.model("moody", rows=4)
        with pytest.raises(ModelFailed, match="3 engines died one after another with this ticket"):
            model.infer(np.full((1, 4), 668, np.float32), timeout=200)
        x = np.ones((2, 4), np.float32)
        np.testing.assert_array_equal(model.infer(x, timeout=60), x + 1)
    assert server.text().count("child died") == 3
    assert server.process.poll() is None


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_model_that_ends_every_engine_after_good_service_is_put_in_quarantine(tmp_path, nothing_left):
    """Each death looks like a kill -9, but it happens during the same model each time."""
    models = {"affine": MODELS["affine"], "tiring": {"factory": "tests.models:tiring", "max_batch": 2}}
    with serving(tmp_path, models, max_restarts=0, standby=True) as server, server.connect() as client:
        tiring, affine = client.model("tiring", rows=2), client.model("affine", rows=2)
        until = time.monotonic() + 300
        with pytest.raises(ModelFailed, match="'tiring' is in quarantine"):
            while time.monotonic() < until:
                np.testing.assert_array_equal(tiring.infer(X, timeout=100), 2 * X + 1)
                time.sleep(0.05)
        np.testing.assert_array_equal(affine.infer(X, timeout=100), 2 * X + 1)
        assert server.text().count("child died") > 3
        client.load("tiring", timeout=100)
        np.testing.assert_array_equal(client.model("tiring", rows=2).infer(X, timeout=100), 2 * X + 1)


@pytest.mark.timeout(300)
def test_kills_from_outside_end_neither_the_server_nor_its_models(lasting):
    """A model without faults is computed all the time; it must not be blamed for kills from outside."""
    server = lasting
    with server.connect() as client, ThreadPoolExecutor(1) as pool:
        busy = client.model("affine", rows=2)
        stop, answers = threading.Event(), []

        def ask() -> int:
            while not stop.is_set():
                np.testing.assert_array_equal(busy.infer(X, timeout=200), 2 * X + 1)
                answers.append(1)
            return len(answers)

        asking = pool.submit(ask)
        try:
            for _ in range(2):  # more than max_restarts
                wait_until(lambda: {"engine-0", "gateway"} <= server.pids().keys(), 60)
                wait_until(lambda: client.status()["server"]["state"] == "serving", 60)
                time.sleep(1.2)  # it has served for more than a second, and shows that it does
                before = len(answers)
                wait_until(lambda: len(answers) > before + 3, 60)  # noqa: B023
                pids = server.pids()
                killed = {pids[role] for role in ("engine-0", "gateway")}
                for pid in killed:
                    os.kill(pid, signal.SIGKILL)
                wait_until(lambda: not killed & set(server.pids().values()), 60)  # noqa: B023
            busy_again = client.model("affine", rows=2)
            np.testing.assert_array_equal(busy_again.infer(X, timeout=200), 2 * X + 1)
        finally:
            stop.set()
        assert asking.result(200) > 3
        assert server.process.poll() is None
        assert {model["state"] for model in client.status()["models"]} == {"ready"}
    assert "charged_to" not in server.text()
