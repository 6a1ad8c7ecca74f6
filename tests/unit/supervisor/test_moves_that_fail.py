"""A model that can neither leave the device nor return to it counts as asleep, so that it can be woken or unloaded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tests.serving import wait_until

from jurybox.protocol.scoreboard import Scoreboard
from jurybox.protocol.segment import Segment, segment_name
from jurybox.server.settings.config import ModelSettings
from jurybox.server.supervisor.models import Models
from jurybox.server.supervisor.supervisor import Supervisor

torch = pytest.importorskip("torch")

from jurybox.server.engine.model_loader import ModelLoader  # noqa: E402
from jurybox.server.engine.served import Served  # noqa: E402


class Stuck(Served):
    """Its weights can be moved in neither direction while `failing` says so."""

    def __init__(self):
        self.failing = {"sleep", "wake"}

    def sleep(self):
        if "sleep" in self.failing:
            raise RuntimeError("no room on the host")
        return 4

    def wake(self):
        if "wake" in self.failing:
            raise RuntimeError("no room on the device")
        return 4


class Core:
    """What the loader needs of an engine's core, with one model."""

    def __init__(self, served):
        self.slot, self.asleep = SimpleNamespace(served=served), False

    def rest(self, model, message):
        self.asleep = True
        return self.slot

    def resting(self, model):
        return self.slot if self.asleep else None

    def resume(self, model):
        self.asleep = False


@pytest.fixture
def models():
    scoreboard = Scoreboard.create(segment_name("movetest", "scoreboard"), 2, 0.0)
    yield Models("movetest", scoreboard, Segment.create)
    scoreboard.close()


@pytest.fixture
def engine():
    """An engine's loader, whose orders come from a supervisor and whose messages go to a list."""
    served, told = Stuck(), []
    core = Core(served)
    loader = ModelLoader(
        torch.device("cpu"), lambda kind, **fields: told.append({"kind": kind, **fields}), lambda act: act(), core
    )

    def send(kind, model, load, reason=""):
        getattr(loader, kind)(model, load, *([reason] if kind == "sleep" else []))

    yield SimpleNamespace(role="engine-0", send=send, served=served, core=core, loader=loader, told=told)
    loader.unload(0)


def test_a_model_that_can_be_moved_in_neither_direction_sleeps_and_can_be_woken_later(models, engine):
    held = models.add("m", ModelSettings.model_validate({"factory": "a:b"}))
    load = models.begin_load(held, 0)
    engine.loader._wanted[held.index] = load
    held.ready(0, 0)
    supervisor = object.__new__(Supervisor)
    quiet = SimpleNamespace(info=lambda *_, **__: None, error=lambda *_, **__: None)
    vars(supervisor).update(_models=models, _engines=SimpleNamespace(engines=[engine]), _log=quiet)

    def hear(kind):
        """Pass the engine's next message on; it must be of this kind."""

        def moved():
            return [message for message in engine.told if message["kind"] not in ("begins", "ends")]

        wait_until(moved, what=f"the message {kind!r}")
        (message,) = moved()
        engine.told.clear()
        assert message["kind"] == kind
        supervisor._on_weights_moved(0, message)

    for number, at in held.fall_asleep().items():
        assert number == 0
        engine.send("sleep", held.index, at, "it sleeps")
    hear("awake")
    assert (held.state, held.moving, held.settled, held.asleep_in) == ("sleeping", set(), True, [0])
    assert "no room on the host; then " in held.reason and "no room on the device" in held.reason
    assert engine.core.asleep
    for failing, state in (({"sleep", "wake"}, "sleeping"), (set(), "ready")):
        engine.served.failing = failing
        for at in held.wake_up().values():
            engine.send("wake", held.index, at)
        hear("awake")
        assert (held.state, held.moving, held.settled) == (state, set(), True)
    assert held.reason == "" and not engine.core.asleep
