"""A server on one host and its client on another, with a slow network between them that is cut for a while."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from benchmarks.cluster.namespaces import A, B, TwoHosts
from benchmarks.cluster.two_hosts import served
from tests.unit.hockey.hockey_runs import settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_CLIENT = """\
import json, sys, time
from pathlib import Path
import numpy as np
from jurybox.client import Error
from jurybox.training.cluster import doors
book = Path(sys.argv[1])
with doors.reach("hockey", lambda: doors.find(book, "hockey"), 60.0) as server:
    with server.model("policy/hockey", rows=4) as policy, server.model("policy/hockey-pool", rows=4) as past:
        for line in sys.stdin:
            began = time.monotonic()
            try:
                newest = policy.infer(np.zeros((4, 18), np.float32), timeout=float(line))
                pinned = past.infer(np.zeros((4, 18), np.float32), timeout=float(line), version=1)
                said = {"shapes": [newest.shape, pinned.shape]}
            except Error as error:
                said = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps({**said, "seconds": time.monotonic() - began, "to": server.address}), flush=True)
"""


@pytest.fixture
def hosts():
    try:
        with TwoHosts(0.005) as made:
            yield made
    except (OSError, RuntimeError) as error:
        pytest.skip(f"no network namespaces here: {error}")


def test_a_client_beyond_a_slow_network_is_told_of_a_cut_and_goes_on_after_it(hosts, tmp_path):
    with served(hosts, tmp_path, settings()):
        command = hosts.inside(B, [sys.executable, "-c", _CLIENT, str(tmp_path)])
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:

            def asks(timeout: float) -> dict[str, object]:
                client.stdin.write(f"{timeout}\n")
                client.stdin.flush()
                return json.loads(client.stdout.readline())

            try:
                first = asks(60.0)
                assert first["to"].startswith(f"grpcs://{A}:"), "with its token and certificate"
                assert first["shapes"] == [[4, 4], [4, 4]], first
                assert first["seconds"] > 2 * 0.01, "two questions, two round trips"
                hosts.cut.set()
                told = asks(2.0)
                assert "Timeout" in told["error"] and "network to it is broken" in told["error"], told
                # The bound that it was given, and what a busy machine makes of it.
                assert told["seconds"] < 30.0
                hosts.cut.clear()
                again = asks(60.0)
                assert again["shapes"] == first["shapes"], again
            finally:
                client.stdin.close()
                client.wait(30)
