"""A robot's WebSocket connection that is heard, and whose message waits while nothing is read of it."""

from __future__ import annotations

from tests.unit.server.test_robots_connection import frame, port, told  # noqa: F401  `port` is a fixture

from jurybox.server.security.limits import SILENCE


async def test_whatever_a_robot_sends_is_heard_by_the_turns_of_all_doors(port):  # noqa: F811
    """Heavy work of other doors leaves time only to those who want something."""
    robot, _ = await port.joined()
    heard = []
    port.turns.heard = heard.append
    for sent in (frame(b"x" * 100)[:50], frame(b"x" * 100)[50:]):
        robot.data_received(sent)
    assert heard == [robot, robot]


async def test_half_a_message_is_not_ended_while_nothing_of_its_rest_is_read(port):  # noqa: F811
    robot, wire = await port.joined()
    robot.data_received(frame(b"x" * 100)[:50])
    robot.pause_writing()
    robot.end_silent(port.now + SILENCE + 1)
    assert not wire.sent, "the rest may have come long ago"
    robot.resume_writing()
    robot.end_silent(port.now + SILENCE + 1)
    assert told(wire)[0] == 1001
