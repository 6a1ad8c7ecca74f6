"""Several engines behind one address."""

import os
import signal
import threading
import time

import numpy as np
import pytest
from tests.serving import serving, wait_until

X = np.ones((1, 4), np.float32)


@pytest.fixture(params=["native", "zmq"])
def door(request):
    """Those that choose an engine; remote clients leave that to the gateway and the relay."""
    return request.param


def crowd(server, clients, seconds, door):
    """Closed-loop clients for a while; gives everyone's latencies."""
    latencies, stop = [[] for _ in range(clients)], time.monotonic() + seconds

    def ask(mine):
        with server.connect(door=door) as client:
            model = client.model("paced")
            while time.monotonic() < stop:
                began = time.monotonic()
                assert model.infer(X, timeout=20)[0, 0] == 2
                mine.append(time.monotonic() - began)

    threads = [threading.Thread(target=ask, args=(mine,)) for mine in latencies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return np.concatenate(latencies)


def test_a_slow_replica_does_not_hold_up_the_rest(tmp_path, door):
    model = {"factory": "tests.models:paced", "args": {"seconds": 0.02, "slow": str(tmp_path / "slow")}}
    with serving(tmp_path, {"paced": model}, replicas=3) as server:
        crowd(server, 4, 1.0, door)  # until the engines have shown how long they take
        latencies = crowd(server, 4, 3.0, door)
    # Evenly spread over three, a third of all requests would take 0.2 s or more.
    assert np.mean(latencies > 0.15) < 0.1
    assert np.median(latencies) < 0.06


def test_a_dead_replicas_tickets_go_to_a_living_one(tmp_path, door):
    model = {"factory": "tests.models:affine"}
    with serving(tmp_path, {"affine": model}, replicas=2) as server, server.connect(door=door) as client:
        served = client.model("affine")
        assert served.infer(X)[0, 0] == 3
        for role in ("engine-0", "engine-1"):
            os.kill(server.pids()[role], signal.SIGKILL)
            for _ in range(20):
                assert served.infer(X, timeout=20)[0, 0] == 3
            wait_until(lambda: all(e["state"] == "serving" for e in client.status()["engines"]), 20, "recovery")
