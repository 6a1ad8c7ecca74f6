"""Two looks at the scoreboard make rates, percentiles and events."""

from __future__ import annotations

import json

import pytest

from jurybox.protocol.errors import ServerGone
from jurybox.protocol.scoreboard import EngineState
from jurybox.server.watch.history import History, sentence
from jurybox.server.watch.sample import ScoreboardReader, growth, sample

SECOND = 10**9
PHOTO, POLICY = 3, 7


def test_rates_and_percentiles_are_those_between_the_two_looks(scene):
    scene.add(0, PHOTO, requests=1000, rows=9000, batches=500)
    scene.bucket(0, PHOTO, "request_ns", 35, 1000)  # seconds long, before we looked
    before = scene.snapshot(taken=0)
    scene.add(0, PHOTO, requests=50, rows=200, batches=10, forward_total_ns=SECOND)
    scene.add(1, PHOTO, requests=50, rows=200, batches=10)
    scene.bucket(0, PHOTO, "request_ns", 17, 99)
    scene.bucket(1, PHOTO, "request_ns", 24, 1)
    scene.bucket(0, PHOTO, "batch_rows", 5, 20)
    shown = sample(before, scene.snapshot(taken=2 * SECOND))
    photo, policy = shown["models"]
    assert photo["rates"] == {"requests": 50.0, "rows": 200.0, "batches": 10.0}
    assert shown["rates"] == photo["rates"]
    assert policy["rates"]["requests"] == 0
    assert 2**16 <= photo["latency"]["request"]["p50"] * 1e9 <= 2**17
    assert photo["latency"]["queue"] == {"p50": None, "p99": None}
    assert photo["batch"]["mean"] == 20.0
    assert photo["batch"]["counts"][5] == 20
    assert [engine["busy"] for engine in shown["engines"]] == [0.5, 0.0]
    assert [engine["rates"]["requests"] for engine in shown["engines"]] == [25.0, 25.0]


def test_current_values_come_from_the_later_sample(scene):
    scene.lease(0, PHOTO, 8)
    scene.lease(5, PHOTO, 4)
    scene.lease(6, POLICY, 1)
    scene.add(0, POLICY, version=4, newest=5, waiting=3)
    scene.add(1, POLICY, version=5, newest=5)
    scene.engine(1, restarts=2, device_bytes=1 << 20, expected_wait=2_000_000)
    shown = sample(None, scene.snapshot())
    assert (shown["lanes"]["in_use"], shown["lanes"]["rows"], shown["waiting"]) == (3, 13, 3)
    photo, policy = shown["models"]
    assert photo["lanes"] == {"in_use": 2, "rows": 12}
    assert (policy["weights"]["version"], policy["weights"]["newest"], policy["weights"]["lag"]) == (4, 5, 1)
    engine = shown["engines"][1]
    assert (engine["restarts"], engine["device_bytes"], engine["expected_wait"]) == (2, 1 << 20, 0.002)
    assert shown["memory"]["device_bytes"] == 1 << 20
    json.dumps(shown, allow_nan=False)


def test_an_invalid_state_that_another_process_wrote_counts_as_absent(scene):
    document = scene.document()
    scene.engine(0, state=99)
    states = [engine["state"] for engine in sample(None, scene.snapshot(document=document))["engines"]]
    assert states == ["absent", "serving"]


def test_the_first_look_has_no_rates(scene):
    scene.add(0, PHOTO, requests=1000, rows=1000)
    assert sample(None, scene.snapshot())["rates"] == {"requests": 0.0, "rows": 0.0, "batches": 0.0}


def test_a_model_that_appeared_between_two_samples_began_at_zero(scene):
    policy = scene.models.pop()
    before = scene.snapshot()
    scene.models.append(policy)
    scene.add(0, POLICY, requests=7)
    assert growth(before, scene.snapshot())["requests"][:, 1].tolist() == [7, 0]


