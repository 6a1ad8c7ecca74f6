"""What the control requests of clients answer, and what they make of models, lanes and orders to the engines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from tests.unit.supervisor.played_children import MODEL, Server

from jurybox.protocol import control_pb2 as pb
from jurybox.protocol.device_memory import HANDLE
from jurybox.protocol.errors import Code, ModelNotFound, Refused, asleep
from jurybox.protocol.scoreboard import NORMAL, EngineState
from jurybox.protocol.wire import PREFIX, build_version
from jurybox.server.supervisor.control import ControlSocket, Events

AFFINE = {"factory": "tests.models:affine", "rows": 32}
PLACES = {name: [pb.RegionPlace(tensor="x", handle=bytes(HANDLE))] for name in ("inputs", "outputs")}


def ask(world: Server, kind: str, **fields: Any) -> Any:
    request = pb.ControlRequest(**{kind: fields})
    return world.supervisor._control.handlers[kind](getattr(request, kind))


def refusal(world: Server, kind: str, **fields: Any) -> str:
    with pytest.raises(Refused) as refused:
        ask(world, kind, **fields)
    return str(refused.value)


@pytest.mark.parametrize(("transport", "told"), [("zmq", "zmq"), ("auto", "")])
def test_a_client_that_says_hello_learns_where_everything_is(
    server: Callable[..., Server], transport: str, told: str
) -> None:
    world = server({"m": MODEL, "n": MODEL}, transport=transport, replicas=2)
    answer = ask(world, "hello")
    assert (answer.build, answer.transport, list(answer.models)) == (build_version(), told, ["m", "n"])
    assert answer.scoreboard == world.supervisor._scoreboard.segment.name and answer.server_id in answer.scoreboard
    assert list(answer.engines) == world.supervisor._engines.addresses and len(answer.engines) == 2


def test_the_status_is_that_of_this_server(server: Callable[..., Server]) -> None:
    world = server(http="127.0.0.1:0", tcp="127.0.0.1:0", engine_timeout=10.0)
    world.serves()
    control, scoreboard = world.supervisor._control, world.supervisor._scoreboard
    control.listening["http"], control.relay = "127.0.0.1:4711", {"clients": 3}
    control._events.keep({"event": "model ready", "level": "info", "model": "m"})
    world.supervisor._leases.grant(world.models["m"].index, 5, 32, world.models["m"].arena_number)
    control._panels, world.supervisor._engines.pythons[0] = {"p": {"m": {"weight": 1.0}}}, "/usr/bin/python9"
    scoreboard.engines["state"][0] = EngineState.SERVING
    scoreboard.engines["heartbeat"][0] = time.monotonic_ns() - 5 * 10**9
    found = json.loads(ask(world, "status").json)
    of_server = found["server"]
    assert of_server["id"] == ask(world, "hello").server_id and of_server["state"] != "draining"
    assert (of_server["address"], of_server["http"]) == (f"ipc://{world.folder}/engine", "127.0.0.1:4711")
    assert (of_server["tcp"], of_server["grpc"]) == ("127.0.0.1:0", "")
    assert [model["name"] for model in found["models"]] == ["m"] and found["relay"] == {"clients": 3}
    (engine,) = found["engines"]
    assert (engine["device"], engine["hung"]) == ("cpu", True), "as engine_timeout says"
    assert engine["python"] == "/usr/bin/python9" and found["panels"] == {"p": {"m": {"weight": 1.0}}}
    assert (found["lanes"]["in_use"], found["lanes"]["rows"]) == (1, 5)
    assert found["memory"]["segments"] == world.supervisor._segments.sizes()
    assert scoreboard.segment.name in found["memory"]["segments"]
    assert found["events"][-1]["event"] == "model ready" and found["events"][-1]["fields"] == {"model": "m"}
    control.draining = True
    assert json.loads(ask(world, "status").json)["server"]["state"] == "draining"


def test_a_lane_is_leased_at_an_engine_of_the_model_with_normal_priority_unless_asked_otherwise(
    server: Callable[..., Server],
) -> None:
    world = server({"other": MODEL, "m": MODEL}, replicas=2)
    world.serves()
    held = world.models["m"]
    held.only = (1,)
    answers = [ask(world, "lease", model="m", rows=rows, priority=priority) for rows, priority in ((4, 0), (28, 1))]
    assert [answer.engine for answer in answers] == [1, 1]
    assert [answer.model.name for answer in answers] == ["m", "m"]
    lanes = world.supervisor._scoreboard.lanes
    assert [int(lanes["priority"][answer.lane]) for answer in answers] == [NORMAL, 1]
    assert [int(lanes["model"][answer.lane]) for answer in answers] == [held.index] * 2
    assert [int(lanes["arena"][answer.lane]) for answer in answers] == [held.arena_number] * 2
    held.spec, held.arena = held.spec, None
    assert "is still loading" in refusal(world, "lease", model="m", rows=1)


def test_a_lane_may_have_all_rows_of_the_arena(server: Callable[..., Server]) -> None:
    world = server()
    world.serves()
    assert ask(world, "lease", model="m", rows=32).rows == 32
    assert "33 rows were asked for" in refusal(world, "lease", model="m", rows=33)


def test_engines_forget_the_lane_and_the_bindings_of_the_lease_that_is_released(
    server: Callable[..., Server],
) -> None:
    world = server(replicas=2)
    world.serves()
    leases = [ask(world, "lease", model="m", rows=2) for _ in range(2)]
    for each in leases:
        bound = {"lane": each.lane, "lease": each.lease, "first": each.first_row, "rows": 1}
        assert not ask(world, "bind", **bound, **PLACES).settled
    world.forget()
    second = leases[1]
    ask(world, "release", lane=second.lane, lease=second.lease)
    for role in ("engine-0", "engine-1"):
        (order,) = world.process(role).heard()
        assert order == {"kind": "retire", "lane": second.lane, "lease": second.lease}
    bindings = world.supervisor._engines.bindings
    assert [order["lease"] for order in bindings.of([world.models["m"].index])] == [leases[0].lease]


def test_rows_are_bound_in_the_living_engines_of_their_model_alone(server: Callable[..., Server]) -> None:
    world = server(replicas=3)
    world.serves()
    world.models["m"].only = (0, 1)
    lease = ask(world, "lease", model="m", rows=2)
    world.forget()
    world.child("engine-1").stop(0.0)
    bound = {"lane": lease.lane, "lease": lease.lease, "first": lease.first_row}
    assert not ask(world, "bind", **bound, rows=2, **PLACES).settled
    assert world.process("engine-0").kinds() == ["bind"] and world.process("engine-2").kinds() == []
    world.tells("bound", lease=lease.lease, first=lease.first_row, ends=False, reason="no such memory")
    answer = ask(world, "bind", **bound, rows=2, **PLACES)
    assert (answer.settled, answer.reason) == (True, "no such memory")


def test_orders_to_sleep_and_to_wake_name_the_model_its_load_and_why_it_answers_nobody(
    server: Callable[..., Server],
) -> None:
    world = server({"other": MODEL, "m": MODEL})
    world.serves()
    held = world.models["m"]
    ask(world, "sleep", model="m")
    (order,) = world.process().heard()
    assert order == {"kind": "sleep", "model": held.index, "load": held.loads[0], "reason": str(asleep("m"))}
    world.tells("asleep", model=held.index, load=held.loads[0], bytes=1, reason="")
    ask(world, "wake", model="m")
    (order,) = world.process().heard()
    assert order == {"kind": "wake", "model": held.index, "load": held.loads[0]}
    assert "moves its weights: wake it, then load it" in refusal(world, "load", model="m")
    world.tells("awake", model=held.index, load=held.loads[0], bytes=1, reason="")
    assert ask(world, "load", model="m").state == "ready"


@pytest.mark.parametrize("engines", [{0: "ready", 1: "loading"}, {0: "ready", 1: "reloading"}, {}])
def test_a_model_falls_asleep_only_when_it_is_ready_and_no_engine_loads_it(
    server: Callable[..., Server], engines: dict[int, str]
) -> None:
    world = server(replicas=2)
    world.serves()
    world.models["m"].engines = engines
    assert "it can sleep when it is ready" in refusal(world, "sleep", model="m")
    assert not world.models["m"].sleeping and world.process().heard() == []


def test_a_model_with_an_interpreter_of_its_own_is_loaded_again_with_the_same(server: Callable[..., Server]) -> None:
    own = {**AFFINE, "python": sys.executable}
    world = server({"m": own})
    world.start()
    ask(world, "load", model="m", settings_json=json.dumps(own))
    assert "cannot move to None" in refusal(world, "load", model="m", settings_json=json.dumps(AFFINE))


REMOTE = {"remote_factories": ["tests.models:*"]}


@pytest.mark.parametrize(
    ("fields", "settings", "said"),
    [
        ({}, {"factory": "os:system"}, "clients may not name other code"),
        ({"remote": True, "keep": 60.0}, {"factory": "os:system"}, "may not be loaded from another host"),
        ({"remote": True, "keep": 60.0}, {**AFFINE, "weights": "/w"}, "weights of model 'new' is not taken from a"),
        ({"remote": True}, AFFINE, "keep = 0 of model 'new': a model from another host is held for 1 to 3600 s"),
    ],
)
def test_code_and_files_that_a_client_may_not_name_reach_no_engine(
    server: Callable[..., Server], fields: dict[str, Any], settings: dict[str, Any], said: str
) -> None:
    world = server(**REMOTE)
    world.serves()
    assert said in refusal(world, "load", model="new", settings_json=json.dumps(settings), **fields)
    assert list(world.models) == ["m"] and world.process().heard() == []


def test_settings_from_a_network_are_taken_for_models_from_a_network_alone(server: Callable[..., Server]) -> None:
    world = server(**REMOTE)
    world.serves()
    settings = {"settings_json": json.dumps(AFFINE)}
    ask(world, "load", model="own", **settings)
    for fields in ({**settings, "keep": 60.0}, {"keep": 60.0}):
        assert "is this server's own" in refusal(world, "load", model="own", remote=True, **fields)
    assert not world.models["own"].remote and world.models["own"].until is None
    ask(world, "load", model="theirs", **settings, keep=60.0, remote=True)
    held = world.models["theirs"]
    until = held.until
    assert held.remote and until is not None
    ask(world, "load", model="theirs", remote=True)
    assert held.remote and held.until == until, "it is loaded again as it is"
    ask(world, "load", model="theirs", keep=600.0, remote=True)
    assert held.until > until
    ask(world, "load", model="theirs", **settings)
    assert not held.remote and held.until is None, "a client of this host has made it its own"
    assert "is this server's own" in refusal(world, "load", model="theirs", remote=True, keep=60.0)
    ask(world, "unload", model="m")
    assert "is this server's own" in refusal(world, "load", model="m", remote=True, **settings, keep=60.0)


@pytest.mark.parametrize("given", ["[1]", "{", "7"])
def test_settings_that_are_none_are_refused_for_what_they_are(server: Callable[..., Server], given: str) -> None:
    world = server()
    world.serves()
    assert refusal(world, "load", model="m", settings_json=given)
    assert world.process().heard() == []


def test_settings_that_would_silently_end_publications_are_refused_and_a_null_ends_them(
    server: Callable[..., Server], tmp_path: Path
) -> None:
    saved = {"publish": "snapshot", "save_dir": str(tmp_path / "w")}
    world = server({"m": {**MODEL, **saved}})
    world.serves()
    for left_out, given in (("publish", {}), ("save_dir", {"publish": "snapshot"})):
        said = refusal(world, "load", model="m", settings_json=json.dumps({**AFFINE, **given}))
        assert f"has {left_out} = {saved[left_out]!r} (weights version 0)" in said
        assert f"expected {left_out!r}: {saved[left_out]!r}, which keeps it, or {left_out!r}: null" in said
    for given in (saved, {"publish": None, "save_dir": None}):
        ask(world, "load", model="m", settings_json=json.dumps({**AFFINE, **given}))
        assert world.process().heard()[-1]["settings"]["publish"] == given["publish"]


def test_a_model_is_loaded_again_with_the_settings_in_service_or_as_configured_if_it_was_unloaded(
    server: Callable[..., Server],
) -> None:
    world = server()
    world.serves()
    held = world.models["m"]
    held.quarantined, held.deaths = "it ends engines", {0: 3}
    ask(world, "load", model="m", settings_json=json.dumps({**AFFINE, "max_batch": 7}))
    assert not held.quarantined and not held.deaths
    world.loads()
    world.readies()
    ask(world, "load", model="m")
    assert world.process().heard()[-1]["settings"]["max_batch"] == 7
    ask(world, "unload", model="m")
    ask(world, "load", model="m")
    assert world.models["m"].asked == world.supervisor._all.models["m"] and world.models["m"].configured
    with pytest.raises(ModelNotFound):
        ask(world, "load", model="another")


def test_a_model_that_failed_is_described_until_it_is_unloaded(server: Callable[..., Server]) -> None:
    world = server()
    world.serves()
    ask(world, "load", model="new", settings_json=json.dumps(AFFINE))
    held = world.models["new"]
    assert not held.configured
    world.tells("failed", model=held.index, load=held.loads[0], reason="no such file")
    assert (ask(world, "model", model="new").state, ask(world, "model", model="new").reason) == (
        "failed",
        "no such file",
    )
    ask(world, "unload", model="new")
    for kind in ("model", "unload"):
        with pytest.raises(ModelNotFound, match="there are: m"):
            ask(world, kind, model="new")
    assert list(world.models) == ["m"]


def test_an_unloaded_model_leaves_neither_lanes_nor_arena_nor_weights(
    server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = server({"other": MODEL, "m": {**MODEL, "publish": "snapshot"}})
    world.start()
    held = world.models["m"]
    dropped, discarded = list[object](), list[object]()
    monkeypatch.setattr(world.supervisor._weights_saver, "drop", dropped.append)
    for name in ("other", "m"):
        world.loads(name, weights=[["bias", "float32", [4]]] if name == "m" else [])
        world.readies(name)
    lease = ask(world, "lease", model="m", rows=2)
    channel, arena, index = held.channel, held.arena, held.index
    assert channel is not None and arena is not None
    world.supervisor._engines.load(held)
    world.loads("m", weights=[["bias", "float32", [5]]])
    first, second = held.channels
    assert first is channel and held.placed[0].channel is second
    world.forget()
    monkeypatch.setattr(world.supervisor._weights_saver, "discard", discarded.append)
    ask(world, "unload", model="m")
    retire, unload = world.process().heard()
    assert (retire["kind"], retire["lane"]) == ("retire", lease.lane)
    assert (unload["kind"], unload["model"]) == ("unload", index)
    assert channel.closed and second.closed and held.channel is None and not held.placed
    assert dropped == discarded == [held]
    assert arena.segment.fd >= 0
    world.tells("retired", lane=lease.lane, lease=lease.lease)
    world.tick()
    assert arena.segment.fd < 0


# ---- the socket


class Asked:
    """A control socket and a client of it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.reported: list[dict[str, Any]] = []
        self.answers: dict[str, Callable[[Any], Any]] = {}
        self.ours = ControlSocket(context, address, self.answers, self.report)
        self.theirs = context.socket(zmq.DEALER)
        self.theirs.setsockopt(zmq.LINGER, 0)
        self.theirs.setsockopt(zmq.RCVTIMEO, 30_000)
        self.theirs.connect(address)

    def report(self, event: str, **fields: Any) -> None:
        self.reported.append({"event": event, **fields})

    def sends(self, number: bytes, **request: Any) -> None:
        self.theirs.send_multipart((PREFIX, number, pb.ControlRequest(**request).SerializeToString()))

    def answer(self, limit: int = 64) -> None:
        assert self.ours.socket.poll(30_000)
        self.ours.answer_waiting(limit)

    def hears(self) -> tuple[bytes, pb.ControlReply]:
        prefix, number, body = self.theirs.recv_multipart()
        assert prefix == PREFIX
        return number, pb.ControlReply.FromString(body)


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Asked]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    world = Asked(context, f"ipc://{tmp_path}/control")
    yield world
    world.theirs.close()
    world.ours.close()
    context.term()


