"""Connections of HTTP without a parser or a socket, by a clock of the test's own: what ends each, and when."""

from __future__ import annotations

import pytest
from tests.clocks import Clock, given
from tests.wires import Wire

from jurybox import native
from jurybox.server.gateway import http_connection
from jurybox.server.gateway.http_connection import KEEP_ALIVE, LINGER, PAUSE, Counted
from jurybox.server.security.limits import ANSWERS, SILENCE
from jurybox.server.security.pace import Turns

MIB = 1 << 20


class Parsed:
    """What uvicorn's protocol is to a connection; the test says what was parsed."""

    def __init__(self):
        self.app, self.cycle, self.seen = "the application", None, []

    def connection_made(self, transport):
        self.transport = transport
        self.connections.add(self)

    def data_received(self, data):
        self.seen.append(data)

    def connection_lost(self, _error):
        self.connections.discard(self)

    def pause_writing(self):
        self.seen.append("pause")

    def resume_writing(self):
        self.seen.append("resume")


class Connection(Counted, Parsed):
    between, receiving, _works = True, False, False

    def _drop(self, data):
        return data.endswith(b"end")


@pytest.fixture
def clock(monkeypatch):
    return given(Clock(), monkeypatch, http_connection)


@pytest.fixture
def connect(clock, monkeypatch):
    """Open a connection of a server that has room for three; return it and its transport."""
    monkeypatch.setattr(http_connection, "HTTP_CONNECTIONS", 3)
    monkeypatch.setattr(Connection, "budget", native.Budget((MIB, MIB, 9), (MIB, MIB, 9)), raising=False)
    monkeypatch.setattr(Connection, "turns", Turns(), raising=False)
    monkeypatch.setattr(Connection, "connections", set(), raising=False)

    def connected(data=b"", *, tls=False):
        connection, beneath = Connection(), Wire(can_end=not tls)
        connection.connection_made(beneath)
        if data:
            connection.data_received(data)
        return connection, beneath

    return connected


