"""The loop of an engine's process: the test plays its supervisor, its transports, its loader and the clock."""

from __future__ import annotations

import io
import os
import select
import socket
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.models import VECTOR

from jurybox.processes import ControlPipe, encode_message
from jurybox.protocol import TensorSpec
from jurybox.protocol.arena import Arena, ArenaLayout
from jurybox.protocol.errors import Code, Refused
from jurybox.protocol.scoreboard import EngineState, Scoreboard
from jurybox.protocol.segment import segment_name
from jurybox.protocol.spec import ModelSpec
from jurybox.protocol.timings import Timings
from jurybox.protocol.wire import TICKET
from jurybox.server.engine import process
from jurybox.server.engine.device import DeviceLost
from jurybox.server.engine.process import CallbackQueue, EngineProcess
from jurybox.server.engine.served import Served
from jurybox.server.logs import LEVELS, Log
from jurybox.server.models import ServedModel

INDEX, INCARNATION, LANE, LEASE = 1, 77, 5, 9
ACTION = {"action": TensorSpec("float32", (4,))}


class Transport:
    """Both of an engine's transports in one class: tickets that wait, answers, and what else it was asked."""

    number = 0
    slow = False

    def __init__(self, world):
        self.world, self.waiting, self.answers, self.waits = world, [], [], []
        self.incarnation, self.closed, self.overwritten, self.quiet = INCARNATION, 0, 0, True

    def sends(self, rows=1, **more):
        record = np.zeros(1, TICKET)
        for name, value in {"lane": LANE, "lease": LEASE, "rows": rows, **more}.items():
            record[name] = value
        self.waiting.append(record)

    def collect(self, out):
        if not self.waiting:
            return 0
        out[:1] = self.waiting.pop(0)
        return 1

    def reply(self, tickets, code, version, message):
        self.answers += [(code, message)] * len(tickets)

    def fileno(self):
        return 1000

    def may_sleep(self):
        if not self.quiet:
            self.world.step()
        return self.quiet

    def wait(self, seconds):
        self.waits.append(seconds)
        self.world.now += int(seconds * 1e9)
        return bool(self.world.step())

    def pause(self, seconds, tickets):
        raise AssertionError("no client is expected")

    def mend(self):
        found, self.overwritten = self.overwritten, 0
        return found

    def renew(self, incarnation):
        self.incarnation = incarnation

    def close(self):
        self.closed += 1


class Noted:
    """Notes the calls of its methods, and fails where it is told to."""

    def __init__(self, *names):
        self.calls, self.fails = [], {}
        for name in names:
            setattr(self, name, lambda *given, name=name: self._called(name, given))

    def _called(self, name, given):
        self.calls.append((name, *given))
        if name in self.fails:
            raise self.fails[name]

    def __bool__(self):
        return False


