"""What a model is to clients while some of its engines serve it, load it, sleep or have failed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jurybox.protocol.errors import ModelNotFound
from jurybox.protocol.scoreboard import Scoreboard
from jurybox.protocol.segment import Segment, segment_name
from jurybox.protocol.spec import ModelSpec, TensorSpec
from jurybox.protocol.weights import WeightsLayout
from jurybox.server.settings.config import ModelSettings
from jurybox.server.settings.model_settings import Holders
from jurybox.server.supervisor.models import HeldModel, Models, PublicationRate

GOOD = ModelSettings.model_validate({"factory": "tests.models:affine"})
PUBLISHED = ModelSettings.model_validate({"factory": "tests.models:affine", "publish": "snapshot", "max_lag": 3})
SPEC = ModelSpec("m", {"x": TensorSpec("float32", (4,))}, {"y": TensorSpec("float32", (2,))})


class Made:
    """Makes segments, and keeps them."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []

    def __call__(self, name: str, size: int) -> Segment:
        self.segments.append(Segment.create(name, size))
        return self.segments[-1]

    def left(self) -> list[str]:
        return [segment.name for segment in self.segments if segment.fd >= 0]


@pytest.fixture
def made() -> Made:
    return Made()


@pytest.fixture
def models(made: Made) -> Iterator[Models]:
    scoreboard = Scoreboard.create(segment_name("statetest", "scoreboard"), 2, 0.0)
    models = Models("statetest", scoreboard, made)
    yield models
    models.close()
    scoreboard.close()


def placed(models: Models, held: HeldModel, spec: ModelSpec = SPEC, size: int = 0, engine: int = 0) -> bool:
    """An engine has loaded a model with weights of that size, or with none; return whether lanes must be revoked."""
    models.begin_load(held, engine)
    layout = WeightsLayout([("w", "float32", (size,))]) if size else None
    return models.adopt(held, engine, spec, f"digest {size}", layout)


def served(engines: int) -> HeldModel:
    """A model that so many engines serve in arena 7."""
    held = HeldModel(0, "m", GOOD)
    held.arena_number = 7
    for engine in range(engines):
        held.begin_load(engine, 10 + engine)
        held.ready(engine, 7)
    return held


@pytest.mark.parametrize(("later", "state"), [("failed", "ready"), ("loading", "loading"), ("ready", "loading")])
def test_an_engine_in_an_earlier_arena_keeps_a_model_from_being_ready_unless_it_has_failed(
    later: str, state: str
) -> None:
    held = served(2)
    for engine in (0, 1):
        held.begin_load(engine, 20 + engine)
    held.arena_number = 8
    held.ready(0, 8)
    held.engines[1] = later
    assert held.state == state


@pytest.mark.parametrize(
    ("engines", "state"),
    [
        ([], "loading"),
        (["failed", "failed"], "failed"),
        (["failed", "loading"], "loading"),
        (["failed", "ready"], "ready"),
        (["loading", "reloading"], "ready"),
        (["sleeping", "sleeping"], "loading"),
    ],
)
def test_a_model_is_ready_if_one_engine_answers_and_failed_if_all_have(engines: list[str], state: str) -> None:
    held = HeldModel(0, "m", GOOD)
    held.engines = dict(enumerate(engines))
    assert held.state == state
    held.sleeping = True
    assert held.state == "sleeping"
    held.quarantined = "it ends engines"
    assert (held.state, held.reason) == ("quarantined", "it ends engines")


def test_a_load_that_begins_ends_the_complaint_about_the_one_before_it_in_that_engine_alone() -> None:
    held = served(2)
    for engine in (0, 1):
        held.begin_load(engine, 20 + engine)
        held.failed(engine, f"why {engine}")
    assert held.reason == "why 0; why 1"
    held.begin_load(0, 30)
    assert (held.reason, held.engines, held.loads) == ("why 1", {0: "reloading", 1: "ready"}, {0: 30, 1: 21})
    held.begin_load(0, 31)
    assert held.engines[0] == "reloading", "the earlier load still serves"
    held.failed(0, "why 1")
    assert held.reason == "why 1", "what all engines say is said once"


