"""The metrics for Prometheus, read by Prometheus's own parser."""

from __future__ import annotations

import math

import numpy as np
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families

from jurybox import native
from jurybox.protocol.errors import Code, Refused, SpecMismatch
from jurybox.protocol.segment import segment_name
from jurybox.protocol.weights import WeightsChannel, WeightsLayout
from jurybox.protocol.weights.publisher import Publisher
from jurybox.server.gateway.metrics import TABLE, MetricKind, exposition
from jurybox.server.gateway.robots.counters import ChunkReport, PortCounters, RobotDelays
from jurybox.server.gateway.robots.msgpack_arrays import Malformed
from jurybox.server.security.limits import GRPC, ROBOTS

PHOTO, POLICY = 3, 7
OPEN = "application/openmetrics-text;version=1.0.0"


def scraped(scene, accept: str = "") -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    body, _ = exposition(scene.snapshot(), accept)
    parse = open_families if accept else text_string_to_metric_families
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse(body.decode())
        for sample in family.samples
    }


def value(scene, name: str, **labels: str) -> float:
    return scraped(scene)[f"jurybox_{name}", tuple(sorted(labels.items()))]


@pytest.mark.parametrize("accept", ["", OPEN])
def test_every_metric_of_the_table_is_exposed_with_its_type_and_help(scene, accept):
    body, content_type = exposition(scene.snapshot(), accept)
    parse = open_families if accept else text_string_to_metric_families
    families = {family.name: family for family in parse(body.decode())}
    assert content_type.startswith("application/openmetrics-text" if accept else "text/plain")
    for metric in TABLE:
        family = families["jurybox_" + metric.name]
        assert (family.type, family.documentation) == (metric.kind.value, metric.help)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels)


def test_counters_are_summed_over_engines(scene):
    scene.add(0, PHOTO, requests=10, rows=40, batches=5, failed=1, expired=2, refused=3, updates=1)
    scene.add(1, PHOTO, requests=5, rows=9, failed=4)
    assert value(scene, "requests_total", model="photo") == 15
    assert value(scene, "rows_total", model="photo") == 49
    assert value(scene, "requests_total", model="policy/agent0") == 0
    assert value(scene, "request_failures_total", model="photo", reason="failed") == 5
    assert value(scene, "request_failures_total", model="photo", reason="expired") == 2
    assert value(scene, "engine_requests_total", engine="1") == 5


def test_a_histogram_is_the_scoreboards_cumulated_with_its_sum_in_seconds(scene):
    scene.bucket(0, PHOTO, "request_ns", 5, 2)  # below the first bound
    scene.bucket(0, PHOTO, "request_ns", 17, 3)  # [65.5 us, 131 us)
    scene.bucket(1, PHOTO, "request_ns", 20, 1)
    scene.bucket(1, PHOTO, "request_ns", 39, 1)  # above the last bound
    scene.add(0, PHOTO, request_total_ns=1_500_000_000)
    scene.add(1, PHOTO, request_total_ns=500_000_000)
    found = scraped(scene)
    buckets = {
        float(dict(labels)["le"]): count
        for (name, labels), count in found.items()
        if name == "jurybox_request_duration_seconds_bucket" and dict(labels)["model"] == "photo"
    }
    assert list(buckets) == [*(2**i / 1e9 for i in range(10, 37)), math.inf]
    assert list(buckets.values()) == sorted(buckets.values())
    assert [buckets[2**i / 1e9] for i in (10, 16, 17, 19, 20, 36)] == [2, 2, 5, 5, 6, 6]
    assert buckets[math.inf] == 7
    assert value(scene, "request_duration_seconds_count", model="photo") == 7
    assert value(scene, "request_duration_seconds_sum", model="photo") == 2.0


def test_batch_sizes_have_exact_bounds(scene):
    for rows in (1, 2, 3, 4, 64):
        scene.bucket(0, PHOTO, "batch_rows", rows.bit_length())
        scene.add(0, PHOTO, rows=rows)
    for bound, count in ((1, 1), (3, 3), (7, 4), (63, 4), (127, 5)):
        assert value(scene, "batch_rows_bucket", model="photo", le=str(float(bound))) == count
    assert value(scene, "batch_rows_sum", model="photo") == 74


def test_weights_metrics_have_version_newest_lag_and_age(scene):
    adopted = scene.snapshot().taken - 2_000_000_000
    scene.add(0, POLICY, version=3, newest=5, adopted=adopted)
    scene.add(1, POLICY, version=5, newest=5)
    labels = {"model": "policy/agent0"}
    assert value(scene, "weights_version", **labels) == 3
    assert value(scene, "weights_newest_version", **labels) == 5
    assert value(scene, "weights_lag_versions", **labels) == 2
    age = value(scene, "weights_age_seconds", **labels)
    assert 2 <= age <= (scene.snapshot().taken - adopted) / 1e9
    assert ("jurybox_weights_age_seconds", (("model", "photo"),)) not in scraped(scene)


def test_publications_are_counted_though_their_versions_skip_numbers(scene):
    weights = {"w": np.zeros(3, np.float32)}
    channel = WeightsChannel.create(segment_name(scene.id, "weights"), WeightsLayout.of(weights))
    scene.models[1].channel = channel
    publisher = Publisher(channel)
    publisher.publish(weights, version=1000)
    publisher.publish(weights)
    assert value(scene, "weights_publications_total", model="policy/agent0") == 2
    assert value(scene, "weights_newest_version", model="policy/agent0") == 1001
    assert value(scene, "weights_publications_total", model="photo") == 0
    publisher.close()
    channel.close()


