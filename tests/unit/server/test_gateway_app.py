"""The HTTP application with a scripted status source."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from jurybox.protocol.errors import Code, Error, ProtocolMismatch, Refused, ServerGone, Timeout
from jurybox.protocol.wire import PROTOCOL_VERSION, build_version
from jurybox.server.gateway.app import create_app


class Source:
    """Gives a document, or raises."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self.error: Error | None = None

    async def status(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return self.document


@pytest.fixture
def source(document) -> Source:
    return Source(document)


@pytest.fixture
async def http(source) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(source))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/healthz", "/livez", "/readyz"])
async def test_a_serving_server_is_healthy(http, path):
    answer = await http.get(path)
    assert (answer.status_code, answer.json()) == (200, {"status": "ok", "reasons": []})


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/healthz", "/livez", "/readyz"])
@pytest.mark.parametrize("error", [ServerGone("nobody there"), Timeout("too slow")])
async def test_a_silent_supervisor_is_neither_live_nor_ready(http, source, path, error):
    source.error = error
    answer = await http.get(path)
    assert (answer.status_code, answer.json()) == (503, {"status": "unavailable", "reasons": [str(error)]})


@pytest.mark.parametrize(("code", "status"), [(Code.DRAINING, 503), (Code.BUSY, 429)])
async def test_a_server_that_has_no_room_or_stops_says_when_to_ask_again(http, source, code, status):
    source.error = Refused("ask again later", code)
    answer = await http.get("/status")
    assert (answer.status_code, answer.headers["retry-after"]) == (status, "2")


async def reasons(http: httpx.AsyncClient) -> list[str]:
    """Why it is not ready; it is live all the same."""
    assert {(await http.get(path)).status_code for path in ("/health/live", "/livez")} == {200}
    answers = [await http.get(path) for path in ("/health", "/health/ready", "/healthz", "/readyz")]
    assert [answer.status_code for answer in answers] == [503] * 4
    return answers[0].json()["reasons"]


async def test_a_draining_server_is_live_and_not_ready(http, source):
    source.document["server"]["state"] = "draining"
    assert await reasons(http) == ["the server is draining"]


async def test_engines_that_do_not_serve_are_named(http, source):
    first = source.document["engines"][0]
    source.document["server"]["state"] = "down"
    source.document["engines"] = [
        {**first, "hung": True, "heartbeat_age": 75.0},
        {**first, "index": 1, "state": "absent", "restarts": 3},
    ]
    assert await reasons(http) == [
        "engine 0 hangs: its last heartbeat is 75.0 s old",
        "engine 1 is absent, restarted 3 times",
    ]


async def test_one_engine_of_two_is_enough(http, source):
    source.document["engines"].append({**source.document["engines"][0], "state": "absent", "restarts": 1})
    assert (await http.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("state", "reason", "said"),
    [("loading", "", "model 'photo' is loading"), ("failed", "no weights", "model 'photo' is failed: no weights")],
)
async def test_a_model_that_is_not_ready_is_named_with_its_reason(http, source, state, reason, said):
    source.document["models"][0].update(state=state, reason=reason)
    assert await reasons(http) == [said]


async def test_version_names_the_build_and_the_weights_of_every_model(http):
    version = (await http.get("/version")).json()
    assert (version["build"], version["protocol"], version["server"]) == (build_version(), PROTOCOL_VERSION, "abcd1234")
    assert version["python"].startswith("3.")
    assert version["models"] == {
        "photo": {"state": "ready", "version": 5, "newest": 6, "digest": "cafe", "age": 2.5}
    }  # fmt: skip


async def test_version_is_known_without_a_server(http, source):
    source.error = ServerGone("nobody there")
    answer = await http.get("/version")
    assert answer.status_code == 200
    assert (answer.json()["server"], answer.json()["models"]) == (None, {})
    assert answer.json()["build"] == build_version()


async def test_status_is_the_document(http, document):
    assert (await http.get("/status")).json() == document


@pytest.mark.parametrize(
    ("error", "status"), [(ServerGone("gone"), 503), (Timeout("slow"), 504), (ProtocolMismatch("old"), 400)]
)
async def test_an_error_has_the_http_status_of_the_table(http, source, error, status):
    source.error = error
    answer = await http.get("/status")
    assert answer.status_code == status
    assert answer.json() == {"error": str(error), "code": error.code.name}


@pytest.mark.parametrize("path", ["/health", "/status", "/version", "/nowhere"])
async def test_no_answer_is_kept_by_a_cache(http, path):
    assert (await http.get(path)).headers["cache-control"] == "no-store"


async def test_no_page_is_loaded_from_a_foreign_host(http):
    assert [(await http.get(path)).status_code for path in ("/docs", "/redoc")] == [404, 404]
    assert "/health/ready" in (await http.get("/openapi.json")).json()["paths"]
