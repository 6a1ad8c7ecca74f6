"""The door that answers robots over plain HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
from types import SimpleNamespace

import numpy as np
import pytest
from tests.loops import turns

from jurybox.server.frontend.frontend import Frontend
from jurybox.server.gateway.robots.act import ActDoor
from jurybox.server.gateway.robots.json_arrays import loads
from jurybox.server.security.access import Access


@contextlib.asynccontextmanager
async def opened(infer):
    """A door whose model is `infer`, and a connection to it."""

    @contextlib.asynccontextmanager
    async def episode(timeout, *, returns):
        yield SimpleNamespace(infer=infer)

    settings = {"model": "m", "clients": 1, "timeout": 1.0, "listen": "127.0.0.1:0"}
    door = ActDoor("arm", settings, Frontend("ipc:///nowhere", None), Access())
    door.policy = SimpleNamespace(episode=episode, close=lambda: asyncio.sleep(0))
    await door.start()
    host, port = door.bound.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    yield door, reader, writer
    await door.stop()
    await turns()
    assert door.ended.is_set()
    writer.close()


def ask(writer):
    body = json.dumps({"state": [1.0]}).encode()
    writer.write(b"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


async def test_the_door_is_busy_while_an_action_is_computed_and_has_ended_when_it_has_stopped():
    """The server that stops waits for busy doors, so that a robot gets the action that it has asked for."""
    began, may = asyncio.Event(), asyncio.Event()

    async def infer(request, *, needs_actions):
        began.set()
        await may.wait()
        return {"a": np.zeros(2)}

    async with opened(infer) as (door, reader, writer):
        assert door.busy is False
        ask(writer)
        await asyncio.wait_for(began.wait(), 20)
        assert door.busy is True
        assert door.counters.connected == 1
        may.set()
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        assert head.startswith(b"HTTP/1.1 200")
        await turns()
        assert door.busy is False
        assert (door.counters.connected, door.counters.opened) == (0, 1)
        assert not door.ended.is_set()


@pytest.mark.parametrize(
    ("outputs", "told"),
    [
        ({"a": [1.0, 2.0]}, [1.0, 2.0]),
        ({"a": [[1.0, 2.0], [3.0, 4.0]]}, [[1.0, 2.0], [3.0, 4.0]]),
        ({"value": [7.0], "actions": [1.0, 2.0]}, [1.0, 2.0]),
        ({"value": [7.0], "arm": [1.0, 2.0]}, {"value": [7.0], "arm": [1.0, 2.0]}),
    ],
)
async def test_the_answer_is_the_actions_or_every_output_by_its_name(outputs, told):
    async def infer(request, *, needs_actions):
        return {name: np.array(value) for name, value in outputs.items()}

    async with opened(infer) as (_, reader, writer):
        ask(writer)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        (length,) = [
            int(line.split(b":")[1]) for line in head.lower().splitlines() if line.startswith(b"content-length")
        ]
        body = await asyncio.wait_for(reader.readexactly(length), 20)
    found = loads(b'{"answer": ' + body + b"}")["answer"]
    plain = {name: value.tolist() for name, value in found.items()} if isinstance(found, dict) else None
    assert (plain or np.asarray(found).tolist()) == told
