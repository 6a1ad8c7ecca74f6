"""A server on one host and its client on another, with a slow network between them that is cut for a while."""

from __future__ import annotations

import time

import pytest
from benchmarks.cluster.cut import client
from benchmarks.cluster.namespaces import A, TwoHosts
from benchmarks.cluster.two_hosts import served
from tests.unit.studies.hockey.hockey_runs import settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def hosts():
    try:
        made = TwoHosts(0.005)
        made.__enter__()
    except (OSError, RuntimeError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    yield made
    made.__exit__()


def test_a_client_beyond_a_slow_network_reports_a_cut_and_continues_after_it(hosts, tmp_path):
    with served(hosts, tmp_path, settings()), client(hosts, tmp_path) as remote:
        first = remote.asks(60.0)
        assert first["to"].startswith(f"grpcs://{A}:"), "with its token and certificate"
        assert first["shapes"] == [[4, 4], [4, 4]], first
        assert first["seconds"] > 2 * 0.01, "two requests, two round trips"
        hosts.cut.set()
        cut_off = remote.asks(2.0)
        assert "Timeout" in cut_off["error"] and "network to it is broken" in cut_off["error"], cut_off
        assert cut_off["seconds"] < 30.0, "its own limit, and what a busy machine adds"
        hosts.cut.clear()
        deadline = time.monotonic() + 60.0
        # A channel that is reconnecting fails at once.
        while "error" in (again := remote.asks(5.0)) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert again.get("shapes") == first["shapes"], again
