"""How long a line waits for its reader, what is told of lines that were left out, and what else reads of a line."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jurybox.server import logs
from jurybox.server.logs import LogLimiter, configure, traced


class Clock:
    """The time, which passes while somebody sleeps."""

    def __init__(self) -> None:
        self.now, self.slept = 100.0, 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(logs, "time", SimpleNamespace(monotonic=found.monotonic, sleep=found.sleep))
    return found


@pytest.fixture(autouse=True)
def libraries() -> Iterator[None]:
    """Libraries log to what they logged before, afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


class Reader:
    """Takes what it has room for."""

    def __init__(self) -> None:
        self.room, self.taken = 0, b""

    def send(self, data: memoryview) -> int:
        if not self.room:
            raise BlockingIOError
        part = bytes(data[: self.room])
        self.room -= len(part)
        self.taken += part
        return len(part)


def lines_for(reader: Reader) -> logs._Lines:
    lines = logs._Lines(io.StringIO())
    lines._send = reader.send
    return lines


def test_a_line_waits_a_fifth_of_a_second_for_a_reader_and_those_of_the_next_ten_seconds_do_not(clock: Clock) -> None:
    reader = Reader()
    lines = lines_for(reader)
    waits = []
    for later in (0.0, 0.1, 9.9, 9.9, 10.1, 9.9):  # since the last line that was dropped
        clock.now, clock.slept = clock.now + later, 0.0
        assert not lines.write("line")
        waits.append(pytest.approx(clock.slept, abs=0.011))
    assert waits == [0.2, 0, 0, 0, 0.2, 0]
    reader.room = 1000
    clock.now += 1
    assert lines.write("whole") and reader.taken == b"whole\n"


def test_a_line_goes_on_where_its_reader_has_made_room_and_one_that_was_cut_ends_before_the_next(clock: Clock) -> None:
    reader = Reader()
    lines = lines_for(reader)
    sleep = clock.sleep

    def reads(seconds: float) -> None:
        sleep(seconds)
        reader.room += 3

    logs.time.sleep = reads
    reader.room = 2
    assert lines.write("a long line") and reader.taken == b"a long line\n"
    logs.time.sleep = sleep
    reader.room, reader.taken = 4, b""
    assert not lines.write("another line")
    assert not lines.write("no room at all")
    reader.room = 100
    assert lines.write("next") and lines.write("last")
    assert reader.taken == b"anot\nnext\nlast\n"


