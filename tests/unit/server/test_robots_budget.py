"""A robot's observations and answers are counted in the budget of the gateway, and one without room fails alone."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.server import ServerProtocol

from jurybox import native
from jurybox.server.gateway.process import _loop
from jurybox.server.gateway.robots import openpi as module
from jurybox.server.gateway.robots.connection import RobotConnection
from jurybox.server.gateway.robots.counters import PortCounters, RobotDelays
from jurybox.server.gateway.robots.msgpack_arrays import packb
from jurybox.server.gateway.robots.openpi import RobotServer
from jurybox.server.security.limits import ANSWERS, RECEIVED, ROBOTS, SILENCE
from jurybox.server.security.pace import Turns


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
    server.budget, server.counters, server.turns = budget, PortCounters(), Turns()
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


class Serving:
    """What a connection needs of its server; it reads messages if it is told to."""

    def __init__(self, reads):
        self.handler_tasks, self.reads, self.received = set(), reads, 0

    def is_serving(self):
        return True

    async def handler(self, connection):
        await connection.handshake()
        with contextlib.suppress(ConnectionClosed):
            while self.reads:
                await connection.recv()
                self.received += 1
                await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def joined(budget, serving):
    """A robot's connection, and the two ends of its peer."""
    kind = type("Connection", (RobotConnection,), {"budget": budget, "turns": Turns(), "open": set(), "clients": 1})
    robots = []

    def made():
        robots.append(kind(ServerProtocol(max_size=1 << 24), serving, max_queue=1))
        return robots[-1]

    listening = await asyncio.get_running_loop().create_server(made, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
    writer.write(
        b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
    yield robots[0], reader, writer
    writer.close()
    async with asyncio.timeout(20):
        while robots[0].open:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert budget.held(RECEIVED) == 0
    listening.close()


def test_as_many_as_there_are_free_places_may_come_at_once_and_those_that_say_nothing_are_soon_few():
    places, waiting = 100, 64

    async def ended_of(count):
        budget, serving, arrived = (
            native.Budget((1 << 24, 1 << 24, 9), (1 << 24, 1 << 24, 9)),
            Serving(reads=False),
            set(),
        )
        kind = type("Port", (RobotConnection,), {"budget": budget, "turns": Turns(), "open": set(), "clients": places})

        def made():
            arrived.add(one := kind(ServerProtocol(), serving, max_queue=1))
            return one

        listening = await asyncio.get_running_loop().create_server(made, "127.0.0.1", 0, backlog=count)
        began = time.monotonic()
        peers = [await asyncio.open_connection(*listening.sockets[0].getsockname()) for _ in range(count)]
        async with asyncio.timeout(20):
            while len(arrived) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        ended = sum(one.transport.is_closing() for one in arrived)
        for one in arrived:
            one.end_silent(began + 1)
        assert sum(one.transport.is_closing() for one in arrived) == ended, "they may be about to say hello"
        for one in arrived:
            one.end_silent(time.monotonic() + 3)
        assert sum(not one.transport.is_closing() for one in arrived) == waiting
        for _, writer in peers:
            writer.close()
        listening.close()
        return ended

    assert asyncio.run(ended_of(places + waiting)) == 0
    assert asyncio.run(ended_of(places + waiting + 1)) == 1


def test_a_flood_of_small_messages_is_read_as_fast_as_it_is_parsed():
    """Twenty thousand messages in 5 MiB of frames, and never more than a few reads of them in memory."""
    budget, serving = native.Budget((1 << 24, 1 << 24, 9), (1 << 24, 1 << 24, 9)), Serving(reads=True)
    most = 0

    async def flood():
        nonlocal most
        async with joined(budget, serving) as (_, _, writer):
            writer.write((b"\x82\xfe\0\xfa" + bytes(4 + 250)) * 20_000)
            async with asyncio.timeout(60):
                while serving.received < 20_000:
                    most = max(most, budget.held(RECEIVED))
                    await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=_loop) as runner:
        runner.run(flood())
    assert 0 < most < 1 << 20


async def test_a_large_frame_is_received_without_small_steps_and_counted_whole(monkeypatch):
    """Its contents arrive exactly, whatever follows it, and are neither fed in small pieces nor copied as they grow."""
    budget, serving, steps, came = native.Budget((1 << 26, 1 << 26, 9), (1 << 26, 1 << 26, 9)), Serving(True), [], []
    feed = ServerProtocol.receive_data
    monkeypatch.setattr(ServerProtocol, "receive_data", lambda self, data: (steps.append(len(data)), feed(self, data)))
    contents = bytes(range(256)) * (8 << 12)  # 8 MiB

    async def recv(self, decode=None):
        came.append(await received(self, decode))
        return came[-1]

    received = RobotConnection.recv
    monkeypatch.setattr(RobotConnection, "recv", recv)
    async with joined(budget, serving) as (robot, _, writer):
        mask = b"\1\2\3\4"
        masked = (int.from_bytes(contents) ^ int.from_bytes(mask * (len(contents) // 4))).to_bytes(len(contents))
        writer.write(b"\x82\xff" + len(contents).to_bytes(8) + mask + masked[:-1])
        async with asyncio.timeout(20):
            while budget.held(RECEIVED) < len(contents) - 1:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert len(robot.protocol.reader.buffer) < len(contents) // 2
        writer.write(masked[-1:] + b"\x82\x82" + bytes(4) + b"ab")
        async with asyncio.timeout(20):
            while serving.received < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    assert came[0] == contents and came[1] == b"ab"
    assert len(steps) < len(contents) >> 13, "of 2 KiB there would be four times as many"


async def test_messages_that_nobody_took_are_freed_with_their_connection_and_not_by_the_collector():
    budget = native.Budget((1 << 24, 1 << 24, 9), (1 << 24, 1 << 24, 9))
    gc.disable()
    try:
        async with joined(budget, Serving(reads=False)) as (robot, _, writer):
            writer.write(b"\x82\xff" + (1 << 20).to_bytes(8) + bytes(4) + bytes(1 << 20))
            async with asyncio.timeout(20):
                while not robot.is_ahead:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            frames = robot.recv_messages.frames
            assert len(frames) == 1
        assert not frames  # the connection itself may wait for the collector: websockets' objects refer to each other
    finally:
        gc.enable()


async def test_a_message_that_does_not_go_on_ends_its_connection():
    budget = native.Budget((1000, 1000, 9), (1000, 1000, 9))
    async with joined(budget, Serving(reads=False)) as (robot, reader, writer):
        now = time.monotonic()
        robot.end_silent(now + 1000)  # between two messages a robot may be silent
        writer.write(b"\x82\xff" + bytes(7) + b"\xff" + bytes(4) + b"x" * 100)
        async with asyncio.timeout(20):
            while not budget.held(RECEIVED) >= 100:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        robot.end_silent(time.monotonic() + SILENCE - 1)
        assert robot.open
        robot.end_silent(time.monotonic() + SILENCE + 1)
        assert b"nothing came for 30 s" in await asyncio.wait_for(reader.read(), 20)
