"""Where the spans of a link go, and who is asked to collect them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.resources import SERVICE_NAME
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import ProxyTracerProvider, SpanKind
from tests.unit.client.test_tracing import Transport, ticket

from jurybox.client import tracing
from jurybox.client.in_flight import Answer
from jurybox.client.tracing import TracedTransport, traced
from jurybox.protocol.errors import Code, SharedMemoryError


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The provider of this process: none yet. `memory` has the spans that come to its exporter."""
    here = SimpleNamespace(now=ProxyTracerProvider(), memory=InMemorySpanExporter())
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: here.now)
    monkeypatch.setattr(trace, "set_tracer_provider", lambda made: setattr(here, "now", made))
    monkeypatch.setattr(trace, "get_tracer", lambda *names: here.now.get_tracer(names[0], *names[1:]))
    monkeypatch.setattr(tracing, "exporter", lambda: here.memory)
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    monkeypatch.delenv("OTEL_RESOURCE_ATTRIBUTES", raising=False)
    return here


def answered(transport: Any, inner: Transport) -> None:
    transport.send(ticket())
    inner.answers = [Answer(5, Code.OK, "", 6, 1)]
    transport.receive(0)


def test_a_process_without_a_provider_gets_one_that_exports(provider: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answered(traced(inner := Transport(), "m", None, 4), inner)
    assert isinstance(provider.now, TracerProvider)
    provider.now.force_flush()
    (span,) = provider.memory.get_finished_spans()
    assert span.name == "infer m" and span.kind == SpanKind.CLIENT and span.attributes["jurybox.lane"] == 4
    assert span.resource.attributes[SERVICE_NAME] == "jurybox-client"
    assert span.instrumentation_scope.name == "jurybox" and span.instrumentation_scope.version
    provider.now.shutdown()


def test_a_service_that_the_environment_names_is_the_spans(provider: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine")
    traced(Transport(), "m", None, None)
    assert provider.now.resource.attributes[SERVICE_NAME] == "mine"
    provider.now.shutdown()


def test_a_provider_that_the_process_has_is_used(provider: Any) -> None:
    memory = InMemorySpanExporter()
    provider.now = given = TracerProvider()
    given.add_span_processor(SimpleSpanProcessor(memory))
    answered(traced(inner := Transport(), "m", None, None), inner)
    assert provider.now is given and len(memory.get_finished_spans()) == 1
    assert not provider.memory.get_finished_spans()


@pytest.mark.parametrize("records", [True, False])
def test_times_of_a_batch_are_looked_for_beside_the_scoreboard_on_this_host(
    provider: Any, monkeypatch: pytest.MonkeyPatch, records: bool
) -> None:
    asked = []

    def attach(name: str) -> Any:
        asked.append(name)
        if not records:
            raise SharedMemoryError("the server records none")
        return "times"

    monkeypatch.setattr(tracing.Timings, "attach", attach)
    provider.now = TracerProvider()
    found: Any = traced(Transport(), "m", "jurybox-1-abc-scoreboard-0", 4)
    assert asked == ["jurybox-1-abc-timings-0"] and found._timings == ("times" if records else None)
    far: Any = traced(Transport(), "m", None, None)
    assert far._timings is None and len(asked) == 1


def test_a_ticket_goes_to_the_transport_with_its_span_begun() -> None:
    transport = TracedTransport(inner := Transport(), "m", 4, None, TracerProvider().get_tracer("test"))
    sent = ticket()
    transport.send(sent)
    assert inner.calls == [("send", sent)]


def test_without_a_lane_no_times_are_looked_for() -> None:
    timings: Any = SimpleNamespace(read=lambda *of: pytest.fail("it has no number"))
    transport = TracedTransport(inner := Transport(), "m", None, timings, TracerProvider().get_tracer("test"))
    answered(transport, inner)


@pytest.mark.parametrize(
    ("variables", "proxied"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector.example:4318"}, True),
        (
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector.example:4318",
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://localhost:4318/v1/traces",
            },
            False,
        ),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "not a URL"}, True),
    ],
)
def test_a_collector_on_this_host_is_never_asked_by_proxy(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], proxied: bool
) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(trace_exporter, "OTLPSpanExporter", lambda *, session: session)
    session: Any = tracing.exporter()
    assert session.trust_env == proxied
    session.close()
