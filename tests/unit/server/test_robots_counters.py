"""What a port for robots counts, and which reports of robots it takes."""

from __future__ import annotations

import pytest

from jurybox.client.chunks import DROPPED
from jurybox.protocol.errors import Code, Refused
from jurybox.protocol.scoreboard import TIME_BUCKETS
from jurybox.server.gateway.robots.counters import FAILURES, ChunkReport, Jitter, PortCounters, RobotDelays, Times
from jurybox.server.gateway.robots.msgpack_arrays import Malformed


@pytest.mark.parametrize(("seconds", "bucket"), [(0.0, 0), (1e-9, 1), (1024e-9, 11), (1023e-9, 10), (1e9, -1)])
def test_a_duration_counts_in_the_bucket_of_its_size(seconds, bucket):
    times = Times()
    for _ in range(2):
        times.add(seconds)
    assert times.counts[bucket] == 2 and times.counts.sum() == 2 and len(times.counts) == TIME_BUCKETS
    assert times.total == 2 * seconds


def test_the_jitter_is_the_smoothed_difference_of_delays():
    jitter = Jitter()
    assert jitter.add(None, 5.0) == 5.0 and jitter.seconds == 0.0
    assert jitter.add(5.0, 3.0) == 3.0 and jitter.seconds == 2 / 16
    jitter.add(3.0, 3.0)
    assert jitter.seconds == 2 / 16 * 15 / 16


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (Code.MALFORMED, "malformed"),
        (Code.SPEC_MISMATCH, "observation"),
        (Code.ROW_FAILED, "row"),
        (Code.TIMEOUT, "late"),
        (Code.SESSION_LOST, "session"),
        (Code.MODEL_FAILED, "model"),
        (Code.BUSY, "server"),
    ],
)
def test_a_failure_is_counted_by_its_reason(code, reason):
    counters = PortCounters()
    counters.failed(Refused("why", code))
    assert counters.failures == {reason: 1} and reason in FAILURES


def test_a_report_without_a_delay_adds_none():
    counters = PortCounters()
    delays = RobotDelays(counters)
    delays.answered(0.5, None)
    delays.answered(0.5, ChunkReport({}))
    assert counters.requests == 2 and counters.client_delay.counts.sum() == 0 and counters.client_jitter.seconds == 0
    for delay in (0, 1):
        delays.answered(0.5, ChunkReport({"delay": delay, "late": 2}))
    assert counters.client_delay.counts.sum() == 2 and counters.client_delay.total == 1.0
    assert counters.client_jitter.seconds == 1 / 16 and counters.jitter.seconds == 0
    assert counters.dropped["late"] == 4 and counters.starved == 0


@pytest.mark.parametrize("delay", [None, 0, 0.0, 3600, 3600.0])
def test_a_delay_of_up_to_an_hour_is_taken(delay):
    report = ChunkReport({"delay": delay, "stale": 1_000_000, "starved": 0})
    assert report.delay == delay and (report.delay is None or type(report.delay) is float)
    assert report.starved == 0 and "starved" not in report.dropped
    assert report.dropped == dict.fromkeys(DROPPED, 0) | {"stale": 1_000_000}


@pytest.mark.parametrize(
    ("report", "why"),
    [
        ([], "expected a map, came list"),
        ({"more": 1}, "expected delay, starved, .*; came more"),
        ({"delay": 3600.1}, "expected a delay from 0 to 3600 s, came 3600.1"),
        ({"delay": -0.1}, "expected a delay from 0 to 3600 s, came -0.1"),
        ({"delay": True}, "expected a delay from 0 to 3600 s, came True"),
        ({"starved": 1_000_001}, "expected starved as a number from 0 to 1000000, came 1000001"),
        ({"starved": -1}, "expected starved as a number from 0 to 1000000, came -1"),
        ({"stale": True}, "expected stale as a number from 0 to 1000000, came True"),
        ({"late": None}, "expected late as a number from 0 to 1000000, came None"),
    ],
)
def test_a_report_of_something_else_is_refused(report, why):
    with pytest.raises(Malformed, match=f"chunk_report: {why}"):
        ChunkReport(report)
