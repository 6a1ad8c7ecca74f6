"""The page's files and headers, and the stream behind it, without a browser."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from jurybox.protocol.errors import Refused, ServerGone, Timeout
from jurybox.server.gateway import live
from jurybox.server.gateway.app import create_app
from jurybox.server.gateway.live import Broadcast, Snapshots

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