class World:
    """The process and what surrounds it. While it sleeps, the next of `steps` happens; then it is told to stop."""

    def __init__(self, patch):
        self.now, self.steps, self.lines, self.polled, self.looks = 10**12, [], [], [], []
        self.heeded, self.made, self.changed, self.stops = [], [], [], True
        self.owner = Scoreboard.create(segment_name("processtest", "scoreboard"), 3, 0.0)
        self.owner.lanes[LANE : LANE + 1][["lease", "model", "first", "rows"]] = (LEASE, 0, 0, 4)
        self.record = self.owner.engines[INDEX : INDEX + 1]
        ours, theirs = socket.socketpair()
        self.pipe, self.supervisor = ControlPipe(ours.detach()), ControlPipe(theirs.detach())
        self.shm, self.zmq = Transport(self), Transport(self)
        self.loader = Noted("load", "arena", "abandon", "sleep", "wake", "unload")
        self.regions = Noted("bind", "unbind", "forget", "close")
        self.opened = [self.owner, self.pipe, self.supervisor]
        log = Log("engine-1", LEVELS["debug"], str, io.StringIO(), lambda line: self.lines.append({**line}))
        world = self

        class Surroundings:
            def restore(self, *, slow=True):
                world.looks.append((world.now, slow))
                changed, world.changed = world.changed, []
                return changed

        class Poll:
            def __init__(self):
                self._real = select.poll()

            def register(self, fd, events):
                world.heeded.append(fd)
                self._real.register(fd, events)

            def poll(self, timeout):
                world.polled.append(timeout)
                world.now += timeout * 1_000_000
                world.step()
                return self._real.poll(0)

        played = {
            "ShmTickets": lambda *given: self.make("shm", given, self.shm),
            "ZmqTickets": lambda *given: self.make("zmq", given, self.zmq),
            "ModelLoader": lambda *given: self.make("loader", given, self.loader),
            "DeviceRegions": lambda *given: self.make("regions", given, self.regions),
            "configure": lambda *given: self.make("log", given, log),
            "Surroundings": Surroundings,
            "LOADS": SimpleNamespace(running=False),
            "time": SimpleNamespace(monotonic_ns=lambda: self.now),
            "select": SimpleNamespace(poll=Poll, POLLIN=select.POLLIN),
        }
        for name in (
            "keep_freed_memory",
            "exact_sleeps",
            "look_in",
            "bound_device_memory",
            "show_device_memory",
            "use_device",
        ):
            played[name] = lambda *given, name=name: self.made.append((name, *given))
        for name, value in played.items():
            patch.setattr(process, name, value)
        patch.setattr(torch, "set_num_threads", lambda threads: self.made.append(("threads", threads)))
        patch.setattr(sys, "setswitchinterval", lambda seconds: self.made.append(("switches", seconds)))
        self.orders = {
            "threads": 3,
            "device": "cpu",
            "device_memory_mib": 100,
            "memory": 0.5,
            "index": INDEX,
            "incarnation": INCARNATION,
            "log_level": "info",
            "log_format": "text",
            "scoreboard": self.owner.segment.name,
            "address": "ipc://nowhere",
            "rings": "the rings",
            "spin_us": 50,
            "timings": "",
            "folder": "/the/configuration",
            "factories": ["tests.models:affine"],
            "bindings": [],
            "models": [],
            "refused": [],
            "paused": False,
        }

    def make(self, name, given, thing):
        self.made.append((name, *given))
        return thing

    def given(self, name):
        (found,) = [more for made, *more in self.made if made == name]
        return found

    def starts(self, **orders):
        self.process = EngineProcess(self.pipe, {**self.orders, **orders})
        self.opened += [self.process._scoreboard, self.process._callbacks]
        return self.process

    def serves(self, *steps, **orders):
        """Run the loop until all steps have happened and it was stopped."""
        self.steps = list(steps)
        if not hasattr(self, "process"):
            self.starts(**orders)
        self.process.serve()

    def step(self):
        if self.steps:
            return self.steps.pop(0)()
        if self.stops:
            self.tells("stop")
        return False

    def tells(self, kind, **fields):
        self.supervisor.send(kind, **fields)

    def told(self, *fields):
        """Return the messages to the supervisor since the last call: their kinds, or also some of their fields."""
        messages = []
        while (message := self.supervisor.receive(0)) is not None:
            messages.append(message)
        return [message["kind"] for message in messages] if not fields else messages

    def installs(self, module=None):
        """Serve a model from the next turn on."""
        model = ServedModel(module or torch.nn.Identity(), VECTOR, ACTION)
        layout = ArenaLayout(ModelSpec("m", model.inputs, model.outputs), 4)
        arena = Arena.create(segment_name("processtest", "arena"), layout)
        self.opened.append(arena)
        self.process._engine.install(0, Served("m", model, arena.inputs, arena.outputs, 4))

    @property
    def state(self):
        return EngineState(int(self.record["state"][0]))

    def logged(self, event):
        return [line for line in self.lines if line["event"] == event]


@pytest.fixture
def world(monkeypatch):
    world = World(monkeypatch)
    yield world
    if hasattr(world, "process"):
        world.process._context.term()
    for each in world.opened:
        each.close()


def model(number, load=1):
    return {"model": number, "load": load, "name": f"m{number}", "settings": {"factory": f"f{number}"}}


