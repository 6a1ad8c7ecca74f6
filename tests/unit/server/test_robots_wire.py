"""What the doors of robots take from the wire: large messages, silence, garbage, and where they listen."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import zmq
import zmq.asyncio
from tests.clocks import Clock, given
from tests.paces import NotedTurns
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from jurybox.server.frontend.frontend import Frontend
from jurybox.server.gateway.robots import door as door_module
from jurybox.server.gateway.robots import openpi
from jurybox.server.gateway.robots.counters import RobotDelays
from jurybox.server.gateway.robots.door import RobotDoor, door
from jurybox.server.gateway.robots.msgpack_arrays import packb, unpackb
from jurybox.server.security.access import Access
from jurybox.server.security.doors import Doors
from jurybox.server.security.pace import Turns

HELLO = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
SETTINGS = {"model": "m", "clients": 2, "timeout": 1.0, "listen": "127.0.0.1:0", "metadata": {"fps": 30}}
PING, CLOSE = 0x89, 0x88


async def acts(*_, **__):
    return {"actions": np.ones(2)}


@contextlib.asynccontextmanager
async def opened(speaks="openpi", infer=acts, paces=None, **more):
    """A door that serves, whose model is `infer`."""

    @contextlib.asynccontextmanager
    async def episode(_timeout):
        yield SimpleNamespace(infer=infer, takes=lambda _name: False)

    settings = SETTINGS | {"speaks": speaks, "ping": 20.0, "like": "n1.6"} | more
    made = door("arm", settings, Frontend("ipc:///nowhere", None), Access(max_message=1000), None, None, paces)
    made.policy = SimpleNamespace(episode=episode, close=lambda: asyncio.sleep(0))
    await made.start()
    try:
        async with asyncio.timeout(60):
            yield made
    finally:
        await made.stop()


async def frame(reader):
    """The first byte of a short frame, and its contents."""
    async with asyncio.timeout(15):  # the library's own limits are longer
        first, size = await reader.readexactly(2)
        return first, await reader.readexactly(size)


async def test_a_robot_that_answers_no_ping_is_told_that_it_is_taken_for_gone():
    async with opened(ping=0.01) as made:
        reader, writer = await asyncio.open_connection(*made.bound.rsplit(":", 1))
        writer.write(HELLO)
        await reader.readuntil(b"\r\n\r\n")
        assert unpackb((await frame(reader))[1]) == {"fps": 30}
        assert (await frame(reader))[0] == PING
        while (found := await frame(reader))[0] != CLOSE:
            assert found[0] == PING
        assert found[1][:2] == (1011).to_bytes(2)
        writer.close()


async def test_a_message_beyond_the_limit_ends_its_connection():
    async with opened() as made, connect(f"ws://{made.bound}", proxy=None) as robot:
        await robot.recv()
        observation = packb({"x": "a" * 950})
        await robot.send(observation)
        assert unpackb(await robot.recv())["actions"].tolist() == [1, 1]
        await robot.send(observation + b"a" * 100)
        with pytest.raises(ConnectionClosed) as told:
            await robot.recv()
        assert told.value.rcvd.code == 1009


async def test_messages_are_not_compressed_though_a_robot_could_read_them():
    async with opened() as made, connect(f"ws://{made.bound}", proxy=None, compression="deflate") as robot:
        assert "Sec-WebSocket-Extensions" in robot.request.headers
        assert "Sec-WebSocket-Extensions" not in robot.response.headers


async def test_what_comes_to_the_port_is_not_logged(caplog):
    """Strangers could fill the log."""
    caplog.set_level(logging.DEBUG, logger="websockets")
    async with opened() as made:
        for sent in (b"\x16\x03\x01\0\xa5\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"):
            reader, writer = await asyncio.open_connection(*made.bound.rsplit(":", 1))
            writer.write(sent)
            await asyncio.wait_for(reader.read(), 20)
            writer.close()
    assert not [record for record in caplog.records if record.name.startswith("websockets")]


async def test_a_robot_that_does_not_wait_for_its_answers_lets_others_come_first_after_each(monkeypatch):
    """It counts as work only from a message on, and never for longer than a turn."""
    clock, paces, took = Clock(), NotedTurns(), [0.0005, 0.0005, 0.001, 9.0, 0.0005]
    may, asked = asyncio.Event(), []

    async def infer(*_, **__):
        asked.append(None)
        await may.wait()
        clock.now += took[len(asked) - 1]
        return {"actions": np.ones(2)}

    async with opened(infer=infer, paces=paces) as made, connect(f"ws://{made.bound}", proxy=None) as robot:
        given(clock, monkeypatch, openpi)
        await robot.recv()
        may.set()
        for _ in range(2):
            clock.now += 5.0
            await robot.send(packb({"x": 1.0}))
            await robot.recv()
        assert not paces.waits, "it has waited for its answers"
        may.clear()
        clock.now += 5.0
        for _ in range(3):
            await robot.send(packb({"x": 1.0}))
        (connection,) = made.connections()
        while len(asked) < 3 or not connection.is_ahead:  # noqa: ASYNC110
            await asyncio.sleep(0)
        may.set()
        for _ in range(3):
            await robot.recv()
        assert [who for who, _ in paces.waits] == [connection] * len(paces.waits)
        assert [seconds for _, seconds in paces.waits] == [pytest.approx(0.001), 0.002][: len(paces.waits)]
        assert paces.waits


async def test_a_door_that_has_stopped_has_no_connections_left(caplog):
    async with opened() as made, connect(f"ws://{made.bound}", proxy=None) as robot:
        await robot.recv()
        await made.stop()
        assert (made.busy, made.connections()) == (False, [])
    assert not caplog.records


@pytest.mark.parametrize("speaks", ["openpi", "gr00t", "act", "lerobot"])
async def test_a_door_may_be_stopped_again(speaks):
    async with opened(speaks, fps=10.0, grpc_http2="auto") as made:  # which stops it at its end
        await made.stop()


@pytest.mark.parametrize("sent", [b"", HELLO[:20]])
async def test_who_has_not_said_hello_holds_no_stop_up(monkeypatch, caplog, sent):
    serve, met, made_of = openpi.serve, asyncio.Event(), openpi.RobotConnection.connection_made

    def meet(connection, transport):
        made_of(connection, transport)
        met.set()

    monkeypatch.setattr(openpi.RobotConnection, "connection_made", meet)
    monkeypatch.setattr(openpi, "serve", lambda *given, **more: serve(*given, **more | {"open_timeout": 600}))
    async with opened() as made:
        reader, writer = await asyncio.open_connection(*made.bound.rsplit(":", 1))
        writer.write(sent)
        await asyncio.wait_for(met.wait(), 30)
        await made.stop()
        assert made.connections() == []
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()
    assert not caplog.records


async def test_connections_that_do_not_end_in_time_are_logged_and_hold_nothing_up(monkeypatch, caplog):
    async with opened() as made, connect(f"ws://{made.bound}", proxy=None) as robot:
        await robot.recv()
        with monkeypatch.context() as later:
            later.setattr(openpi, "GRACE", -1.0)  # there is no time at all
            await made.stop()
        assert [record.message for record in caplog.records] == ["robots.arm: connections did not end in time"]


@pytest.mark.parametrize("speaks", ["openpi", "gr00t"])
async def test_a_door_may_listen_on_an_address_of_ipv6(speaks):
    try:
        asked = opened(speaks, listen="[::1]:0")
        made = await asked.__aenter__()
    except OSError:
        pytest.skip("this host has no ::1")
    assert made.bound.startswith("[::1]:") and not made.bound.endswith(":0")
    await asked.__aexit__(None, None, None)


async def test_gr00ts_door_is_busy_while_an_action_is_computed_and_until_it_has_left():
    """The server that stops waits for busy doors, so that a robot gets the action that it has asked for."""
    began, may = asyncio.Event(), asyncio.Event()

    async def infer(*_, **__):
        began.set()
        await may.wait()
        return {"arm": np.ones((1, 2, 2))}

    async with opened("gr00t", infer) as made:
        assert made.busy is False
        with zmq.asyncio.Context() as context, context.socket(zmq.REQ) as robot:
            robot.linger = 0
            robot.connect(f"tcp://{made.bound}")
            await robot.send(packb({"endpoint": "get_action", "data": {"state.arm": np.zeros((1, 2))}}))
            await asyncio.wait_for(began.wait(), 20)
            assert made.busy is True
            may.set()
            assert "action.arm" in unpackb(await robot.recv())
            while made.busy:  # noqa: ASYNC110  until it has been seen that the answer has left
                await asyncio.sleep(0)


def test_a_door_shares_the_processes_limits_and_turns_or_has_its_own():
    frontend, access, doors, turns = Frontend("ipc:///nowhere", None), Access(max_message=1000), Doors(), Turns()
    budget = access.budget()
    made = RobotDoor("arm", SETTINGS, frontend, access, doors, budget, turns)
    assert made.budget is budget and made.doors is doors and made.turns is turns
    alone = RobotDoor("arm", SETTINGS, frontend, access)
    assert alone.budget is not budget and not alone.doors.closed and alone.turns is not turns


def test_an_observation_is_counted_with_the_time_that_its_answer_took(monkeypatch):
    clock = given(Clock(), monkeypatch, door_module)
    made = RobotDoor("arm", SETTINGS, Frontend("ipc:///nowhere", None), Access())
    with made.counted(RobotDelays(made.counters)):
        clock.now += 0.25
    assert (made.counters.delay.total, made.counters.requests) == (0.25, 1)


def test_a_door_without_connections_of_its_own_has_none_to_look_after():
    made = RobotDoor("arm", SETTINGS, Frontend("ipc:///nowhere", None), Access())
    assert made.connections() == []