def test_an_unexpected_fault_is_answered_in_short_and_logged_in_full(asked: Asked) -> None:
    def fail(request: object) -> None:
        raise ValueError("odd" * 1000)

    asked.answers["status"] = fail
    asked.sends(b"12345678", status={})
    asked.answer()
    number, reply = asked.hears()
    assert (number, reply.error.code) == (b"12345678", Code.REFUSED)
    assert reply.error.message.startswith("the server failed to handle this request (") and "odd" in reply.error.message
    assert len(reply.error.message) < 700
    (line,) = asked.reported
    assert line["event"] == "request failed" and "odd" * 1000 in line["error"]
    assert "Traceback" in line["exception"] and "in fail" in line["exception"]


@pytest.mark.parametrize(
    ("frames", "number"),
    [((PREFIX, b"12345678"), b"12345678"), ((b"no prefix", b"12345678", b""), b"12345678"), ((PREFIX, b"1"), b"")],
)
def test_a_malformed_request_is_answered_to_the_call_that_it_names(
    asked: Asked, frames: tuple[bytes, ...], number: bytes
) -> None:
    asked.theirs.send_multipart(frames)
    asked.answer()
    told, reply = asked.hears()
    assert told == number and reply.error.code in (Code.MALFORMED, Code.PROTOCOL_MISMATCH)


