"""Logs: one line per event, from any process and with any content."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import select
import socket
import termios
import threading

import pytest
from tests.serving import wait_until

from jurybox.server import logs
from jurybox.server.logs import configure


@pytest.fixture
def stream():
    yield io.StringIO()
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if type(handler).__module__ == "jurybox.server.logs"]:
        root.removeHandler(handler)
    root.setLevel(logging.WARNING)


def test_a_text_line_has_time_level_process_and_event(stream):
    configure("engine-0", "info", "text", stream).info("model ready", model="photo", note="two words", n=3)
    time, rest = stream.getvalue().split(" ", 1)
    assert time.endswith("Z")
    assert rest == 'info engine-0 model ready model=photo note="two words" n=3\n'


def test_a_json_line_holds_the_same(stream):
    configure("gateway", "info", "json", stream).warning("bad message", error='say "x"', bytes=3)
    line = json.loads(stream.getvalue())
    del line["timestamp"]
    expected = {"level": "warning", "process": "gateway", "event": "bad message", "error": 'say "x"', "bytes": 3}
    assert line == expected


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_newline_in_a_value_cannot_forge_a_line(stream, format):
    log = configure("supervisor", "info", format, stream)
    log.info("client\n2026 error gateway down", name="a\nb\r\x1b[31m", other="x=1 y=2")
    assert stream.getvalue().count("\n") == 1
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()


@pytest.mark.parametrize("format", ["text", "json"])
def test_an_exception_is_one_line_with_its_traceback(stream, format):
    log = configure("supervisor", "info", format, stream)
    try:
        raise ValueError("broken")
    except ValueError as error:
        log.error("failed", exc_info=error)
    assert stream.getvalue().count("\n") == 1
    assert "ValueError: broken" in stream.getvalue()
    assert "test_logs.py" in stream.getvalue()


def test_lower_levels_are_left_out(stream):
    log = configure("supervisor", "warning", "text", stream)
    log.info("quiet")
    log.debug("quiet")
    log.warning("loud")
    assert stream.getvalue().count("\n") == 1


@pytest.mark.parametrize("level", ["info", "debug"])
def test_warnings_of_libraries_come_in_our_lines_and_their_reports_with_debug(stream, level):
    configure("gateway", level, "text", stream)
    foreign = logging.getLogger("uvicorn.error")
    foreign.info("starting")
    foreign.warning(f"slow {level}")  # each text once a second
    foreign.log(35, "between levels")
    text = stream.getvalue()
    assert f"warning gateway slow {level} logger=uvicorn.error" in text
    assert "between levels" in text
    assert ("starting" in text) == (level == "debug")


def test_configuring_twice_does_not_double_the_lines_of_libraries(stream):
    configure("gateway", "info", "text", io.StringIO())
    configure("gateway", "info", "text", stream)
    logging.getLogger("x").warning("once")
    assert stream.getvalue().count("once") == 1


def test_a_library_whose_arguments_do_not_fit_gets_its_line_too(stream):
    configure("gateway", "info", "text", stream)
    ours = next(
        handler for handler in logging.getLogger().handlers if type(handler).__module__ == "jurybox.server.logs"
    )
    ours.handle(logging.LogRecord("x", logging.ERROR, "", 1, "bad arguments %d", ("x",), None))
    assert "bad arguments %d ('x',)" in stream.getvalue()


def test_a_full_disk_or_a_closed_pipe_ends_no_process():
    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

        def flush(self):
            raise OSError(28, "No space left on device")

    log = configure("engine-0", "info", "text", Full())
    log.info("said into the void")


def test_text_that_cannot_be_encoded_and_values_without_text_are_logged(tmp_path):
    class Speechless:
        def __str__(self):
            raise SystemExit

    for format in ("text", "json"):
        path = tmp_path / format
        with path.open("w", encoding="utf-8") as sink:
            log = configure("engine-0", "info", format, sink)
            log.error("model failed", error="half \ud800 a pair", what=Speechless())
        assert "half" in path.read_text() and "Speechless" in path.read_text()


class Unread:
    """A pipe, terminal or socket as standard error, and its other end. Nobody reads it; `read` gets what is there."""

    def __init__(self, kind):
        if kind == "terminal":
            self.far, near = pty.openpty()
            attributes = termios.tcgetattr(near)
            attributes[1] &= ~termios.OPOST  # newlines stay as they are
            termios.tcsetattr(near, termios.TCSANOW, attributes)
        elif kind == "socket":
            self.far, near = (end.detach() for end in socket.socketpair())
        else:
            self.far, near = os.pipe()
        self.near = near
        self.stream = os.fdopen(near, "w")
        os.set_blocking(self.far, False)

    def fill(self):
        os.set_blocking(self.near, False)
        room = select.poll()
        room.register(self.near, select.POLLOUT)
        for size in (4096, 1):  # a terminal that is not writable may have room for a line all the same
            written = True
            while written or room.poll(200):  # it also makes room while it passes on what was written
                try:
                    written = bool(os.write(self.near, b"." * size))
                except BlockingIOError:
                    written = False
        os.set_blocking(self.near, True)

    def read(self):
        text = b""
        while True:
            poll = select.poll()
            poll.register(self.far, select.POLLIN)
            if not poll.poll(200):
                return text.decode()
            try:
                text += os.read(self.far, 1 << 20)
            except BlockingIOError:
                continue


KINDS = ["pipe", "another user's pipe", "terminal", "socket"]


@pytest.fixture(params=KINDS)
def unread(request, monkeypatch):
    if request.param.startswith("another"):

        def refuse(*_):
            raise PermissionError

        monkeypatch.setattr(logs.os, "open", refuse)
    unread = Unread(request.param)
    yield unread
    os.close(unread.far)  # first: whoever waits in a write gets an error
    unread.stream.close()


def in_time(action):
    """Run an action that must not wait for a reader."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it waits for somebody who reads the log"


