"""What is kept for each of LeRobot's robots counts for its connection, and is given back when that has ended."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tests.loops import turns

from jurybox import native
from jurybox.protocol.spec import ModelSpec, TensorSpec
from jurybox.server.gateway.robots.lerobot_features import STATE, RobotFeatures
from jurybox.server.gateway.robots.lerobot_messages import Observed, Setup
from jurybox.server.gateway.robots.lerobot_robots import LeRobotRobots
from jurybox.server.security.limits import RECEIVED, ROBOTS, Charge, budget_of

TWO = TensorSpec("float32", (2,))
SPEC = ModelSpec("policy", {STATE: TWO}, {"actions": TWO})


@pytest.mark.parametrize("told", [True, False])
async def test_a_robots_account_is_that_of_its_connection_or_one_of_its_own(told):
    """Over grpcio a call knows no account."""
    budget = budget_of(1 << 20)
    account = native.Account(budget, ROBOTS)
    call = SimpleNamespace(peer=lambda: "ipv4:1.2.3.4:5", **({"account": account} if told else {}))
    robot = LeRobotRobots(budget, ROBOTS).of(call, new=True)
    assert (robot.account is account) is told
    Charge(budget, robot.account).take(1000)
    assert budget.held(RECEIVED) == 1000


@pytest.mark.parametrize("end", ["the connection's", "the door's"])
async def test_an_observation_that_waits_is_given_back_at_the_end_whoever_keeps_its_robot(end):
    budget, farewells = budget_of(1 << 20), {}
    robots = LeRobotRobots(budget, ROBOTS)
    robot = robots.of(SimpleNamespace(peer=lambda: "ipv4:1.2.3.4:5", farewells=farewells), new=True)
    robot.features = RobotFeatures(Setup("act", {STATE: {"names": ["a", "b"]}}, 5, {}), SPEC)
    charge = Charge(budget, robot.account)
    charge.take(1000)
    assert robot.keep(Observed((), 0.0, 0, {"a": 1.0, "b": 2.0}, must_go=False), charge)
    if end == "the door's":
        await robots.close()
    else:
        farewells["robot"]()
    assert budget.held(RECEIVED) == 0
    await turns()
