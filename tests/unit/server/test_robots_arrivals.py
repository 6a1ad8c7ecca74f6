"""The next batch of robots waits for those that are about to send a request, and only while it pays."""

from __future__ import annotations

import asyncio
import heapq
from types import SimpleNamespace

import numpy as np
import pytest
from tests.loops import turns

from jurybox.client import SessionLost, Timeout
from jurybox.client.ticket import Reply
from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.protocol.errors import Code, Refused
from jurybox.server.frontend.coalescer import RequestCoalescer
from jurybox.server.frontend.frontend import Frontend
from jurybox.server.frontend.reserved import ReservedRows
from jurybox.server.frontend.returns import Returns, WholeGroup
from jurybox.server.gateway.robots.policy import RobotPolicy


class Port:
    """Robots in a closed loop, a tracker that decides when batches are sent, and one engine: simulated, in seconds.

    Args:
        fixed, by_row: the cost of a batch.
        gap: the time to read one observation; they are read one after another.
        slow: robots that compute for a second before the next request.
        away: seconds between an answer and the next observation.
    """

    def __init__(self, robots, fixed, by_row, gap, most=8, slow=0, away=0.0):
        self.away = away
        self.now = 0.0
        self.arrivals = WholeGroup(most, clock=lambda: self.now)
        self.batches, self.events, self.order = [], [], 0
        self.waiting, self.computing, self.read = [], [], 0.0
        self.cost, self.gap, self.most = (fixed, by_row), gap, most
        self.slow = set(range(slow))
        for robot in range(robots):
            self.comes(robot)

    def at(self, when, what, *which):
        heapq.heappush(self.events, (when, self.order, what, which))
        self.order += 1

    def comes(self, robot):
        self.read = max(self.read, self.now + (1.0 if robot in self.slow else self.away)) + self.gap
        self.at(self.read, self.asks, robot)
        if robot in self.slow:
            self.read = self.now  # slow robots do not delay others

    def asks(self, robot):
        self.arrivals.arrived(robot)
        self.waiting.append(robot)
        self.send()

    def send(self):
        if self.computing or not self.waiting:
            return
        if len(self.waiting) < self.most and (wait := self.arrivals.wait(len(self.waiting), 0)) > 0:
            self.at(self.now + wait, self.send)
            return
        self.computing, self.waiting = self.waiting[: self.most], self.waiting[self.most :]
        self.at(self.now + self.cost[0] + self.cost[1] * len(self.computing), self.answers)

    def answers(self):
        done, self.computing = self.computing, []
        self.batches.append((self.now, len(done)))
        self.arrivals.took(len(done), self.cost[0] + self.cost[1] * len(done))
        for robot in done:
            self.arrivals.answered(robot)
        for robot in done:
            self.comes(robot)
        self.send()

    def run(self, until):
        """Answers a second in the last half of the time, and the mean batch."""
        while self.events and self.events[0][0] < until:
            self.now, _, what, which = heapq.heappop(self.events)
            what(*which)
        last = [rows for when, rows in self.batches if when > until / 2]
        return sum(last) / (until / 2), sum(last) / len(last)


def test_robots_in_a_closed_loop_share_a_batch_if_its_cost_is_fixed():
    rate, batch = Port(8, fixed=0.018, by_row=0.0002, gap=0.0006).run(20.0)
    alone, _ = Port(1, fixed=0.018, by_row=0.0002, gap=0.0006).run(20.0)
    assert batch == 8.0
    assert rate > 6 * alone


def test_robots_behind_a_slow_network_are_computed_in_one_batch_while_that_pays():
    near, batch = Port(8, fixed=0.08, by_row=0.0, gap=0.001, away=0.04).run(40.0)
    assert batch == 8.0
    assert near == pytest.approx(8 / (0.08 + 0.04 + 0.008), rel=0.02)
    for away in (0.07, 0.075, 0.09, 0.2):  # robots that would return only after another batch are not waited for
        far, hasty = (Port(8, fixed=0.08, by_row=0.0, gap=0.001, away=away) for _ in range(2))
        hasty.arrivals.wait = lambda waiting, computing: 0.0
        assert far.run(40.0)[0] > 0.98 * hasty.run(40.0)[0]


def test_little_is_lost_if_most_waits_are_in_vain():
    """A few robots come back just in time, and the rest too late."""
    for seconds in (20.0, 40.0):
        patient, hasty = (Port(8, fixed=0.01, by_row=0.002, gap=0.003, away=0.005) for _ in range(2))
        hasty.arrivals.wait = lambda waiting, computing: 0.0
        assert patient.run(seconds)[0] > 0.75 * hasty.run(seconds)[0]


