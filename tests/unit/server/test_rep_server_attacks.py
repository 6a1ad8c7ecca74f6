"""Clients of a REP server that send without end, or read no answer, cost others at most half of the time."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import struct
import time

import pytest
from tests.serving import wait_until

from jurybox.server.gateway.rep_server import RepServer
from jurybox.server.security.doors import Doors
from jurybox.server.security.limits import ANSWERS, RECEIVED, ROBOTS, Watch, budget_of, unread
from jurybox.server.security.pace import Turns
from jurybox.server.settings.endpoints import listen

MIB = 1 << 20


@contextlib.asynccontextmanager
async def serving(answer, turns=Turns):
    """A server whose largest message has a MiB, its address and its budget."""
    listener, budget = listen("127.0.0.1:0", "robots.x.listen"), budget_of(MIB)
    server = RepServer(
        listener, MIB, budget, ROBOTS, Doors(), turns(),
        begin=lambda _: None, answer=answer, refused=lambda error: str(error).encode(),
    )  # fmt: skip
    server.start()
    try:
        yield server, listener.getsockname(), budget
    finally:
        await server.stop()
        assert budget.held(ANSWERS) == 0


def joined(where, received=1 << 16):
    """A connection of a REQ socket that has been greeted."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, received)
    made.settimeout(20)
    made.connect(where)
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 3) + b"REQ\x08Identity" + bytes(4)
    made.sendall(b"\xff" + bytes(8) + b"\x7f\3\1NULL" + bytes(48) + bytes([4, len(ready)]) + ready)
    return made


def request(body):
    return b"\x01\x00\x00" + bytes([len(body)]) + body


async def until(condition, seconds=30.0):
    await asyncio.to_thread(wait_until, condition, seconds)


async def test_requests_that_are_sent_before_the_answer_to_the_one_before_let_others_go_first():
    done = []

    async def answer(_peer, body):
        time.sleep(0.01)  # noqa: ASYNC251  it is work
        done.append(body)
        return b"well"

    async with serving(answer) as (_, where, _):
        with contextlib.ExitStack() as closing:
            floods = [closing.enter_context(joined(where)) for _ in range(3)]
            light = closing.enter_context(joined(where))
            await asyncio.sleep(0.1)
            for flood in floods:
                flood.sendall(request(b"flood") * 14)
            light.sendall(request(b"light"))
            await until(lambda: len(done) == 3 * 14 + 1)
    assert done.index(b"light") < 12


async def test_a_connection_that_asks_on_and_on_and_reads_nothing_is_ended():
    async def answer(_peer, _body):
        return bytes(MIB // 2)

    async with serving(answer) as (server, where, budget):
        with joined(where, 4096) as peer:
            await asyncio.to_thread(peer.sendall, request(b"more") * 16)
            await until(lambda: budget.held(ANSWERS) > 0)
            assert len(server.connections()) == 1

            def send_on():
                with pytest.raises(OSError), contextlib.suppress(TimeoutError):
                    while True:
                        peer.sendall(request(b"more") * 100)

            await asyncio.to_thread(send_on)
            await until(lambda: not server.connections() and not budget.held(ANSWERS))


async def test_a_reader_that_leaves_no_room_for_others_is_ended():
    async def answer(_peer, _body):
        return bytes(MIB)

    async with serving(answer) as (server, where, budget):
        watch = Watch(budget, [server.connections])
        with contextlib.ExitStack() as closing:
            for _ in range(12):
                closing.enter_context(joined(where, 4096)).sendall(request(b"x") * 8)
            await until(lambda: budget.held(ANSWERS) > 6 * MIB)
            before = len(server.connections())
            assert sum(unread(one.account) for one in server.connections()) == budget.held(ANSWERS)
            for second in (0.0, 11.0):
                watch.check(time.monotonic() + second)
            assert len(server.connections()) == before - 1


async def test_requests_that_nobody_will_answer_are_returned_with_their_connection_and_not_by_the_collector():
    async def answer(_peer, _body):
        await asyncio.Event().wait()

    gc.disable()
    try:
        async with serving(answer) as (server, where, budget):
            with joined(where) as peer:
                await asyncio.to_thread(peer.sendall, request(b"x" * 200) * 10)
                await until(lambda: budget.held(RECEIVED) == 10 * 2 * 200)
            await until(lambda: not server.connections())
            await until(lambda: budget.held(RECEIVED) == 0)
    finally:
        gc.enable()


@pytest.mark.parametrize("rest", [0.0, 0.001])
async def test_more_messages_than_are_read_in_a_turn_are_read_without_another_one_coming(monkeypatch, rest):
    """Of 200 at once the last were received with the first, so the connection's descriptor tells nothing more."""
    monkeypatch.setattr("jurybox.server.gateway.rep_server._TICK", 3600.0)

    class Resting(Turns):
        def rest(self, who, owed, since=None):
            return rest if since is None else 0.0

    async def answer(_peer, body):
        return b"well"

    async with serving(answer, Resting) as (_, where, _):
        with joined(where) as many:
            many.sendall(request(b"one") * 200)
            received = bytearray()

            def all_answered():
                received.extend(many.recv(1 << 16))
                return received.count(b"well") + received.count(b"wait for their answers") >= 200

            await until(all_answered)