def test_an_engine_that_has_failed_serves_nothing_because_it_fails_again() -> None:
    held = served(2)
    held.engines[1] = "failed"
    held.begin_load(1, 20)
    assert held.engines[1] == "loading"
    held.failed(1, "why")
    assert held.engines == {0: "ready", 1: "failed"}


def test_the_warm_up_of_a_model_is_that_of_the_last_engine_that_told_one() -> None:
    held = served(1)
    assert held.warm_up == {}
    held.ready(0, 7, {"seconds": 0.5})
    assert held.warm_up == {"seconds": 0.5}
    held.ready(0, 7)
    assert held.warm_up == {}


def test_an_engine_whose_load_has_a_channel_of_its_own_is_cut_off_with_a_reason_that_hides_no_other() -> None:
    held = served(4)
    source: object = object()
    held.channel = source  # type: ignore[assignment]
    held.sources[0] = source  # type: ignore[assignment]
    held.engines[2] = "reloading"
    held.reasons[3] = "why"
    held.cut_off()
    assert held.engines == {0: "ready", 1: "failed", 2: "reloading", 3: "failed"}
    assert held.reasons == {1: "it serves an earlier load, which gets no publications: load it again", 3: "why"}


def test_only_engines_that_load_other_settings_than_those_in_service_are_outdated() -> None:
    held = served(3)
    other = GOOD.model_copy(update={"max_batch": 8})
    held.asked = other
    for engine in (0, 1):
        held.begin_load(engine, 20 + engine)
    assert held.outdated() == [0, 1]
    held.failed(1, "why")
    assert held.outdated() == [0]
    held.engine_died(0)
    assert held.outdated() == []


def test_sleep_and_wake_begin_without_complaints_about_the_move_before_and_move_only_what_is_there() -> None:
    held = served(3)
    held.engines[2] = "failed"
    held.reasons[2] = "why"
    assert held.fall_asleep() == {0: 10, 1: 11} and held.moving == {0, 1} and held.reason == ""
    for engine in (0, 1):
        held.weights_moved(engine, asleep=True, reason="")
    held.reasons[0] = "why"
    assert held.wake_up() == {0: 10, 1: 11} and held.moving == {0, 1} and (held.sleeping, held.reason) == (False, "")


def test_engines_that_could_not_move_weights_in_opposite_states_are_left_as_they_are() -> None:
    held = served(2)
    held.fall_asleep()
    held.weights_moved(0, asleep=False, reason="no room on the host")
    assert held.weights_moved(1, asleep=True, reason="no way back") == {}
    assert (held.sleeping, held.moving, held.settled) == (True, set(), True)
    assert held.reason == "no room on the host; no way back"


def test_an_engine_that_dies_leaves_nothing_of_its_load_and_loads_or_sleeps_with_the_others() -> None:
    held = served(2)
    held.engine_died(0)
    assert (held.loads, held.arenas, held.orders, held.sources) == ({1: 11}, {1: 7}, {1: GOOD}, {1: None})
    assert held.engines == {0: "loading", 1: "ready"}
    held.fall_asleep()
    held.engine_died(1)
    assert held.engines == {0: "loading", 1: "sleeping"} and held.settled is False and not held.moving
    held.engine_died(7)
    assert 7 not in held.engines, "it does not compute this model"
    held.quarantined = "why"
    held.engines = {0: "quarantined"}
    held.engine_died(0)
    assert held.engines == {0: "quarantined"}


