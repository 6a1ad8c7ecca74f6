"""What the door for robots over plain HTTP asks of its policy and of the other doors, and what it does not serve."""

from __future__ import annotations

import asyncio
import contextlib
import json
from types import SimpleNamespace

import numpy as np
import pytest
from tests.unit.server import test_robots_wire as wire
from tests.unit.server.test_robots_act import answer, ask, opened

from jurybox.server.security.pace import Turns


async def acts(_, *, needs_actions):
    return {"a": np.zeros(2)}


async def test_each_request_is_an_episode_of_a_robot_that_returns_and_a_door_that_stops_releases_its_lane():
    """So batches wait for the next request, which comes over any connection."""
    asked, closed = [], []

    @contextlib.asynccontextmanager
    async def episode(_, *, returns=False):
        asked.append(returns)
        yield SimpleNamespace(infer=acts)

    async def close():
        closed.append(True)

    async with opened(acts) as (door, reader, writer):
        door.policy = SimpleNamespace(episode=episode, close=close)
        for _ in range(2):
            ask(writer)
            assert (await answer(reader))[0] == 200
        assert asked == [True, True] and not closed
    assert closed == [True]


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/openapi.json"])
async def test_a_robots_door_serves_no_documentation_which_would_load_files_from_other_hosts(path):
    async with opened(acts) as (_, reader, writer):
        ask(writer, b"", f"GET {path}")
        assert (await answer(reader))[0] == 404


async def test_a_chunk_is_a_list_of_actions_each_of_which_is_an_array():
    """As clients of OpenVLA-OFT read it, which take one action after another off the list."""

    async def infer(_, *, needs_actions):
        return {"a": np.arange(6.0).reshape(3, 2)}

    async with opened(infer) as (_, reader, writer):
        ask(writer)
        found = json.loads((await answer(reader))[2])
    assert [(set(one), one["dtype"], one["shape"]) for one in found] == [
        ({"__numpy__", "dtype", "shape"}, "<f8", [2])
    ] * 3


@pytest.mark.parametrize("speaks", ["act", "gr00t", "lerobot"])
async def test_a_door_that_stops_ends_its_connections(speaks):
    async with wire.opened(speaks, fps=10.0, grpc_http2="auto") as made:
        reader, writer = await asyncio.open_connection(*made.bound.rsplit(":", 1))
        if speaks == "gr00t":
            await reader.readexactly(10)  # of ZeroMQ's greeting
        else:
            while not made.connections():  # noqa: ASYNC110
                await asyncio.sleep(0)
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), 20)
    assert not made.connections()
    writer.close()


@pytest.mark.parametrize("speaks", ["act", "openpi"])
async def test_the_connections_of_a_door_take_turns_with_those_of_others_and_share_its_budget(speaks):
    shared = Turns()
    async with wire.opened(speaks, paces=shared) as made:
        reader, writer = await asyncio.open_connection(*made.bound.rsplit(":", 1))
        writer.write(b"GET / HT")
        while not made.connections():  # noqa: ASYNC110
            await asyncio.sleep(0)
        (connection,) = made.connections()
        assert connection.turns is shared and connection.budget is made.budget
        writer.close()
