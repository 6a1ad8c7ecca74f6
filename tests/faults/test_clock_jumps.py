"""The wall clock of server and clients jumps by days: nothing times out, and no lease is revoked."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from tests.faults.asker import Asker
from tests.faults.conftest import MODELS
from tests.serving import serving, wait_until

DAY = 86_400

pytestmark = pytest.mark.slow


@pytest.fixture
def wall_clock(tmp_path, monkeypatch):
    """Moves the wall clock of every process started from now on: call it with seconds."""
    if (compiler := shutil.which("cc") or shutil.which("gcc")) is None:
        pytest.skip("no C compiler")
    library, offset = tmp_path / "wall_clock.so", tmp_path / "offset"
    source = Path(__file__).with_name("wall_clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    offset.write_bytes(bytes(8))
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("WALL_CLOCK_OFFSET", str(offset))
    descriptor = os.open(offset, os.O_WRONLY)
    yield lambda seconds: os.pwrite(descriptor, int(seconds).to_bytes(8, "little", signed=True), 0)
    os.close(descriptor)


def test_jumps_of_the_wall_clock_have_no_effect(tmp_path, wall_clock, nothing_left):
    transports = {"tcp": "127.0.0.1:0", "http": "127.0.0.1:0"}
    with serving(tmp_path, MODELS, engine_timeout=20, **transports) as server, server.connect() as client:
        askers = [Asker(server.address, "shm"), Asker(server.address, "zmq")]
        askers.append(Asker(f"tcp://{server.listening('tcp')}", "auto"))
        for asker in askers:
            asker.ready()
        pids = server.pids()
        assert abs(client.status()["server"]["uptime"]) < 600
        wall_clock(10 * DAY)
        wait_until(lambda: client.status()["server"]["uptime"] > 9 * DAY, 10, "the jump: if not, this shows nothing")
        for days in (-10, 3, -3, 0):
            time.sleep(1.5)  # several periodic checks of each process
            wall_clock(days * DAY)
        time.sleep(1.5)
        told = [asker.end() for asker in askers]
        assert server.pids() == pids
    assert [(each.wrong, each.errors) for each in told] == [(0, [])] * 3
