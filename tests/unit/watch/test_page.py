"""The page's files and headers, and the stream behind it, without a browser."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from jurybox.protocol.errors import Refused, ServerGone, Timeout
from jurybox.server.gateway import live
from jurybox.server.gateway.app import create_app
from jurybox.server.gateway.live import Broadcast, Snapshots
from jurybox.server.security.http import Heads

PAGE = Path(live.__file__).parent / "page"


class Source:
    """A status source for a scene that counts its calls."""

    def __init__(self, scene: Any) -> None:
        self.scene = scene
        self.asked = 0
        self.error: Exception | None = None

    async def status(self) -> dict[str, Any]:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.scene.document()


@pytest.fixture
def source(scene) -> Source:
    return Source(scene)


@pytest.fixture
async def http(source):
    app: FastAPI = create_app(source)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        yield client
    app.state.watching.close()


async def test_the_page_and_all_that_it_names_are_served_with_a_policy_that_allows_only_itself(http):
    page = await http.get("/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    named = set(re.findall(r'(?:href|src)="(/page/[^"]+)"', page.text)) | {"/page/charts.js"}
    assert len(named) == 4
    for path in ["/", *named]:
        answer = await http.get(path)
        assert answer.status_code == 200
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert set(policy.values()) <= {"'none'", "'self'"}
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("file", sorted(path.name for path in PAGE.iterdir()))
def test_no_file_of_the_page_has_inline_code_or_names_a_foreign_host(file):
    text = (PAGE / file).read_text()
    assert not [url for url in re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text) if "www.w3.org" not in url]
    if file.endswith(".html"):
        assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\son\w+=|\sstyle=", text)
    assert "innerHTML" not in text


async def test_metrics_come_from_the_scoreboard_and_the_status_is_read_once_in_a_while(
    http, source, scene, monkeypatch
):
    monkeypatch.setattr("jurybox.server.gateway.live._NAMES_FOR", 60.0)
    for requests in range(1, 6):
        scene.add(0, 3, requests=1)
        text = (await http.get("/metrics")).text
        assert f'jurybox_requests_total{{model="photo"}} {requests}.0' in text
    assert source.asked == 1


async def test_metrics_without_a_server_are_unavailable(http, source):
    source.error = ServerGone("nobody there")
    answer = await http.get("/metrics")
    assert (answer.status_code, answer.json()["code"]) == (503, "SERVER_GONE")


@pytest.mark.parametrize("error", [Timeout("too slow"), ServerGone("no answer within 1.0 s")])
async def test_a_supervisor_that_is_slow_to_answer_does_not_end_the_numbers(source, monkeypatch, error):
    watch = Snapshots(source)
    await watch.snapshot()
    monkeypatch.setattr("jurybox.server.gateway.live._NAMES_FOR", 0.0)
    source.error = error
    assert (await watch.snapshot()).models
    monkeypatch.setattr("jurybox.server.gateway.live._SILENT_FOR", 0.0)
    with pytest.raises(type(error)):
        await watch.snapshot()
    watch.close()


async def test_a_server_that_died_is_gone_at_once_though_its_names_are_known(source, scene, monkeypatch):
    watch = Snapshots(source)
    await watch.snapshot()
    monkeypatch.setattr("jurybox.server.gateway.live._NAMES_FOR", 0.0)
    source.error = ServerGone("no answer within 1.0 s")
    scene.scoreboard.close()
    with pytest.raises(ServerGone, match="is gone"):
        await watch.snapshot()
    watch.close()


def parsed(event: str) -> tuple[str, dict[str, Any]]:
    kind, data = re.fullmatch(r"event: (\w+)\ndata: (.*)\n\n", event).groups()
    return kind, json.loads(data)


async def test_the_stream_samples_only_with_subscribers(source):
    broadcast = Broadcast(Snapshots(source), interval=0.05)
    assert source.asked == 0
    streams = [broadcast.stream() for _ in range(3)]
    for stream in streams:
        assert parsed(await anext(stream))[0] == "sample"
    assert broadcast.watchers == 3
    for stream in streams:
        await stream.aclose()
    assert broadcast.watchers == 0
    assert broadcast._task is None
    broadcast.close()


async def test_the_stream_reports_that_the_server_is_gone_and_resumes_when_it_is_back(source):
    broadcast = Broadcast(Snapshots(source), interval=0.05)
    stream = broadcast.stream()
    source.error = ServerGone("nobody there")
    assert parsed(await anext(stream)) == ("gone", {"reason": "nobody there"})
    source.error = None
    async with asyncio.timeout(30):
        while parsed(await anext(stream))[0] != "sample":
            pass
    await stream.aclose()


async def test_close_ends_the_streams(source):
    broadcast = Broadcast(Snapshots(source), interval=0.05)
    stream = broadcast.stream()
    await anext(stream)
    broadcast.close()
    async with asyncio.timeout(30):
        assert len([event async for event in stream]) <= 1
    assert broadcast.watchers == 0


async def test_there_is_a_bound_to_the_watchers(source, monkeypatch):
    monkeypatch.setattr("jurybox.server.gateway.live._MOST_WATCHERS", 1)
    broadcast = Broadcast(Snapshots(source), interval=0.05)
    stream = broadcast.stream()
    await anext(stream)
    with pytest.raises(Refused, match="1 live pages are open"):
        broadcast.require_room()
    await stream.aclose()
    broadcast.require_room()


async def test_all_who_scrape_at_once_get_one_text_that_is_not_older_than_their_request(http, monkeypatch):
    """A scrape takes as long as twenty other requests, so a flood of them is not answered one by one."""
    begun, asked = [], []

    def slow(snapshot, accept):
        begun.append(len(asked))
        return b"metrics", accept or "text/plain"

    monkeypatch.setattr(live, "exposition", slow)

    async def scrape(accept):
        asked.append(accept)
        number = len(asked)
        answer = await http.get("/metrics", headers={"Accept": accept})
        assert answer.content == b"metrics" and answer.headers["content-type"].startswith(accept)
        assert begun[-1] >= number, "it began after it was asked for"

    openmetrics, text = "application/openmetrics-text", "text/plain"
    await asyncio.gather(*(scrape(accept) for accept in [text, openmetrics] * 20))
    assert len(begun) <= 6
    await scrape(text)
    await scrape(text)
    assert len(begun) >= 4


async def test_a_scrape_that_fails_fails_for_all_who_wait_and_not_for_the_next(http, source):
    source.error = ServerGone("the server is gone")
    answers = await asyncio.gather(*(http.get("/metrics") for _ in range(5)))
    assert {answer.status_code for answer in answers} == {503}
    source.error = None
    assert (await http.get("/metrics")).status_code == 200


async def test_a_clock_decides_when_the_names_are_read_again_and_for_how_long_old_ones_do(source, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: now[0]))
    watch = Snapshots(source)
    for seconds, asked in ((0.0, 1), (0.75, 1), (0.25, 2), (0.75, 2), (1.0, 3)):
        now[0] += seconds
        await watch.snapshot()
        assert source.asked == asked
    source.error = Timeout("too slow")
    now[0] += 29.75
    await watch.snapshot()
    now[0] += 0.25
    with pytest.raises(Timeout):
        await watch.snapshot()
    watch.close()


async def test_the_first_snapshot_needs_the_status(source):
    source.error = Timeout("too slow")
    with pytest.raises(Timeout):
        await Snapshots(source).snapshot()


async def test_after_a_server_died_its_names_are_read_anew(source, scene, monkeypatch):
    watch = Snapshots(source)
    await watch.snapshot()
    before, reader = source.asked, watch._reader
    monkeypatch.setattr(reader, "read", _raising(ServerGone("its scoreboard is gone")))
    with pytest.raises(ServerGone):
        await watch.snapshot()
    monkeypatch.undo()
    assert (await watch.snapshot()).models and source.asked == before + 1
    watch.close()


def _raising(error: Exception) -> Any:
    def raises(*_: Any) -> None:
        raise error

    return raises


async def test_a_head_request_for_the_stream_ends_and_opens_no_stream(source):
    transport = httpx.ASGITransport(Heads(create_app(source)))
    async with asyncio.timeout(30), httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        answer = await client.head("/events")
    assert source.asked == 0
    assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (200, "text/event-stream")
    assert answer.headers["x-frame-options"] == "DENY"


async def test_a_stream_is_no_longer_open_to_more_watchers_than_the_most(http, monkeypatch):
    monkeypatch.setattr("jurybox.server.gateway.live._MOST_WATCHERS", 0)
    answer = await http.get("/events")
    assert (answer.status_code, answer.json()["code"]) == (429, "BUSY")


async def test_there_is_no_film_without_trainings(http):
    answer = await http.get("/runs/film", params={"name": "run"})
    assert (answer.status_code, "no film of 'run'" in answer.text) == (404, True)


async def test_who_comes_later_gets_the_last_document_at_once(source):
    broadcast = Broadcast(Snapshots(source), interval=3600.0)
    first = broadcast.stream()
    event = await anext(first)
    second = broadcast.stream()
    async with asyncio.timeout(30):
        assert await anext(second) == event
    await first.aclose()
    assert broadcast.watchers == 1
    await second.aclose()
    assert broadcast.watchers == 0


async def test_closing_the_routes_ends_the_streams_and_the_scrapes_that_wait(source, monkeypatch):
    routes = live.LiveRoutes(source)
    stream = routes._broadcast.stream()
    await anext(stream)
    scraped = asyncio.ensure_future(routes._scrapes.scrape(""))
    await asyncio.sleep(0)
    routes.close()
    async with asyncio.timeout(30):
        assert len([event async for event in stream]) <= 1
        with pytest.raises(asyncio.CancelledError):
            await scraped