def test_a_process_does_not_wait_for_a_reader_of_its_log_and_counts_the_lines_that_it_dropped(unread):
    log = configure("engine-0", "info", "json", unread.stream)
    log.info("before")
    assert '"before"' in unread.read()
    unread.fill()
    in_time(lambda: [log.info("dropped", number=number) for number in range(100)])
    assert unread.read().strip(".") == ""
    in_time(lambda: [log.info("after"), log.info("the next")])
    lines = [json.loads(line) for line in unread.read().strip(".\n").splitlines()]
    assert [line["event"] for line in lines] == ["log lines dropped, nobody read them", "after", "the next"]
    assert (lines[0]["lines"], lines[0]["level"], lines[0]["process"]) == (100, "warning", "engine-0")
    assert os.get_blocking(unread.near)  # other processes share it


def test_no_line_is_written_before_the_count_of_those_that_were_dropped(stream):
    class Narrow:
        room, written = 0, ()

        def write(self, line):
            if fits := len(line) <= self.room:
                self.written = (*self.written, line.split("Z ")[1])
            return fits

    log = configure("engine-0", "info", "text", stream)
    log._lines = narrow = Narrow()
    for narrow.room in (0, 60, 1000):  # no room, room for a short line, room for all
        log.info("line")
    assert narrow.written == (
        "warning engine-0 log lines dropped, nobody read them lines=2",
        "info engine-0 line",
    )


def test_a_line_that_is_longer_than_a_pipe_is_cut_and_the_next_one_begins_anew(unread):
    log = configure("engine-0", "info", "text", unread.stream)
    in_time(lambda: log.error("long", **{f"field{number}": "x" * 20_000 for number in range(50)}))
    cut = unread.read()
    assert cut.split(" ", 1)[1].startswith("error engine-0 long field0=xxx") and "\n" not in cut
    in_time(lambda: log.info("after"))
    blank, count, after = unread.read().splitlines()
    assert (blank, count.split("Z ")[1], after.split("Z ")[1]) == (
        "",
        "warning engine-0 log lines dropped, nobody read them lines=1",
        "info engine-0 after",
    )


def test_a_long_line_arrives_whole_if_somebody_reads(unread, monkeypatch):
    monkeypatch.setattr(logs, "_PATIENCE", 60.0)  # on a busy machine the reader may take long between two reads
    log, text = configure("engine-0", "info", "text", unread.stream), []
    done = threading.Event()

    def read():
        while not done.is_set():
            text.append(unread.read())

    reader = threading.Thread(target=read)
    reader.start()
    try:
        in_time(lambda: log.error("long", **{f"field{number}": "x" * 10_000 for number in range(20)}))
        wait_until(lambda: "".join(text).endswith("\n"), what="the line's end, which a terminal hands over later")
    finally:
        done.set()
        reader.join()
    assert (
        "".join(text).split("Z ")[1]
        == "error engine-0 long " + " ".join(f"field{number}={'x' * 10_000}" for number in range(20)) + "\n"
    )


def test_a_stopped_terminal_stops_no_process():
    unread = Unread("terminal")
    try:
        log = configure("engine-0", "info", "text", unread.stream)
        termios.tcflow(unread.near, termios.TCOOFF)  # as Ctrl-S does
        in_time(lambda: log.info("dropped"))
        termios.tcflow(unread.near, termios.TCOON)
        log.info("after")
        assert [line.split("Z ")[1] for line in unread.read().splitlines()] == [
            "warning engine-0 log lines dropped, nobody read them lines=1",
            "info engine-0 after",
        ]
    finally:
        os.close(unread.far)
        unread.stream.close()


