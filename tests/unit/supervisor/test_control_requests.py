"""What a control request makes of a model, its lanes and its engines, and what it is refused for."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest

from jurybox.protocol import control_pb2 as pb
from jurybox.protocol.errors import Busy, Code, Error, ModelFailed, Refused
from jurybox.protocol.scoreboard import Scoreboard
from jurybox.protocol.segment import Segment, segment_name
from jurybox.protocol.spec import ModelSpec, TensorSpec
from jurybox.server.settings.config import Configuration
from jurybox.server.supervisor.bindings import Bindings
from jurybox.server.supervisor.control import ControlHandlers, Events
from jurybox.server.supervisor.leases import Leases
from jurybox.server.supervisor.models import Models

VECTOR = {"x": TensorSpec("float32", (4,))}
SETTINGS = {"factory": "tests.models:affine", "rows": 32}


class Engines:
    """Two engines that remember their orders, and load when they are told to."""

    def __init__(self, models: Models) -> None:
        self.sent: list[tuple[int, str]] = []
        self.engines = [
            SimpleNamespace(orders_waiting=0, send=lambda kind, index=index, **_: self.sent.append((index, kind)))
            for index in (0, 1)
        ]
        self.addresses, self.devices, self.pythons, self.paused = ["a", "b"], ["cpu", "cpu"], ["", ""], False
        self.bindings = Bindings(lambda index, kind, **_: self.sent.append((index, kind)))
        self._models = models

    def of(self, held):
        return [0, 1]

    def living(self):
        return [0, 1]

    def order(self, kind, **_):
        self.sent += [(index, kind) for index in (0, 1)]

    def load(self, held, only=(0, 1)):
        for index in only:
            self._models.begin_load(held, index)
            self.sent.append((index, "load"))

    def pause(self, pause):
        self.paused = pause


@pytest.fixture
def world():
    """A server's control requests, with a model m of the configuration that is ready."""
    panels = {"taste": {"members": {"kind": {"weight": 1.0, "model": "m"}}}}
    configuration = Configuration.model_validate({"models": {"m": SETTINGS}, "panels": panels})
    scoreboard = Scoreboard.create(segment_name("asktest", "scoreboard"), 2, 0.0)
    models = Models("asktest", scoreboard, Segment.create)
    leases, engines, dropped = Leases(scoreboard, lambda lane: False, time.monotonic), Engines(models), []
    saver = SimpleNamespace(drop=dropped.append, discard=lambda held: None, release=lambda channel: channel.close())
    handlers = ControlHandlers(
        configuration, "asktest", scoreboard, models, leases, engines, saver, Events(), segments=dict
    )
    held = models.add("m", configuration.models["m"])

    def serve(held):
        for engine in (0, 1):
            models.begin_load(held, engine)
            models.adopt(held, engine, ModelSpec(held.name, VECTOR, VECTOR), "digest", None, lambda channel: None)
            models.take_over(held, engine)
            held.ready(engine, held.arena_number)

    def ask(kind, **fields):
        request = pb.ControlRequest(**{kind: fields})
        return handlers.handlers[kind](getattr(request, kind))

    serve(held)
    yield SimpleNamespace(
        ask=ask, held=held, engines=engines, handlers=handlers, leases=leases, models=models, serve=serve, saved=dropped
    )
    models.close()
    scoreboard.close()


def refused(world, kind, **fields):
    """Ask for what is refused; return the error."""
    world.engines.sent.clear()
    with pytest.raises(Error) as error:
        world.ask(kind, **fields)
    assert world.engines.sent == []
    return error.value


