"""Logs: one line per event, from any process and with any content."""

from __future__ import annotations

import io
import json
import logging

import pytest

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
    foreign.warning("slow %s", "client")
    foreign.log(35, "between levels")
    text = stream.getvalue()
    assert "warning gateway slow client logger=uvicorn.error" in text
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