def test_text_that_the_encoding_of_standard_error_lacks_is_escaped(unread):
    unread.stream.reconfigure(encoding="ascii")
    configure("engine-0", "info", "text", unread.stream).info("model ready", model="vögel")
    assert unread.read().endswith("model ready model=v\\xf6gel\n")


def test_a_finalizer_may_log_while_its_thread_writes_a_line():
    class Interrupted(io.StringIO):
        def write(self, text):
            if "line" in text:
                log.info("finalized")
            return super().write(text)

    stream = Interrupted()
    log = configure("engine-0", "info", "text", stream)
    in_time(lambda: log.info("line"))
    assert [line.split()[-1] for line in stream.getvalue().splitlines()] == ["finalized", "line"]


def test_a_log_that_is_no_longer_used_keeps_no_descriptor(unread):
    before = os.listdir("/proc/self/fd")
    configure("engine-0", "info", "text", unread.stream).info("line")
    configure("engine-0", "info", "text", io.StringIO())  # libraries log there from now on
    assert os.listdir("/proc/self/fd") == before


def test_a_line_is_a_single_write_to_the_journal_however_long():
    far, near = socket.socketpair(type=socket.SOCK_SEQPACKET)  # each write is a message of its own
    with far, os.fdopen(near.detach(), "w") as stream:
        configure("engine-0", "info", "text", stream).error("failed", error="x" * 20_000)
        text = far.recv(1 << 20).decode()
    assert text.endswith("x\n") and len(text) > 20_000


@pytest.mark.parametrize("say", ["own", "library", "texts"])
def test_an_event_that_occurs_again_and_again_does_not_fill_the_disk(stream, monkeypatch, say):
    """Of any door, by whomever it is caused: the limit is the logger's."""
    now = [100.0]
    monkeypatch.setattr(logs.time, "monotonic", lambda: now[0])
    log = configure("gateway", "info", "text", stream)
    foreign = logging.getLogger("a.library")
    for i in range(10_000):
        if say == "own":
            log.error("a call failed", error="x" * 200)
        elif say == "library":
            foreign.error("bad request of %s", "x" * 200 + str(i))
        else:
            log.error(f"event {i}", error="x" * 200)
    if say == "texts":
        assert stream.getvalue().count("\n") < logs._EVENTS + logs._AT_ONCE // 200
        return
    assert len(stream.getvalue()) < logs._AT_ONCE + 1000
    before = stream.getvalue().count("\n")
    log.info("another event")
    assert stream.getvalue().endswith(" another event\n")  # others are not affected
    now[0] += 10
    log.info("another event")
    told = stream.getvalue().splitlines()[before + 1 :]
    assert f"left_out={10_000 - before}" in told[0]
    assert told[1].endswith(" another event")


def test_an_event_that_occurs_again_tells_how_many_were_left_out(stream, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(logs.time, "monotonic", lambda: now[0])
    log = configure("gateway", "info", "text", stream)
    calls = 0
    while stream.getvalue().count("\n") == calls:
        log.error("a call failed", error="x" * 500)
        calls += 1
    for _ in range(4):
        log.error("a call failed", error="x" * 500)
    now[0] += 0.9
    log.error("a call failed", error="short")
    log.error("a call failed", error="short")
    told = [line.partition(" error=")[2] for line in stream.getvalue().splitlines()[calls - 1 :]]
    assert told == ["short left_out=5", "short"]


def test_an_exception_without_a_text_has_a_line_of_its_own():
    class Silent(Exception):
        def __str__(self):
            raise RuntimeError("no words")

    assert "Silent" in logs.traced(Silent())
    assert "ValueError: seen" in logs.traced(ValueError("seen"))


def test_a_burst_of_a_thousand_lines_is_whole(stream):
    log = configure("supervisor", "info", "text", stream)
    for i in range(1000):
        log.info("model ready", model=f"policy/agent{i}", role="engine-0", warm_up=0.125)
    assert stream.getvalue().count("model ready") == 1000
    assert "left_out" not in stream.getvalue()


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("one", "one"), ("zwölf", "zwölf"), ("zwölf é", '"zwölf é"'), ("", '""'), ('a"b', r'"a\"b"'), ("a=b", '"a=b"'),
        ("é\n", r'"\u00e9\n"'), ("\x1b[2J", r'"\u001b[2J"'), (7, "7"),
    ],
)  # fmt: skip
def test_a_value_is_one_word_of_a_line_and_what_a_terminal_would_obey_is_escaped(value, written):
    assert logs._word(value) == written