def test_an_engine_that_died_is_down_and_counted(scene):
    from jurybox.protocol.scoreboard import EngineState

    scene.engine(1, state=EngineState.ABSENT, restarts=1)
    assert [value(scene, "engine_up", engine=str(index)) for index in (0, 1)] == [1, 0]
    assert [value(scene, "engine_restarts_total", engine=str(index)) for index in (0, 1)] == [0, 1]


def test_a_restarted_engine_changes_no_sum_and_no_count(scene):
    from jurybox.protocol.scoreboard import EngineState

    counted = {metric.full_name for metric in TABLE if metric.kind is MetricKind.COUNTER} | {
        f"jurybox_{metric.name}_{part}"
        for metric in TABLE
        if metric.kind is MetricKind.HISTOGRAM
        for part in ("sum", "count")
    }
    scene.add(0, PHOTO, requests=10, rows=40, batches=5, request_total_ns=1000, version=2, newest=2)
    before = scraped(scene)
    scene.engine(0, state=EngineState.LOADING, incarnation=6, heartbeat=2)
    after = scraped(scene)
    assert {key: count for key, count in before.items() if key[0] in counted} == {
        key: count for key, count in after.items() if key[0] in counted
    }


def test_events_at_a_port_for_robots_are_counted_by_port(scene):
    port = PortCounters()
    port.opened, port.connected, port.sessions = 3, 2, 5
    port.refused["token"] += 4
    port.failed(SpecMismatch("too short"))
    port.failed(Refused("odd", Code.STALE_LEASE))
    port.waited([0.001, 0.003])
    report = ChunkReport({"delay": 0.02, "stale": 2, "starved": 7})
    delays, others = RobotDelays(port), RobotDelays(port)
    for seconds in (0.010, 0.026, 0.026):
        delays.answered(seconds, report)
    others.answered(9.0, None)  # of another robot: no jitter, however far it is
    snapshot = scene.snapshot(ports={"arm": port})
    body, _ = exposition(snapshot, "")
    found = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }

    def told(name, **labels):
        return found[f"jurybox_robot_{name}", tuple(sorted({"port": "arm", **labels}.items()))]

    assert [told(name) for name in ("connections", "connections_opened_total", "sessions_total")] == [2, 3, 5]
    assert told("requests_total") == 4
    assert [told("connections_refused_total", reason=reason) for reason in ("token", "full")] == [4, 0]
    assert [told("request_failures_total", reason=reason) for reason in ("observation", "server", "row")] == [1, 1, 0]
    assert (told("delay_seconds_count"), told("batch_wait_seconds_count")) == (4, 2)
    assert told("delay_seconds_sum") == pytest.approx(9.062)
    assert told("batch_wait_seconds_sum") == pytest.approx(0.004)
    assert told("delay_seconds_bucket", le=str(2**24 / 1e9)) == 1  # 16.8 ms
    assert told("jitter_seconds") == pytest.approx(0.016 / 16 * 15 / 16)
    assert (told("client_delay_seconds_count"), told("client_jitter_seconds")) == (3, 0)
    assert [told("client_chunks_dropped_total", reason=reason) for reason in ("late", "stale")] == [0, 6]
    assert told("client_starved_steps_total") == 21


@pytest.mark.parametrize(
    "wrong", [7, {"delay": "x"}, {"delay": float("nan")}, {"delay": -1.0}, {"stale": 1.5}, {"late": -1}, {"more": 1}]
)
def test_the_error_for_an_invalid_report_says_what_was_expected(wrong):
    with pytest.raises(Malformed, match="chunk_report: expected"):
        ChunkReport(wrong)


def test_build_info_names_the_build(scene):
    (labels,) = [dict(labels) for name, labels in scraped(scene) if name == "jurybox_build_info"]
    assert labels["server"] == scene.id
    assert labels["version"]


def test_a_model_name_cannot_break_the_format(scene):
    scene.models[0].name = 'a"b\\c'
    scene.add(0, PHOTO, requests=1)
    assert value(scene, "requests_total", model='a"b\\c') == 1


def test_what_gateway_and_relay_hold_and_refuse_is_told_by_door_kind_and_reason(scene):
    budget = native.Budget((100, 100, 2), (150, 150, 3))
    first, second = native.Account(budget, GRPC), native.Account(budget, ROBOTS)
    assert [first.take(0, 90), first.take(0, 20), second.take(0, 90), first.take(1, 30), first.take(2, 1)] == [
        0,
        1,
        2,
        0,
        0,
    ]
    snapshot = scene.snapshot(budget=budget)
    snapshot.document["relay"] = {
        "received": {"bytes": 7, "limit": 70}, "answers": {"bytes": 8, "limit": 80},
        "refused": {"connection": 3, "all": 4},
    }  # fmt: skip
    body, _ = exposition(snapshot, "")
    found = {
        (sample.name.removeprefix("jurybox_client_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
        if sample.name.startswith("jurybox_client_")
    }
    refusals = {key[1:]: count for key, count in found.items() if key[0] == "refusals_total"}
    assert {key: count for key, count in found.items() if key[0] != "refusals_total"} == {
        ("bytes", "received", "gateway"): 90, ("bytes", "answers", "gateway"): 30, ("calls",): 1,
        ("bytes", "received", "relay"): 7, ("bytes", "answers", "relay"): 8,
        ("limit_bytes", "received", "gateway"): 150, ("limit_bytes", "answers", "gateway"): 150, ("limit_calls",): 3,
        ("limit_bytes", "received", "relay"): 70, ("limit_bytes", "answers", "relay"): 80,
    }  # fmt: skip
    assert {key: count for key, count in refusals.items() if count} == {
        ("grpc", "received", "connection"): 1, ("robots", "received", "all"): 1,
        ("tcp", "received", "connection"): 3, ("tcp", "received", "all"): 4,
    }  # fmt: skip
    assert len(refusals) == 2 * (2 + 3 + 2 + 1)
