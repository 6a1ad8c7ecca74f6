"""A model across engines and loads: which ones count."""

import time

import numpy as np
import pytest

from jurybox.protocol.errors import ModelNotFound, Refused, SpecMismatch
from jurybox.protocol.scoreboard import MAX_MODELS, Scoreboard
from jurybox.protocol.segment import Segment, segment_name
from jurybox.protocol.spec import ModelSpec, TensorSpec
from jurybox.protocol.weights import WeightsLayout
from jurybox.protocol.weights.publisher import Publisher
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


PUBLISHED = ModelSettings.model_validate({"factory": "tests.models:affine", "publish": "snapshot"})
OTHER = ModelSettings.model_validate({"factory": "tests.models:other", "publish": "snapshot"})
VECTOR = {"x": TensorSpec("float32", (4,))}


def layout(size):
    return WeightsLayout([("w", "float32", (size,))])


def adopt(models, held, engine, size, keep=lambda channel: None):
    """What an engine loaded gets its arena and channel."""
    return models.adopt(held, engine, ModelSpec("m", VECTOR, VECTOR), f"digest {size}", layout(size), keep)


def serve(models, held, engine):
    """The engine's load is ready; return whether the model's channel changed."""
    changed = models.take_over(held, engine)
    held.ready(engine, held.arena_number)
    return changed


def load(models, held, settings, engines=(0, 1)):
    models.add("m", settings)
    for engine in engines:
        models.begin_load(held, engine)


@pytest.fixture
def published(models):
    """A model that two engines serve, with a weights channel."""
    held = models.add("m", PUBLISHED)
    load(models, held, PUBLISHED)
    for engine in (0, 1):
        adopt(models, held, engine, 4)
        models.take_over(held, engine)
    for engine in (0, 1):
        assert not serve(models, held, engine)
    yield held
    models.close()


def test_a_load_whose_weights_are_refused_changes_nothing_of_the_model(models, published):
    held = published

    def refuse(channel):
        assert channel.layout == layout(5) and not channel.closed
        refused.append(channel)
        raise SpecMismatch("these weights don't fit the saved ones")

    refused = []
    before = (held.spec, held.arena, held.arena_number, held.channel, held.digest, [*held.channels], {**held.placed})
    with pytest.raises(SpecMismatch):
        models.adopt(held, 0, ModelSpec("m", {**VECTOR, "y": VECTOR["x"]}, VECTOR), "second", layout(5), refuse)
    assert (held.spec, held.arena, held.arena_number, held.channel, held.digest, held.channels, held.placed) == before
    assert not held.channel.closed and refused[0].closed
    models.close()
    assert held.channel.closed


def test_a_reload_with_other_weights_has_a_channel_of_its_own_until_it_serves(models, published):
    held, first = published, published.channel
    load(models, held, OTHER)
    assert not adopt(models, held, 0, 5) and not adopt(models, held, 1, 5)
    second = held.placed[0].channel
    assert (held.channel, held.digest, held.message().weights) == (first, "digest 4", first.name)
    assert held.placed[1].channel is second and held.channels == [first, second] and models.unused(held) == []
    assert serve(models, held, 0)
    assert (held.channel, held.digest, held.settings, held.channels) == (second, "digest 5", OTHER, [first, second])
    assert models.unused(held) == [first] and held.channels == [second]
    first.close()
    assert not serve(models, held, 1)
    assert (held.state, held.reason, held.sources) == ("ready", "", {0: second, 1: second})


def test_the_channel_of_a_reload_that_no_engine_can_serve_is_given_up(models, published):
    held, first = published, published.channel
    load(models, held, OTHER)
    for engine in (0, 1):
        adopt(models, held, engine, 5)
    second = held.placed[0].channel
    held.failed(0, "why")
    assert models.unused(held) == []  # the other engine may still serve it
    held.failed(1, "why")
    assert models.unused(held) == [second]
    second.close()
    assert (held.channel, held.digest, held.settings, held.asked) == (first, "digest 4", PUBLISHED, PUBLISHED)
    assert (held.state, held.engines) == ("ready", {0: "ready", 1: "ready"})


