"""The gateway's status source: one request at a time for any number of callers, and no hang."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from jurybox.protocol.errors import ModelFailed, ServerGone, Timeout
from jurybox.server.frontend.source import ClientSource


class Server:
    """A connection that counts, and answers when it may."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.asked = 0
        self.closed = 0
        self.error: Exception | None = None
        self.may_answer = threading.Event()
        self.may_answer.set()

    def open(self, address: str, *, timeout: float) -> Server:
        self.opened.append(address)
        return self

    def status(self) -> dict[str, Any]:
        self.asked += 1
        assert self.may_answer.wait(10)
        if self.error:
            raise self.error
        return {"asked": self.asked}

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def server(monkeypatch):
    server = Server()
    monkeypatch.setattr("jurybox.server.frontend.source.connect", server.open)
    yield server
    server.may_answer.set()


def source(server: Server, **options: float) -> ClientSource:
    return ClientSource("ipc:///x", **options)


async def test_many_probes_are_one_question(server):
    server.may_answer.clear()
    asking = source(server, keep=60.0)
    probes = [asyncio.create_task(asking.status()) for _ in range(50)]
    await asyncio.sleep(0)
    server.may_answer.set()
    assert await asyncio.gather(*probes) == [{"asked": 1}] * 50
    assert await asking.status() == {"asked": 1}
    assert (server.asked, server.opened) == (1, ["ipc:///x"])


async def test_an_answer_is_good_for_a_moment_only(server):
    asking = source(server, keep=0.0)
    assert [await asking.status(), await asking.status()] == [{"asked": 1}, {"asked": 2}]
    assert len(server.opened) == 1


async def test_a_server_that_went_is_connected_to_anew(server):
    asking = source(server, keep=0.0)
    await asking.status()
    server.error = ServerGone("gone")
    with pytest.raises(ServerGone):
        await asking.status()
    server.error = None
    assert await asking.status() == {"asked": 3}
    assert (len(server.opened), server.closed) == (2, 1)


async def test_a_server_that_hangs_is_a_time_out_and_its_late_answer_serves_the_next(server, monkeypatch):
    monkeypatch.setattr("jurybox.server.frontend.source._MARGIN", 0.0)
    server.may_answer.clear()
    asking = source(server, timeout=0.05, keep=60.0)
    with pytest.raises(Timeout, match=r"ipc:///x did not answer within 0.05 s"):
        await asking.status()
    with pytest.raises(Timeout):
        await asking.status()
    assert server.asked == 1  # a second question would wait behind the first
    server.may_answer.set()
    asking._timeout = 10.0
    assert await asking.status() == {"asked": 1}


async def test_a_caller_that_gives_up_does_not_cancel_the_request_of_others(server):
    server.may_answer.clear()
    asking = source(server)
    patient, impatient = asyncio.create_task(asking.status()), asyncio.create_task(asking.status())
    await asyncio.sleep(0)
    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    server.may_answer.set()
    assert await patient == {"asked": 1}


async def test_closing_lets_go_of_the_connection(server):
    asking = source(server)
    await asking.status()
    await asking.close()
    asking._thread.shutdown(wait=True)
    assert server.closed == 1


@pytest.mark.parametrize("error", [Timeout("asked for too long"), ModelFailed("of another kind")])
async def test_an_error_that_the_client_raised_is_told_as_it_came_and_leaves_the_connection_open(server, error):
    asking = source(server, keep=0.0)
    server.error = error
    with pytest.raises(type(error), match=f"^{error}$"):
        await asking.status()
    server.error = None
    assert await asking.status() == {"asked": 2}
    assert (len(server.opened), server.closed) == (1, 0)


async def test_an_error_is_good_for_a_moment_too_and_a_fresh_document_is_asked_for_at_once(server):
    asking = source(server, keep=60.0)
    server.error = ServerGone("gone")
    for _ in range(2):
        with pytest.raises(ServerGone):
            await asking.status()
    assert server.asked == 1
    server.error = None
    assert await asking.status(fresh=True) == {"asked": 2}
    assert await asking.status() == {"asked": 2}