def test_an_engine_is_made_as_its_first_message_says(world):
    engine = world.starts()
    callbacks = engine._callbacks.fileno()
    assert world.given("threads") == [3] and world.given("look_in") == ["/the/configuration"]
    assert world.given("keep_freed_memory") == [] and world.given("use_device") == [torch.device("cpu")]
    assert world.given("bound_device_memory") == [torch.device("cpu"), 100, 0.5]
    assert world.given("log") == ["engine-1", "info", "text"]
    assert world.given("zmq")[1:3] == ["ipc://nowhere", INCARNATION]
    assert world.given("shm") == ["the rings", [1000, world.pipe.fileno(), callbacks], INCARNATION, 50]
    device, tell, later, core, *_, factories, beat = world.given("loader")
    assert (device, core, factories) == (torch.device("cpu"), engine._engine, ["tests.models:affine"])
    assert core.index == INDEX and core._pause == world.shm.pause
    world.now += 5
    beat()
    assert world.record["heartbeat"] == world.now
    later(lambda: tell("anything", more=1))
    assert world.told() == ["serving"]
    engine._obey()
    assert world.supervisor.receive(0) == {"kind": "anything", "more": 1}


def test_an_engine_without_models_serves_at_once_and_shows_who_it_is(world):
    world.starts()
    assert world.told() == ["serving"] and world.state == EngineState.SERVING
    shown = world.record[["incarnation", "heartbeat", "pid"]][0].tolist()
    assert shown == (INCARNATION, world.now, os.getpid())
    assert world.owner.engines["incarnation"].tolist() == [0, INCARNATION, 0]
    device, record = world.given("show_device_memory")
    record["device_bytes"] = 11
    assert device == torch.device("cpu") and world.owner.engines["device_bytes"].tolist() == [0, 11, 0]


def test_an_engine_of_another_device_computes_there_and_keeps_no_freed_memory_of_the_host(world):
    engine = world.starts(device="meta")
    assert engine._engine._batches._device == torch.device("meta")
    assert "keep_freed_memory" not in [name for name, *_ in world.made]


def test_the_queue_of_actions_wakes_nobody_before_there_is_one_and_belongs_to_this_process(world):
    callbacks = world.starts()._callbacks
    fd = callbacks.fileno()
    assert not select.select([fd], [], [], 0)[0]
    assert not os.get_inheritable(fd) and not os.get_blocking(fd)


def test_a_queue_of_actions_that_nobody_answers_for_raises_their_errors_and_closes_its_descriptor():
    callbacks = CallbackQueue()
    fd = callbacks.fileno()

    def fail():
        raise KeyError("no")

    callbacks.put(fail)
    with pytest.raises(KeyError, match="no"):
        callbacks.run()
    callbacks.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize("last", ["ready", "failed", "unloaded", "refused"])
def test_an_engine_serves_once_each_model_of_the_configuration_is_ready_or_was_given_up(world, last):
    engine = world.starts(models=[model(0), model(4, 2)])
    assert world.loader.calls == [("load", 0, 1, "m0", {"factory": "f0"}), ("load", 4, 2, "m4", {"factory": "f4"})]
    assert world.told() == [] and world.state == EngineState.LOADING
    tell = world.given("loader")[1]
    for kind, number in (("begins", 0), ("begins", 4), ("ready", 0)):
        tell(kind, model=number)
    assert world.told() == ["begins", "begins", "ready"] and world.state == EngineState.LOADING
    if last in ("ready", "failed"):
        tell(last, model=4)
    else:
        world.tells("unload" if last == "unloaded" else "refuse", model=4, reason="it crashed")
        engine._obey()
        assert world.loader.calls[-1] == ("unload", 4)
    assert world.state == EngineState.SERVING
    assert sorted(world.told()) == sorted(["serving", *([] if last == "refused" else [last])])
    tell("ready", model=4)
    assert world.told() == ["ready"], "it serves already"


def test_an_engine_that_drains_does_not_serve_again_when_its_last_model_is_ready(world):
    engine = world.starts(models=[model(0)])
    world.tells("drain")
    engine._obey()
    world.given("loader")[1]("ready", model=0)
    assert world.state == EngineState.DRAINING and world.told() == ["ready"]


def test_models_that_are_refused_from_the_start_say_why(world):
    world.starts(refused=[{"model": 0, "code": int(Code.SLEEPING), "reason": "it sleeps"}])
    world.shm.sends()
    world.process._engine.turn()
    assert world.shm.answers == [(Code.SLEEPING, "it sleeps")]