def test_clients_are_told_all_of_a_model_that_they_need_to_call_it(models: Models) -> None:
    models.add("other", GOOD)
    held = models.add("m", PUBLISHED)
    message = held.message()
    assert (message.name, message.index, message.state, message.settled) == ("m", 1, "loading", True)
    assert (message.arena, message.arena_rows, message.weights, message.max_lag) == ("", 0, "", 0)
    models.begin_load(held, 0)
    assert not held.message().settled
    models.adopt(held, 0, SPEC, "its digest", WeightsLayout([("w", "float32", (4,))]))
    models.take_over(held, 0)
    held.ready(0, held.arena_number)
    held.reasons[1] = "half \ud800 a pair"
    held.only = (1, 3)
    message = held.message()
    assert held.arena is not None and held.channel is not None
    assert (message.state, message.settled, message.digest) == ("ready", True, "its digest")
    assert message.reason.startswith("half ") and message.reason.endswith(" a pair")
    assert (message.arena, message.arena_rows) == (held.arena.segment.name, held.arena.rows)
    assert (message.weights, message.max_lag) == (held.channel.name, 3)
    assert (message.max_batch, list(message.engines)) == (PUBLISHED.max_batch, [1, 3])
    assert [spec.name for spec in message.inputs] == ["x"] and [spec.name for spec in message.outputs] == ["y"]


def test_a_lane_has_the_rows_that_are_asked_for_or_the_models_default() -> None:
    held = HeldModel(0, "m", GOOD.model_copy(update={"lane_rows": 6}))
    held.spec = SPEC
    assert (held.lane_rows(3), held.lane_rows(0)) == (3, 6)


@pytest.mark.parametrize("state", [False, True])
def test_a_model_with_state_has_a_row_for_every_client_of_its_robots(models: Models, state: bool) -> None:
    settings = GOOD.model_copy()
    settings.keep_lanes_of(Holders(robots={"arm": 3000}))
    held = models.add("m", settings)
    spec = ModelSpec("m", SPEC.inputs, SPEC.outputs, {"h": TensorSpec("float32", (8,))} if state else {})
    placed(models, held, spec)
    rows = {kept: settings.resolve_rows(spec.row_bytes, state=kept) for kept in (False, True)}
    lane_rows = {kept: settings.resolve_lane_rows(spec.row_bytes, state=kept) for kept in (False, True)}
    assert rows[True] > rows[False] and lane_rows[True] > lane_rows[False]
    assert held.arena is not None
    assert (held.arena.rows, held.lane_rows(0)) == (rows[state], lane_rows[state])


def test_an_arena_of_another_spec_replaces_the_one_before_it_which_stays_for_its_lanes(
    models: Models, made: Made
) -> None:
    held = models.add("m", GOOD)
    assert placed(models, held) is False
    first, number = held.arena, held.arena_number
    assert placed(models, held) is False and held.arena is first
    other = ModelSpec("m", SPEC.inputs, SPEC.inputs)
    assert placed(models, held, other) is True
    assert held.arena is not first and held.arena is not None and (held.arena_number, held.spec) != (number, SPEC)
    assert first is not None and first.segment.fd >= 0
    models.close_replaced(())
    assert made.left() == [held.arena.segment.name]
    closed = list[str]()
    first.close = lambda: closed.append("again")  # type: ignore[method-assign]
    models.close_replaced(())
    assert not closed


def test_a_load_that_is_refused_leaves_no_memory_of_its_own(models: Models, made: Made) -> None:
    def refuse(channel: object) -> None:
        raise ValueError("these do not fit")

    held = models.add("m", PUBLISHED)
    models.begin_load(held, 0)
    with pytest.raises(ValueError, match="these do not fit"):
        models.adopt(held, 0, SPEC, "digest", WeightsLayout([("w", "float32", (4,))]), refuse)
    assert len(made.segments) == 2 and not made.left()
    assert held.arena is None and not held.channels and not held.placed


def test_all_memory_of_models_is_removed_at_the_end(models: Models, made: Made) -> None:
    for name, size in (("m", 4), ("n", 0)):
        held = models.add(name, PUBLISHED)
        placed(models, held, size=size)
        models.take_over(held, 0)
    placed(models, models.named("m"), size=5)
    placed(models, models.named("m"), ModelSpec("m", SPEC.inputs, SPEC.inputs))
    assert len(made.left()) == 5, "three arenas and two channels"
    models.close()
    assert not made.left()


