"""Several engines behind one address."""

import asyncio
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

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
def asking(server, way, name, output="action"):
    """A client's function for one request of one row."""
    if module := TRITON.get(way):
        with module.InferenceServerClient(server.listening(way)) as client:
            inputs = [observation(module, X)]
            yield lambda: client.infer(name, inputs).as_numpy(output)
        return
    far = connect("tcp://" + server.listening("tcp")) if way == "tcp" else server.connect(transport=way)
    with far as client:
        model = client.model(name)
        yield lambda: model.infer(X, timeout=60)


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
    """Two engines, one of which is ten times slower than the other."""
    folder = tmp_path_factory.mktemp("uneven")
    models = {
        "paced": {"factory": "tests.models:paced", "args": {"seconds": 0.02, "slow": str(folder / "slow")}},
        "affine": {"factory": "tests.models:affine"},
    }
    with serving(folder, models, replicas=2, **DOORS) as server:
        crowd(server, 4, 1.0, "auto")  # until the engines' speeds are measured
        yield server


def test_a_slow_replica_does_not_hold_up_the_rest(uneven, way):
    def unevenly():
        (slow, quick), _ = crowd(uneven, 4, 1.0, way)
        # With an even distribution each would always answer half; on a loaded machine both may be slow for a while.
        return slow < 0.25 * (slow + quick)

    wait_until(unevenly, 60, "the slow engine gets few requests")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two engines with models whose batches save nothing; and a function for what share of their time both computed."""
    folder = tmp_path_factory.mktemp("pair")
    (folder / "times").mkdir()
    model = {"factory": "tests.models:rowwise", "args": {"seconds": 0.02, "times": str(folder / "times")}}

    def together(since):
        both = alone = 0.0
        edges = []  # of all batches since then
        for file in (folder / "times").iterdir():
            for line in file.read_text().splitlines():
                began, ended = map(float, line.split())
                if began >= since:
                    edges += [(began, 1), (ended, -1)]
        computing, last = 0, 0.0
        for at, change in sorted(edges):
            both += (at - last) * (computing == 2)
            alone += (at - last) * (computing == 1)
            computing, last = computing + change, at
        return both / (both + alone) if both else 0.0

    with serving(folder, {"one": {**model, "lane_rows": 1}, "score": model}, replicas=2, **DOORS) as server:
        yield server, together


def test_a_second_engine_computes_while_the_first_does(pair, way):
    server, together = pair
    began = time.monotonic()
    with ExitStack() as stack, ThreadPoolExecutor(6) as pool:
        asks = [stack.enter_context(asking(server, way, "one", output="score")) for _ in range(6)]

        def crowded():
            answers = list(pool.map(lambda ask: [ask() for _ in range(10)], asks))
            assert (np.concatenate(answers, axis=None) == 4.0).all()

        wait_until(lambda: crowded() or together(began) > 0.05, 60, "both compute: it is 0 if one waits for the other")


@pytest.mark.parametrize("far", ["", "tcp", "grpc"])
def test_a_jurors_rows_are_computed_by_all_engines(pair, far):
    server, together = pair
    juror = Juror("score", address=f"{far}://{server.listening(far)}" if far else server.address)
    rows = [np.full(4, i, np.float32) for i in range(8)]
    began = time.monotonic()

    def call():  # one at a time, as of a trainer that scores a whole batch
        assert juror.scores({"observation": rows}, 8) == [4.0 * i for i in range(8)]

    wait_until(lambda: call() or together(began) > 0.05, 60, "both engines compute at the same time")
    began = time.monotonic()

    async def crowd():
        return await asyncio.gather(*(juror.scores_async({"observation": [rows[i % 8]]}, 1) for i in range(40)))

    def crowded():
        assert asyncio.run(crowd()) == [[4.0 * (i % 8)] for i in range(40)]

    wait_until(lambda: crowded() or together(began) > 0.05, 60, "both engines compute at the same time")
    juror.close()
    assert juror.scores({"observation": rows}, 8) == [4.0 * i for i in range(8)]
    juror.close()


@pytest.mark.parametrize(
    "way",
    ["shm", "tcp", "grpc", *(pytest.param(one, marks=pytest.mark.runs) for one in ("zmq", "http"))],
    indirect=True,
)
def test_a_dead_replicas_tickets_go_to_a_living_one(uneven, way):
    server = uneven
    with server.connect() as client:
        wait_until(lambda: all(e["state"] == "serving" for e in client.status()["engines"]), 60, "both engines")
    with asking(server, way, "affine") as one:
        for _ in range(20):  # then native code sends them
            assert one()[0, 0] == 3
        os.kill(server.pids()["engine-0"], signal.SIGKILL)
        for _ in range(20):
            assert one()[0, 0] == 3


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """Two engines, of which one could not load the model."""
    folder = tmp_path_factory.mktemp("half")
    models = {"only": {"factory": "tests.models:loads_once", "args": {"taken": str(folder / "taken")}}}
    with serving(folder, models, replicas=2, **DOORS) as server, server.connect() as client:
        wait_until(lambda: all(e["state"] == "serving" for e in client.status()["engines"]), 60, "both engines")
        yield server


@pytest.mark.parametrize(
    "way",
    ["shm", "grpc", *(pytest.param(one, marks=pytest.mark.runs) for one in ("zmq", "tcp", "http"))],
    indirect=True,
)
def test_a_replica_that_could_not_load_a_model_gets_no_requests_for_it(half, way):
    """It computes nothing, so it seems to be the one with the shortest wait."""
    server = half
    with server.connect() as client:
        computed = client._link.scoreboard.counters["requests"][:, client.status()["models"][0]["index"]]
        before = computed.copy()  # the gateway probes a model
        with asking(server, way, "only") as one:
            assert all(one()[0, 0] == 3 for _ in range(50))
            time.sleep(1.1)  # engines without the model get another request after one second
            assert all(one()[0, 0] == 3 for _ in range(50))
        # An engine counts a request after it has answered.
        wait_until(lambda: (computed - before).max() >= 100, 10, "the last request's count")
        assert computed.min() == 0


@pytest.fixture(scope="module")
def even(tmp_path_factory):
    """Two engines that nobody else asks."""
    models = {"affine": {"factory": "tests.models:affine", "lane_rows": 1}}
    with serving(tmp_path_factory.mktemp("even"), models, replicas=2) as server, server.connect() as client:
        wait_until(lambda: all(e["state"] == "serving" for e in client.status()["engines"]), 60, "both engines")
        yield server


def test_lanes_are_spread_and_single_rows_take_the_native_path(even, transport):
    with even.connect(transport=transport) as client:
        wait_until(lambda: client.status()["lanes"]["in_use"] == 0, 30, "the end of the leases of a test before")
        computed = client._link.scoreboard.counters["requests"][:, client.status()["models"][0]["index"]]
        before = computed.copy()
        random.seed(7)
        expected = random.Random(7).random()
        lanes = [client.model("affine") for _ in range(4)]
        for _ in range(50):
            assert all(model(X[0])[0] == 3 for model in lanes)
        assert random.random() == expected, "the program's own random numbers were used"
        assert sorted(model.requests.lane._choice.home for model in lanes) == [0, 0, 1, 1]
        for model in lanes:
            assert all(call is not None for call, _ in model.requests.kept[0]._calls.values())
        # Not from both for sure: an engine that had a slow moment is asked less until others are as slow.
        wait_until(lambda: (computed - before).sum() == 200, 10, "the last request's count")