def test_a_refusal_is_answered_with_its_code_and_not_logged(asked: Asked) -> None:
    def refuse(request: object) -> None:
        raise Refused("stopping", Code.DRAINING)

    asked.answers["status"] = refuse
    asked.sends(b"12345678", status={})
    asked.answer()
    _, reply = asked.hears()
    assert (reply.error.code, reply.error.message, asked.reported) == (Code.DRAINING, "stopping", [])


def test_an_answer_has_the_kind_of_its_message_even_if_that_is_empty(asked: Asked) -> None:
    asked.answers.update(
        hello=lambda request: pb.ServerMessage(), model=lambda request: pb.ModelMessage(name=request.model)
    )
    asked.answers["keep"] = lambda request: None
    for number, request in enumerate(({"hello": {}}, {"model": {"model": "m"}}, {"keep": {"model": "m", "keep": 1.0}})):
        asked.sends(bytes([number] * 8), **request)
        asked.answer()
        told, reply = asked.hears()
        assert told == bytes([number] * 8)
        assert reply.WhichOneof("reply") == ("server", "model", "done")[number]
        if number == 1:
            assert reply.model.name == "m"


def test_a_name_that_no_model_may_have_reaches_no_handler(asked: Asked) -> None:
    heard = list[str]()
    asked.answers["model"] = lambda request: heard.append(request.model)
    for name in ("m", "x" * 10_000):
        asked.sends(b"12345678", model={"model": name})
        asked.answer()
        _, reply = asked.hears()
        assert (reply.WhichOneof("reply") == "done") == (name == "m")
    assert heard == ["m"]


