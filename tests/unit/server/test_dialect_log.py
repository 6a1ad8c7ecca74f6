"""What a stranger sends to a dialect does not fill the log, and none of it is left out of the counts."""

from __future__ import annotations

import asyncio

import pytest

from jurybox.protocol.errors import Code, Refused
from jurybox.server.gateway import process
from jurybox.server.gateway.dialects import router
from jurybox.server.logs import LogLimiter


@pytest.fixture
def now():
    return [100.0]


@pytest.fixture
def lines():
    return []


@pytest.fixture
def reports(now, lines):
    return LogLimiter(lambda event, **fields: lines.append((event, fields)), lambda: now[0])


def test_requests_without_a_reward_write_one_line_a_second_to_the_log(reports, now, lines):
    report = router._reporter(reports, "unirl")
    for _ in range(1000):
        router._refused(router._DIALECTS["unirl"], report, Refused("no", Code.MALFORMED))
        report("none")
    assert lines == [("no reward", {"dialect": "unirl", "reason": "no"})]
    now[0] += 1.1
    report("again")
    assert lines[1:] == [("no reward", {"dialect": "unirl", "reason": "again", "times": 2000})]


def test_the_last_of_many_requests_without_a_reward_are_counted_though_no_other_follows(
    reports, now, lines, monkeypatch
):
    for name in ("unirl", "slime"):
        report = router._reporter(reports, name)
        for number in range(5):
            report(f"{name} {number}")
    assert [fields["reason"] for _, fields in lines] == ["unirl 0", "slime 0"]

    async def slept(seconds):
        if len(lines) > 2:
            raise asyncio.CancelledError
        now[0] += seconds

    monkeypatch.setattr(process.asyncio, "sleep", slept)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(process._flushed(reports))
    assert [(fields["reason"], fields["times"]) for _, fields in lines[2:]] == [("unirl 4", 4), ("slime 4", 4)]
