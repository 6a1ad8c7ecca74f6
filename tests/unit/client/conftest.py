"""Fixtures of calls over HTTP/2 lines of our own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.unit.client.played_gateway import Gateway, Started

from jurybox.client.remote import http2_call
from jurybox.client.remote.http2_calls import Http2Calls


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    gateway = Gateway()
    yield gateway
    gateway.close()


@pytest.fixture
def calls(gateway: Gateway) -> Iterator[Http2Calls]:
    calls = Http2Calls(gateway.address, (("authorization", "Bearer me"),))
    yield calls
    calls.close()


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2_call, "_FIRST_PAUSE", 0.002)


@pytest.fixture
def endless_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that pauses before it is made again is not made again."""
    for name in ("_FIRST_PAUSE", "_LONGEST_PAUSE"):
        monkeypatch.setattr(http2_call, name, 1000.0)


@pytest.fixture
def started(calls: Http2Calls) -> Iterator[Started]:
    started = Started(calls)
    yield started
    started.calls.close()
