"""What the routes of the Open Inference Protocol over HTTP answer where there is nothing to say, or nothing to do."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import httpx
import pytest

from jurybox.protocol.errors import Code
from jurybox.server.gateway.app import create_app
from jurybox.server.gateway.inference.http_inference import router
from jurybox.server.gateway.inference.shared_memory import Region
from jurybox.server.security.pace import Turns

SYSTEM, CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
KEY, HANDLE = {"key": "/k", "byte_size": 8}, {"raw_handle": {"b64": "YWI="}, "byte_size": 8}


class Noting(Turns):
    """Turns that note what is decoded in them."""

    def __init__(self):
        super().__init__()
        self.bodies = []

    async def decoded(self, decode, body, *more):
        self.bodies.append(body)
        return await super().decoded(decode, body, *more)


@pytest.fixture(scope="module")
def turns():
    return Noting()


@pytest.fixture(scope="module")
def app(turns):
    models = SimpleNamespace(
        repository=AsyncMock(),
        regions=Mock(status=lambda name: [Region(name or "all", 8, "/k", 4, -1)]),
        cuda_regions=SimpleNamespace(register=Mock(), unregister=AsyncMock()),
        metadata=lambda: {"name": "jurybox"},
        statistics=AsyncMock(side_effect=lambda name, version: [{"name": name, "version": version}]),
        index=AsyncMock(side_effect=lambda repository, ready: [{"repository": repository, "ready": ready}]),
    )
    return create_app(None, routers=[router(models, turns=turns)])


@pytest.fixture
async def http(app):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        yield client


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *((f"/v2/repository/models/m/{verb}", None) for verb in ("load", "unload", "sleep", "wake")),
        (f"{SYSTEM}/region/r/register", KEY),
        (f"{SYSTEM}/region/r/unregister", None),
        (f"{SYSTEM}/unregister", None),
        (f"{CUDA}/region/r/register", HANDLE),
        (f"{CUDA}/region/r/unregister", None),
        (f"{CUDA}/unregister", None),
    ],
)
async def test_what_was_done_is_answered_by_an_empty_object(http, path, body):
    answer = await http.post(path, json=body) if body else await http.post(path)
    assert (answer.status_code, answer.json()) == (200, {})


@pytest.mark.parametrize("path", ["/v2/trace/setting", "/v2/logging"])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_settings_that_there_are_not_are_refused_with_the_extensions_that_there_are(http, path, method):
    answer = await http.request(method, path)
    assert answer.json()["code"] == Code.UNSUPPORTED.name and answer.status_code >= 400
    assert "trace and log settings are not served here; there are: " in answer.json()["error"]


async def test_what_is_told_of_the_server_and_its_models_is_of_those_that_were_asked_for(http):
    for path in ("/v2", "/v2/"):
        assert (await http.get(path)).json() == {"name": "jurybox"}
    for path, told in (
        ("/v2/models/stats", {"name": "", "version": ""}),
        ("/v2/models/a/b/stats", {"name": "a/b", "version": ""}),
        ("/v2/models/m/versions/3/stats", {"name": "m", "version": "3"}),
    ):
        assert (await http.get(path)).json() == {"model_stats": [told]}
    for body, ready in ((None, False), ({"ready": True}, True), ({}, False)):
        answer = (
            await http.post("/v2/repository/index", json=body)
            if body is not None
            else await http.post("/v2/repository/index")
        )
        assert answer.json() == [{"repository": "", "ready": ready}]


async def test_bodies_are_decoded_in_the_turns_of_all_doors(http, turns):
    turns.bodies.clear()
    await http.post(f"{SYSTEM}/region/r/register", content=b'{"key": "/k", "byte_size": 8}')
    await http.post(f"{SYSTEM}/unregister")
    assert turns.bodies == [b'{"key": "/k", "byte_size": 8}']


async def test_regions_are_shown_with_their_places(http):
    for path, name in (("/status", "all"), ("/region/r/status", "r")):
        found = (await http.get(SYSTEM + path)).json()
        assert found == [{"name": name, "key": "/k", "offset": 4, "byte_size": 8}]
