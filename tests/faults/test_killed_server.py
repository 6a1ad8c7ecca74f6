"""kill -9 of the supervisor: no process is orphaned, clients get an error, the next start cleans up."""

import os
import signal

import numpy as np
import pytest
from tests.faults.conftest import MODELS
from tests.serving import segments, serving, wait_until, wait_until_computing

from jurybox.client import ServerGone, connect


def gone(pid):
    try:
        return open(f"/proc/{pid}/stat").read().split(")")[1].split()[0] == "Z"  # noqa: PTH123
    except FileNotFoundError:
        return True


@pytest.mark.usefixtures("started_anew")
def test_its_children_die_its_clients_get_an_error_at_once_and_the_next_server_cleans_up_and_serves(
    tmp_path, nothing_left, caplog, monkeypatch
):
    monkeypatch.setattr("jurybox.client.control._NOTICE", 0.4)
    before = segments()
    with (
        serving(tmp_path, MODELS) as server,
        server.connect(transport="shm") as native,
        server.connect(transport="zmq") as zmq,
    ):
        engine = server.pids()["engine-0"]
        models = [client.model("moody") for client in (native, zmq)]
        # The forward outlasts the wait by far: no answer, but the news ends it.
        tickets = [model.submit(np.full((1, 4), 60_000_000, np.float32), timeout=60) for model in models]
        server.process.kill()
        server.process.wait()
        for model, ticket in zip(models, tickets, strict=True):
            with pytest.raises(ServerGone, match="1 tickets of 'moody' in flight"):
                ticket.result(timeout=30)
        wait_until(lambda: gone(engine), 20, "the death of the engine")
        left = segments() - before
        assert left, "a killed server cannot clean up: if it did, this test shows nothing"
        with pytest.raises(ServerGone, match="within 1.5 s: .*nothing listens on .*: its server was killed"):
            connect(server.address, timeout=1.5)  # for which it waits, since one may be starting; it says so
        assert "waiting up to 1.5 s for a server at ipc://" in caplog.text and "was killed" in caplog.text
        with serving(tmp_path, MODELS):
            assert not (segments() & left)
            x = np.ones((1, 4), np.float32)
            for client, model in zip((native, zmq), models, strict=True):
                np.testing.assert_array_equal(model.infer(x, timeout=20), x + 1)
                np.testing.assert_array_equal(client.model("affine").infer(x), 2 * x + 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.runs)])
def test_a_signal_drains_requests_in_flight_and_ends_with_status_0(server, number):
    with server.connect() as client:
        model = client.model("moody")
        slow = np.full((1, 4), 700_000, np.float32)
        ticket = model.submit(slow, timeout=30)
        wait_until_computing(client, "moody")
        os.kill(server.process.pid, number)
        np.testing.assert_array_equal(ticket.result(timeout=20).outputs, slow + 1)
        assert server.process.wait(20) == 0


def test_a_second_signal_stops_at_once(tmp_path, nothing_left):
    # Neither the forward nor the draining would end before the test gives up.
    with serving(tmp_path, MODELS, drain_timeout=100.0) as server, server.connect() as client:
        client.model("moody").submit(np.full((1, 4), 100_000_000, np.float32), timeout=100)
        wait_until_computing(client, "moody")
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "draining" in server.text(), 20, "draining")
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(30)