def test_memory_that_clients_have_bound_to_a_dead_engine_is_bound_again_as_far_as_it_can_be(world):
    world.regions.fails["bind"] = Refused("it is gone")
    world.starts(bindings=[{"lease": 1}, {"lease": 2}])
    assert world.regions.calls == [("bind", {"lease": 1}), ("bind", {"lease": 2})]
    assert world.process._engine.regions is world.regions and world.loader.regions is world.regions


def test_tickets_of_both_transports_are_answered_while_the_engine_serves(world):
    world.starts()
    world.installs()
    world.shm.sends()
    world.zmq.sends()
    world.serves()
    assert world.shm.answers == world.zmq.answers == [(Code.OK, "")]


def test_the_times_of_batches_are_written_for_traces(world):
    timings = Timings.create(segment_name("processtest", "timings"))
    world.opened.append(timings)
    world.starts(timings=timings.segment.name)
    world.opened.append(world.process._timings)
    world.installs()
    world.shm.sends(rows=2, sequence=3)
    world.zmq.sends(sequence=4)
    world.serves()
    for sequence in (3, 4):
        record = timings.read(LANE, sequence)
        assert record[["engine", "rows", "tickets"]].tolist() == (INDEX, 3, 2)
        assert 0 < record["began"] < record["ended"]
    assert world.shm.answers == world.zmq.answers == [(Code.OK, "")]


def test_an_engine_sleeps_until_a_batch_is_due_and_no_longer_than_to_its_next_heartbeat(world):
    world.starts()
    world.installs()
    engine, core = world.process, world.process._engine
    core._clock = lambda: world.now
    queue = core.slots[0].queue
    queue.min_batch, queue.max_wait_ns = 2, 600_000_000
    world.serves(lambda: world.shm.sends(submitted=world.now), *[lambda: None] * 3)
    assert world.shm.waits == pytest.approx([0.25, 0.25, 0.25, 0.1, 0.25])
    assert world.shm.answers == [(Code.OK, "")] and engine._stopped


def test_an_engine_does_not_sleep_while_a_message_waits_whose_signal_is_gone(world):
    world.zmq.quiet = False
    world.serves(lambda: None, lambda: None)
    assert world.shm.waits == []


def test_a_drained_engine_says_so_once_when_nothing_waits_any_more(world):
    world.starts()
    world.installs()
    core = world.process._engine
    core._clock = lambda: world.now
    queue = core.slots[0].queue
    queue.min_batch, queue.max_wait_ns = 2, 600_000_000
    told = []

    def later():
        told.append(world.told())

    def drain():
        world.shm.sends(submitted=world.now)
        world.tells("drain")

    def late():
        later()
        world.zmq.sends()

    world.serves(drain, later, later, late, later, later)
    assert world.state == EngineState.STOPPED
    assert world.shm.answers == [(Code.OK, "")]
    assert world.zmq.answers == [(Code.DRAINING, "the server is stopping; it takes no new requests")]
    assert told == [["serving"], [], [], ["drained"], []]


