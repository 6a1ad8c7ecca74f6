"""The status document: the scoreboard's arrays, summed, with times in seconds."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jurybox.protocol.arena import Arena, ArenaLayout
from jurybox.protocol.scoreboard import TIME_BUCKETS, EngineState, Scoreboard
from jurybox.protocol.segment import segment_name
from jurybox.protocol.spec import ModelSpec, TensorSpec
from jurybox.protocol.wire import PROTOCOL_VERSION
from jurybox.server.settings.config import ModelSettings
from jurybox.server.status import percentile, status_document, status_json
from jurybox.server.supervisor.leases import GrantedLease
from jurybox.server.supervisor.models import HeldModel

SECOND = 10**9
NOW = 1000 * SECOND  # of the monotonic clock


class Scene:
    """A scoreboard of two engines and one model, as a supervisor would have them."""

    def __init__(self) -> None:
        self.id = f"status{secrets.token_hex(4)}"
        self.scoreboard = Scoreboard.create(segment_name(self.id, "scoreboard"), 2, started=5000.0)
        spec = ModelSpec("photo", {"image": TensorSpec("uint8", (4, 4, 3))}, {"score": TensorSpec("float32")})
        self.arena = Arena.create(segment_name(self.id, "arena", 1), ArenaLayout(spec, 16))
        settings = ModelSettings(factory="a:b")
        self.model = HeldModel(
            3, "photo", settings, spec=spec, arena=self.arena, digest="cafe", engines={0: "ready", 1: "ready"}
        )
        for index in (0, 1):
            self.engine(
                index, state=EngineState.SERVING, pid=100 + index, incarnation=2**61 + index, heartbeat=NOW - SECOND
            )

    def engine(self, index: int, **fields: int) -> None:
        for name, value in fields.items():
            self.scoreboard.engines[name][index] = value

    def count(self, engine: int, **fields: int) -> None:
        for name, value in fields.items():
            self.scoreboard.counters[name][engine, self.model.index] = value

    def document(self, lanes: list[GrantedLease] | None = None, **options: object) -> dict:
        segments = {segment.name: segment.size for segment in (self.scoreboard.segment, self.arena.segment)}
        options = {"segments": segments, "now": 5060.0, "monotonic_ns": NOW, **options}
        return status_document(
            self.scoreboard, [self.model], lanes or [], server_id=self.id, address="ipc:///x/engine", **options
        )

    def close(self) -> None:
        self.arena.close()
        self.scoreboard.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.close()


def lane(number: int, rows: int, retiring: bool = False) -> GrantedLease:
    return GrantedLease(number, number + 1, 3, 0, rows, 0.0, retiring={0} if retiring else None)


def test_the_document_is_json_and_names_the_process(scene):
    text = status_json(
        scene.scoreboard,
        [scene.model],
        [],
        segments={},
        server_id=scene.id,
        address="ipc:///x/engine",
        http="127.0.0.1:8000",
        draining=False,
    )
    server = json.loads(text)["server"]
    assert (server["id"], server["address"], server["http"]) == (scene.id, "ipc:///x/engine", "127.0.0.1:8000")
    server = scene.document()["server"]
    assert (server["started"], server["uptime"], server["state"]) == (5000.0, 60.0, "serving")
    assert server["protocol"] == PROTOCOL_VERSION


def test_counters_and_histograms_are_summed_over_engines(scene):
    scene.count(0, requests=10, rows=30, batches=3, failed=1, waiting=2)
    scene.count(1, requests=5, rows=10, batches=1, expired=2, refused=3)
    scene.scoreboard.counters["batch_rows"][0, 3, 4] = 3
    scene.scoreboard.counters["batch_rows"][1, 3, 4] = 1
    scene.scoreboard.counters["queue_ns"][1, 7, 0] = 99  # another model's
    model = scene.document()["models"][0]
    assert {key: model[key] for key in ("requests", "rows", "batches", "failed", "expired", "refused", "waiting")} == {
        "requests": 15, "rows": 40, "batches": 4, "failed": 1, "expired": 2, "refused": 3, "waiting": 2
    }  # fmt: skip
    assert model["mean_batch"] == 10.0
    assert model["histograms"]["batch_rows"][4] == 4
    assert sum(model["histograms"]["queue_ns"]) == 0
    assert len(model["histograms"]["request_ns"]) == TIME_BUCKETS


def test_sessions_of_a_dead_engine_are_none(scene):
    scene.count(0, sessions=3)
    scene.count(1, sessions=4)
    scene.model.engines = {0: "ready", 1: "ready"}
    assert scene.document()["models"][0]["sessions"] == 7
    scene.model.engines = {0: "ready"}
    assert scene.document()["models"][0]["sessions"] == 3


def test_missing_measurements_are_null_and_not_zero(scene):
    model = scene.document()["models"][0]
    assert model["mean_batch"] is None
    assert model["latency"]["request"] == {"p50": None, "p90": None, "p99": None}
    assert model["weights"]["age"] is None


def test_latencies_are_percentiles_in_seconds(scene):
    scene.scoreboard.counters["request_ns"][0, 3, 20] = 90  # 0.5 to 1 ms
    scene.scoreboard.counters["request_ns"][1, 3, 24] = 10  # 8 to 17 ms
    latency = scene.document()["models"][0]["latency"]["request"]
    assert 2**19 / 1e9 < latency["p50"] < 2**20 / 1e9
    assert latency["p90"] == pytest.approx(2**20 / 1e9)
    assert 2**23 / 1e9 < latency["p99"] < 2**24 / 1e9


@given(st.lists(st.integers(min_value=0, max_value=2**38), min_size=1, max_size=300), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_percentile_is_off_by_less_than_a_factor_of_two(values, quantile):
    counts = np.bincount([value.bit_length() for value in values], minlength=TIME_BUCKETS).astype(np.uint64)
    exact = sorted(values)[int(np.ceil(quantile * len(values))) - 1]
    estimated = percentile(counts.tolist(), quantile)
    assert estimated is not None
    if exact == 0:
        assert estimated == 0
    else:
        assert 0.5 < estimated / exact <= 2.0


def test_weights_are_those_of_the_serving_engine_that_is_furthest_behind(scene):
    scene.count(0, version=7, newest=9, adopted=NOW - 2 * SECOND)
    scene.count(1, version=5, newest=9, adopted=NOW - 4 * SECOND)
    assert scene.document()["models"][0]["weights"] == {
        "digest": "cafe", "version": 5, "newest": 9, "lag": 4, "age": 4.0, "max_lag": None,
        "publications": 0, "published_per_second": 0.0, "saved": None,
    }  # fmt: skip
    scene.model.engines[1] = "loading"  # it computes nothing, so it delays no client
    weights = scene.document()["models"][0]["weights"]
    assert (weights["version"], weights["lag"], weights["age"]) == (7, 2, 2.0)


def test_an_engine_with_an_old_heartbeat_hangs(scene):
    scene.engine(1, heartbeat=NOW - 11 * SECOND, restarts=4, expected_wait=1500, device_bytes=7)
    document = scene.document()
    assert [engine["hung"] for engine in document["engines"]] == [False, True]
    assert document["server"]["state"] == "serving"
    engine = document["engines"][1]
    assert (engine["heartbeat_age"], engine["restarts"], engine["expected_wait"]) == (11.0, 4, 1.5e-6)
    assert [engine["hung"] for engine in scene.document(engine_timeout=100.0)["engines"]] == [False, False]


def test_an_incarnation_survives_javascript(scene):
    assert scene.document()["engines"][1]["incarnation"] == "2000000000000001"


@pytest.mark.parametrize(
    ("engines", "draining", "expected"),
    [
        ([{"state": EngineState.SERVING}, {"state": EngineState.ABSENT}], False, "serving"),
        ([{"state": EngineState.SERVING}, {"state": EngineState.SERVING}], True, "draining"),
        ([{"state": EngineState.LOADING}, {"state": EngineState.ABSENT}], False, "starting"),
        (
            [{"state": EngineState.ABSENT, "heartbeat": 0}, {"state": EngineState.ABSENT, "heartbeat": 0}],
            False,
            "starting",
        ),
        ([{"state": EngineState.ABSENT, "restarts": 1}, {"state": EngineState.ABSENT, "restarts": 1}], False, "down"),
        ([{"state": EngineState.ABSENT, "restarts": 1}, {"state": EngineState.LOADING}], False, "starting"),
        ([{"heartbeat": 1}, {"heartbeat": 1}], False, "down"),
    ],
)
def test_the_servers_state_follows_from_its_engines(scene, engines, draining, expected):
    for index, fields in enumerate(engines):
        scene.engine(index, **fields)
    assert scene.document(draining=draining)["server"]["state"] == expected


def test_lanes_are_counted_by_state(scene):
    document = scene.document([lane(0, 4), lane(1, 8), lane(2, 1, retiring=True)])
    assert document["lanes"] == {"in_use": 2, "retiring": 1, "rows": 13, "most": len(scene.scoreboard.lanes)}
    assert document["models"][0]["lanes"] == {"in_use": 3, "rows": 13}


def test_a_model_is_described_as_its_clients_see_it(scene):
    model = scene.document()["models"][0]
    assert model["inputs"] == {"image": {"dtype": "uint8", "shape": [4, 4, 3]}}
    assert model["outputs"] == {"score": {"dtype": "float32", "shape": []}}
    assert model["arena"] == {"segment": scene.arena.segment.name, "rows": 16}
    scene.model.failed(0, "no such file")
    scene.model.failed(1, "no such file")
    model = scene.document()["models"][0]
    assert (model["state"], model["reason"], model["engines"]) == (
        "failed",
        "no such file",
        {"0": "failed", "1": "failed"},
    )


def test_shared_memory_is_the_servers_segments(scene):
    memory = scene.document()["memory"]
    assert set(memory["segments"]) == {scene.scoreboard.segment.name, scene.arena.segment.name}
    assert memory["shared_bytes"] == scene.scoreboard.segment.size + scene.arena.segment.size
