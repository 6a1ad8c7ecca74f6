"""kill -9 of an engine: its clients' tickets are answered by its successor."""

import os
import signal
import threading
import time

import numpy as np
import pytest
from tests.serving import wait_until

from jurybox.client import Timeout


def test_a_ticket_in_flight_is_answered_by_the_restarted_engine(server, door):
    with server.connect(door=door) as client:
        model = client.model("moody", rows=2)
        slow = np.full((2, 4), 1_500_000, np.float32)
        ticket = model.submit(slow, timeout=30)
        time.sleep(0.2)  # let it be in the middle of the forward
        os.kill(server.pids()["engine-0"], signal.SIGKILL)
        np.testing.assert_array_equal(model.result(ticket, timeout=30).outputs, slow + 1)


def test_every_answer_is_right_while_the_engine_is_killed_again_and_again(server, door):
    stop, wrong, answered = threading.Event(), [], [0]

    def ask():
        rng = np.random.default_rng()
        with server.connect(door=door) as client:
            model = client.model("affine", rows=8)
            while not stop.is_set():
                x = rng.standard_normal((5, 4)).astype(np.float32)
                y = model.infer(x, timeout=30)
                answered[0] += 1
                if not np.array_equal(y, 2 * x + 1):
                    wrong.append((x, y))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            before = answered[0]
            wait_until(lambda: answered[0] > before + 50, 30, "service")  # noqa: B023
            os.kill(server.pids()["engine-0"], signal.SIGKILL)
        before = answered[0]
        wait_until(lambda: answered[0] > before + 50, 30, "service after the last kill")
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_while_no_engine_serves_a_client_waits_no_longer_than_it_said(server, door):
    with server.connect(door=door) as client:
        model = client.model("affine")
        os.kill(server.pids()["engine-0"], signal.SIGKILL)
        began = time.monotonic()
        try:
            model.infer(np.zeros((1, 4), np.float32), timeout=0.3)
        except Timeout as error:
            assert "no engine serves" in str(error) or "is at engine" in str(error)
        assert time.monotonic() - began < 1.0


def test_a_stopped_engine_that_goes_on_later_answers_late_and_nothing_breaks(server, door):
    engine = server.pids()["engine-0"]
    with server.connect(door=door) as client:
        model = client.model("affine", rows=2)
        x = np.ones((2, 4), np.float32)
        os.kill(engine, signal.SIGSTOP)
        try:
            with pytest.raises(Timeout):
                model.infer(x, timeout=0.3)
        finally:
            os.kill(engine, signal.SIGCONT)
        wait_until(lambda: model._lane.receive(0.05) or model._lane.free.free == 2, 5, "the late answer")
        np.testing.assert_array_equal(model.infer(2 * x), 4 * x + 1)