def test_orders_wait_for_five_milliseconds_while_tickets_are_served(world):
    engine, heard = world.starts(), []

    def turn():
        world.now += 1_000_000
        if len(heard) == 3:
            engine._stopped = True
        return True

    engine._engine.turn = turn
    engine._obey = lambda: heard.append(world.now)
    began = world.now
    world.serves()
    assert [(at - began) // 1_000_000 for at in heard] == [1, 6, 11]


def test_orders_are_heard_at_once_after_a_sleep_that_no_ticket_has_ended(world):
    engine, heard = world.starts(), []
    ended_by_a_ticket = [True, True, False, True, False, False]

    def wait(seconds):
        world.now += 100_000
        world.shm.waits.append(seconds)
        return ended_by_a_ticket.pop(0)

    def obey():
        heard.append(len(world.shm.waits))
        engine._stopped = len(heard) == 3

    world.shm.wait, engine._obey = wait, obey
    world.serves()
    assert heard == [1, 3, 5]


@pytest.mark.parametrize(
    ("milliseconds", "turns", "looks"),
    [
        (10, 40, {10: True, 60: False, 110: False, 160: False, 210: False, 260: True, 310: False, 360: False}),
        (30, 12, {30: True, 90: False, 150: False, 210: False, 270: False, 300: True, 360: False}),
    ],
)
@pytest.mark.parametrize("loading", [False, True])
def test_what_forwards_change_is_looked_for_unless_a_factory_runs(world, loading, milliseconds, turns, looks):
    """Every 50 ms, and what takes longer to look at every 250 ms."""
    process.LOADS.running = loading
    engine, taken, began = world.starts(), [], world.now

    def turn():
        world.now += milliseconds * 1_000_000
        taken.append(world.now)
        engine._stopped = len(taken) == turns
        return True

    engine._engine.turn = turn
    world.serves()
    assert {(at - began) // 1_000_000: slow for at, slow in world.looks} == ({} if loading else looks)


def test_what_a_forward_has_changed_is_reported_with_the_model_that_was_computed(world):
    world.starts()
    world.installs()
    world.shm.sends()
    world.changed = ["the locale", "NumPy's error state"]
    world.serves()
    (line,) = world.logged(process._CHANGED)
    assert (line["level"], line["model"], line["changed"]) == ("warning", "m", "the locale, NumPy's error state")


@pytest.mark.parametrize(
    ("event", "level"),
    [("weights version not held", "warning"), ("out of memory, batches halved", "warning"), ("model failed", "error")],
)
def test_an_event_that_a_client_can_cause_at_any_rate_is_logged_once_a_second_with_its_count(world, event, level):
    engine, seconds = world.starts(), [0.0]
    for limiter in (engine._warnings, engine._errors):
        limiter._clock = lambda: seconds[0]

    def happens():
        for number in range(3):
            engine._engine._report(event, model="m", number=number)

    world.serves(happens, lambda: seconds.insert(0, 1.5), lambda: None)
    assert [(line["level"], line["number"], line.get("times")) for line in world.logged(event)] == [
        (level, 0, None),
        (level, 2, 2),
    ]


def test_memory_that_others_have_overwritten_is_rewritten_four_times_a_second(world):
    engine = world.starts()
    world.installs()
    world.shm.sends()
    seen = []

    def overwrite():
        seen.append((world.record[["incarnation", "pid"]][0].tolist(), int(world.owner.counters["requests"][INDEX, 0])))
        world.record[:] = 0
        world.owner.counters[INDEX, 0] = 0

    world.serves(overwrite, overwrite, overwrite)
    assert seen == [((INCARNATION, os.getpid()), 1)] * 3
    assert engine._incarnation == world.shm.incarnation == INCARNATION


def test_after_the_tickets_memory_was_overwritten_an_engine_begins_anew_with_no_tickets(world):
    world.starts()
    world.installs()
    core = world.process._engine
    queue = core.slots[0].queue
    queue.min_batch, queue.max_wait_ns = 2, 10**15
    waiting = []

    def overwritten():
        world.shm.overwritten = 2

    def look():
        waiting.append(len(queue))

    world.serves(lambda: world.shm.sends(submitted=2**62), look, overwritten, look)
    (line,) = world.logged("another process wrote to the tickets' memory; clients send all tickets in flight again")
    assert (line["level"], line["lanes"], waiting) == ("error", 2, [1, 0])
    new = world.shm.incarnation
    assert new not in (0, INCARNATION) and new % 2 and new < 2**62 and world.zmq.incarnation == new
    assert world.record["incarnation"] == new and world.shm.answers == []


def test_clients_see_a_new_incarnation_before_the_next_turn(world):
    engine = world.starts()
    world.shm.overwritten = 1
    engine._mend()
    assert world.record["incarnation"] == engine._incarnation != INCARNATION


def test_an_engine_looks_once_more_than_there_are_orders(world):
    engine, looks = world.starts(), []
    receive = world.pipe.receive
    world.pipe.receive = lambda timeout: looks.append(timeout) or receive(timeout)
    world.tells("retire", lane=1, lease=1)
    engine._obey()
    assert looks == [0, 0]


def test_orders_for_models_are_passed_to_the_loader(world):
    engine = world.starts()
    world.tells("load", **model(3, 2))
    world.tells("arena", model=3, load=2, segment="s", number=7, rows=16, weights="w")
    world.tells("abandon", model=3, load=2, reason="no memory")
    world.tells("sleep", model=3, load=2, reason="it sleeps")
    world.tells("wake", model=3, load=2)
    engine._obey()
    assert world.loader.calls == [
        ("load", 3, 2, "m3", {"factory": "f3"}),
        ("arena", 3, 2, "s", 7, 16, "w"),
        ("abandon", 3, 2, "no memory"),
        ("sleep", 3, 2, "it sleeps"),
        ("wake", 3, 2),
    ]


@pytest.mark.parametrize(
    ("order", "code", "said", "told"),
    [
        ({"kind": "unload", "model": 0}, Code.MODEL_NOT_FOUND, "was unloaded", [{"kind": "unloaded", "model": 0}]),
        ({"kind": "refuse", "model": 0, "reason": "it crashed"}, Code.MODEL_FAILED, "it crashed", []),
        (
            {"kind": "retire", "lane": LANE, "lease": LEASE},
            Code.STALE_LEASE,
            "not leased",
            [{"kind": "retired", "lane": LANE, "lease": LEASE}],
        ),
    ],
)
def test_an_order_that_takes_a_model_or_a_lane_back_answers_what_waits_and_is_confirmed(world, order, code, said, told):
    engine = world.starts()
    world.installs()
    world.told()
    world.shm.sends()
    engine._engine._take_in(0)
    world.tells(**order)
    engine._obey()
    assert [(got, said in message) for got, message in world.shm.answers] == [(code, True)]
    assert world.told("all") == told
    assert (("forget", LEASE) in world.regions.calls) == (
        order["kind"] == "retire" and engine._engine.regions is not None
    )


@pytest.mark.parametrize("error", [None, ValueError("the driver does not know it")])
def test_memory_that_a_client_binds_or_releases_is_confirmed_with_the_reason_if_it_cannot_be(world, error):
    engine, finished = world.starts(), []
    engine._engine.finish = lambda: finished.append(len(world.regions.calls))
    if error is not None:
        world.regions.fails = {"bind": error, "unbind": error}
    world.told()
    world.tells("bind", lease=LEASE, first=2, rows=1)
    world.tells("unbind", lease=LEASE, first=2)
    engine._obey()
    assert world.regions.calls == [
        ("bind", {"kind": "bind", "lease": LEASE, "first": 2, "rows": 1}),
        ("unbind", LEASE, 2),
    ]
    assert finished == [0, 1], "before each, nothing is under way"
    reason = "" if error is None else "ValueError: the driver does not know it"
    assert world.told("all") == [
        {"kind": "bound", "lease": LEASE, "first": 2, "ends": ends, "reason": reason} for ends in (False, True)
    ]
    assert engine._engine.regions is world.regions


@pytest.mark.parametrize("ends", ["pause", "drain", "stop"])
def test_an_engine_that_is_paused_computes_nothing_but_shows_itself_and_hears_orders(world, ends):
    world.starts()
    world.installs()
    paused, beats = [], []

    def look():
        paused.append((int(world.record["paused"][0]), len(world.shm.answers)))
        beats.append(int(world.record["heartbeat"][0]) == world.now - 250_000_000)

    def begin():
        look()
        world.tells("pause", pause=True)
        world.shm.sends()

    def again():
        look()
        world.tells("pause", pause=True)
        world.tells("retire", lane=1, lease=1)

    def end():
        look()
        world.tells(ends, **({"pause": False} if ends == "pause" else {}))

    world.serves(begin, again, end, look)
    answered = [] if ends == "stop" else [(Code.OK, "")]
    assert world.shm.answers == answered
    assert paused[:3] == [(0, 0), (1, 0), (1, 0)] and world.record["paused"] == 0
    assert world.polled == [250, 250] and all(beats[1:3])
    assert "retired" in world.told()


def test_an_engine_is_paused_as_often_as_it_is_told_to_and_answers_first_what_is_under_way(world):
    engine, events = world.starts(), []
    engine._engine.finish = lambda: events.append(("finished", int(world.record["paused"][0])))

    def tells(pause):
        events.append(int(world.record["paused"][0]))
        world.tells("pause", pause=pause)

    world.serves(*[lambda pause=pause: tells(pause) for pause in (True, False, True, False)])
    assert events == [0, ("finished", 0), 1, 0, ("finished", 0), 1]
    assert sorted(set(world.heeded)) == sorted([world.pipe.fileno(), engine._callbacks.fileno()])


def test_an_engine_may_be_told_to_pause_any_number_of_times(world):
    engine = world.starts(paused=True)
    paused = []

    def again():
        paused.append(int(world.record["paused"][0]))
        for _ in range(50):
            world.tells("pause", pause=True)

    world.serves(*[again] * 10)
    assert paused == [1] * 10 and engine._stopped and "order failed" not in world.told()


def test_an_engine_that_is_started_while_all_are_paused_stands_by_first(world):
    seen = []
    world.starts(paused=True)
    world.installs()
    world.shm.sends()

    def look():
        seen.append((int(world.record["paused"][0]), len(world.shm.answers)))

    def end():
        look()
        world.tells("pause", pause=False)

    world.serves(end, look)
    assert seen == [(1, 0), (0, 1)]


def test_an_action_of_another_thread_ends_the_wait_of_a_paused_engine(world):
    done = []
    world.starts(paused=True)
    world.serves(lambda: world.process._callbacks.put(lambda: done.append(len(world.polled))), lambda: None)
    assert done == [1]


def test_an_order_that_cannot_be_carried_out_is_reported_and_the_next_one_is(world):
    engine = world.starts()
    world.loader.fails["load"] = RuntimeError("no thread")
    world.told()
    world.tells("dance")
    world.supervisor._socket.sendall(encode_message("stop").replace(b"{", b"?"))
    world.tells("load", **model(1))
    world.tells("retire", lane=1, lease=2)
    engine._obey()
    assert world.told("all") == [
        {"kind": "order failed", "order": "dance", "reason": "ValueError: unknown order 'dance'"},
        {"kind": "order failed", "order": "load", "reason": "RuntimeError: no thread"},
        {"kind": "retired", "lane": 1, "lease": 2},
    ]
    failed = world.logged("an order failed")
    assert [(line["order"], line["error"]) for line in failed] == [
        ("dance", "ValueError: unknown order 'dance'"),
        ("load", "RuntimeError: no thread"),
    ]
    assert all("Traceback" in line["exception"] for line in failed)
    (line,) = world.logged("a message is not an order")
    assert line["level"] == "error" and "JSON" in line["error"]


def test_an_action_that_fails_is_logged_and_the_engine_goes_on(world):
    def fail():
        raise RuntimeError("no")

    done = []
    world.starts()
    world.process._callbacks.put(fail)
    world.process._callbacks.put(lambda: done.append(1))
    world.serves(lambda: None)
    (line,) = world.logged("an action failed")
    assert (line["level"], line["error"], done) == ("error", "RuntimeError: no", [1])
    assert "Traceback" in line["exception"]


@pytest.mark.parametrize("how", ["stopped", "its supervisor is gone"])
def test_an_engine_that_ends_lets_go_of_everything_and_says_so(world, how):
    world.starts()
    updaters = []
    world.process._engine.stop_updaters = lambda: updaters.append(world.state)

    def end():
        if how == "stopped":
            world.tells("stop")
        else:
            world.supervisor.close()

    world.stops = False
    world.serves(end)
    assert updaters == [EngineState.SERVING] and world.state == EngineState.STOPPED
    assert world.regions.calls == [("close",)] and world.shm.closed == world.zmq.closed == 1
    assert world.process._context.closed
    assert world.given("switches") == [0.0005] and world.given("exact_sleeps") == []


@pytest.mark.parametrize("lost", [False, True])
def test_the_status_of_a_process_says_whether_it_lost_its_device(world, monkeypatch, lost):
    def fail():
        raise DeviceLost("it fails every call", 3)

    def made(pipe, orders):
        assert (pipe, orders) == (world.pipe, {"kind": "configure", **world.orders})
        return world.starts()

    monkeypatch.setattr(process, "EngineProcess", made)
    world.tells("configure", **world.orders)
    world.steps = [(lambda: world.process._callbacks.put(fail)) if lost else lambda: None]
    assert process.run(world.pipe) == int(lost)
    lines = world.logged("device lost, the engine ends")
    assert [line["error"] for line in lines] == ["DeviceLost: it fails every call"] * lost
    assert all("Traceback" in line["exception"] for line in lines)
    assert world.record["computing"] == (3 if lost else 0), "the death counts for this model"
    assert world.state == (EngineState.SERVING if lost else EngineState.STOPPED)


def test_a_process_whose_supervisor_is_gone_before_it_is_configured_ends_well(world):
    world.supervisor.close()
    assert process.run(world.pipe) == 0
