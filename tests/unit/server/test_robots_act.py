"""The door that answers robots over plain HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
from types import SimpleNamespace

import numpy as np
import pytest
from tests.loops import turns

from jurybox.protocol.errors import Code, Refused, RowFailed, SpecMismatch
from jurybox.server.frontend.frontend import Frontend
from jurybox.server.gateway.robots.act import ActDoor
from jurybox.server.gateway.robots.json_arrays import loads
from jurybox.server.security.access import Access
from jurybox.server.security.limits import RECEIVED


@contextlib.asynccontextmanager
async def opened(infer):
    """A door whose model is `infer`, and a connection to it."""

    @contextlib.asynccontextmanager
    async def episode(timeout, *, returns):
        yield SimpleNamespace(infer=infer)

    settings = {"model": "m", "clients": 1, "timeout": 1.0, "listen": "127.0.0.1:0"}
    door = ActDoor("arm", settings, Frontend("ipc:///nowhere", None), Access(max_message=1000))
    door.policy = SimpleNamespace(episode=episode, close=lambda: asyncio.sleep(0))
    await door.start()
    host, port = door.bound.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    yield door, reader, writer
    await door.stop()
    await turns()
    assert door.ended.is_set()
    writer.close()


def ask(writer, given=None, method="POST /act"):
    body = given if isinstance(given, bytes) else json.dumps({"state": [1.0]} if given is None else given).encode()
    writer.write(f"{method} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


async def answer(reader):
    """The status, the fields and the body of an answer."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
    status, *lines = head.decode().lower().splitlines()
    fields = dict(line.split(": ", 1) for line in lines if line)
    body = await asyncio.wait_for(reader.readexactly(int(fields["content-length"])), 20)
    return int(status.split()[1]), fields, body


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
        _, _, body = await answer(reader)
    found = loads(b'{"answer": ' + body + b"}")["answer"]
    plain = {name: value.tolist() for name, value in found.items()} if isinstance(found, dict) else None
    assert (plain or np.asarray(found).tolist()) == told


def raises(error):
    async def infer(request, *, needs_actions):
        raise error

    return infer


@pytest.mark.parametrize(
    ("error", "status", "counted"),
    [
        (Refused("busy", Code.BUSY), 503, "server"),
        (Refused("late", Code.TIMEOUT), 503, "late"),
        (Refused("gone", Code.SERVER_GONE), 503, "server"),
        (Refused("not ready", Code.NOT_READY), 503, "server"),
        (Refused("stopping", Code.DRAINING), 503, "server"),
        (RowFailed("broken"), 422, "row"),
        (SpecMismatch("x is missing"), 422, "observation"),
        (RuntimeError("a fault"), 500, "model"),
    ],
)
async def test_an_error_has_a_status_that_says_whether_to_ask_again(error, status, counted):
    async with opened(raises(error)) as (door, reader, writer):
        ask(writer)
        found, fields, body = await answer(reader)
        assert found == status and fields["content-type"] == "application/json"
        assert fields.get("retry-after") == ("2" if status == 503 else None)
        assert str(error) in json.loads(body)["detail"] and set(json.loads(body)) == {"detail"}
        assert door.counters.failures == {counted: 1} and door.counters.requests == 0


async def test_a_request_may_be_json_within_json_and_is_answered_so():
    given = []

    async def infer(request, *, needs_actions):
        given.append(request)
        return {"a": np.zeros(2)}

    async with opened(infer) as (door, reader, writer):
        ask(writer, {"encoded": json.dumps({"state": [1.0], "text": "\ud800"})})
        status, _, body = await answer(reader)
        assert status == 200 and given == [{"state": [1.0], "text": "\ud800"}]
        inner = json.loads(body)
        assert type(inner) is str and loads(f'{{"a": {inner}}}'.encode())["a"].tolist() == [0, 0]
        assert door.counters.requests == 1
        for wrong in ({"encoded": "{}", "more": 1}, {"encoded": {"state": [1.0]}}):
            ask(writer, wrong)
            status, _, body = await answer(reader)
            assert status == 400
            assert json.loads(body) == {"detail": "'encoded': expected JSON as text, and no other field"}
        assert len(given) == 1 and door.counters.failures == {"malformed": 2}


async def test_an_observation_of_gr00t_comes_alone_and_is_answered_by_nested_lists():
    given = []

    async def infer(request, *, needs_actions):
        given.append(request)
        return {"arm": np.ones((1, 2, 3)), "action.hand": np.zeros((1, 2))}

    async with opened(infer) as (_, reader, writer):
        ask(writer, {"observation": {"state.arm": [[[1.0, 2.0]]], "task": ["x"]}})
        _, _, body = await answer(reader)
        assert json.loads(body) == {"action.arm": [[[1.0] * 3] * 2], "action.hand": [[0.0, 0.0]]}
        assert set(given[0]) == {"state/arm", "language/task"}
        for other in ({"observation": {"state": [1.0]}, "text": "x"}, {"observation": [1.0]}):
            ask(writer, other)
            await answer(reader)
            assert given[-1] == other


@pytest.mark.parametrize(
    ("method", "status", "told"),
    [
        ("POST /act/", 200, None),
        ("GET /act", 405, None),
        ("POST /reset", 200, {"status": "reset"}),
        ("GET /reset", 405, None),
        ("GET /health", 200, {"status": "healthy", "model": "m"}),
        ("GET /healthz", 200, {"status": "healthy", "model": "m"}),
        ("GET /docs", 404, None),
        ("GET /redoc", 404, None),
        ("GET /openapi.json", 404, None),
    ],
)
async def test_other_paths_answer_as_the_originals(method, status, told):
    async with opened(raises(RowFailed("x")) if status != 200 else acting) as (_, reader, writer):
        ask(writer, method=method)
        found, _, body = await answer(reader)
        assert found == status
        assert told is None or json.loads(body) == told


async def acting(request, *, needs_actions):
    return {"a": np.zeros(2)}


async def test_a_body_beyond_the_limit_is_refused_in_the_form_of_the_door():
    async with opened(acting) as (_, reader, writer):
        ask(writer, b" " * 1001)
        found = (await asyncio.wait_for(reader.read(), 20)).decode()
        assert found.startswith("HTTP/1.1 413") and '{"detail": "' in found and "at most 1000 bytes" in found


async def test_what_a_request_holds_is_counted_twice_while_it_is_computed():
    """The body, and its arrays, which are smaller."""
    held = []

    async def infer(request, *, needs_actions):
        held.append(door.budget.held(RECEIVED))
        return {"a": np.zeros(2)}

    async with opened(infer) as (door, reader, writer):
        ask(writer, {"state": "x" * 500})
        await answer(reader)
        assert len(door.connections()) == 1
        assert held[0] >= 2 * 500
        await turns()
        assert door.budget.held(RECEIVED) == 0