@pytest.mark.parametrize("fails_first", [False, True])
def test_of_two_engines_the_one_that_cannot_load_other_weights_does_not_count_as_ready(models, published, fails_first):
    held = published
    load(models, held, OTHER)
    for engine in (0, 1):
        adopt(models, held, engine, 5)
    if fails_first:
        held.failed(1, "why")
        assert held.engines[1] == "ready" and serve(models, held, 0)
    else:
        assert serve(models, held, 0)
        held.failed(1, "why")
    assert (held.engines, held.state, held.reason) == ({0: "ready", 1: "failed"}, "ready", "why")
    assert (held.settings, held.asked, held.channel.layout) == (OTHER, OTHER, layout(5))
    held.engine_died(1)
    models.begin_load(held, 1)  # its successor loads what is in service
    adopt(models, held, 1, 5)
    assert not serve(models, held, 1)
    assert set(held.engines.values()) == {"ready"} and held.sources == {0: held.channel, 1: held.channel}
    for channel in models.unused(held):
        channel.close()


def test_an_engine_that_dies_during_a_reload_gives_up_its_channel_and_no_more(models, published):
    held, first = published, published.channel
    load(models, held, OTHER, [0])
    adopt(models, held, 0, 5)
    held.engine_died(0)
    (second,) = models.unused(held)
    second.close()
    assert held.channel is first and not first.closed
    models.begin_load(held, 0)
    adopt(models, held, 0, 5)
    assert serve(models, held, 0) and models.unused(held) == [first]
    first.close()


def test_a_load_with_earlier_settings_is_outdated_once_another_engine_serves_the_new_ones(models, published):
    held = published
    load(models, held, OTHER)
    adopt(models, held, 0, 5)
    held.failed(1, "why")
    held.engine_died(1)
    models.begin_load(held, 1)  # with the settings that were known to work
    adopt(models, held, 1, 4)
    assert serve(models, held, 0)
    assert held.outdated() == [1] and held.asked is OTHER
    assert models.unused(held) == []  # the channel of the outdated load is still open
    models.begin_load(held, 1)
    (outdated,) = models.unused(held)
    outdated.close()
    assert held.outdated() == [] and outdated is not held.channel


def test_publications_before_the_first_tick_count(models, published):
    with Publisher(published.channel) as publisher:
        publisher.publish({"w": np.zeros(4, np.float32)})
    models.look(time.monotonic() + 1)
    assert published.published.per_second > 0


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


def test_a_server_that_is_full_takes_one_more_model_for_each_that_is_removed(models):
    for number in range(MAX_MODELS):
        assert models.add(f"m{number}", GOOD).index == number
    with pytest.raises(Refused, match=f"the server has {MAX_MODELS} models, the most it can serve: unload one first"):
        models.add("another", GOOD)
    assert models.add("m5", BAD) is models.named("m5")
    models._scoreboard.counters["requests"][:, 5] = 7
    models.remove("m5")
    assert models.add("another", GOOD).index == 5
    assert not models._scoreboard.counters["requests"].any(), "these were the unloaded model's"


@pytest.mark.parametrize(
    ("pythons", "python", "only"),
    [(["", ""], None, ()), (["", "p"], None, (0,)), (["", "p"], "p", (1,)), (["p", "p"], "p", ())],
)
def test_a_model_is_computed_by_the_engines_of_its_interpreter(pythons, python, only):
    scoreboard = Scoreboard.create(segment_name("onlytest", "scoreboard"), 2, 0.0)
    try:
        models = Models("onlytest", scoreboard, Segment.create, pythons)
        assert models.add("m", GOOD.model_copy(update={"python": python})).only == only
    finally:
        scoreboard.close()
