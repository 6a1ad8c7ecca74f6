"""No file descriptors left in the server: it keeps serving, and operations that need one are retried."""

from __future__ import annotations

import os
import resource
import signal

import numpy as np
import pytest
from tests.serving import wait_until


@pytest.mark.slow
def test_a_server_without_descriptors_keeps_running_and_its_engine_is_restarted(server):
    supervisor = server.process.pid
    with server.connect() as client:
        model = client.model("affine", rows=1)
        x = np.ones((1, 4), np.float32)
        limits = resource.prlimit(supervisor, resource.RLIMIT_NOFILE)
        resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (3, limits[1]))  # it has more already
        os.kill(server.pids()["engine-0"], signal.SIGKILL)
        wait_until(lambda: "cannot start a child yet" in server.text(), 20, "the log")
        resource.prlimit(supervisor, resource.RLIMIT_NOFILE, limits)
        np.testing.assert_array_equal(model.infer(x, timeout=60), 2 * x + 1)
    assert server.process.poll() is None