def test_batches_do_not_wait_if_only_rows_have_a_cost():
    rate, _ = Port(8, fixed=0.0, by_row=0.005, gap=0.002).run(20.0)
    assert rate > 0.98 / 0.005  # the engine is never idle


def test_robots_that_take_longer_to_come_back_than_a_batch_costs_are_computed_in_groups():
    rate, _ = Port(8, fixed=0.01, by_row=0.0, gap=0.003).run(20.0)
    assert rate > 0.95 / 0.003  # as fast as they can be read at all


def test_a_lone_robot_does_not_wait_and_slow_robots_delay_no_other():
    rate, batch = Port(1, fixed=0.02, by_row=0.0, gap=0.001).run(10.0)
    assert batch == 1.0 and rate > 0.95 / 0.021
    quick_alone, _ = Port(4, fixed=0.02, by_row=0.0, gap=0.001).run(10.0)
    with_others, _ = Port(8, fixed=0.02, by_row=0.0, gap=0.001, slow=4).run(10.0)
    assert with_others > 0.9 * quick_alone


def test_clients_that_stay_away_are_waited_for_once_and_not_longer_than_a_batch_costs():
    now = [0.0]
    arrivals = WholeGroup(8, clock=lambda: now[0])
    for rows in (1, 8, 1, 8):
        arrivals.took(rows, 0.02)
    assert arrivals.fixed == pytest.approx(0.02)

    def back_at_once(*robots):
        for robot in robots:
            arrivals.answered(robot)
        now[0] += 0.001
        for robot in robots:
            arrivals.arrived(robot)

    back_at_once(0, 1)  # both are quick
    for robot in (0, 1):
        arrivals.answered(robot)
    now[0] += 0.005
    arrivals.arrived(0)
    assert arrivals.wait(1, 0) == pytest.approx(0.015)
    now[0] += 0.0151
    assert arrivals.wait(1, 0) == 0.0
    arrivals.answered(0)
    now[0] += 0.001
    arrivals.arrived(0)
    assert arrivals.wait(1, 0) == 0.0  # the other is not waited for again
    arrivals.answered(0)
    back_at_once(1)
    arrivals.answered(1)
    arrivals.left(1)
    arrivals.arrived(0)
    assert arrivals.wait(1, 0) == 0.0  # nor one that has disconnected


def test_engines_get_their_parts_of_the_robots():
    now = [0.0]
    arrivals = WholeGroup(8, engines=2, clock=lambda: now[0])
    for rows in (1, 8, 1, 8):
        arrivals.took(rows, 0.02)
    for _ in range(2):
        for robot in range(8):
            arrivals.arrived(robot)
        for robot in range(8):
            arrivals.answered(robot)
    for robot in range(4):
        assert arrivals.wait(robot, 0) > 0
        arrivals.arrived(robot)
    assert arrivals.wait(4, 0) == 0.0  # and the other four go to the other engine


SPEC = ModelSpec("m", {"x": TensorSpec("float32", (2,))}, {"y": TensorSpec("float32", (2,))})


class Lane:
    """A model that answers twice its input a few turns of the loop later, and remembers its tickets."""

    name, spec, max_batch = "m", SPEC, 8

    def __init__(self):
        self.tickets = []

    async def infer_reply_async(self, inputs, *, timeout, version):
        self.tickets.append(inputs["x"].copy())
        await turns()
        return Reply(inputs["x"] * 2, 7)

    def room(self):
        return 8

    def look(self):
        pass


def rows(value, dtype="float32"):
    return {"x": np.full((1, 2), value, dtype)}


async def test_a_ticket_is_held_back_until_all_have_come_or_their_time_is_over():
    lane, held, taken = Lane(), [], []

    class Gathering(Returns):
        waits_left = [60.0] * 2 + [0.0] + [0.05, 0.05, 0.0]  # while one, two and three have come; then for nobody

        def wait(self, waiting, computing):
            held.append(waiting)
            return self.waits_left.pop(0)

        def went(self, waits):
            self.waits = waits()

        def took(self, rows, seconds):
            taken.append(rows)

    gathering = Gathering()
    together = RequestCoalescer(lane, 8, returns=gathering)
    asking = []
    for value in (1, 2, 3):
        assert not lane.tickets
        asking.append(asyncio.ensure_future(together.ask(rows(value), 1, 60.0, 0)))
        await turns()
    answers = await asyncio.wait_for(asyncio.gather(*asking), 30)
    assert held == [1, 2, 3] and [len(ticket) for ticket in lane.tickets] == [3] and len(gathering.waits) == 3
    assert [answer[0]["y"][0, 0] for answer in answers] == [2, 4, 6]
    outputs, _ = await asyncio.wait_for(together.ask(rows(4), 1, 60.0, 0), 30)  # nobody comes
    await turns()
    assert held == [1, 2, 3, 1, 1, 1] and taken == [3, 1]
    assert outputs["y"][0, 0] == 8 and not together.busy


