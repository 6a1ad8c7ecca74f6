"""An engine on standby takes the place of one that was killed, and its own death is nobody's loss."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from tests.faults.conftest import MODELS, leaving_nothing
from tests.serving import children_of, serving, wait_until

X = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with leaving_nothing(), serving(tmp_path_factory.mktemp("server"), MODELS, standby=True) as running:
        yield running


def engine_processes(server) -> set[int]:
    """The serving one and the waiting one; one that is dead has no command line."""
    found = {pid: command_line(pid) for pid in children_of(server.process.pid)}
    return {pid for pid, line in found.items() if b"jurybox.server.engine" in line}


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def serving_and_waiting(server, client) -> tuple[int, int]:
    wait_until(lambda: len(engine_processes(server)) == 2, 60, "a process on standby")
    engine = client.status()["engines"][0]["pid"]
    (waiting,) = engine_processes(server) - {engine}
    return engine, waiting


def test_who_waits_takes_a_killed_engines_place_and_another_one_waits(server):
    with server.connect() as client:
        model = client.model("affine", rows=2)
        engine, waiting = serving_and_waiting(server, client)
        os.kill(engine, signal.SIGKILL)
        np.testing.assert_array_equal(model.infer(X, timeout=60), 2 * X + 1)
        assert client.status()["engines"][0]["pid"] == waiting
        assert serving_and_waiting(server, client)[0] == waiting


def test_the_death_of_who_waits_costs_nothing_and_the_next_engine_starts_without_it(server):
    with server.connect() as client:
        model = client.model("affine", rows=2)
        engine, waiting = serving_and_waiting(server, client)
        os.kill(waiting, signal.SIGKILL)
        os.kill(engine, signal.SIGKILL)
        np.testing.assert_array_equal(model.infer(X, timeout=60), 2 * X + 1)
        assert client.status()["engines"][0]["pid"] not in (engine, waiting)


def test_a_server_that_stops_or_dies_leaves_nobody_waiting(server):
    with server.connect() as client:
        _, waiting = serving_and_waiting(server, client)
    assert server.stop() == 0
    assert not Path(f"/proc/{waiting}").exists()
