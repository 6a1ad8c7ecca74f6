"""kill -9 of the supervisor: nobody is orphaned, clients learn it, the next start heals."""

import os
import signal
import time

import numpy as np
import pytest
from tests.faults.conftest import MODELS
from tests.serving import segments, serving, wait_until

from jurybox.client import ServerGone


def gone(pid):
    try:
        return open(f"/proc/{pid}/stat").read().split(")")[1].split()[0] == "Z"  # noqa: PTH123
    except FileNotFoundError:
        return True


def test_children_die_with_their_parent(server):
    pids = server.pids()
    server.process.kill()
    server.process.wait()
    for role in ("engine-0",):
        wait_until(lambda: gone(pids[role]), 5, f"the death of {role}")  # noqa: B023
    with serving(server.log.parent, MODELS):  # sweeps what the killed one left
        pass


def test_clients_are_told_at_once_and_can_go_on_with_the_next_server(server, tmp_path, door):
    with server.connect(door=door) as client:
        model = client.model("moody")
        ticket = model.submit(np.full((1, 4), 5_000_000, np.float32), timeout=60)
        server.process.kill()
        server.process.wait()
        began = time.monotonic()
        with pytest.raises(ServerGone, match="1 tickets of 'moody' in flight"):
            model.result(ticket, timeout=30)
        assert time.monotonic() - began < 2.0
        with serving(tmp_path, MODELS):
            x = np.ones((1, 4), np.float32)
            np.testing.assert_array_equal(model.infer(x, timeout=20), x + 1)
            np.testing.assert_array_equal(client.model("affine").infer(x), 2 * x + 1)


def test_the_next_start_removes_what_a_killed_server_left(tmp_path):
    before = segments()
    with serving(tmp_path, MODELS) as server:
        server.process.kill()
        server.process.wait()
        left = segments() - before
        assert left, "a killed server cannot clean up: if it did, this test shows nothing"
    with serving(tmp_path / "next", MODELS):
        assert not (segments() & left)
    assert segments() - before == set()


def test_a_living_servers_memory_is_not_swept_by_another(server, tmp_path):
    with server.connect() as client, serving(tmp_path / "other", MODELS) as other, other.connect() as stranger:
        x = np.ones((1, 4), np.float32)
        assert np.array_equal(client.model("affine").infer(x), 2 * x + 1)
        assert np.array_equal(stranger.model("affine").infer(x), 2 * x + 1)
        assert client.status()["server"] != stranger.status()["server"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_what_is_in_flight_and_ends_with_status_0(server, number):
    with server.connect() as client:
        model = client.model("moody")
        slow = np.full((1, 4), 700_000, np.float32)
        ticket = model.submit(slow, timeout=20)
        time.sleep(0.1)
        os.kill(server.process.pid, number)
        np.testing.assert_array_equal(model.result(ticket, timeout=20).outputs, slow + 1)
        assert server.process.wait(15) == 0


def test_a_second_signal_stops_at_once(server):
    with server.connect() as client:
        client.model("moody").submit(np.full((1, 4), 8_000_000, np.float32), timeout=20)
        time.sleep(0.1)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "draining" in server.text(), 5, "draining")
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(10)
        assert time.monotonic() - began < 6