@pytest.mark.parametrize(
    ("state", "kind", "code", "message"),
    [
        ("quarantined", ModelFailed, Code.MODEL_FAILED, "it ends engines"),
        ("sleeping", Refused, Code.SLEEPING, "'m' sleeps"),
        ("failed", ModelFailed, Code.MODEL_FAILED, "model 'm' could not be loaded: why"),
        ("loading", Refused, Code.NOT_READY, "model 'm' is still loading"),
        ("closed", Refused, Code.DRAINING, "accepts no new clients"),
    ],
)
def test_no_lane_is_leased_of_a_model_that_cannot_answer(world, state, kind, code, message):
    held = world.held
    if state == "quarantined":
        held.quarantined = "it ends engines"
    elif state == "sleeping":
        held.fall_asleep()
    elif state == "closed":
        world.handlers.closed = True
    else:
        held.engines = dict.fromkeys((0, 1), state)
        held.failed(0, "why") if state == "failed" else None
    error = refused(world, "lease", model="m", rows=1)
    assert isinstance(error, kind) and error.code == code and message in str(error)
    assert world.leases.in_use() == []


def test_a_lane_has_the_rows_and_the_priority_that_were_asked_for(world):
    lease = world.ask("lease", model="m", rows=31, priority=3)
    assert (lease.rows, lease.priority, lease.first_row, lease.engine) == (31, 3, 0, 0)
    single = world.ask("lease", model="m", rows=1)
    assert (single.rows, single.priority, single.first_row, single.engine) == (1, 0, 31, 1)
    assert "33 rows were asked for, the arena of 'm' has 32" in str(refused(world, "lease", model="m", rows=33))
    assert "priority=4 was asked for" in str(refused(world, "lease", model="m", rows=1, priority=4))


def test_a_lane_that_is_released_is_forgotten_by_the_engines_once(world):
    lease = world.ask("lease", model="m", rows=4)
    for number, orders in ((lease.lease + 1, []), (lease.lease, [(0, "retire"), (1, "retire")]), (lease.lease, [])):
        world.engines.sent.clear()
        world.ask("release", lane=lease.lane, lease=number)
        assert world.engines.sent == orders


def test_a_model_that_is_loaded_sleeps_and_wakes_in_every_engine(world):
    world.ask("wake", model="m")  # it is awake
    world.ask("sleep", model="m")
    assert world.engines.sent == [(0, "sleep"), (1, "sleep")]
    world.ask("sleep", model="m")
    assert len(world.engines.sent) == 2
    error = refused(world, "wake", model="m")
    assert error.code == Code.NOT_READY and "falling asleep or waking up" in str(error)
    assert refused(world, "load", model="m").code == Code.SLEEPING
    for engine in (0, 1):
        world.held.weights_moved(engine, asleep=True, reason="")
    assert refused(world, "load", model="m").code == Code.SLEEPING
    world.held.engine_died(1)
    world.ask("wake", model="m")
    assert world.engines.sent == [(0, "wake"), (1, "load")]


@pytest.mark.parametrize(
    ("state", "kind", "code"),
    [
        ("failed", ModelFailed, Code.MODEL_FAILED),
        ("quarantined", ModelFailed, Code.MODEL_FAILED),
        ("loading", Refused, Code.NOT_READY),
        ("grouped", Refused, Code.REFUSED),
    ],
)
def test_a_model_that_is_not_ready_or_is_computed_with_others_cannot_sleep(world, state, kind, code):
    held = world.held
    if state == "quarantined":
        held.quarantined = "why"
    elif state == "grouped":
        held.settings = held.settings.model_copy(update={"group": "g"})
    else:
        held.engines = dict.fromkeys((0, 1), state)
    error = refused(world, "sleep", model="m")
    assert isinstance(error, kind) and error.code == code and not held.sleeping


@pytest.mark.parametrize(("waiting", "busy"), [(256, False), (257, True)])
def test_an_engine_that_reads_no_orders_gets_no_more_loads(world, waiting, busy):
    world.engines.engines[1].orders_waiting = waiting
    if busy:
        error = refused(world, "load", model="m")
        assert isinstance(error, Busy) and "engine 1 is behind" in str(error)
    else:
        world.ask("load", model="m")
        assert world.engines.sent == [(0, "load"), (1, "load")]