def test_a_model_that_was_loaded_anew_began_at_zero(scene):
    scene.add(0, PHOTO, requests=100)
    before = scene.snapshot()
    scene.scoreboard.counters[:, PHOTO] = 0
    scene.add(0, PHOTO, requests=3)
    assert growth(before, scene.snapshot())["requests"][0].tolist() == [3, 0]


def test_another_server_is_not_compared_with_the_one_before(scene):
    history = History()
    before = scene.snapshot(taken=0)
    history.add(before)
    scene.add(0, PHOTO, requests=100)
    document = scene.document()
    document["server"]["id"] = "other"
    assert history.add(scene.snapshot(taken=SECOND, document=document))["rates"]["requests"] == 0


def test_the_history_shows_the_last_seconds_only(scene):
    history = History(window=2.0)
    for look in range(10):
        scene.add(0, PHOTO, requests=10 if look < 5 else 30)
        shown = history.add(scene.snapshot(taken=look * SECOND))
    assert (shown["seconds"], shown["rates"]["requests"]) == (2.0, 30.0)


def test_failures_are_events_and_those_that_come_together_are_one(scene):
    scene.events.append({"at": 5.0, "level": "info", "event": "model ready", "fields": {"model": "photo"}})
    history = History()
    history.add(scene.snapshot(at=10.0))
    scene.add(0, PHOTO, failed=2)
    history.add(scene.snapshot(at=11.0))
    scene.add(1, PHOTO, failed=1)
    scene.add(1, POLICY, expired=4)
    shown = history.add(scene.snapshot(at=12.0))
    assert [(event["event"], event["fields"]) for event in shown["events"]] == [
        ("model ready", {"model": "photo"}),
        ("the model failed", {"model": "photo", "requests": 3}),
        ("requests expired while they waited", {"model": "policy/agent0", "requests": 4}),
    ]
    assert [event["text"] for event in shown["events"]] == [
        "model ready: model photo",
        "photo: 3 requests failed",
        "policy/agent0: 4 requests expired while they waited",
    ]
    assert shown["models"][0]["failures"]["failed"] == 3


def test_errors_are_those_of_the_servers_life(scene):
    scene.add(0, PHOTO, failed=2, expired=1)
    scene.add(1, PHOTO, failed=1)
    errors = sample(None, scene.snapshot())["models"][0]["errors"]
    assert errors == {"failed": 3, "expired": 1, "refused": 0, "not_held": 0}


@pytest.mark.parametrize("state", [EngineState.ABSENT, EngineState.LOADING, EngineState.STOPPED])
def test_an_engine_that_is_dead_has_no_rates_and_nothing_waits_for_it(scene, state):
    before = scene.snapshot(taken=0)
    for engine in (0, 1):
        scene.add(engine, PHOTO, requests=10, rows=20, batches=5, waiting=4, forward_total_ns=SECOND, failed=1)
        scene.bucket(engine, PHOTO, "request_ns", 20, 10)
        scene.engine(engine, expected_wait=5_000_000)
    scene.engine(0, state=state)
    shown = sample(before, scene.snapshot(taken=2 * SECOND))
    assert (shown["rates"]["requests"], shown["waiting"]) == (5.0, 4)
    dead, alive = shown["engines"]
    assert (dead["busy"], dead["rates"]["requests"], dead["expected_wait"]) == (0, 0, None)
    assert (alive["rates"]["requests"], alive["expected_wait"]) == (5.0, 0.005)
    scene.engine(1, state=state)
    shown = sample(before, scene.snapshot(taken=2 * SECOND))
    assert (shown["rates"], shown["waiting"]) == ({"requests": 0.0, "rows": 0.0, "batches": 0.0}, 0)
    assert shown["latency"]["request"] == {"p50": None, "p99": None}
    assert shown["batch"]["mean"] is None
    assert shown["models"][0]["failures"]["failed"] == 2, "an error stays one, whatever became of its engine"


