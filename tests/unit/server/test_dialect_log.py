"""What a stranger sends to a dialect does not fill the log."""

from __future__ import annotations

from jurybox.protocol.errors import Code, Refused
from jurybox.server.gateway.dialects import router


def test_requests_without_a_reward_write_one_line_a_second_to_the_log(monkeypatch):
    lines, now = [], [100.0]

    class Log:
        def warning(self, event, **fields):
            lines.append((event, fields))

    limiter = router.LogLimiter
    monkeypatch.setattr(router, "LogLimiter", lambda report: limiter(report, lambda: now[0]))
    report = router._reporter(Log(), "unirl")
    for _ in range(1000):
        router._refused(router._DIALECTS["unirl"], report, Refused("no", Code.MALFORMED))
        report("none")
    assert lines == [("no reward", {"dialect": "unirl", "reason": "no"})]
    now[0] += 1.1
    report("again")
    assert lines[1:] == [("no reward", {"dialect": "unirl", "reason": "again", "times": 2000})]
