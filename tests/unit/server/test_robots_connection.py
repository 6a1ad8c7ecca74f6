"""A robot's connection over a wire without a network: what it holds, when it reads, and when it is ended."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from tests.loops import turns
from tests.wires import Wire
from websockets.exceptions import ConnectionClosed
from websockets.server import ServerProtocol

from jurybox import native
from jurybox.server.gateway.robots import connection as module
from jurybox.server.gateway.robots.connection import RobotConnection
from jurybox.server.security.limits import RECEIVED, SILENCE

HELLO = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
WAITING = 64  # connections without a place


def frame(data, opcode=2, *, fin=True):
    size = len(data)
    head = bytes((128 + size,)) if size < 126 else b"\xfe" + size.to_bytes(2) if size < 1 << 16 else None
    return bytes((fin << 7 | opcode,)) + (head or b"\xff" + size.to_bytes(8)) + bytes(4) + data


class Paces:
    """Turns that are had when a test says so."""

    def __init__(self):
        self.waiting, self.rests = [], 0.0

    def heard(self, who):
        pass

    def spent(self, began, size):
        return 0.0

    def rest(self, who, seconds):
        return self.rests

    def later(self, who, seconds):
        self.waiting.append(who)


class Port:
    """A port's connections, and its clock."""

    async def handler(self, robot):
        await robot.handshake()
        await robot.wait_closed()

    def __init__(self, monkeypatch, clients=1, each=1 << 24):
        self.now, self.step, self.handler_tasks = 100.0, 0.0, set()
        self.budget = native.Budget((each, each, 9), (1 << 26, 1 << 26, 9))
        self.turns, self.open = Paces(), set()
        names = {"budget": self.budget, "turns": self.turns, "open": self.open, "clients": clients}
        self.kind = type("PortConnection", (RobotConnection,), names)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=self.clock))

    def is_serving(self):
        return True

    def clock(self):
        self.now += self.step
        return self.now

    def comes(self, *, hello=True, placed=False):
        """A connection that has come now, and its wire."""
        robot, wire = self.kind(ServerProtocol(max_size=1 << 24), self, max_queue=1), Wire()
        robot.connection_made(wire)
        robot.placed = placed
        if hello:
            robot.data_received(HELLO)
        self.now += 0.001
        return robot, wire

    async def joined(self):
        """A connection whose handshake is done."""
        robot, wire = self.comes()
        await turns()
        assert wire.sent.startswith(b"HTTP/1.1 101")
        wire.sent = b""
        return robot, wire

    @property
    def held(self):
        return self.budget.held(RECEIVED)


@pytest.fixture
async def port(monkeypatch):
    made = Port(monkeypatch)
    yield made
    for robot in list(made.open):
        robot.connection_lost(None)
    assert made.held == 0
    for task in made.handler_tasks:
        task.cancel()
    await asyncio.gather(*made.handler_tasks, return_exceptions=True)


def told(wire):
    """The code and the reason of a close."""
    assert wire.sent[0] == 0x88
    return int.from_bytes(wire.sent[2:4]), wire.sent[4:].decode()


async def parts(robot, count):
    """Send so many frames of a message that goes on, to somebody who takes them."""
    taking = asyncio.create_task(robot.recv())
    await turns()
    for i in range(count):
        robot.data_received(frame(b"x", 0 if i else 2, fin=False))
        await turns(3)
    return taking


async def test_a_message_may_have_many_frames_and_is_counted_with_what_each_takes(port):
    robot, wire = await port.joined()
    for _ in range(2):  # each message has as many
        taking = await parts(robot, 1023)
        assert port.held > 100 * 1023 and not wire.sent
        robot.data_received(frame(b"x", 0))
        assert robot.is_ahead and not wire.sent
        assert await taking == b"x" * 1024
        assert not robot.is_ahead and port.held == 0


async def test_one_frame_too_many_ends_the_connection_soon(port, monkeypatch):
    monkeypatch.setattr(module, "_CLOSE", 0.0)
    robot, wire = await port.joined()
    taking = await parts(robot, 1024)
    assert told(wire) == (1009, "a message may have 1024 frames: send fewer and larger ones")
    async with asyncio.timeout(20):
        while not wire.is_closing():  # noqa: ASYNC110
            await asyncio.sleep(0)
    robot.connection_lost(None)
    with pytest.raises(ConnectionClosed):
        await taking


