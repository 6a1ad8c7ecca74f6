"""kill -9 of an engine: its clients' tickets are answered by its successor."""

import contextlib
import os
import signal
import threading

import numpy as np
import pytest
from tests.faults.conftest import MODELS, leaving_nothing
from tests.serving import START, serving, wait_until, wait_until_computing

from jurybox.client import Timeout

TRANSPORTS = ("shm", "zmq")


@pytest.fixture(scope="module")
def lasting(tmp_path_factory):
    """One server for all, and each kill is for both transports: the supervisor waits longer from death to death."""
    with leaving_nothing(), serving(tmp_path_factory.mktemp("server"), MODELS) as running:
        yield running


@pytest.fixture
def server(lasting):
    """It, with its engine back from what the test before did to it."""
    with lasting.connect() as client:
        wait_until(lambda: client.status()["engines"][0]["state"] == "serving", START, "the engine")
    return lasting


@pytest.fixture
def clients(server):
    """One over each transport."""
    with server.connect(transport="shm") as native, server.connect(transport="zmq") as zmq:
        yield native, zmq


def test_a_stopped_engine_that_continues_answers_late_without_harm(server, clients):
    engine = server.pids()["engine-0"]
    models = [client.model("affine", rows=2) for client in clients]
    x = np.ones((2, 4), np.float32)
    os.kill(engine, signal.SIGSTOP)
    try:
        for model in models:
            with pytest.raises(Timeout):
                model.infer(x, timeout=0.3)
    finally:
        os.kill(engine, signal.SIGCONT)
    for model in models:
        lane = model.requests.lane
        wait_until(lambda: lane.receive(0.05) or lane.free == 2, 20, "the late answer")  # noqa: B023
        np.testing.assert_array_equal(model.infer(2 * x), 4 * x + 1)


def test_a_ticket_in_flight_is_answered_by_the_restarted_engine(server, clients):
    models = [client.model("moody", rows=2) for client in clients]
    slow = np.full((2, 4), 2_000_000, np.float32)  # two seconds, in which it is seen to compute
    tickets = [model.submit(slow, timeout=60) for model in models]
    wait_until_computing(clients[0], "moody")
    os.kill(server.pids()["engine-0"], signal.SIGKILL)
    for model, ticket in zip(models, tickets, strict=True):
        np.testing.assert_array_equal(ticket.result(timeout=60).outputs, slow + 1)


def test_without_an_engine_a_client_waits_no_longer_than_its_time_out(server, clients):
    models = [client.model("affine") for client in clients]
    pids = server.pids()
    os.kill(pids["supervisor"], signal.SIGSTOP)  # so that there is no next engine that would answer them
    try:
        os.kill(pids["engine-0"], signal.SIGKILL)
        for model in models:
            with pytest.raises(Timeout, match="no engine serves|is at engine"):
                model.infer(np.zeros((1, 4), np.float32), timeout=0.2)
    finally:
        os.kill(pids["supervisor"], signal.SIGCONT)
    for model in models:
        np.testing.assert_array_equal(model.infer(np.zeros((1, 4), np.float32), timeout=60), np.ones((1, 4)))


def test_every_answer_is_right_while_the_engine_is_killed_again_and_again(server):
    stop, wrong, answered = threading.Event(), [], dict.fromkeys(TRANSPORTS, 0)

    def ask(transport):
        rng = np.random.default_rng()
        with server.connect(transport=transport) as client:
            model = client.model("affine", rows=8)
            while not stop.is_set():
                x = rng.standard_normal((5, 4)).astype(np.float32)
                y = model.infer(x, timeout=60)
                answered[transport] += 1
                if not np.array_equal(y, 2 * x + 1):
                    wrong.append((x, y))

    def service():
        before = dict(answered)
        wait_until(
            lambda: all(answered[transport] > before[transport] + 50 for transport in TRANSPORTS),
            60,
            "service over both transports",
        )

    threads = [threading.Thread(target=ask, args=(transport,)) for transport in TRANSPORTS for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):
            service()
            os.kill(server.pids()["engine-0"], signal.SIGKILL)
        service()
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_an_engine_is_restarted_though_a_process_that_its_model_forked_keeps_its_pipe_open(tmp_path, nothing_left):
    """The supervisor would read the end of the pipe only when that process ends, too."""
    pids = tmp_path / "pids"
    pids.touch()
    models = {"forking": {"factory": "tests.faults.reloaded_models:forking", "args": {"pids": str(pids)}}}
    try:
        with serving(tmp_path, models) as server, server.connect() as client:
            x = np.ones((2, 4), np.float32)
            np.testing.assert_array_equal(client.model("forking").infer(x), 2 * x + 1)
            (forked,) = map(int, pids.read_text().split())
            os.kill(server.pids()["engine-0"], signal.SIGKILL)
            np.testing.assert_array_equal(client.model("forking").infer(x, timeout=40), 2 * x + 1)
            os.kill(forked, 0)  # it still had the pipe
            assert client.status()["engines"][0]["restarts"] == 1
    finally:
        for pid in map(int, pids.read_text().split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
