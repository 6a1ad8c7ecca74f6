"""How a connection to a gateway begins and ends, when its lanes are traced, and how it pauses between two questions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from tests.clocks import Clock, given
from tests.unit.client.test_grpc_link import Channels, Failure, Gateway, gateway, link, reached  # noqa: F401  fixtures

from jurybox.client import Refused, ServerGone
from jurybox.client.link import POLL
from jurybox.client.remote import grpc_link
from jurybox.client.remote.grpc_link import GrpcLink

ADDRESS = "grpc://there:1"


class Opened:
    """The channels of a connection, and the ways that requests take; `fails` has the error of a method."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bool]] = []
        self.fails: dict[str, Exception] = {}
        self.closed: list[str] = []
        self.given: tuple[Any, ...] = ()
        self.metadata = (("authorization", "Bearer me"),)

    def channels(self, *how: Any) -> Opened:
        self.given = how
        return self

    def call(self, method: str, request: Any, timeout: float, *, wait_for_ready: bool = False) -> str:
        assert 0 < timeout <= 9.0
        self.asked.append((method, wait_for_ready))
        if method in self.fails:
            raise self.fails[method]
        return "told"

    def way(self, name: str) -> Any:
        return lambda *how: SimpleNamespace(name=name, how=how, close=lambda: self.closed.append(name))

    def close(self) -> None:
        self.closed.append("channels")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    made = Opened()
    monkeypatch.setattr(grpc_link, "Channels", made.channels)
    monkeypatch.setattr(grpc_link, "GrpcioCalls", made.way("grpcio"))
    monkeypatch.setattr(grpc_link, "Http2Calls", made.way("lines"))
    monkeypatch.setattr(grpc_link, "can_dial", lambda address, tls_ca: tls_ca is None)
    return made


@pytest.mark.parametrize("tls_ca", [None, b"a certificate"])
def test_a_connection_waits_for_its_gateway_and_shows_its_token_before_any_request(
    opened: Opened, tls_ca: bytes | None
) -> None:
    made = GrpcLink(ADDRESS, "me", 9.0, tls_ca)
    assert opened.given == (ADDRESS, (("authorization", "Bearer me"),), tls_ca)
    assert opened.asked == [("ServerLive", True), ("ServerMetadata", False)]
    lines = made._infer
    assert lines.name == ("lines" if tls_ca is None else "grpcio")
    assert lines.how == ((ADDRESS, opened.metadata, None) if tls_ca is None else (opened,))
    assert not made.closed and made.waits
    made.close()
    assert made.closed and opened.closed == [lines.name, "channels"]


def test_a_gateway_that_is_not_there_is_gone_and_nothing_stays_open(opened: Opened) -> None:
    opened.fails["ServerLive"] = Failure(grpc.StatusCode.UNAVAILABLE)
    with pytest.raises(
        ServerGone, match=r"no answer from grpc://there:1 within 9\.0 s \(.*\): is a server's gateway running there"
    ):
        GrpcLink(ADDRESS, None, 9.0)
    assert opened.closed == ["grpcio", "channels"] and opened.given == (ADDRESS, (), None)


def test_a_gateway_that_refuses_the_token_is_left(opened: Opened) -> None:
    opened.fails["ServerMetadata"] = Failure(grpc.StatusCode.PERMISSION_DENIED)
    with pytest.raises(Refused):
        GrpcLink(ADDRESS, "other", 9.0)
    assert opened.closed == ["grpcio", "channels"]


@pytest.mark.parametrize("traces", [False, True])
def test_a_lane_over_a_gateway_is_far_and_traced_if_that_is_asked_for(
    reached: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    traces: bool,
) -> None:
    traced: list[Any] = []

    def trace(transport: Any, name: str) -> Any:
        traced.append((transport, name))
        return transport

    monkeypatch.setattr(grpc_link, "traced", trace)
    reached._traces = traces
    lane, *_ = reached.lease("m", 2, 9.0)
    assert [(transport is lane.transport, name) for transport, name in traced] == [(True, "m")] * traces
    ticket = SimpleNamespace(engine=0, rows=2)
    assert "its server is busy, or the network to it is broken" in lane.why_late(ticket)


def test_a_gateway_is_asked_again_after_a_pause_and_for_no_longer_than_there_is_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = given(Clock(), monkeypatch, grpc_link)
    channels = Channels(2)
    assert link(channels)._told("ModelMetadata", None, 30.0) == "told"
    assert clock.slept == [POLL, POLL] and channels.timeouts == pytest.approx([30.0, 30.0 - POLL, 30.0 - 2 * POLL])
    clock.slept.clear()
    with pytest.raises(ServerGone, match=r"no answer from grpc://127\.0\.0\.1:1 within 0\.2 s"):
        link(Channels(10**6))._told("ModelMetadata", None, 0.2)
    assert 0.1001 < sum(clock.slept) < 0.2001