def test_a_server_that_stops_loads_nothing(world):
    world.handlers.draining = True
    assert refused(world, "load", model="m").code == Code.DRAINING


@pytest.mark.parametrize("remote", [False, True])
def test_no_model_takes_the_name_of_a_panel_under_which_doors_would_answer_otherwise(world, remote):
    settings = json.dumps(SETTINGS)
    said = str(refused(world, "load", model="taste", settings_json=settings, keep=60.0, remote=remote))
    assert said == "'taste' is a panel of this server's: load the model by another name"
    assert world.models.get("taste") is None


@pytest.mark.parametrize(("keep", "good"), [(0.5, True), (3600.0, True), (3600.5, False), (-1.0, False)])
def test_a_clients_model_is_kept_for_at_most_an_hour_from_the_last_request(world, keep, good):
    settings = json.dumps(SETTINGS)
    if not good:
        assert "expected seconds, more than 0" in str(
            refused(world, "load", model="c", settings_json=settings, keep=keep)
        )
        assert world.models.get("c") is None
        return
    before = time.monotonic()
    world.ask("load", model="c", settings_json=settings, keep=keep)
    held = world.models.named("c")
    assert before + keep <= held.until <= time.monotonic() + keep
    world.ask("keep", model="c", keep=100.0)
    assert held.until >= before + 100.0
    assert "expected seconds" in str(refused(world, "keep", model="c", keep=0.0))
    world.ask("load", model="c", settings_json=settings)
    assert held.until is None
    assert "was loaded without keep" in str(refused(world, "keep", model="c", keep=1.0))


def test_a_model_of_the_configuration_takes_no_time_limit_and_no_settings_from_a_network(world):
    assert "stays loaded" in str(refused(world, "load", model="m", keep=1.0))
    for fields in ({"settings_json": json.dumps(SETTINGS)}, {"keep": 1.0}):
        assert "is this server's own" in str(refused(world, "load", model="m", remote=True, **fields))
    world.ask("load", model="m", remote=True)
    assert world.held.until is None and not world.held.remote


def test_a_model_keeps_its_interpreter(world):
    for model, said in (("m", "cannot move to '/usr/bin/python9'"), ("c", "none that the configuration names")):
        settings = json.dumps({**SETTINGS, "python": "/usr/bin/python9"})
        assert said in str(refused(world, "load", model=model, settings_json=settings))


def test_an_unloaded_model_takes_its_lanes_along_and_can_be_loaded_again_as_configured(world):
    world.ask("lease", model="m", rows=4)
    world.ask("unload", model="m")
    assert world.engines.sent == [(index, kind) for kind in ("retire", "unload") for index in (0, 1)]
    assert world.saved == [world.held] and world.models.get("m") is None
    assert all(lane.retiring for lane in world.leases.in_use())
    assert world.ask("load", model="m").state == "loading"
    assert world.models.named("m").settings.rows == SETTINGS["rows"]


def test_a_binding_ends_with_its_lease(world):
    lease = world.ask("lease", model="m", rows=4)
    world.ask("release", lane=lease.lane, lease=lease.lease)
    of_lane = {"lane": lease.lane, "lease": lease.lease}
    assert refused(world, "bind", **of_lane, rows=4).code == Code.STALE_LEASE
    assert world.ask("bind", **of_lane, end=True).settled


def test_engines_pause_only_for_the_holder_of_the_lock_and_resume_when_it_is_gone(world, monkeypatch):
    assert "needs the pause lock" in str(refused(world, "pause", pause=True)) and not world.engines.paused
    locked = [True]
    monkeypatch.setattr("jurybox.server.supervisor.control.is_locked", lambda *_: locked[0])
    world.ask("pause", pause=True)
    assert world.engines.paused and not world.handlers.look_at_pause() and world.engines.paused
    locked[0] = False
    assert world.handlers.look_at_pause() and not world.engines.paused
    assert not world.handlers.look_at_pause()
    world.ask("pause", pause=False)
    assert not world.engines.paused
