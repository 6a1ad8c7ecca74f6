"""kill -9 of a client: its rows are returned, and other clients are not affected.

Programs that it has started live on, and hold nothing of it.
"""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest
from tests.serving import wait_until

from jurybox.client import Busy
from jurybox.server.supervisor.leases import GRACE

HOLDER = """
import sys, time, numpy
from jurybox.client import connect
from tests.descriptors import start_helper
server = connect(sys.argv[1], transport=sys.argv[2], timeout=60.0)
model = server.model("moody", rows=60, timeout=60.0)
model.submit(numpy.full((8, 4), 300_000, numpy.float32))
print(start_helper(), flush=True)
time.sleep(60)
"""


@pytest.fixture
def server(enduring):
    return enduring


@contextmanager
def holder(server, transport):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, server.address, transport], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            helper = int(process.stdout.readline())
            try:
                yield process
            finally:
                os.kill(helper, signal.SIGKILL)
        finally:
            process.kill()


def test_the_rows_of_a_killed_client_are_returned(server, transport):
    before = server.text().count("rows taken back")
    with holder(server, transport) as process, server.connect(transport=transport) as client:
        with pytest.raises(Busy):
            client.model("moody", rows=60, timeout=0.3)
        process.kill()
        process.wait()
        model = client.model("moody", rows=60, timeout=20)
        x = np.ones((8, 4), np.float32)
        np.testing.assert_array_equal(model.infer(x), x + 1)
        wait_until(lambda: server.text().count("rows taken back") > before, 30, "the log")


def test_a_lease_lasts_as_long_as_its_client_however_quiet(server):
    with holder(server, "auto"), server.connect() as client, pytest.raises(Busy):
        client.model("moody", rows=60, timeout=GRACE + 0.5)


def test_a_client_that_closes_returns_its_rows_at_once(server, transport):
    for _ in range(30):
        with server.connect(transport=transport) as client:
            # Kept until the end: one that is merely dropped is noticed by its lock, which takes longer.
            kept = client.model("moody", rows=60, timeout=30.0)
            assert kept.name == "moody"