def test_a_request_that_does_not_go_on_is_told_so_and_its_rest_is_awaited(connect, clock):
    connection, beneath = connect(b"POST")
    connection.receiving = True
    connection.end_silent(clock.now + SILENCE - 0.5)
    assert not beneath.sent
    connection.end_silent(clock.now + SILENCE)
    assert beneath.sent.startswith(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\n") and beneath.ended
    assert not beneath.closed and connection.in_progress
    sent = beneath.sent
    connection.end_silent(clock.now + SILENCE)
    connection.transport.write(b"more")
    assert beneath.sent == sent, "nothing follows the answer that ends the connection"


def test_a_connection_between_two_requests_is_left_to_its_parser_and_one_that_never_asked_is_closed(connect, clock):
    asked, beneath_asked = connect(b"GET")
    silent, beneath = connect()
    for seconds, closed in ((KEEP_ALIVE, False), (KEEP_ALIVE + 0.5, True)):
        for connection in (asked, silent):
            connection.end_silent(clock.now + seconds)
        assert beneath.closed == closed and not beneath.sent and not beneath_asked.closed


@pytest.mark.parametrize("tls", [False, True])
def test_the_rest_of_a_request_is_dropped_after_its_answer_and_then_the_connection_ends(connect, tls):
    connection, beneath = connect(b"POST", tls=tls)
    connection.receiving = True
    connection.transport.pause_reading()
    connection.transport.close()
    assert beneath.ended == (not tls) and beneath.reads and not beneath.closed
    connection.data_received(b"more")
    assert not beneath.closed
    connection.data_received(b"the end")
    assert beneath.closed and connection.seen == [b"POST"]


@pytest.mark.parametrize(
    ("steps", "aborted"),
    [
        ([PAUSE - 0.5], False),
        ([PAUSE], True),
        ([PAUSE - 0.5] * 5, False),
        ([PAUSE - 0.5] * 6 + [PAUSE - 2.5], False),
        ([PAUSE - 0.5] * 6 + [LINGER - 6 * (PAUSE - 0.5)], True),
    ],
)
def test_the_rest_of_a_request_may_take_a_while_and_not_pause_for_long(connect, clock, steps, aborted):
    connection, beneath = connect(b"POST")
    connection.receiving = True
    connection.transport.close()
    for seconds in steps:
        connection.data_received(b"more")
        clock.now += seconds
    connection.end_silent(clock.now)
    assert beneath.aborted == aborted


def test_what_cannot_be_parsed_is_answered_and_dropped_up_to_a_bound(connect, clock):
    connection, beneath = connect(b"nonsense")
    connection.send_400_response("no HTTP")
    assert beneath.sent.endswith(b"content-length: 7\r\n\r\nno HTTP") and beneath.sent.startswith(b"HTTP/1.1 400 ")
    assert beneath.ended and not beneath.closed and connection.sends_ahead
    for _ in range(8):
        clock.now += 1.0
        connection.data_received(bytes(MIB))
    assert not beneath.closed, "eight MiB are read"
    connection.end_silent(clock.now + PAUSE - 0.5)
    assert not beneath.aborted
    connection.data_received(b"x")
    assert beneath.closed


def test_a_connection_that_is_between_requests_closes_at_once_and_only_once(connect):
    connection, beneath = connect(b"GET")
    connection.transport.close()
    assert beneath.closed and not beneath.ended and not connection.transport.closing
    beneath.closed = False
    beneath.aborted = True
    connection.transport.close()
    assert not beneath.closed


def test_unread_answers_are_counted_while_the_transport_is_full(connect):
    connection, beneath = connect(b"GET")
    held = connection.account.held
    assert not connection.in_progress
    beneath.unsent = 1000
    assert connection.in_progress, "its client may not have the answer"
    connection.pause_writing()
    assert (held(ANSWERS), connection.seen[-1]) == (1000, "pause")
    connection.resume_writing()
    assert (held(ANSWERS), connection.seen[-1]) == (0, "resume")
    connection.pause_writing()
    connection.connection_lost(None)
    assert held(ANSWERS) == connection.budget.held(ANSWERS) == 0
    assert connection.app == "the application" and connection.cycle is None
    connection.transport.close()
    assert beneath.closed, "and nothing of it is called any more"


def test_a_connection_too_many_ends_one_that_was_idle_for_longest(connect, clock):
    first, second, third = (connect(b"GET") for _ in range(3))
    clock.now += 2.0
    first[0].data_received(b"GET")
    third[0].between = False
    fourth, beneath = connect()
    assert second[1].aborted and not (first[1].aborted or third[1].aborted or beneath.aborted or beneath.sent)
    assert second[0] not in fourth.connections and len(fourth.connections) == 3


@pytest.mark.parametrize("why", ["it works", "its answer is unread", "it asked just now"])
def test_a_connection_too_many_is_told_so_if_all_are_in_use(connect, clock, why):
    others = [connect(b"GET") for _ in range(3)]
    clock.now += 0.0 if why == "it asked just now" else 2.0
    for connection, beneath in others:
        connection.between = why != "it works"
        if why == "its answer is unread":
            beneath.unsent = 1
            connection.pause_writing()
    _, beneath = connect()
    assert beneath.sent.startswith(b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 2\r\n")
    assert beneath.sent.endswith(b"ask again later") and beneath.ended and not beneath.closed
    assert not any(one.aborted for _, one in others)
    assert connect()[1].sent, "whoever waits for its end takes nobody's place"


def test_a_connection_that_has_said_nothing_makes_room_at_once(connect):
    silent = connect()
    for _ in range(2):
        connect(b"GET")
    _, beneath = connect()
    assert silent[1].aborted and not beneath.sent


def test_connections_that_have_their_last_answer_take_nobodys_place_and_far_too_many_are_closed_at_once(connect):
    used = [connect(b"GET")[0] for _ in range(3)]
    for connection in used:
        connection.between = False
    refused = [connect() for _ in range(4)]
    assert all(beneath.sent for _, beneath in refused)
    assert [beneath.closed for _, beneath in refused] == [False] * 3 + [True]
    for gone in (refused[-1][0], used[0]):
        gone.connection_lost(None)
    assert not connect()[1].sent