async def test_a_request_whose_caller_left_is_not_sent_and_a_full_ticket_does_not_wait():
    lane = Lane()

    class Gathering(Returns):
        def wait(self, waiting, computing):
            return 60.0

    together = RequestCoalescer(lane, 8, returns=Gathering())
    gone = asyncio.ensure_future(together.ask(rows(9), 1, 60.0, 0))
    await turns()
    gone.cancel()
    answers = await asyncio.wait_for(
        asyncio.gather(*(together.ask(rows(value), 1, 60.0, 0) for value in range(8)), return_exceptions=True), 30
    )
    assert [answer[0]["y"][0, 0] for answer in answers[:7]] == [0, 2, 4, 6, 8, 10, 12]
    assert not (np.concatenate(lane.tickets) == 9).any()


async def test_rows_made_for_an_earlier_dtype_never_become_rows_of_another():
    lane = Lane()

    class Gathering(Returns):
        def wait(self, waiting, computing):
            return 0.0 if waiting == 2 else 0.05

    for gathering in (None, Gathering()):
        together = RequestCoalescer(lane, 8, returns=gathering)
        await asyncio.gather(together.ask(rows(1), 1, 60.0, 0), together.ask(rows(2, "uint8"), 1, 60.0, 0))
        assert {str(ticket.dtype) for ticket in lane.tickets if 2 in ticket} == {"uint8"}
        lane.tickets.clear()


class Lanes:
    """Lanes whose only one answers with what it is given, after its errors were raised."""

    def __init__(self, *answers, state=True):
        self.answers, self.reserved, self.asked = list(answers), 0, []
        self._state = object() if state else None

    async def reserve(self, name, rows, seconds, returns, priority):
        self.reserved += 1
        model = SimpleNamespace(spec=SPEC)
        self.held = SimpleNamespace(model=model, spec=SPEC, sessions=self._state, retired=False)
        return self.held

    async def ask_sessions(self, held, inputs, sessions, begin, seconds, version, client):
        self.asked.append((sessions, begin))
        if isinstance(answer := self.answers.pop(0), Exception):
            held.retired = getattr(answer, "code", None) == Code.STALE_LEASE
            raise answer
        return {"y": np.full((1, 2), answer)}, 7

    async def ask(self, held, inputs, n, seconds, version, client):
        return await self.ask_sessions(held, inputs, [client], [True], seconds, version, client)


OBSERVATION = {"x": np.zeros(2, np.float32)}


def policy_on(lanes):
    policy = RobotPolicy(Frontend("ipc:///nowhere", None), "m", 2, 1.0)
    policy._rows = ReservedRows(lanes, "m", 2, 1.0)
    return policy


async def test_an_episode_does_not_continue_after_a_late_answer():
    """Its ticket may be in time for the other robots in it, so that the step is taken."""
    policy = policy_on(Lanes(0.0, Timeout("too late"), 3.0))
    await policy.ask(OBSERVATION, 0, begins=True)
    with pytest.raises(Timeout):
        await policy.ask(OBSERVATION, 0, begins=False)
    for _ in range(2):
        with pytest.raises(SessionLost, match="begin another episode"):
            await policy.ask(OBSERVATION, 0, begins=False)
    assert (await policy.ask(OBSERVATION, 0, begins=True))["y"][0] == 3.0


@pytest.mark.parametrize("state", [True, False])
async def test_rows_that_were_taken_back_cost_an_episode_its_state_and_others_nothing(state):
    lanes = Lanes(
        Refused("taken back", Code.STALE_LEASE), 1.0, Refused("taken back", Code.STALE_LEASE), 2.0, state=state
    )
    policy = policy_on(lanes)
    assert (await policy.ask(OBSERVATION, 1, begins=True))["y"][0] == 1.0
    assert lanes.reserved == 2
    if state:
        with pytest.raises(SessionLost, match="begin another episode"):
            await policy.ask(OBSERVATION, 1, begins=False)
    assert (await policy.ask(OBSERVATION, 1, begins=state))["y"][0] == 2.0
    assert lanes.reserved == 3


async def test_a_model_that_was_loaded_again_with_another_spec_gets_another_lane():
    lanes = Lanes(1.0, 2.0)
    lanes.retire = lambda held: setattr(held, "retired", True)
    policy = policy_on(lanes)
    await policy.ask(OBSERVATION, 0, begins=True)
    lanes.held.model.spec = SPEC.__class__("m", SPEC.inputs, SPEC.outputs)
    await policy.ask(OBSERVATION, 0, begins=True)
    assert lanes.reserved == 2
