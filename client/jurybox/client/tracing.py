"""OpenTelemetry traces of tickets, from sending to the answer. Imported only if JURYBOX_TRACES is true.

    infer photo          client: from sending the ticket to receiving its answer; a child of the caller's current span
    |- queue             until its batch began
    |- batch             gather, forward, scatter; with the batch's rows and tickets, and the engine
    `- reply             until the client received the answer

The client creates the child spans as well, from the times that the engine records in jurybox.protocol.timings: the
engine's loop exports nothing and has no spans. If the server records no times (server.traces is false), or is connected
to over tcp:// or grpc://, there is only the outer span.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.trace import ProxyTracerProvider, Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context

from jurybox.client.in_flight import Answer, InFlight
from jurybox.client.transports.transport import Transport
from jurybox.protocol.address import is_loopback
from jurybox.protocol.errors import Code, SharedMemoryError
from jurybox.protocol.segment import sibling
from jurybox.protocol.timings import Timings
from jurybox.protocol.wire import build_version

if TYPE_CHECKING:
    import asyncio

    from opentelemetry.sdk.trace.export import SpanExporter

_MOST_OPEN = 4096  # spans; if there are more, the oldest is ended, as its caller no longer waits for the answer


def traced(transport: Transport, model: str, scoreboard: str | None, lane: int | None) -> Transport:
    """Wrap a transport to trace its tickets. Spans go to the process's tracer provider.

    If the process has no provider, one is set up that exports by OTLP over HTTP, configured by the OTEL_ variables.
    `scoreboard` is the name of the server's scoreboard; None: its memory is not on this host.
    """
    if isinstance(trace.get_tracer_provider(), ProxyTracerProvider):
        _export()
    timings: Timings | None = None
    if scoreboard is not None:
        with contextlib.suppress(SharedMemoryError):
            timings = Timings.attach(sibling(scoreboard, "timings"))
    return TracedTransport(transport, model, lane, timings, trace.get_tracer("jurybox", build_version()))


class TracedTransport(Transport):
    """A wrapper around a transport that traces its tickets. It has no `caller`, so that it sees every ticket.

    Args:
        model: the model's name, for the spans.
        lane: the number of the lane; None: it has none.
        timings: the times that the engines record; None if they record none.
    """

    def __init__(
        self, transport: Transport, model: str, lane: int | None, timings: Timings | None, tracer: Tracer
    ) -> None:
        self._transport = transport
        self._model = model
        self._lane = lane
        self._timings = timings
        self._tracer = tracer
        self._open: dict[int, tuple[Span, InFlight, int]] = {}  # by sequence; with the offset in ns to time since 1970

    def send(self, ticket: InFlight) -> None:
        self._begin(ticket)
        self._transport.send(ticket)

    def exchange(self, ticket: InFlight, timeout: float) -> Answer | None:
        self._begin(ticket)
        answer = self._transport.exchange(ticket, timeout)
        if answer is not None:
            self._end(answer)
        return answer

    def receive(self, timeout: float) -> Sequence[Answer]:
        answers = self._transport.receive(timeout)
        for answer in answers:
            self._end(answer)
        return answers

    def settled(self, answer: Answer) -> None:
        self._transport.settled(answer)

    def holds(self, ticket: InFlight) -> bool:
        return self._transport.holds(ticket)

    def is_reading(self, ticket: InFlight) -> bool:
        return self._transport.is_reading(ticket)

    def watch(self, loop: asyncio.AbstractEventLoop, arrived: Callable[[], None]) -> None:
        self._transport.watch(loop, arrived)

    def close(self) -> None:
        for sequence in list(self._open):
            self._give_up(sequence)
        if self._timings is not None:
            self._timings.close()
        self._transport.close()

    def forked(self) -> None:
        """See Transport.forked. The spans belong to the parent."""
        self._open.clear()
        if self._timings is not None:
            self._timings.close()
        self._transport.forked()

    def _begin(self, ticket: InFlight) -> None:
        if (known := self._open.get(ticket.sequence)) is not None:
            span, _, offset = known
            span.add_event("sent again", {"jurybox.engine": ticket.engine}, ticket.submitted + offset)
            return
        offset = time.time_ns() - time.monotonic_ns()
        attributes: dict[str, str | int] = {
            "jurybox.model": self._model,
            "jurybox.rows": ticket.rows,
            "jurybox.sequence": str(ticket.sequence),  # 64 bits unsigned, too large for an int attribute
        }
        if self._lane is not None:
            attributes["jurybox.lane"] = self._lane
        began = ticket.submitted + offset
        span = self._tracer.start_span(f"infer {self._model}", kind=SpanKind.CLIENT, attributes=attributes,
                                       start_time=began)  # fmt: skip
        if not span.is_recording():
            return  # not sampled
        if len(self._open) >= _MOST_OPEN:
            self._give_up(next(iter(self._open)))
        self._open[ticket.sequence] = (span, ticket, offset)

    def _end(self, answer: Answer) -> None:
        if (known := self._open.pop(answer.sequence, None)) is None:
            return
        span, ticket, offset = known
        now = time.monotonic_ns()
        timing = None
        if self._timings is not None and self._lane is not None:
            timing = self._timings.read(self._lane, answer.sequence)
        if timing is not None:
            inside = set_span_in_context(span)
            began, ended = int(timing["began"]), int(timing["ended"])
            about: dict[str, int] = {
                "jurybox.batch.rows": int(timing["rows"]),
                "jurybox.batch.tickets": int(timing["tickets"]),
                "jurybox.engine": int(timing["engine"]),
            }
            for name, start, end in (
                ("queue", ticket.submitted, began),
                ("batch", began, ended),
                ("reply", ended, now),
            ):
                part = self._tracer.start_span(name, inside, start_time=start + offset)
                if name == "batch":
                    part.set_attributes(about)
                part.end(end + offset)
        span.set_attribute("jurybox.weights.version", answer.version)
        if answer.code != Code.OK:
            span.set_status(Status(StatusCode.ERROR, answer.message))
        span.end(now + offset)

    def _give_up(self, sequence: int) -> None:
        if (known := self._open.pop(sequence, None)) is None:
            return
        span = known[0]
        span.set_status(Status(StatusCode.ERROR, "no answer came"))
        span.end()


def _export() -> None:
    """Set up a tracer provider. Its last spans are exported when the process ends."""
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource({SERVICE_NAME: "jurybox-client"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(exporter()))
    trace.set_tracer_provider(provider)


def exporter() -> SpanExporter:
    """Return an exporter for the collector that the OTEL_ variables name. One on this host is never asked by proxy."""
    import requests  # what the exporter sends with
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    names = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    where = next((os.environ[name] for name in names if os.environ.get(name)), "http://localhost:4318")
    session = requests.Session()
    session.trust_env = not is_loopback(urlsplit(where).hostname or "")
    return OTLPSpanExporter(session=session)
