"""Several engines behind one address."""

import asyncio
import os
import random
import signal
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tests.serving import serving, wait_until
from tests.tritons import observation

from jurybox.client import connect
from jurybox.client.juror import Juror

LOCAL = "127.0.0.1:0"
DOORS = {"http": LOCAL, "grpc": LOCAL, "tcp": LOCAL}
TRITON = {"http": tritonclient.http, "grpc": tritonclient.grpc}
PER_ROW = 0.02  # seconds of "rowwise"
X = np.ones((1, 4), np.float32)


@pytest.fixture(params=["shm", "zmq"])
def transport(request):
    """Transports whose clients choose an engine."""
    return request.param


@pytest.fixture(params=["shm", "zmq", *DOORS])
def way(request):
    """All ways to a server; for remote clients the gateway and the relay choose an engine."""
    return request.param


@contextmanager
def asking(server, way, name):
    """A client's function for one request of one row."""
    if module := TRITON.get(way):
        with module.InferenceServerClient(server.listening(way)) as client:
            row = [observation(module, X)]
            yield lambda: client.infer(name, row).as_numpy("action")
        return
    far = connect("tcp://" + server.listening("tcp")) if way == "tcp" else server.connect(transport=way)
    with far as client:
        model = client.model(name)
        yield lambda: model.infer(X, timeout=20)


def crowd(server, clients, seconds, way, name="paced"):
    """Run closed-loop clients.

    Returns:
        How many requests each engine answered, the slowest engine first; and the requests of all clients.
    """
    stop = time.monotonic() + seconds
    answered = []

    def ask():
        with asking(server, way, name) as one:
            while time.monotonic() < stop:
                assert one()[0, 0] == 2
                answered.append(1)

    with server.connect() as client:
        counters = client._link.scoreboard.counters[:, client.status()["models"][0]["index"]]
        before = counters["requests"].copy()
        threads = [threading.Thread(target=ask) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        slowness = counters["forward_total_ns"] / np.maximum(counters["batches"], 1)
        return (counters["requests"] - before)[np.argsort(-slowness)], len(answered)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """Three engines, one of which is ten times slower than the others."""
    folder = tmp_path_factory.mktemp("uneven")
    models = {
        "paced": {"factory": "tests.models:paced", "args": {"seconds": 0.02, "slow": str(folder / "slow")}},
        "affine": {"factory": "tests.models:affine"},
    }
    with serving(folder, models, replicas=3, **DOORS) as server:
        crowd(server, 4, 1.0, "auto")  # until the engines' speeds are measured
        yield server


def test_a_slow_replica_does_not_hold_up_the_rest(uneven, way):
    (slow, *others), _ = crowd(uneven, 4, 1.5, way)
    # With an even distribution each would answer a third.
    assert slow < 0.15 * (slow + sum(others))
    assert min(others) > 0


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two engines with models whose batches save nothing."""
    models = {
        "rowwise": {"factory": "tests.models:rowwise", "args": {"seconds": PER_ROW}, "lane_rows": 1},
        "score": {"factory": "tests.models:rowwise_score", "args": {"seconds": PER_ROW}},
    }
    with serving(tmp_path_factory.mktemp("pair"), models, replicas=2, **DOORS) as server:
        yield server


def test_a_second_engine_computes_while_the_first_does(pair, way):
    seconds = 1.5
    _, answered = crowd(pair, 6, seconds, way, "rowwise")
    assert answered > 1.3 * seconds / PER_ROW  # one engine computes no more than `seconds / PER_ROW`


@pytest.mark.parametrize("far", ["", "tcp", "grpc"])
def test_a_jurors_rows_are_computed_by_all_engines(pair, far):
    juror = Juror("score", address=f"{far}://{pair.listening(far)}" if far else pair.address)
    rows = [np.full(4, i, np.float32) for i in range(8)]
    assert juror.scores({"observation": rows[:1]}, 1) == [4.0]
    began, rounds = time.monotonic(), 5
    for _ in range(rounds):  # one call at a time, as of a trainer that scores a whole batch
        assert juror.scores({"observation": rows}, 8) == [4.0 * i + 4 for i in range(8)]
    assert time.monotonic() - began < rounds * 8 * PER_ROW / 1.3
    began = time.monotonic()

    async def crowd():
        return await asyncio.gather(*(juror.scores_async({"observation": [rows[i % 8]]}, 1) for i in range(40)))

    assert asyncio.run(crowd()) == [[4.0 * (i % 8) + 4] for i in range(40)]
    assert time.monotonic() - began < 40 * PER_ROW / 1.3
    juror.close()
    assert juror.scores({"observation": rows}, 8) == [4.0 * i + 4 for i in range(8)]
    juror.close()


def test_a_dead_replicas_tickets_go_to_a_living_one(uneven, way):
    server = uneven
    with server.connect() as client, asking(server, way, "affine") as one:
        for _ in range(20):  # then native code sends them
            assert one()[0, 0] == 3
        os.kill(server.pids()["engine-0"], signal.SIGKILL)
        for _ in range(20):
            assert one()[0, 0] == 3
        wait_until(lambda: all(e["state"] == "serving" for e in client.status()["engines"]), 60, "recovery")


def test_a_replica_that_could_not_load_a_model_gets_no_requests_for_it(tmp_path, way):
    """It computes nothing, so it seems to be the one with the shortest wait."""
    models = {"only": {"factory": "tests.models:loads_once", "args": {"taken": str(tmp_path / "taken")}}}
    with serving(tmp_path, models, replicas=2, **DOORS) as server, server.connect() as client:
        wait_until(lambda: all(e["state"] == "serving" for e in client.status()["engines"]), 60, "both engines")
        computed = client._link.scoreboard.counters["requests"][:, client.status()["models"][0]["index"]]
        before = computed.copy()  # the gateway probes a model
        with asking(server, way, "only") as one:
            assert all(one()[0, 0] == 3 for _ in range(50))
            time.sleep(1.1)  # engines without the model get another request after one second
            assert all(one()[0, 0] == 3 for _ in range(50))
        # An engine counts a request after it has answered.
        wait_until(lambda: (computed - before).max() >= 100, 10, "the last request's count")
        assert computed.min() == 0


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
