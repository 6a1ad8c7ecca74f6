"""Requests to a REP server that are sent before the answer to the one before: whose turn it is, and for how long."""

from __future__ import annotations

import asyncio

import pytest
import zmq
import zmq.asyncio
from tests.clocks import Clock, given
from tests.paces import NotedTurns

from jurybox.server.gateway import rep_server
from jurybox.server.gateway.rep_server import RepServer
from jurybox.server.security.doors import Doors
from jurybox.server.security.limits import ROBOTS, budget_of
from jurybox.server.settings.endpoints import listen


async def test_a_connection_that_asks_on_lets_others_come_first_after_each_answer_and_never_for_longer_than_a_turn(
    monkeypatch,
):
    clock, paces, may, took = (
        given(Clock(), monkeypatch, rep_server),
        NotedTurns(),
        asyncio.Event(),
        [0.001, 9.0, 0.0005],
    )
    peers = []

    async def answer(peer, body):
        peers.append(peer)
        await may.wait()
        clock.now += took[len(peers) - 1]
        return body

    listener = listen("127.0.0.1:0", "robots.x.listen")
    where = "tcp://{}:{}".format(*listener.getsockname())
    server = RepServer(
        listener, 1 << 20, budget_of(1 << 20), ROBOTS, Doors(), paces,
        begin=lambda _: None, answer=answer, refused=lambda error: str(error).encode(),
    )  # fmt: skip
    server.start()
    try:
        async with asyncio.timeout(60):
            with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as robot:
                robot.linger = 0
                robot.connect(where)
                for body in (b"a", b"b", b"c"):
                    await robot.send_multipart([b"", body])
                while not peers or peers[0].requests.qsize() < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                assert server.busy
                may.set()
                assert [(await robot.recv_multipart())[-1] for _ in range(3)] == [b"a", b"b", b"c"]
                while server.busy:  # noqa: ASYNC110
                    await asyncio.sleep(0)
    finally:
        await server.stop()
    assert [who for who, _ in paces.waits] == peers[:2] and len(set(peers)) == 1
    assert [seconds for _, seconds in paces.waits] == [pytest.approx(0.001), 0.002]