async def test_what_is_not_taken_is_counted_and_freed_with_its_connection(port):
    robot, _ = await port.joined()
    robot.data_received(frame(b"", 9))  # a ping is no message
    assert port.held == 0 and not robot.is_ahead
    robot.data_received(frame(b"x" * 1000)[:500])
    assert port.held >= 490
    robot.data_received(frame(b"x" * 1000)[500:])
    one = port.held
    assert one > 1000 and robot.is_ahead
    robot.data_received(frame(b"x" * 1000))
    assert port.held >= 2000
    robot.connection_lost(None)
    assert port.held == 0 and not port.open and not robot.is_ahead


async def test_a_message_without_room_ends_its_connection_and_what_follows_is_dropped(monkeypatch):
    port = Port(monkeypatch, each=2000)
    robot, wire = await port.joined()
    message = frame(b"x" * 3000)
    robot.data_received(message[:1000])
    assert not wire.sent and port.held > 900
    robot.data_received(message[1000:2500])
    code, why = told(wire)
    assert code == 1013 and "this connection" in why
    before = wire.sent
    robot.data_received(message[2500:])
    assert wire.sent == before and port.held == 0 and not robot.is_ahead
    robot.connection_lost(None)
    assert port.held == 0


async def test_a_peer_that_does_not_read_is_not_read(port):
    robot, wire = await port.joined()
    robot.pause_writing()
    assert not wire.reads
    robot.data_received(frame(b"ab"))
    assert not robot.is_ahead and port.held > 0
    robot.data_received(frame(b"cd"))
    robot.resume_writing()
    assert robot.is_ahead
    assert await robot.recv() == b"ab"
    await turns()
    assert await robot.recv() == b"cd" and port.held == 0
    await turns()
    assert wire.reads


async def test_messages_that_are_not_taken_stop_the_reading(port):
    """As many as the first read had, one after another."""
    robot, wire = await port.joined()
    robot.data_received(b"".join(frame(bytes((i,)) * 600) for i in range(9)))
    assert not wire.reads
    assert 9 * 600 < port.held < 9 * 600 + 9 * 300
    for i in range(9):
        assert await robot.recv() == bytes((i,)) * 600
        assert not wire.reads or port.held < 1000, "what is here already is parsed first"
        await turns()
    assert wire.reads and port.held == 0 and not port.turns.waiting


async def test_parsing_ends_its_turn_and_goes_on_when_others_had_theirs(port):
    robot, wire = await port.joined()
    port.step = 0.0006  # that each look at the clock takes
    robot.data_received(frame(b"a" * 10, 9) * 1000)
    assert port.turns.waiting == [robot] and not wire.reads and port.held > 10_000
    for _ in range(100):
        if not port.turns.waiting:
            break
        robot.data_received(b"")  # is not parsed before its turn
        port.turns.waiting.pop().go_on()
    assert wire.reads and port.held == 0
    assert wire.sent == (b"\x8a\x0a" + b"a" * 10) * 1000, "each ping got its pong"


@pytest.mark.parametrize(
    ("size", "rests", "waits"), [(1 << 16, 1.0, True), (1 << 16, 0.0, False), (60_000, 1.0, False)]
)
async def test_after_a_large_read_others_come_first_while_somebody_wants_something(port, size, rests, waits):
    robot, wire = await port.joined()
    port.turns.rests = rests
    robot.data_received(frame(b"x" * (1 << 20))[:size])
    assert bool(port.turns.waiting) is waits and wire.reads is not waits
    if waits:
        port.turns.waiting.pop().go_on()
        assert wire.reads


async def test_a_connection_that_is_closing_is_not_read_on(port):
    robot, wire = await port.joined()
    robot.pause_writing()
    robot.data_received(frame(b"ab"))
    wire.aborted = True
    robot.resume_writing()
    assert not wire.reads and not robot.is_ahead