@pytest.mark.parametrize(
    ("event", "fields", "text"),
    [
        ("child died", {"role": "engine-0", "status": -9, "failures": 1}, "Engine 0 was killed by SIGKILL"),
        ("child died", {"role": "relay", "status": -99, "failures": 1}, "Relay was killed by signal 99"),
        ("child died", {"role": "gateway", "status": 3, "failures": 1}, "Gateway ended with exit status 3"),
        (
            "client gone, rows taken back",
            {"lane": 3, "rows": 8},
            "A client is gone: its 8 rows are free again (lane 3)",
        ),
        ("model ready", {"model": "photo", "role": "engine-1"}, "photo is ready on engine 1"),
        ("something else", {"a": 1, "b": "x"}, "something else: a 1, b x"),
        ("stopping at once", {}, "stopping at once"),
    ],
)
def test_an_event_is_described_in_words(event, fields, text):
    assert sentence({"at": 0.0, "level": "info", "event": event, "fields": fields}) == text


def test_failures_before_the_first_sample_are_not_reported(scene):
    scene.add(0, PHOTO, failed=2)
    assert History().add(scene.snapshot())["events"] == []


def test_root_may_watch_another_users_server(scene, monkeypatch):
    document = scene.document()
    monkeypatch.setattr("os.getuid", lambda: 12345)  # names of its own segments have another number in them
    assert ScoreboardReader().read(document).server_id == scene.id


def test_watchers_cannot_write_to_the_scoreboard_and_notice_a_dead_server(scene):
    reader = ScoreboardReader()
    document = scene.document()
    reader.read(document)
    scoreboard = reader._scoreboard
    assert scoreboard is not None
    with pytest.raises(ValueError, match="read-only"):
        scoreboard.counters["requests"][0, 0] = 1
    scene.scoreboard.segment.close()  # lets go of the lock, as a dead server does
    with pytest.raises(ServerGone, match="gone"):
        reader.read(document)
    scene.scoreboard.segment.unlink()


def test_a_look_is_at_the_scoreboard_of_the_server_that_the_document_names(scene):
    other = type(scene)()
    scene.add(0, 3, requests=1)
    other.add(0, 3, requests=5)
    looks = [scene._reader.read(server.document()) for server in (scene, other, other, scene)]
    assert [look.counters["requests"][0].tolist() for look in looks] == [[1, 0], [5, 0], [5, 0], [1, 0]]
    other.close()


def test_until_the_first_request_it_is_said_how_to_send_one(scene):
    scene.listening = {"http": "127.0.0.1:8000"}
    lines = sample(None, scene.snapshot())["first_request"]
    assert "connect('ipc:///x/engine').model('photo')" in lines[1]
    assert "curl http://127.0.0.1:8000/v2/models/photo " in lines[-1]
    scene.add(1, POLICY, requests=1)
    assert sample(None, scene.snapshot())["first_request"] == []


def test_without_a_model_that_is_ready_nothing_is_said_of_requests(scene):
    for model in scene.models:
        model.engines.clear()
    assert sample(None, scene.snapshot())["first_request"] == []


def test_a_model_is_ready_where_an_engine_that_does_not_hang_has_it(scene):
    document = scene.document()
    look = scene.snapshot(document=document)
    assert [look.ready(at) for at in (0, 1)] == [True, True]
    document["engines"][0]["hung"] = True
    assert look.ready(0)
    document["engines"][1]["hung"] = True
    assert not look.ready(0)
    document["models"][0]["engines"] = {}
    assert look.ready(0), "no engine has said anything yet"
    document["models"][0]["state"] = "sleeping"
    assert not look.ready(0)


def test_the_oldest_version_and_age_of_weights_are_told_of_the_engines_that_serve(scene):
    scene.add(0, POLICY, version=4, newest=5, adopted=3 * SECOND)
    scene.add(1, POLICY, version=5, newest=6, adopted=4 * SECOND)
    look = scene.snapshot(taken=10 * SECOND)
    assert look.weights(1) == (4, 6)
    assert (look.weights_age(1), look.weights_age(0)) == (7.0, None)
    assert scene.snapshot(taken=0).weights_age(1) == 0.0
    scene.engine(0, state=EngineState.ABSENT)
    assert scene.snapshot().weights(1) == (5, 6)
    scene.engine(1, state=EngineState.ABSENT)
    assert scene.snapshot().weights(1) == (4, 6), "where none serves, of all"