def logged(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_has_its_time_in_utc_with_microseconds() -> None:
    stream = io.StringIO()
    log = configure("gateway", "info", "json", stream)
    before = datetime.now(UTC)
    log.info("model ready")
    (line,) = logged(stream)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", line["timestamp"])
    assert before <= datetime.fromisoformat(line["timestamp"][:-1] + "+00:00") <= datetime.now(UTC)


def test_a_time_without_a_fraction_has_as_many_digits_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """So lines of several processes are sorted by their texts."""
    monkeypatch.setattr(logs, "datetime", SimpleNamespace(now=lambda zone: datetime(2026, 3, 1, 12, tzinfo=zone)))
    stream = io.StringIO()
    configure("gateway", "info", "text", stream).info("model ready")
    assert stream.getvalue() == "2026-03-01T12:00:00.000000Z info gateway model ready\n"


@pytest.mark.parametrize("seconds", [0.9, 1.0])
def test_lines_that_were_left_out_are_told_once_with_their_event_and_level_a_second_later(
    clock: Clock, seconds: float
) -> None:
    stream = io.StringIO()
    log = configure("gateway", "info", "json", stream)
    for _ in range(100):
        log.error("a call failed", error="x" * 20_000)
    count = len(logged(stream))
    left_out = 100 - count
    assert 0 < count < 20
    clock.now += 100  # the event has room again
    log._limits["a call failed"].last = clock.now - seconds
    for _ in range(2):
        log.info("another event")
    told = [{key: value for key, value in line.items() if key != "timestamp"} for line in logged(stream)[count:]]
    other = {"level": "info", "process": "gateway", "event": "another event"}
    late = {"level": "error", "process": "gateway", "event": "a call failed", "left_out": left_out}
    assert told == ([late] if seconds >= 1.0 else []) + [other, other]


def test_details_for_developers_are_never_left_out_and_cost_others_nothing(clock: Clock) -> None:
    stream = io.StringIO()
    log = configure("gateway", "debug", "text", stream)
    for _ in range(40):
        log.debug("bytes", data="x" * 10_000)
    log.info("bytes", data="y")
    assert stream.getvalue().count("\n") == 41 and "left_out" not in stream.getvalue()


def test_an_event_gets_a_kibibyte_a_second_back_and_never_more_than_it_had() -> None:
    limit = logs._Limit()
    limit._since, limit._room = limit._since + 1e9, -1024.0  # of a time to come: nothing comes back
    assert not limit.has_room()
    began = limit._since
    limit._room, limit._since = -1024.0, began - 2.0
    assert limit.has_room() and limit._room == pytest.approx(1024, rel=0.5)
    limit._room, limit._since = 0.0, began - 1e9
    assert limit.has_room() and limit._room == 256 << 10


def test_who_keeps_lines_gets_the_fields_of_each_and_changes_none_of_them() -> None:
    stream, kept = io.StringIO(), list[Mapping[str, Any]]()

    def keep(fields: Mapping[str, Any]) -> None:
        kept.append(dict(fields))
        fields.clear()  # type: ignore[attr-defined]

    log = configure("supervisor", "info", "text", stream, keep)
    log.debug("not logged")
    log.warning("model failed", model="a", rows=3)
    (fields,) = kept
    assert fields.pop("timestamp").endswith("Z")
    assert fields == {"event": "model failed", "level": "warning", "process": "supervisor", "model": "a", "rows": 3}
    assert stream.getvalue().endswith("Z warning supervisor model failed model=a rows=3\n")


def test_levels_of_libraries_between_ours_are_the_lower_one_and_their_exceptions_are_logged() -> None:
    stream = io.StringIO()
    configure("gateway", "debug", "json", stream)
    library = logging.getLogger("a.library")
    for level in (5, 10, 19, 25, 30, 49, 50, 70):
        library.log(level, "at %d", level)
    try:
        raise KeyError("gone")
    except KeyError:
        library.exception("it failed")
    *levels, failed = [line for line in logged(stream) if line.get("logger") == "a.library"]
    assert [(line["event"], line["level"]) for line in levels] == [
        ("at 10", "debug"), ("at 19", "debug"), ("at 25", "info"), ("at 30", "warning"), ("at 49", "error"),
        ("at 50", "critical"), ("at 70", "critical"),
    ]  # fmt: skip
    assert failed["exception"].endswith("KeyError: 'gone'") and failed["exception"].startswith("Traceback")


def test_of_a_long_traceback_the_end_is_kept() -> None:
    text = traced(ValueError("a" * 10_000 + "the end"))
    assert text.startswith("aaa") and text.rstrip().endswith("the end") and len(text) <= 6000


def test_a_limiter_that_has_seen_too_many_kinds_forgets_them_and_goes_on_limiting() -> None:
    said, now = list[tuple[str, Any]](), [0.0]
    limited = LogLimiter(lambda event, **fields: said.append((event, fields.get("times"))), lambda: now[0])
    for number in range(256):
        limited(f"event {number}")
    limited("event 0")
    assert len(said) == 256
    limited("one more")
    assert len(limited._kinds) == 1
    limited("event 0")
    limited("event 0")
    assert said[256:] == [("one more", None), ("event 0", None)]
    now[0] = 1.0
    limited.flush()
    assert said[258:] == [("event 0", None)], "it occurred once after it was said"
    limited.flush()
    assert len(said) == 259


def exhaust(log: Any, event: str) -> None:
    """Log an event until lines of it are left out."""
    for _ in range(20):
        log.info(event, data="x" * 20_000)
    assert log._limits[event].left_out


def test_a_detail_for_developers_is_logged_where_other_lines_of_its_event_are_left_out(clock: Clock) -> None:
    stream = io.StringIO()
    log = configure("gateway", "debug", "json", stream)
    exhaust(log, "bytes")
    count = len(logged(stream))
    log.debug("bytes", data="y")
    log.info("bytes", data="z")
    assert [line["data"] for line in logged(stream)[count:]] == ["y"]


def test_lines_that_were_left_out_are_told_once_their_event_has_room_again(clock: Clock) -> None:
    stream = io.StringIO()
    log = configure("gateway", "info", "json", stream)
    exhaust(log, "bytes")
    count, room = len(logged(stream)), log._limits["bytes"]._room
    clock.now += 2  # of a kibibyte a second
    assert room < -3 * 1024
    log.info("another event")
    assert [line["event"] for line in logged(stream)[count:]] == ["another event"]
    clock.now += 1 - room / 1024
    log.info("another event")
    assert [line["event"] for line in logged(stream)[count:]] == ["another event", "bytes", "another event"]


def test_events_beyond_a_thousand_share_a_limit_and_those_before_keep_theirs(clock: Clock) -> None:
    stream = io.StringIO()
    log = configure("gateway", "info", "json", stream)
    for number in range(1024):
        log.info(f"event {number}")
    for number in range(100):
        log.info(f"further event {number}", data="x" * 20_000)
    assert 1024 < len(logged(stream)) < 1024 + 20
    count = len(logged(stream))
    for event in ("event 0", "event 1023", "a further one", "event 512"):
        log.info(event)
    assert [line["event"] for line in logged(stream)[count:]] == ["event 0", "event 1023", "event 512"]


def test_a_line_is_in_its_file_at_once(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as stream:
        configure("gateway", "info", "text", stream).info("model ready")
        assert (tmp_path / "log").read_text().endswith("Z info gateway model ready\n")
