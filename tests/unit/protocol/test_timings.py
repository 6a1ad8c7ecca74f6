"""Times of tickets: found only with the right ticket."""

import secrets

import numpy as np
import pytest

from jurybox.protocol.segment import segment_name
from jurybox.protocol.timings import PLACES, Timings
from jurybox.protocol.wire import TICKET


@pytest.fixture
def timings():
    owner = Timings.create(segment_name(f"times{secrets.token_hex(4)}", "timings"))
    yield owner
    owner.close()


def tickets(*pairs):
    records = np.zeros(len(pairs), TICKET)
    records["lane"], records["sequence"] = zip(*pairs, strict=True)
    return records


def test_a_ticket_finds_its_own_times(timings):
    timings.write(tickets((0, 5), (7, 2**63 + 5)), began=10, ended=20, engine=3, batch_rows=8, batch_tickets=2)
    reader = Timings.attach(timings.segment.name)
    found = reader.read(7, 2**63 + 5)
    assert [int(found[name]) for name in ("began", "ended", "engine", "rows", "tickets")] == [10, 20, 3, 8, 2]
    assert reader.read(7, 5) is None
    assert reader.read(1, 5) is None
    with pytest.raises(ValueError, match="read-only"):
        reader.records["began"][0, 0] = 1
    reader.close()


def test_a_ticket_that_was_overwritten_has_none(timings):
    for sequence in range(1, PLACES + 2):
        timings.write(tickets((3, sequence)), began=sequence, ended=0, engine=0, batch_rows=1, batch_tickets=1)
    assert timings.read(3, 1) is None
    assert int(timings.read(3, 2)["began"]) == 2