def test_the_age_of_a_heartbeat_is_that_at_the_look_and_unknown_before_the_first(scene):
    scene.engine(0, heartbeat=3 * SECOND)
    scene.engine(1, heartbeat=0)
    shown = sample(None, scene.snapshot(taken=10 * SECOND))["engines"]
    assert [engine["heartbeat_age"] for engine in shown] == [7.0, None]
    assert sample(None, scene.snapshot(taken=0))["engines"][0]["heartbeat_age"] == 0.0


def test_sessions_are_counted_of_a_model_that_keeps_state_where_an_engine_serves(scene):
    document = scene.document()
    document["models"][1]["session_state"] = [["h", "float32", [1], 0, False]]
    scene.add(0, POLICY, sessions=3)
    scene.add(1, POLICY, sessions=4)
    assert scene.snapshot(document=document).sessions(1) == 7.0
    assert scene.snapshot(document=document).sessions(0) is None
    scene.engine(0, state=EngineState.ABSENT)
    assert scene.snapshot(document=document).sessions(1) == 4.0


def test_all_counters_began_at_zero_before_the_first_look_and_with_another_server(scene):
    scene.add(0, PHOTO, requests=5)
    before, after = scene.snapshot(), scene.snapshot()
    assert growth(before, after)["requests"].sum() == 0
    assert growth(None, after)["requests"].sum() == 5
    before.document["server"]["id"] = "another"
    assert growth(before, after)["requests"].sum() == 5
    assert after.counters["requests"].sum() == 5, "the look itself stays"


def test_a_look_has_what_the_gateway_counts_itself(scene):
    reader = ScoreboardReader()
    try:
        plain = reader.read(scene.document())
        assert (plain.ports, plain.timeouts, plain.budget) == ({}, {}, None)
        full = reader.read(scene.document(), {"arm": "counters"}, {"photo": 3}, "budget")
        assert (full.ports, full.timeouts, full.budget) == ({"arm": "counters"}, {"photo": 3}, "budget")
    finally:
        reader.close()


def test_the_second_look_has_rates_and_two_looks_are_kept_however_far_apart(scene):
    history = History(window=2.0)
    history.add(scene.snapshot(taken=0))
    scene.add(0, PHOTO, requests=30)
    shown = history.add(scene.snapshot(taken=3 * SECOND))
    assert (shown["seconds"], shown["rates"]["requests"]) == (3.0, 10.0)
    scene.add(0, PHOTO, requests=20)
    shown = history.add(scene.snapshot(taken=4 * SECOND))
    assert (shown["seconds"], shown["rates"]["requests"]) == (4.0, 12.5), "the last second is less than the window"
    shown = history.add(scene.snapshot(taken=5 * SECOND))
    assert (shown["seconds"], shown["rates"]["requests"]) == (2.0, 10.0)


def test_failures_of_another_model_kind_or_time_are_another_event(scene):
    history = History()
    history.add(scene.snapshot(at=10.0))
    shown = {}
    for at, model, kind in ((11.0, PHOTO, "failed"), (12.0, POLICY, "failed"), (13.0, PHOTO, "refused"),
                            (15.9, PHOTO, "failed"), (16.0, PHOTO, "failed"), (17.0, PHOTO, "not_held")):  # fmt: skip
        scene.add(0, model, **{kind: 1})
        shown = history.add(scene.snapshot(at=at))
    assert [(event["at"], event["level"], event["text"]) for event in shown["events"]] == [
        (11.0, "error", "photo: 2 requests failed"),
        (12.0, "error", "policy/agent0: 1 requests failed"),
        (13.0, "error", "photo: 1 requests were refused"),
        (16.0, "error", "photo: 1 requests failed"),
        (17.0, "error", "photo: 1 requests named a version that is not held"),
    ]