def test_an_unknown_model_is_told_with_those_that_there_are(models: Models) -> None:
    with pytest.raises(ModelNotFound, match=r"^no model 'x' is served here; there are: none$"):
        models.named("x")
    for name in ("n", "m"):
        models.add(name, GOOD)
    with pytest.raises(ModelNotFound, match=r"^no model 'xxx.*x' is served here; there are: m, n$") as refused:
        models.named("x" * 1000)
    assert len(str(refused.value)) < 300
    assert models.get("m") is models.numbered(1) is models.named("m") and models.get("x") is models.numbered(2) is None


def test_the_last_32_failures_of_clients_models_are_remembered(models: Models) -> None:
    for number in range(40):
        held = models.add(f"m{number}", GOOD, configured=False)
        assert not held.configured
        models.remove(held.name)
        models.remember_failed(held)
    assert not models.forget_failed("m7") and models.forget_failed("m8") and not models.forget_failed("m8")
    assert models.described("m9").name == "m9"
    assert models.add("m10", GOOD).configured and not models.forget_failed("m10"), "it may be loaded again"


def test_a_model_is_kept_until_its_time_is_over_and_for_ever_without_one(models: Models) -> None:
    for name, until in (("early", 10.0), ("late", 20.0), ("own", None)):
        models.add(name, GOOD).until = until
    given_up = {now: [held.name for held in models.given_up(now)] for now in (10.0, 10.1, 20.0, 20.1)}
    assert given_up == {10.0: [], 10.1: ["early"], 20.0: ["early"], 20.1: ["early", "late"]}


def test_an_arena_that_was_replaced_is_removed_when_no_lane_of_its_model_retires(models: Models) -> None:
    arenas = {}
    for name in ("first", "second"):
        held = models.add(name, GOOD)
        models.begin_load(held, 0)
        models.adopt(held, 0, SPEC, "digest", None)
        arenas[name] = held.arena
        models.replaced(held)
        models.replaced(held)
        assert held.arena is None
    first, second = arenas["first"], arenas["second"]
    assert first is not None and second is not None
    models.close_replaced({1})
    assert (first.segment.fd < 0, second.segment.fd < 0) == (True, False)
    models.close_replaced({0})
    assert second.segment.fd < 0


def test_a_channel_that_another_process_wrote_to_is_named_once(models: Models) -> None:
    for name in ("m", "n", "plain"):
        held = models.add(name, PUBLISHED)
        models.begin_load(held, 0)
        models.adopt(held, 0, SPEC, "digest", None if name == "plain" else WeightsLayout([("w", "float32", (4,))]))
        models.take_over(held, 0)
    assert models.look(1.0) == []
    channel = models.named("n").channel
    assert channel is not None
    own = channel.restore
    channel.restore = lambda: own() or not found  # type: ignore[method-assign]
    found = list[str]()
    found += models.look(2.0)
    assert found == ["n"] and models.look(3.0) == []


def test_the_rate_of_publications_needs_two_looks_at_different_times() -> None:
    rate = PublicationRate()
    assert rate.per_second == 0.0
    rate.look(3, 5.0)
    rate.look(9, 5.0)
    assert rate.per_second == 0.0
    rate.look(9, 7.0)
    assert rate.per_second == 3.0


def test_the_rate_of_publications_spans_ten_seconds_or_the_last_two_looks() -> None:
    rate = PublicationRate()
    for now, publications in ((0.0, 0), (4.0, 40), (12.0, 44), (13.0, 45)):
        rate.look(publications, now)
    assert rate.per_second == pytest.approx(45 / 13), "nothing else is old enough"
    rate.look(46, 14.0)
    assert rate.per_second == pytest.approx(6 / 10), "the last look that is ten seconds old is the first that counts"
    rate.look(47, 15.0)
    assert rate.per_second == pytest.approx(7 / 11)
    rate.look(147, 100.0)
    assert rate.per_second == pytest.approx(100 / 85)