def test_a_turn_answers_some_requests_and_leaves_the_others_to_the_next(asked: Asked) -> None:
    answered = list[int]()
    asked.answers["status"] = lambda request: answered.append(1)
    for number in range(5):
        asked.sends(bytes([number] * 8), status={})
        asked.answer()
    assert [asked.hears()[0][0] for _ in range(5)] == list(range(5))
    for number in range(3):
        asked.sends(bytes([number] * 8), status={})
    answered.clear()
    asked.answer(1)
    assert len(answered) == 1
    asked.answer(1)
    asked.answer(1)
    assert len(answered) == 3


def test_events_have_short_keys_and_values_and_numbers_stay_numbers() -> None:
    events = Events(clock=lambda: 7.0)
    long = "x" * 10_000
    line = {"timestamp": "t", "level": "warning", "process": "p", "event": long, "exception": "Traceback"}
    events.keep({**line, long: 2.5, "reason": long, "count": 3, "what": ["a"]})
    (event,) = events.last()
    assert (event["at"], event["level"], len(event["event"])) == (7.0, "warning", 300)
    fields = event["fields"]
    assert {len(key) for key in fields} == {100, 6, 5, 4}
    assert (len(fields["reason"]), fields["count"], fields["what"]) == (300, 3, "['a']")
    assert 2.5 in fields.values()
