"""Several engines behind one address."""

import os
import random
import signal
import threading
import time

import numpy as np
import pytest
from tests.serving import serving, wait_until

X = np.ones((1, 4), np.float32)


@pytest.fixture(params=["shm", "zmq"])
def transport(request):
    """Transports whose clients choose an engine; for remote clients the gateway and the relay choose."""
    return request.param


def crowd(server, clients, seconds, transport):
    """Run closed-loop clients; return how many requests each engine answered, the slowest engine first."""
    stop = time.monotonic() + seconds

    def ask():
        with server.connect(transport=transport) as client:
            model = client.model("paced")
            while time.monotonic() < stop:
                assert model.infer(X, timeout=20)[0, 0] == 2

    with server.connect() as client:
        counters = client._link.scoreboard.counters[:, client.status()["models"][0]["index"]]
        before = counters["requests"].copy()
        threads = [threading.Thread(target=ask) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        slowness = counters["forward_total_ns"] / np.maximum(counters["batches"], 1)
        return (counters["requests"] - before)[np.argsort(-slowness)]


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """Three engines, one of which is ten times slower than the others."""
    folder = tmp_path_factory.mktemp("uneven")
    models = {
        "paced": {"factory": "tests.models:paced", "args": {"seconds": 0.02, "slow": str(folder / "slow")}},
        "affine": {"factory": "tests.models:affine"},
    }
    with serving(folder, models, replicas=3) as server:
        crowd(server, 4, 1.0, "auto")  # until the engines' speeds are measured
        yield server


def test_a_slow_replica_does_not_hold_up_the_rest(uneven, transport):
    slow, *others = crowd(uneven, 4, 2.0, transport)
    # With an even distribution each would answer a third.
    assert slow < 0.15 * (slow + sum(others))
    assert min(others) > 0


def test_a_dead_replicas_tickets_go_to_a_living_one(uneven):
    server = uneven
    with server.connect(transport="shm") as native, server.connect(transport="zmq") as zmq:
        served = [client.model("affine") for client in (native, zmq)]
        assert all(one.infer(X)[0, 0] == 3 for one in served)
        os.kill(server.pids()["engine-0"], signal.SIGKILL)
        for _ in range(20):
            assert all(one.infer(X, timeout=30)[0, 0] == 3 for one in served)
        wait_until(lambda: all(e["state"] == "serving" for e in zmq.status()["engines"]), 60, "recovery")


def test_a_replica_that_could_not_load_a_model_gets_no_requests_for_it(tmp_path, transport):
    """It computes nothing, so it seems to be the one with the shortest wait."""
    models = {"only": {"factory": "tests.models:loads_once", "args": {"taken": str(tmp_path / "taken")}}}
    with serving(tmp_path, models, replicas=2) as server, server.connect(transport=transport) as client:
        wait_until(lambda: all(e["state"] == "serving" for e in client.status()["engines"]), 60, "both engines")
        model = client.model("only")
        assert all(model.infer(X, timeout=20)[0, 0] == 3 for _ in range(50))
        computed = client._link.scoreboard.counters["requests"][:, client.status()["models"][0]["index"]]
        # An engine counts a request after it has answered.
        wait_until(lambda: sorted(computed.tolist()) == [0, 50], 10, "the last request's count")
        time.sleep(1.1)  # engines without the model get another request after one second
        assert all(model(X[0], timeout=20)[0] == 3 for _ in range(50))
        wait_until(lambda: sorted(computed.tolist()) == [0, 100], 10, "the last request's count")


def test_lanes_are_spread_and_single_rows_take_the_native_path(tmp_path, transport):
    models = {"affine": {"factory": "tests.models:affine", "lane_rows": 1}}
    with serving(tmp_path, models, replicas=2) as server, server.connect(transport=transport) as client:
        wait_until(lambda: all(e["state"] == "serving" for e in client.status()["engines"]), 60, "both engines")
        random.seed(7)
        expected = random.Random(7).random()
        lanes = [client.model("affine") for _ in range(4)]
        for _ in range(50):
            assert all(model(X[0])[0] == 3 for model in lanes)
        assert random.random() == expected, "the program's own random numbers were used"
        assert sorted(model.requests.lane._home for model in lanes) == [0, 0, 1, 1]
        for model in lanes:
            assert all(call is not None for call, _ in model.requests.kept._calls.values())
        computed = client._link.scoreboard.counters["requests"][:, client.status()["models"][0]["index"]]
        wait_until(lambda: computed.sum() == 200, 10, "the last request's count")
        assert computed.min() > 0
