"""A robot's observations and answers are counted in the budget of the gateway, and one without room fails alone."""

from __future__ import annotations

import pytest

from jurybox import native
from jurybox.server.gateway.robots import openpi as module
from jurybox.server.gateway.robots.counters import PortCounters, RobotDelays
from jurybox.server.gateway.robots.msgpack_arrays import packb
from jurybox.server.gateway.robots.openpi import RobotServer
from jurybox.server.security.limits import ANSWERS, RECEIVED, ROBOTS


class Robot:
    def __init__(self, budget):
        self.budget, self.received, self.held = budget, [], []

    async def send(self, frame):
        self.held.append([self.budget.held(kind) for kind in (RECEIVED, ANSWERS)])
        self.received.append(frame)


class Fixed(module.Openpi):
    async def answered(self, episode, request, within):
        return b"a" * 40, True


@pytest.mark.parametrize(
    ("size", "in_all", "whose"), [(20, 1000, ""), (80, 1000, "this connection"), (20, 90, "the server")]
)
async def test_an_observation_without_room_gets_an_error_and_the_next_one_an_answer(size, in_all, whose):
    budget = native.Budget((150, 150, 9), (in_all, in_all, 9))
    server, robot, account = RobotServer.__new__(RobotServer), Robot(budget), native.Account(budget, ROBOTS)
    server.budget, server.counters = budget, PortCounters()
    neighbour = native.Account(budget, ROBOTS)
    neighbour.owe(RECEIVED, 60)
    frame = packb({"x": "y" * size})

    async def answer():
        return await server._answer(robot, account, Fixed(), None, RobotDelays(server.counters), frame)

    assert await answer()
    if whose:
        assert whose in robot.received[0] and "ask again later" in robot.received[0]
        assert budget.refused(RECEIVED, 1 if whose == "this connection" else 2, ROBOTS) == 1
    else:
        assert robot.held == [[60 + 2 * len(frame), 40]]
    neighbour.give(RECEIVED, 60)
    frame = packb({"x": "y"})
    assert await answer()
    assert robot.received[-1] == b"a" * 40
    assert [budget.held(kind) for kind in (RECEIVED, ANSWERS)] == [0, 0]