@pytest.mark.parametrize("kind", ["silent", "all said hello", "one has a place"])
async def test_of_too_many_that_wait_for_a_place_the_one_that_was_silent_for_longest_is_ended(port, kind):
    wires = [port.comes(hello=True, placed=kind == "one has a place")[1]]
    wires += [port.comes(hello=kind == "all said hello")[1] for _ in range(WAITING)]
    assert not any(wire.is_closing() for wire in wires)
    port.comes(hello=False)
    gone = 0 if kind == "all said hello" else 1
    assert [i for i, wire in enumerate(wires) if wire.is_closing()] == [gone]


async def test_one_that_was_heard_again_is_not_the_longest_silent(port):
    robots = [port.comes(hello=False) for _ in range(WAITING + 1)]
    robots[0][0].data_received(b"GET ")
    port.comes(hello=False)
    assert [wire.is_closing() for _, wire in robots].index(True) == 1


@pytest.mark.parametrize(
    ("others", "seconds", "hello", "placed", "ended"),
    [
        (WAITING, 2.0, False, False, True),
        (WAITING, 1.99, False, False, False),
        (WAITING, 9.0, True, False, False),
        (WAITING, 9.0, False, True, False),
        (WAITING - 1, 9.0, False, False, False),
    ],
)
async def test_one_of_too_many_that_says_no_hello_in_time_is_ended(port, others, seconds, hello, placed, ended):
    robot, wire = port.comes(hello=hello, placed=placed)
    for _ in range(others):
        port.comes(hello=True)
    if not placed and not hello:
        assert len(port.open) == others + 1
    robot.end_silent(99.999 + 0.001 + seconds)
    assert wire.is_closing() is ended and (robot in port.open) is not ended


@pytest.mark.parametrize("sent", [frame(b"x" * 100)[:50], frame(b"x", fin=False), frame(b"x" * 100)[:1], None])
async def test_a_message_that_does_not_go_on_is_ended_after_some_time(port, sent):
    robot, wire = await port.joined()
    began = port.now
    if sent:
        robot.data_received(sent)
    robot.end_silent(began + SILENCE - 0.001)
    assert not wire.sent
    robot.end_silent(began + SILENCE)
    if sent is None:
        assert not wire.sent
    else:
        assert told(wire) == (1001, "a message was not complete, and nothing came for 30 s")
        assert port.held < 1000
        robot.end_silent(began + SILENCE)  # it was told once


async def test_a_message_that_waits_for_its_turn_is_not_ended(port):
    robot, wire = await port.joined()
    robot.pause_writing()
    robot.data_received(frame(b"x" * 100)[:50])
    robot.end_silent(port.now + SILENCE + 1)
    assert not wire.sent


async def test_a_hello_without_room_ends_its_connection_at_once(monkeypatch):
    port = Port(monkeypatch, each=2000)
    robot, wire = port.comes(hello=False)
    robot.data_received(b"GET / HTTP/1.1\r\nX: " + b"a" * 3000)
    assert wire.is_closing() and not wire.sent
    robot.connection_lost(None)
    assert port.held == 0


async def test_what_comes_without_room_while_a_connection_closes_leaves_it_its_time(monkeypatch):
    port = Port(monkeypatch, each=2000)
    robot, wire = await port.joined()
    closing = asyncio.create_task(robot.close(1012, "later"))
    await turns()
    assert told(wire) == (1012, "later")
    before = wire.sent
    robot.data_received(frame(b"x" * 3000)[:2500])
    assert not wire.is_closing() and wire.sent == before
    robot.connection_lost(None)
    await closing
    assert port.held == 0


async def test_what_waits_to_be_parsed_is_freed_when_its_connection_is_told_to_end(monkeypatch):
    port = Port(monkeypatch, each=2000)
    robot, wire = await port.joined()
    robot.pause_writing()
    robot.data_received(b"x" * 1500)
    assert port.held == 1500
    robot.data_received(b"x" * 1500)
    assert told(wire)[0] == 1013
    robot.data_received(b"x")
    assert port.held == 1
    robot.connection_lost(None)
    assert port.held == 0
