"""What a connection to a relay knows of the link that it has in place of another."""

from __future__ import annotations

import pytest
from tests.clocks import Clock, given
from tests.unit.client.test_remote_connection import Link

from jurybox.client.remote import connection as connection_module
from jurybox.client.remote.connection import IDLE, Connection
from jurybox.protocol.scoreboard import EngineState


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return given(Clock(), monkeypatch, connection_module)


def test_the_link_in_place_of_a_silent_one_has_the_whole_time_for_an_answer_to_its_first_ping(clock: Clock) -> None:
    connection = Connection(lambda attempt: Link())  # type: ignore[arg-type, return-value]
    for _ in range(2):
        link = connection.link
        assert link is not None and not link.pings
        link.silence = 100.0
        link.send(5, ())
        assert connection.server_lives() and link.pings == 1 and not link.broken
        clock.now += 10.1
        assert connection.server_lives() and link.broken and connection.link is not link


def test_a_link_that_does_not_stand_is_waited_for_although_something_has_arrived(clock: Clock) -> None:
    connection = Connection(lambda attempt: Link(ready=False))  # type: ignore[arg-type, return-value]
    link = connection.link
    link.there = [(5, [b"head"])]
    clock.now += 5.1
    assert connection.server_lives() and link.broken, "its handshake has taken too long"


def test_a_connection_that_is_closed_opens_no_link_and_closes_the_one_it_has() -> None:
    opened: list[int] = []
    connection = Connection(lambda attempt: opened.append(attempt) or Link())  # type: ignore[arg-type, func-returns-value]
    link = connection.link
    for _ in range(2):
        connection.close()
    connection.server_lives()
    assert link.broken and opened == [0] and connection.link is None and not connection.stands()


def test_a_link_that_was_made_within_the_opening_of_a_closed_connection_is_closed() -> None:
    made: list[Link] = []

    def opens(attempt: int) -> Link:
        made.append(Link())
        if len(made) == 2:
            connection.close()  # a signal handler
        return made[-1]

    connection = Connection(opens)  # type: ignore[arg-type]
    made[0].close()
    connection.server_lives()
    assert len(made) == 2 and all(link.broken for link in made)


def test_an_idle_link_in_place_of_a_closed_one_is_used_only_once_it_stands(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = [Link(), Link(ready=False), Link()]
    connection = Connection(lambda attempt: links.pop(0))  # type: ignore[arg-type, return-value]
    first = connection.link
    first.silence, first.at_look = IDLE, [first.close]
    slept: list[float] = []

    def select(readers: list[int], *rest: object) -> None:
        slept.append(rest[-1])  # type: ignore[arg-type]
        clock.now += 0.05

    monkeypatch.setattr(connection_module.select, "select", select)
    assert not connection.stands() and connection.link is not first
    assert 0.9 < sum(slept) < 1.1 and connection.engines["state"][0] == EngineState.ABSENT
    following = connection.link
    following.at_look = [lambda: setattr(following, "ready", True)]
    assert connection.stands() and connection.link is following
    assert connection.engines["state"][0] == EngineState.SERVING


def test_a_connection_without_a_link_does_not_stand(clock: Clock) -> None:
    links = [Link(), None]
    connection = Connection(lambda attempt: links.pop(0))  # type: ignore[arg-type, return-value]
    link = connection.link
    link.silence, link.at_look = IDLE, [link.close]
    assert connection.stands() is False and connection.link is None and connection.stands() is False