def test_the_last_thirty_events_are_shown_in_the_order_of_their_times(scene):
    history = History()
    history.add(scene.snapshot(at=1.0))
    scene.add(0, PHOTO, failed=1)
    scene.events += [{"at": float(at), "level": "info", "event": f"{at}", "fields": {}} for at in range(40)]
    shown = history.add(scene.snapshot(at=20.5))["events"]
    assert [event["at"] for event in shown] == [*map(float, range(11, 21)), 20.5, *map(float, range(21, 40))]


def test_thirty_two_failures_are_kept(scene):
    history = History()
    history.add(scene.snapshot(at=0.0))
    for number in range(40):
        scene.add(0, PHOTO, failed=1)
        shown = history.add(scene.snapshot(at=10.0 * number))["events"]
    assert [event["at"] for event in shown] == [10.0 * number for number in range(10, 40)]


def test_a_document_says_when_it_was_made_and_of_which_server(scene):
    scene.lease(2, PHOTO, 8)
    shown = sample(scene.snapshot(taken=0), scene.snapshot(taken=1_234_567_890, at=5061.23456))
    assert (shown["at"], shown["seconds"], shown["server"]["uptime"]) == (5061.235, 1.235, 61.2)
    assert (shown["server"]["id"], shown["server"]["address"]) == (scene.id, "ipc:///x/engine")
    assert sample(None, scene.snapshot(at=4000.0))["server"]["uptime"] == 0.0
    assert shown["lanes"] == {"in_use": 1, "rows": 8, "retiring": 0, "most": 2048}
    photo = shown["models"][0]
    assert (photo["name"], photo["state"], photo["max_batch"], photo["weights"]["digest"]) == (
        "photo", "ready", 64, "cafe",
    )  # fmt: skip
    assert shown["memory"]["shared_bytes"] == scene.scoreboard.segment.size


def test_numbers_have_as_many_digits_as_mean_something(scene):
    before = scene.snapshot(taken=0)
    scene.add(0, PHOTO, requests=1, rows=2, batches=3, forward_total_ns=10 * SECOND)
    scene.bucket(0, PHOTO, "request_ns", 17)
    shown = sample(before, scene.snapshot(taken=3 * SECOND))
    assert shown["rates"] == {"requests": 0.333, "rows": 0.667, "batches": 1.0} and shown["batch"]["mean"] == 0.67
    assert shown["engines"][0]["busy"] == 1.0, "an engine is never busier than all of the time"
    p50 = shown["latency"]["request"]["p50"]
    assert p50 == float(f"{p50:.3g}")


def test_the_usual_address_need_not_be_named_and_without_http_nothing_is_said_of_it(scene, monkeypatch):
    lines = sample(None, scene.snapshot())["first_request"]
    assert len(lines) == 3
    monkeypatch.setattr("jurybox.server.watch.sample.default_address", lambda: "ipc:///x/engine")
    assert "connect().model('photo')" in sample(None, scene.snapshot())["first_request"][1]
    scene.add(0, PHOTO, failed=1)
    assert sample(None, scene.snapshot())["first_request"] == [], "a request that failed was one"


def test_an_engine_that_hangs_is_said_to_and_has_no_rates(scene):
    before = scene.snapshot(taken=0)
    scene.add(0, PHOTO, requests=10)
    scene.add(1, PHOTO, requests=10)
    document = scene.document()
    document["engines"][0]["hung"] = True
    shown = sample(before, scene.snapshot(taken=SECOND, document=document))
    assert [engine["state"] for engine in shown["engines"]] == ["hung", "serving"]
    assert [engine["rates"]["requests"] for engine in shown["engines"]] == [0.0, 10.0]
    assert [engine["index"] for engine in shown["engines"]] == [0, 1]
    assert [engine["pid"] for engine in shown["engines"]] == [100, 101]


def test_an_engine_that_drains_still_works(scene):
    before = scene.snapshot(taken=0)
    scene.add(0, PHOTO, requests=10)
    scene.engine(0, state=EngineState.DRAINING)
    assert sample(before, scene.snapshot(taken=SECOND))["engines"][0]["rates"]["requests"] == 10.0
