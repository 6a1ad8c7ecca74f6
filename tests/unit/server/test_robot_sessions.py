"""Episodes and sessions of a robot's connection: when each begins, what is counted, and how long an answer may take."""

from __future__ import annotations

import numpy as np
import pytest
from tests.clocks import Clock, given

from jurybox.protocol.errors import SessionLost, SpecMismatch
from jurybox.protocol.spec import ModelSpec, TensorSpec
from jurybox.server.frontend.frontend import Frontend
from jurybox.server.frontend.requests import RowsReply
from jurybox.server.gateway.robots import policy as module
from jurybox.server.gateway.robots.counters import PortCounters
from jurybox.server.gateway.robots.observations import rows_of
from jurybox.server.gateway.robots.policy import RobotPolicy

SPEC = ModelSpec("p", {"x": TensorSpec("float32", (2,))}, {"actions": TensorSpec("float32", (2,))})
X = {"x": np.zeros(2, np.float32)}


class Rows:
    """The rows of a policy, which note what is asked."""

    known = SPEC

    def __init__(self):
        self.begins, self.left_places, self.until, self.fails = [], [], None, None

    async def compute(self, request, place, *, begins):
        self.until = request.until
        read = request.read(self.known, False)
        if self.fails is not None:
            raise self.fails
        self.begins.append((place, begins))
        return RowsReply({name: np.zeros((read.n, 2), np.float32) for name in self.known.outputs}, 3)

    def left(self, place):
        self.left_places.append(place)


@pytest.fixture
def counters():
    return PortCounters()


@pytest.fixture
def policy(counters):
    made = RobotPolicy(Frontend("ipc:///nowhere", None), "p", 2, 30.0, counters)
    made._rows = Rows()
    return made


async def test_an_episode_begins_with_its_first_observation_and_after_each_reset(policy, counters):
    rows = policy._rows
    async with policy.episode(1.0) as episode:
        for _ in range(2):
            await episode.infer(X, needs_actions=False)
        episode.reset()
        rows.fails = SessionLost("the engine is gone")
        with pytest.raises(SessionLost):
            await episode.infer(X, needs_actions=False)
        rows.fails = None
        for _ in range(2):
            await episode.infer(X, needs_actions=False)
        assert not rows.left_places
    assert rows.begins == [(0, True), (0, False), (0, True), (0, False)] and rows.left_places == [0]
    assert counters.sessions == 2, "what was never answered did not begin"


async def test_a_place_of_a_robot_that_returns_is_not_left_with_its_request(policy):
    async with policy.episode(1.0, returns=True):
        pass
    assert not policy._rows.left_places and sorted(policy._free) == [0, 1]


async def test_a_session_begins_with_its_name_and_does_not_come_back(policy, counters, monkeypatch):
    monkeypatch.setattr(module, "_MOST_ENDED", 2)
    begins = policy._rows.begins
    async with policy.episode(1.0) as episode:
        for session in ("", "a", "a", "b", "c", "d"):
            episode.name(session)
            await episode.infer(X, needs_actions=False)
        assert [began for _, began in begins] == [True, True, False, True, True, True]
        for session in ("b", "c"):
            with pytest.raises(SessionLost, match=f"session '{session}' ended when 'd' began"):
                episode.name(session)
        episode.name("a")  # only the last ones are remembered
        await episode.infer(X, needs_actions=False)
    assert counters.sessions == 6


@pytest.mark.parametrize(("within", "seconds"), [(None, 30.0), (2.0, 2.0), (60.0, 30.0)])
async def test_an_answer_may_take_as_long_as_the_port_allows_or_less(policy, monkeypatch, within, seconds):
    clock = given(Clock(), monkeypatch, module)
    async with policy.episode(1.0) as episode:
        await episode.infer(X, within, needs_actions=True)
    assert policy._rows.until == clock.now + seconds


@pytest.mark.parametrize(
    ("outputs", "fits"), [(["actions"], True), (["other"], True), (["other", "actions"], True), (["a", "b"], False)]
)
async def test_actions_are_the_only_output_or_named_so(policy, counters, outputs, fits):
    policy._rows.known = ModelSpec("p", SPEC.inputs, {name: TensorSpec("float32", (2,)) for name in outputs})
    async with policy.episode(1.0) as episode:
        if fits:
            assert [*await episode.infer(X, needs_actions=True)] == outputs
        else:
            with pytest.raises(
                SpecMismatch, match="model 'p' has a, b: robots expect one output, or one named actions"
            ):
                await episode.infer(X, needs_actions=True)
        await episode.infer(X, needs_actions=False)
    assert counters.sessions == 1 and episode.takes("x") and not episode.takes("y")


@pytest.mark.parametrize("truths", [np.array([True, False]), [True, False]])
def test_truth_values_are_no_floats(truths):
    with pytest.raises(SpecMismatch, match="'x' of the observation: expected float32, came bool"):
        rows_of({"x": truths}, SPEC)
    whole = ModelSpec("p", {"x": TensorSpec("bool", (2,))}, SPEC.outputs)
    assert rows_of({"x": truths}, whole).values["x"][0].tolist() == [True, False]
