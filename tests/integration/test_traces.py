"""Traces of tickets: a real server, a client process of its own, the SDK's in-memory exporter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
from tests.serving import serving

MODELS = {
    "affine": {"factory": "tests.models:affine", "max_batch": 16, "rows": 64},
    "moody": {"factory": "tests.models:moody", "max_batch": 8, "rows": 64},
}

CLIENT = """
import asyncio, json, sys
import numpy as np
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON

from jurybox.client import Error, connect

memory = InMemorySpanExporter()
provider = TracerProvider(sampler=ALWAYS_OFF if "off" in sys.argv else ALWAYS_ON)
provider.add_span_processor(SimpleSpanProcessor(memory))
trace.set_tracer_provider(provider)
ones = np.ones((3, 4), np.float32)
with connect(sys.argv[1], transport=sys.argv[2], timeout=20) as server:
    model = server.model(sys.argv[3], rows=8)
    for kind in sys.argv[4:]:
        with trace.get_tracer("test").start_as_current_span(kind):
            match kind:
                case "call":
                    model(ones[0])
                case "infer":
                    model.infer(ones)
                case "submit":
                    tickets = [model.submit(ones[:2]) for _ in range(3)]
                    for ticket in tickets:
                        ticket.result()
                case "async":
                    asyncio.run(model.infer_async(ones))
                case "rows":
                    with model.rows(2) as rows:
                        rows.infer()
                case "fail":
                    try:
                        model.infer(np.full((1, 4), 666, np.float32))
                    except Error:
                        pass
print(json.dumps([
    {"name": span.name, "id": span.context.span_id, "trace": span.context.trace_id,
     "parent": span.parent.span_id if span.parent else None, "start": span.start_time, "end": span.end_time,
     "attributes": dict(span.attributes), "error": span.status.status_code.name == "ERROR"}
    for span in memory.get_finished_spans()
]))
"""


def spans(address: str, transport: str, model: str, *kinds: str, traces: str = "true") -> list[dict]:
    run = subprocess.run(
        [sys.executable, "-c", CLIENT, address, transport, model, *kinds],
        env={**os.environ, "JURYBOX_TRACES": traces}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    ports = {"tcp": "127.0.0.1:0", "grpc": "127.0.0.1:0"}
    with serving(tmp_path_factory.mktemp("traced"), MODELS, traces=True, **ports) as running:
        yield running


TICKETS = {"call": 1, "infer": 1, "submit": 3, "async": 1, "rows": 1}


@pytest.fixture(scope="module", params=["shm", "zmq"])
def client_spans(traced, request):
    """The spans of a client that used every kind of call, one after the other."""
    return spans(traced.address, request.param, "affine", *TICKETS)


@pytest.mark.parametrize(("kind", "tickets"), TICKETS.items())
def test_a_ticket_is_one_span_with_queue_batch_and_reply_inside(client_spans, kind, tickets):
    (step,) = [span for span in client_spans if span["name"] == kind]
    assert step["parent"] is None
    found = [span for span in client_spans if span["trace"] == step["trace"]]
    outer = [span for span in found if span["name"] == "infer affine"]
    assert len(outer) == tickets
    assert len(found) == 1 + 4 * tickets
    assert len({span["trace"] for span in client_spans}) == len(TICKETS)
    for span in outer:
        assert span["parent"] == step["id"]
        inside = {part["name"]: part for part in found if part["parent"] == span["id"]}
        queue, batch, reply = (inside[name] for name in ("queue", "batch", "reply"))
        moments = [span["start"], queue["start"], queue["end"], batch["start"], batch["end"], reply["start"],
                   reply["end"], span["end"]]  # fmt: skip
        assert moments == sorted(moments)
        assert batch["start"] < batch["end"]
        assert step["start"] <= span["start"] + 1_000_000  # two clocks: the tracer's and the ticket's
        assert span["end"] <= step["end"] + 1_000_000
        assert batch["attributes"]["jurybox.engine"] == 0
        assert batch["attributes"]["jurybox.batch.rows"] >= span["attributes"]["jurybox.rows"]
        assert span["attributes"]["jurybox.model"] == "affine"


@pytest.mark.parametrize("scheme", ["tcp", "grpc"])
def test_a_server_elsewhere_gives_only_the_outer_spans(traced, scheme):
    found = spans(f"{scheme}://{traced.listening(scheme)}", "auto", "affine", *TICKETS)
    steps = {span["id"]: span["name"] for span in found if span["parent"] is None}
    outer = [span for span in found if span["parent"] is not None]
    assert sorted(steps.values()) == sorted(TICKETS)
    assert {span["name"] for span in outer} == {"infer affine"} and not any(span["error"] for span in outer)
    assert Counter(steps[span["parent"]] for span in outer) == TICKETS


def test_a_failed_ticket_is_a_span_in_error(traced):
    found = spans(traced.address, "shm", "moody", "fail")
    (outer,) = [span for span in found if span["name"] == "infer moody"]
    assert outer["error"]
    assert {span["name"] for span in found} == {
        "fail",
        "infer moody",
    }  # no batch was computed


def test_requests_that_the_sampler_drops_are_not_traced(traced):
    assert spans(traced.address, "shm", "affine", "infer", "call", "off") == []


def test_without_the_setting_a_client_traces_nothing_and_never_imports_opentelemetry(traced):
    assert [span["name"] for span in spans(traced.address, "shm", "affine", "infer", traces="false")] == ["infer"]
    code = (
        "import sys, numpy as np; from jurybox.client import connect\n"
        "with connect(sys.argv[1]) as server: server.model('affine').infer(np.ones((1, 4), np.float32))\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    environment = {key: value for key, value in os.environ.items() if key != "JURYBOX_TRACES"}
    assert subprocess.run([sys.executable, "-c", code, traced.address], env=environment, timeout=60).returncode == 0


def test_without_traces_of_the_server_there_is_only_the_outer_span(server):
    found = spans(server.address, "shm", "affine", "infer", "call")
    assert sorted(span["name"] for span in found) == ["call", "infer", "infer affine", "infer affine"]
