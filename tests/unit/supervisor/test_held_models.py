"""A model across engines and loads: which ones count."""

import pytest

from jurybox.protocol.errors import ModelNotFound, SpecMismatch
from jurybox.protocol.scoreboard import Scoreboard
from jurybox.protocol.segment import Segment, segment_name
from jurybox.protocol.spec import ModelSpec, TensorSpec
from jurybox.protocol.weights import WeightsLayout
from jurybox.server.settings.config import ModelSettings
from jurybox.server.supervisor.models import HeldModel, Models

GOOD = ModelSettings.model_validate({"factory": "tests.models:affine"})
BAD = ModelSettings.model_validate({"factory": "tests.models:broken"})


@pytest.fixture
def models():
    scoreboard = Scoreboard.create(segment_name("heldtest", "scoreboard"), 2, 0.0)
    yield Models("heldtest", scoreboard, Segment.create)
    scoreboard.close()


def test_a_failed_reload_is_not_what_a_restarted_engine_loads(models):
    held = models.add("m", GOOD)
    models.begin_load(held, 0)
    held.ready(0, 0)
    models.add("m", BAD)
    models.begin_load(held, 0)
    assert held.asked is BAD and held.settings is GOOD
    held.failed(0, "why")
    assert (held.asked, held.settings, held.state, held.reason) == (GOOD, GOOD, "ready", "why")


def test_after_a_failed_reload_a_model_whose_arena_is_gone_is_not_ready():
    held = HeldModel(0, "m", GOOD)
    held.begin_load(0, 1)
    held.ready(0, 7)
    held.begin_load(0, 2)
    held.arena_number = 8  # the reload brought another spec
    assert held.state == "loading"
    held.failed(0, "why")
    assert held.state == "failed"


def test_no_lane_is_granted_while_an_engine_computes_in_an_earlier_arena():
    held = HeldModel(0, "m", GOOD)
    for engine in (0, 1):
        held.begin_load(engine, engine + 1)
        held.ready(engine, 0)
    held.begin_load(0, 3)
    held.begin_load(1, 4)
    held.arena_number = 8
    held.ready(0, 8)
    assert held.state == "loading"
    held.ready(1, 8)
    assert held.state == "ready"


def test_a_load_whose_weights_are_refused_changes_nothing_of_the_model(models):
    held = models.add("m", ModelSettings.model_validate({"factory": "tests.models:affine", "publish": "snapshot"}))
    vector = {"x": TensorSpec("float32", (4,))}

    def layout(size):
        return WeightsLayout([("w", "float32", (size,))])

    def refuse(channel):
        assert channel.layout == layout(5) and not channel.closed
        refused.append(channel)
        raise SpecMismatch("these weights don't fit the saved ones")

    refused = []
    assert not models.adopt(held, ModelSpec("m", vector, vector), "first", layout(4))
    before = (held.spec, held.arena, held.arena_number, held.channel, held.digest)
    with pytest.raises(SpecMismatch):
        models.adopt(held, ModelSpec("m", {**vector, "y": vector["x"]}, vector), "second", layout(5), refuse)
    assert (held.spec, held.arena, held.arena_number, held.channel, held.digest) == before
    assert not held.channel.closed and refused[0].closed
    models.close()
    assert held.channel.closed


def test_every_load_has_its_own_number(models):
    held = models.add("m", GOOD)
    assert len({models.begin_load(held, engine) for engine in (0, 1, 0, 1)}) == 4


def test_why_a_clients_model_failed_is_remembered_of_the_last_few(models):
    for number in range(100):
        held = models.add(f"m{number}", BAD, configured=False)
        held.begin_load(0, number)
        held.failed(0, "why")
        models.remove(held.name)
        models.remember_failed(held)
    assert list(models) == []
    assert models.described("m99").reason == "why"
    with pytest.raises(ModelNotFound):
        models.described("m0")
    models.add("m99", GOOD)
    assert models.described("m99").reason == ""


def test_a_model_that_leaves_quarantine_has_not_settled_before_an_engine_has_loaded_it():
    held = HeldModel(0, "m", GOOD)
    held.quarantined, held.engines = "why", {0: "quarantined"}
    assert (held.state, held.reason) == ("quarantined", "why")
    held.leave_quarantine()  # while the engine is being started again
    assert (held.state, held.settled) == ("loading", False)
    held.begin_load(0, 1)
    held.ready(0, 0)
    assert (held.state, held.settled, held.reason) == ("ready", True, "")


@pytest.fixture
def served():
    """A model that three engines serve."""
    held = HeldModel(0, "m", ModelSettings(factory="a:b"))
    for engine in range(3):
        held.begin_load(engine, 10 + engine)
        held.ready(engine, 0)
    return held


def test_a_model_sleeps_in_all_of_its_engines_or_in_none(served):
    assert served.fall_asleep() == {0: 10, 1: 11, 2: 12}
    assert served.state == "sleeping" and not served.settled
    assert served.weights_moved(0, asleep=True, reason="") == {}
    assert served.weights_moved(1, asleep=False, reason="no room on the host") == {}
    assert served.weights_moved(2, asleep=True, reason="") == {0: 10, 2: 12}  # to be woken
    assert not served.sleeping and not served.settled
    for engine in (0, 2):
        assert served.weights_moved(engine, asleep=False, reason="") == {}
    assert (served.state, served.settled, served.reason) == ("ready", True, "no room on the host")


def test_a_model_that_one_engine_cannot_wake_sleeps_on_in_all(served):
    served.fall_asleep()
    for engine in range(3):
        served.weights_moved(engine, asleep=True, reason="")
    assert (served.state, served.settled) == ("sleeping", True)
    assert served.wake_up() == {0: 10, 1: 11, 2: 12} and served.state == "loading"
    served.weights_moved(0, asleep=False, reason="")
    served.weights_moved(1, asleep=True, reason="no room on the device")
    assert served.weights_moved(2, asleep=False, reason="") == {0: 10, 2: 12} and served.sleeping  # to sleep again
    for engine in (0, 2):
        assert served.weights_moved(engine, asleep=True, reason="") == {}
    assert (served.state, served.settled, served.reason) == ("sleeping", True, "no room on the device")
    assert served.wake_up() == {0: 10, 1: 11, 2: 12}
    for engine in range(3):
        served.weights_moved(engine, asleep=False, reason="")
    assert (served.state, served.reason) == ("ready", "")


def test_an_engine_that_died_while_the_model_slept_loads_it_when_it_is_woken(served):
    served.fall_asleep()
    for engine in range(3):
        served.weights_moved(engine, asleep=True, reason="")
    served.engine_died(1)
    assert served.state == "sleeping" and served.asleep_in == [0, 1, 2]
    assert served.wake_up() == {0: 10, 2: 12} and served.asleep_in == [0, 1, 2]
    served.begin_load(1, 20)
    for engine in (0, 2):
        served.weights_moved(engine, asleep=False, reason="")
    assert (served.state, served.settled) == ("ready", False)
    served.ready(1, 0)
    assert (served.state, served.settled) == ("ready", True)


def test_an_engine_that_dies_while_it_moves_weights_is_not_waited_for(served):
    served.fall_asleep()
    served.weights_moved(0, asleep=True, reason="")
    served.engine_died(1)
    served.weights_moved(2, asleep=True, reason="")
    assert (served.state, served.settled) == ("sleeping", True)
