"""The last events: bounded in number and in length, whatever is logged."""

from __future__ import annotations

import io
import json

from jurybox.server.logs import configure
from jurybox.server.supervisor.control import Events


def test_log_records_keep_their_fields():
    events, sink = Events(clock=lambda: 5.0), io.StringIO()
    log = configure("supervisor", "info", "text", sink, keep=events.keep)
    log.debug("started", role="engine-0")
    log.error("child died", role="engine-0", status=-9, failures=1)
    assert events.last() == [
        {"at": 5.0, "level": "error", "event": "child died",
         "fields": {"role": "engine-0", "status": -9, "failures": 1}}
    ]  # fmt: skip
    assert "child died" in sink.getvalue()


def test_the_ring_is_bounded():
    events = Events()
    for number in range(1000):
        events.keep({"event": "x" * 10_000, "level": "info", "reason": "y" * 10_000, "number": number})
    assert len(events.last()) == 50
    assert events.last()[-1]["fields"]["number"] == 999
    assert len(json.dumps(events.last())) < 50_000
