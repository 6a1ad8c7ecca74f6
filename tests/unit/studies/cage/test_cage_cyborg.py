"""The adapter to the real CybORG: its wrapping against something of that shape, itself where CybORG is installed."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from jurybox.studies.workflow.cage import CyborgEnv, CyborgMissing
from jurybox.studies.workflow.cage import tables as t
from jurybox.studies.workflow.cage.cyborg import levels
from jurybox.studies.workflow.cage.tables import Blue, action


class PrivilegeEscalate: ...


class Sleep: ...


class Shape:
    """The parts of CybORG that the adapter uses, with a count of the requests for the true state."""

    def __init__(self) -> None:
        self.asked = 0
        self.red: object = Sleep()
        self.state = {
            "success": True,
            "User0": {"Sessions": [{"Agent": "Red", "Username": "SYSTEM"}]},
            "User1": {"Sessions": [{"Agent": "Blue", "Username": "root"}, {"Agent": "Red", "Username": "user"}]},
            "Op_Host0": {"Processes": []},
        }

    def get_agent_state(self, agent: str) -> dict[str, object]:
        assert agent == "True"
        self.asked += 1
        return self.state

    def get_last_action(self, agent: str) -> object:
        assert agent == "Red"
        return self.red

    def reset(self) -> np.ndarray:
        return np.zeros(52)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, dict[str, object]]:
        return np.ones(52), -0.1, False, {}


@pytest.fixture
def shape() -> Shape:
    return Shape()


@pytest.fixture
def env(shape: Shape) -> CyborgEnv:
    return CyborgEnv("Meander", episode_length=3, make=lambda agent: (shape, shape))


def test_the_true_state_becomes_a_level_per_host(shape: Shape) -> None:
    found = dict(zip(t.HOSTS, levels(shape.state).tolist(), strict=True))
    assert found["User0"] == 2 and found["User1"] == 1 and sum(found.values()) == 3


def test_the_old_api_becomes_gymnasiums(env: CyborgEnv) -> None:
    observation, info = env.reset(seed=1)
    assert env.observation_space.contains(observation) and info["true_state"].shape == (13,)
    ends = [env.step(0)[1:4] for _ in range(3)]
    assert ends == [(-0.1, False, False)] * 2 + [(-0.1, False, True)]


def test_the_true_state_is_requested_only_after_possible_changes(env: CyborgEnv, shape: Shape) -> None:
    env.reset()
    assert shape.asked == 1
    env.step(0)
    env.step(action(Blue.TOMCAT, "User1"))
    assert shape.asked == 1
    env.step(action(Blue.RESTORE, "User1"))
    assert shape.asked == 2
    shape.red = PrivilegeEscalate()
    _, _, _, _, info = env.step(0)
    assert shape.asked == 3
    with pytest.raises(ValueError, match="read-only"):
        info["true_state"][0] = 1


@pytest.mark.skipif(importlib.util.find_spec("CybORG") is not None, reason="CybORG is installed")
def test_without_cyborg_the_error_says_where_to_get_it() -> None:
    with pytest.raises(CyborgMissing, match="cage-challenge-2"):
        CyborgEnv()


@pytest.mark.skipif(importlib.util.find_spec("CybORG") is None, reason="CybORG is not installed")
@pytest.mark.parametrize("red", ["B_line", "Meander"])
def test_the_real_thing_steps(red: str) -> None:
    env = CyborgEnv(red, episode_length=30)
    observation, info = env.reset(seed=0)
    assert env.observation_space.contains(observation) and info["true_state"][t.USER0] > 0
    total = sum(float(env.step(0)[1]) for _ in range(30))
    assert -260 < total < -10
