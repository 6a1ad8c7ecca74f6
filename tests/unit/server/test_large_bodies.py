"""A large body is decoded in a thread, one at a time for all doors, on every way in that reads one."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import pickle
import threading
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from jurybox import native
from jurybox.protocol.errors import Busy
from jurybox.server.gateway.app import create_app
from jurybox.server.gateway.dialects import cosmos, json_dialects, pickle_dialects, robometer
from jurybox.server.gateway.dialects.router import DialectPaths, applications
from jurybox.server.gateway.inference import http_inference
from jurybox.server.gateway.robots import gr00t, lerobot, openpi
from jurybox.server.gateway.robots.act import ActDoor
from jurybox.server.gateway.robots.counters import PortCounters
from jurybox.server.gateway.robots.msgpack_arrays import Malformed
from jurybox.server.security import limits
from jurybox.server.security.access import Access
from jurybox.server.security.http import guarded
from jurybox.server.security.pace import HEAVY, Turns
from jurybox.server.settings.dialect_fields import FIELDS
from jurybox.server.settings.door_settings import DialectSettings

MIB = 1 << 20
# Routes that read no body, or no more than the first bytes of it.
UNREAD = {
    "/v2/repository/models/{name:path}/sleep", "/v2/repository/models/{name:path}/wake", "/v2/trace/setting",
    "/v2/logging", "/v2/systemsharedmemory/unregister", "/v2/systemsharedmemory/region/{name}/unregister",
    "/v2/cudasharedmemory/unregister", "/v2/cudasharedmemory/region/{name}/unregister",
    "/dialects/cosmos/pull", "/dialects/cosmos/ping",
}  # fmt: skip
JSON = b'{"parameters": {}' + b" " * HEAVY + b"}"


def npy():
    sink = io.BytesIO()
    np.save(sink, np.zeros((1, 700, 700, 3), np.uint8))
    return sink.getvalue()


def body_of(path):
    """A large body that is read to its end, whatever comes of it."""
    if path.startswith(("/dialects/flow_grpo", "/dialects/verl_omni")):
        return pickle.dumps({"images": [bytes(HEAVY)]})
    if path.startswith("/dialects/robometer"):
        head = b'--bound\r\nContent-Disposition: form-data; name="sample_0"\r\n\r\n'
        return head + JSON + b"\r\n--bound--\r\n"
    if path.startswith("/dialects/cosmos"):
        return b'{"prompts": ["a"], "reward_fn": {}, "media_type": "image"}\n' + npy()
    return JSON


async def busy(*_arguments, **_named):
    raise Busy("nobody computes here")


FRONTEND = SimpleNamespace(
    panels={}, lanes=SimpleNamespace(timeouts=Counter()), spec=busy, compute=busy, reserved=lambda *_: None
)
SILENT = SimpleNamespace(warning=lambda *_, **__: None, error=lambda *_, **__: None)  # a log
BUSY = SimpleNamespace(load=busy, unload=busy, register=lambda *_: None)
OIP = SimpleNamespace(infer=busy, index=busy, repository=BUSY, regions=BUSY, cuda_regions=BUSY)
DIALECTS = {name: {**DialectSettings(model="m").model_dump(), "reward": "m"} for name in FIELDS}


class Doors:
    """All ways over HTTP, by path."""

    def __init__(self, turns):
        access = Access()
        routes = applications(DIALECTS, FRONTEND, SILENT, turns=turns)
        inference = http_inference.router(OIP, turns=turns)
        app = create_app(None, routers=[inference, routes.paths], turns=turns)
        act = {"model": "m", "clients": 1, "timeout": 1.0, "listen": "127.0.0.1:0"}
        self.act = ActDoor("arm", act, FRONTEND, access, None, None, turns)
        web = guarded(DialectPaths(app, routes.endpoints), access, loopback=True)
        posts = {route.path for route in inference.routes if "POST" in route.methods}
        own = {path.rstrip("/") for path in routes.endpoints}
        self.ways = {**dict.fromkeys(posts | own, web), "/act": guarded(self.act._answer, access, loopback=True)}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.act._server._listener.close()

    async def ask(self, path, body, *headers):
        """Return the status of the answer."""
        statuses = []

        async def receive():
            return {"type": "http.request", "body": body}

        async def send(message):
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        there = path.replace("{name:path}", "m").replace("{name}", "m").replace("{version}", "1")
        scope = {
            "type": "http", "method": "POST", "path": there, "raw_path": there.encode(), "query_string": b"",
            "http_version": "1.1", "headers": [(b"host", b"localhost"), *headers], "client": None, "server": None,
            "scheme": "http", "root_path": "",
        }  # fmt: skip
        await self.ways[path](scope, receive, send)
        return statuses[0]


class Seen:
    """Where large bodies were decoded."""

    def __init__(self, monkeypatch):
        self.alone, self.elsewhere = 0, []
        self._here, original = threading.local(), Turns.alone

        async def alone(turns, call, *arguments):
            def marked(*arguments):
                self._here.alone = True
                try:
                    return call(*arguments)
                finally:
                    self._here.alone = False

            self.alone += 1
            return await original(turns, marked, *arguments)

        monkeypatch.setattr(Turns, "alone", alone)
        decoders = (json, "loads"), (json_dialects, "parsed"), (pickle_dialects, "loads"), (cosmos, "_split")
        robots = (openpi, "unpackb"), (gr00t, "_read"), (lerobot, "observed")
        for module, name in (*decoders, (robometer, "_parts"), *robots):
            self._watch(monkeypatch, module, name)

    def _watch(self, monkeypatch, module, name):
        decode = getattr(module, name)

        def noted(body, *arguments, **named):
            if len(body) >= HEAVY and not getattr(self._here, "alone", False):
                self.elsewhere.append(name)
            return decode(body, *arguments, **named)

        monkeypatch.setattr(module, name, noted)


@pytest.fixture
def seen(monkeypatch):
    return Seen(monkeypatch)


def test_every_way_over_http_decodes_a_large_body_alone(seen):
    async def run():
        found = {}
        with Doors(Turns()) as doors:
            for path in sorted(doors.ways.keys() - UNREAD):
                before, elsewhere = seen.alone, len(seen.elsewhere)
                status = await asyncio.wait_for(doors.ask(path, body_of(path)), 60)
                if seen.alone - before != 1 or len(seen.elsewhere) != elsewhere:
                    found[path] = status, seen.alone - before, seen.elsewhere[elsewhere:]
        return doors.ways.keys(), found

    ways, found = asyncio.run(run())
    assert not found
    assert ways >= UNREAD and len(ways - UNREAD) > 30


def test_a_small_body_that_grows_is_unpacked_alone_and_a_small_one_at_once(seen):
    async def run():
        path, packed = "/v2/repository/index", (b"content-encoding", b"gzip")
        with Doors(Turns()) as doors:
            assert await doors.ask(path, gzip.compress(b'{"ready": true}'), packed) == 429
            assert seen.alone == 0
            large = JSON.replace(b'"parameters": {}', b'"ready": true')
            assert await doors.ask(path, gzip.compress(large), packed) == 429
            assert seen.alone == 2  # to be unpacked and to be parsed

    asyncio.run(run())
    assert not seen.elsewhere


async def stream(*messages):
    for message in messages:
        yield message


ROBOTS = {
    "openpi": openpi.RobotServer._read,
    "gr00t": lambda door, body: gr00t.Gr00tDoor._answer(door, None, body),
    "lerobot": lambda door, body: lerobot.LeRobotDoor.observe(door, stream(body), None),
}


@pytest.mark.parametrize("speaks", ROBOTS)
def test_every_robots_door_decodes_a_large_message_alone_and_a_small_one_at_once(seen, monkeypatch, speaks):
    async def whole(messages, *_):
        return b"".join([message async for message in messages])

    monkeypatch.setattr(lerobot, "joined", whole)

    async def run():
        access = Access()
        door = SimpleNamespace(turns=Turns(), access=access, budget=access.budget(), counters=PortCounters())
        robot = SimpleNamespace(account=native.Account(door.budget, limits.ROBOTS))
        door._robots = SimpleNamespace(of=lambda _: robot)
        for size in (1, HEAVY):
            with pytest.raises(Malformed):  # each has read it to its end
                await ROBOTS[speaks](door, b"\xc1" * size)
            assert seen.alone == (size == HEAVY)

    asyncio.run(run())
    assert not seen.elsewhere
