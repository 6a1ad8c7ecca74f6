"""The WebSocket door for robots, with a model that needs no engine: who comes in, what each gets, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest
from tests.loops import turns
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from jurybox.protocol.errors import Busy, RowFailed, SessionLost
from jurybox.server.frontend.frontend import Frontend
from jurybox.server.gateway.robots.door import door
from jurybox.server.gateway.robots.msgpack_arrays import packb, unpackb
from jurybox.server.gateway.robots.openpi import VLLM_OMNI, RobotServer
from jurybox.server.gateway.robots.policy import RobotEpisode
from jurybox.server.security.access import Access

SECRET = "0123456789abcdef0123"
OBSERVATION = packb({"x": 1.0})


class Policy:
    """Answers with what it is given next, raises it if it is an error, and keeps what it was asked."""

    def __init__(self):
        self.next, self.asked, self.closed, self.full = [], [], False, False
        self.left = asyncio.Event()

    @contextlib.asynccontextmanager
    async def episode(self, timeout):
        if self.full:
            raise Busy("1 robots are connected")
        try:
            yield RobotEpisode(self, 0)
        finally:
            self.left.set()

    def takes(self, name):
        return False

    async def ask(self, observation, place, *, begins, within, needs_actions):
        self.asked.append((dict(observation), within))
        answer = self.next.pop(0) if self.next else np.ones(2)
        if isinstance(answer, Exception):
            raise answer
        return {"actions": answer}

    async def close(self):
        self.closed = True


@contextlib.asynccontextmanager
async def opened(secret=None):
    """A door that serves, and a way to connect to it."""
    settings = {"model": "m", "clients": 2, "timeout": 1.0, "ping": 20.0, "metadata": {"fps": 30}}
    made = door("arm", settings | {"listen": "127.0.0.1:0"}, Frontend("ipc:///nowhere", None), Access(secret))
    assert type(made) is RobotServer
    made.policy = Policy()
    await made.start()

    def robot(path="/", **more):
        return connect(f"ws://{made.bound}{path}", compression=None, proxy=None, ping_interval=None, **more)

    async with asyncio.timeout(60):
        yield made, robot
        await made.stop()
    assert made.policy.closed


async def asked(connection, frame):
    await connection.send(frame)
    return await connection.recv()


async def closed(connection):
    """The code and the reason of a close."""
    with pytest.raises(ConnectionClosed) as told:
        await connection.recv()
    return told.value.rcvd.code, told.value.rcvd.reason


async def test_the_metadata_come_first_and_then_an_answer_to_each_observation():
    async with opened() as (made, robot):
        assert not made.busy and made.connections() == []
        async with robot() as connection:
            assert unpackb(await connection.recv()) == {"fps": 30}
            assert made.busy and [one.placed for one in made.connections()] == [True]
            first, second = [unpackb(await asked(connection, OBSERVATION)) for _ in range(2)]
            assert first["actions"].tolist() == [1, 1]
            assert "prev_total_ms" not in first["server_timing"] and second["server_timing"]["prev_total_ms"] > 0
        await made.policy.left.wait()
        assert (made.counters.requests, made.counters.opened) == (2, 1)
        assert made.counters.delay.counts.sum() == 2
    assert (made.busy, made.connections()) == (False, [])


async def test_only_observations_are_counted_as_answered():
    async with opened() as (made, robot), robot() as connection:
        await connection.recv()
        assert unpackb(await asked(connection, packb({"endpoint": "reset"}))) == {"status": "reset successful"}
        assert made.counters.requests == 0
        for request in ({"x": 1.0}, {"chunk_report": {"starved": 2}}, {"endpoint": "reset"}):
            await asked(connection, packb(request))
        assert (made.counters.requests, made.counters.starved) == (2, 2)
        assert all("chunk_report" not in given for given, _ in made.policy.asked)


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        ("text", "expected a binary frame with a msgpack map (an observation), came a text frame"),
        (packb([1]), "expected a map (an observation), came list"),
        (packb({"chunk_report": 7}), "chunk_report: expected a map, came int"),
        (b"\xc1", "byte 0xc1 at 0"),
    ],
)
async def test_what_is_no_observation_gets_an_error_and_the_next_one_an_answer(frame, why):
    async with opened() as (made, robot), robot() as connection:
        await connection.recv()
        assert why in await asked(connection, frame)
        assert made.counters.failures == {"malformed": 1}
        assert unpackb(await asked(connection, OBSERVATION))["actions"].tolist() == [1, 1]


@pytest.mark.parametrize("within", [1e-9, 1, 86_400, 86_400.0])
async def test_a_robot_may_say_how_long_it_waits_for_an_answer(within):
    async with opened() as (made, robot), robot() as connection:
        await connection.recv()
        await asked(connection, packb({"answer_within": within}))
        await asked(connection, OBSERVATION)
        assert made.policy.asked == [({}, within), ({"x": 1.0}, None)]


@pytest.mark.parametrize("within", [0, -1, 86_401, True, "1", float("nan")])
async def test_other_times_are_refused(within):
    async with opened() as (made, robot), robot() as connection:
        await connection.recv()
        found = await asked(connection, packb({"answer_within": within}))
        assert f"answer_within is {within}: expected seconds, above 0 and at most 86400" in found
        assert not made.policy.asked


@pytest.mark.parametrize("path", [VLLM_OMNI, f"{VLLM_OMNI}/", f"{VLLM_OMNI}?a=b"])
async def test_at_the_path_of_vllm_omni_text_gets_no_answer_and_a_lost_session_ends_no_connection(path):
    async with opened() as (made, robot), robot(path) as connection:
        await connection.recv()
        made.policy.next = [SessionLost("gone"), RowFailed("broken"), np.ones(2)]
        await connection.send("text")
        for why in ("gone", "broken"):
            told = unpackb(await asked(connection, OBSERVATION))
            assert told["type"] == "error" and why in told["message"]
        assert unpackb(await asked(connection, OBSERVATION)).tolist() == [1, 1]
        assert made.counters.failures == {"session": 1, "row": 1}


async def test_elsewhere_a_lost_session_ends_its_connection_after_the_error():
    async with opened() as (made, robot), robot("/any") as connection:
        await connection.recv()
        made.policy.next = [RowFailed("broken"), SessionLost("gone")]
        assert "broken" in await asked(connection, OBSERVATION)
        assert "gone" in await asked(connection, OBSERVATION)
        assert await closed(connection) == (1011, "the session is lost: connect again")


async def test_without_a_place_a_connection_is_told_so():
    async with opened() as (made, robot):
        made.policy.full = True
        async with robot() as connection:
            assert await closed(connection) == (1013, "1 robots are connected")
        assert made.counters.opened == 0


async def test_a_fault_ends_its_connection_alone_and_is_logged(caplog):
    async with opened() as (made, robot), robot() as connection, robot() as other:
        await connection.recv()
        await other.recv()
        made.policy.next = [RuntimeError("a fault")]
        await connection.send(OBSERVATION)
        assert await closed(connection) == (1011, "the gateway failed; its log says more")
        assert unpackb(await asked(other, OBSERVATION))["actions"].tolist() == [1, 1]
    (record,) = [
        one for one in caplog.records if "robots.arm: a connection failed: RuntimeError: a fault" in one.message
    ]
    assert record.exc_info


async def test_a_robot_that_disconnects_is_no_fault(caplog):
    async with opened() as (made, robot):
        async with robot() as connection:
            await connection.recv()
        await made.policy.left.wait()
        await turns()
        assert not made.busy
    assert not caplog.records


async def test_closed_doors_refuse_connections_and_end_those_that_wait():
    async with opened() as (made, robot), robot() as connection:
        await connection.recv()
        await asked(connection, OBSERVATION)
        made.doors.close()
        assert await closed(connection) == (
            1012,
            "the server is stopping and takes no new requests: ask again when it is back",
        )
        with pytest.raises(InvalidStatus) as refused:
            async with robot():
                pass
        answer = refused.value.response
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "2")
        assert b"the server is stopping" in answer.body


@pytest.mark.parametrize(
    ("shown", "known"),
    [
        ([f"Api-Key {SECRET}"], True),
        ([f"API-KEY {SECRET}"], True),
        ([f"Bearer {SECRET}"], True),
        ([f"Api-Key {SECRET}x"], False),
        ([f"Other {SECRET}"], False),
        ([SECRET], False),
        ([], False),
        ([f"Bearer {SECRET}"] * 2, False),
    ],
)
async def test_a_door_with_a_token_lets_in_only_who_shows_it_once(shown, known):
    async with opened(SECRET) as (made, robot):
        coming = robot(additional_headers=[("Authorization", one) for one in shown])
        if known:
            async with coming as connection:
                assert unpackb(await connection.recv()) == {"fps": 30}
                assert "Server" not in connection.response.headers, "nobody is told what to attack"
            assert not made.counters.refused
        else:
            with pytest.raises(InvalidStatus) as refused:
                async with coming:
                    pass
            assert refused.value.response.status_code == 401
            assert b"expected 'Authorization: Api-Key TOKEN' with the server's token" in refused.value.response.body
            assert made.counters.refused == {"token": 1}


@pytest.mark.parametrize("path", ["/healthz", "/healthz/", "/healthz?a"])
async def test_health_needs_no_token(path):
    async with opened(SECRET) as (made, _):
        reader, writer = await asyncio.open_connection(*made.bound.rsplit(":", 1))
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n".encode())
        writer.write(b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"\r\n\r\nOK\n")
        writer.close()


async def test_a_web_page_is_refused_by_its_origin():
    async with opened() as (_, robot):
        with pytest.raises(InvalidStatus) as refused:
            async with robot(origin="http://elsewhere.example"):
                pass
        assert refused.value.response.status_code == 403


async def test_a_door_that_never_started_frees_its_address():
    settings = {"model": "m", "clients": 2, "timeout": 1.0, "ping": 20.0, "metadata": {}, "listen": "127.0.0.1:0"}
    made = RobotServer("arm", settings, Frontend("ipc:///nowhere", None), Access())
    made.policy = Policy()
    await made.stop()
    assert made.policy.closed
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*made.bound.rsplit(":", 1))
