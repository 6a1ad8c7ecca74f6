"""Logging: one line for each event on standard error, as text or JSON, with the process that wrote it.

    2026-03-01T12:00:00.123456Z info engine-0 model ready model=photo

Values are escaped, so that a newline in a name cannot start a new line.

`Log` replaces structlog, whose import took 0.08 s of CPU in each process of a server; the used part of it is 60 lines.

No process waits for a reader of its log: if standard error is a pipe or a terminal that nobody reads, lines are
dropped, and counted in the first line that can be written again.

Nor can anybody fill the disk by causing one event again and again: the bytes of each event are limited.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import stat
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from functools import partial
from typing import Any, TextIO

from jurybox.protocol.errors import plain

_LONGEST = 20_000  # characters of a value in a line
_TRACEBACK = 6000  # characters of a traceback; of a longer one, the end is kept
_KINDS = 256
_EVERY = 1.0  # seconds
_PATIENCE = 0.2  # seconds that a line waits for a reader
_NAP = 0.005  # seconds
_AT_ONCE = 256 << 10  # characters that the lines of one event may have at once
_AFTERWARDS = 1024  # characters a second that they get back
_EVENTS = 1024  # events that have such a limit of their own
_LATE = 1.0  # seconds after which the number of left out lines is logged, if no line of that event follows
_HASTE = 10.0  # seconds after a dropped line in which none waits: together, the waits of a slow reader would be long

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_NAMES = {number: name for name, number in LEVELS.items()} | {logging.CRITICAL: "critical"}


class Log:
    """A process's logger: every call logs one event with its fields as one line. Thread-safe.

    The field `exc_info` is an exception whose traceback is logged with the event. Example::

        log.warning("bad message", client=7, bytes=3)

    Args:
        role, stream, keep: as for `configure`.
        level: the lowest level to log, as in the standard logging module.
        render: returns the text of a line, without the newline.
    """

    def __init__(
        self,
        role: str,
        level: int,
        render: Callable[[dict[str, Any]], str],
        stream: TextIO,
        keep: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        self._role = role
        self._level = level
        self._render = render
        self._lines = _Lines(stream)
        self._dropped = 0  # lines that could not be written, or only in part
        self._limits: dict[str, _Limit] = {}  # by event
        self._keep = keep
        self._one_at_a_time = threading.RLock()  # reentrant: a finalizer may log while this thread writes a line

    def debug(self, event: str, /, **fields: Any) -> None:
        """Log a detail for developers."""
        self.log(logging.DEBUG, event, **fields)

    def info(self, event: str, /, **fields: Any) -> None:
        """Log a normal event."""
        self.log(logging.INFO, event, **fields)

    def warning(self, event: str, /, **fields: Any) -> None:
        """Log an event that an operator may want to act on."""
        self.log(logging.WARNING, event, **fields)

    def error(self, event: str, /, **fields: Any) -> None:
        """Log a failure."""
        self.log(logging.ERROR, event, **fields)

    def log(self, level: int, event: str, /, **fields: Any) -> None:
        """Log an event with a level of the standard logging module."""
        self._log(level, event, event, fields)

    def adopt(self, level: int, event: str, kind: str, **fields: Any) -> None:
        """Log an event of a library; `kind` is the same for all of this kind, whatever their texts."""
        self._log(level, event, kind, fields)

    def _log(self, level: int, event: str, kind: str, fields: dict[str, Any]) -> None:
        if level < self._level:
            return
        raised = fields.pop("exc_info", None)
        now = datetime.now(timezone.utc).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"
        stamp = {"timestamp": now, "process": self._role}
        line: dict[str, Any] = {**fields, "event": event, "level": _NAMES[level], **stamp}
        if isinstance(raised, BaseException):
            line["exception"] = "".join(traceback.format_exception(raised)).rstrip("\n")
        with self._one_at_a_time:
            self._tell_left_out(stamp)
            limit = self._limit_of(kind)
            if level > logging.DEBUG and not limit.has_room():
                limit.leave_out(event, _NAMES[level])
                return
            if limit.left_out:
                line["left_out"] = limit.left_out
                limit.left_out = 0
            if self._keep is not None:
                self._keep({**line})
            text = self._render(line)
            if level > logging.DEBUG:
                limit.take(len(text) + 1)
            self._write(text, stamp)

    def _write(self, text: str, stamp: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError, ValueError):  # a full disk or a closed pipe ends no process
            if self._dropped:
                missing = {"event": "log lines dropped, nobody read them", "level": "warning", "lines": self._dropped}
                if self._lines.write(self._render({**missing, **stamp})):
                    self._dropped = 0
            if self._dropped or not self._lines.write(text):
                self._dropped += 1

    def _limit_of(self, kind: str) -> _Limit:
        if kind not in self._limits and len(self._limits) >= _EVENTS:
            kind = ""  # shared by all that follow
        return self._limits.setdefault(kind, _Limit())

    def _tell_left_out(self, stamp: Mapping[str, Any]) -> None:
        """Log how many lines were left out of events that do not occur any more."""
        now = time.monotonic()
        for limit in self._limits.values():
            if limit.left_out and now - limit.last >= _LATE and limit.has_room():
                told = {"event": limit.event, "level": limit.level, "left_out": limit.left_out, **stamp}
                limit.left_out = 0
                text = self._render(told)
                limit.take(len(text) + 1)
                self._write(text, stamp)


class _Limit:
    """How much may be written of one event.

    Attributes:
        left_out: lines that were not written since the last one.
        event, level: of the last one that was left out; `last`: when that was (s of the monotonic clock).
    """

    __slots__ = ("_room", "_since", "event", "last", "left_out", "level")

    def __init__(self) -> None:
        self._room, self._since = float(_AT_ONCE), time.monotonic()
        self.left_out, self.last = 0, 0.0
        self.event = self.level = ""

    def has_room(self) -> bool:
        now = time.monotonic()
        self._room, self._since = min(_AT_ONCE, self._room + _AFTERWARDS * (now - self._since)), now
        return self._room > 0

    def take(self, characters: int) -> None:
        self._room -= characters

    def leave_out(self, event: str, level: str) -> None:
        self.left_out += 1
        self.event, self.level, self.last = event, level, time.monotonic()


class _Lines:
    """Writes lines to a stream without waiting long for its reader.

    Each line is a single write, so that lines of processes which share standard error do not mix. Only one that is
    longer than the room in the pipe takes several; if the reader stops meanwhile it is cut, and the next begins anew.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._send = self._sender()
        self._patient_from = 0.0  # s of the monotonic clock
        self._cut = False

    def write(self, line: str) -> bool:
        """Write a line; return False if there was no room for all of it. Raises OSError, ValueError."""
        if self._send is None:
            self._stream.write(line + "\n")
            self._stream.flush()
            return True
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        rest = memoryview((("\n" if self._cut else "") + line + "\n").encode(encoding, "backslashreplace"))
        size, now = len(rest), time.monotonic()
        until = now + _PATIENCE if now >= self._patient_from else now
        while rest:
            try:
                rest = rest[self._send(rest) :]
            except BlockingIOError:
                if time.monotonic() >= until:
                    break
                time.sleep(_NAP)  # not poll(2): it also calls a terminal writable that has room for a part of the line
        if rest:
            self._patient_from = time.monotonic() + _HASTE
        if len(rest) < size:
            self._cut = bool(rest)
        return not rest

    def _sender(self) -> Callable[[memoryview], int] | None:
        """Return a function that writes what there is room for, or raises BlockingIOError; None if nothing ever waits.

        That is so for files and for text in memory.
        """
        try:
            mode = os.fstat(fd := self._stream.fileno()).st_mode
        except (OSError, ValueError, AttributeError):
            return None
        if stat.S_ISSOCK(mode):  # of the journal, under systemd
            journal = socket.socket(fileno=os.dup(fd))
            weakref.finalize(self, journal.close).atexit = False
            return lambda data: journal.send(data, socket.MSG_DONTWAIT)
        if stat.S_ISREG(mode):
            return None
        try:
            # Opened anew, since the flag holds for all processes that share an open file.
            own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:  # another user's
            return partial(_send_polled, fd)
        weakref.finalize(self, os.close, own).atexit = False  # other threads may log until the end
        return partial(os.write, own)


def _send_polled(fd: int, data: memoryview) -> int:
    """Write to a descriptor that waits when it is full. A pipe that is writable has room for PIPE_BUF bytes."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    if not poll.poll(0):
        raise BlockingIOError
    return os.write(fd, data[: select.PIPE_BUF])


def configure(
    role: str,
    level: str,
    format: str,
    stream: TextIO | None = None,
    keep: Callable[[Mapping[str, Any]], None] | None = None,
) -> Log:
    """Set up logging in this process and return its logger.

    Args:
        role: the role of the process, such as "supervisor", "engine-0" or "gateway"; the field "process" of every line.
        level: debug, info, warning or error.
        format: text or json.
        stream: the stream for the lines; None: standard error.
        keep: called with the fields of every logged line.
    """
    log = Log(role, LEVELS[level], _as_json if format == "json" else _as_text, stream or sys.stderr, keep)
    _adopt_foreign(log, LEVELS[level])
    return log


def _as_json(event: dict[str, Any]) -> str:
    head = {key: event.pop(key) for key in ("timestamp", "level", "process", "event")}
    return json.dumps({**head, **event}, default=plain)


def _as_text(event: dict[str, Any]) -> str:
    time, level, process, text = (event.pop(key) for key in ("timestamp", "level", "process", "event"))
    fields = " ".join(f"{key}={_word(value)}" for key, value in event.items())
    return f"{time} {level} {process} {_escaped(str(text))}{' ' if fields else ''}{fields}"


def _word(value: Any) -> str:
    """Format a value as one word, quoted if needed."""
    text = plain(value, _LONGEST)
    word = bool(text) and text.isprintable() and not any(mark in text for mark in ' "=')
    return text if word else json.dumps(text, ensure_ascii=not text.isprintable())


def _escaped(text: str) -> str:
    return text if text.isprintable() else json.dumps(text)[1:-1]


class LogLimiter:
    """Limits frequent log events: at most one per second for each event, model and dialect, with a count.

    Args:
        report: called with (event, **fields); the field "times" is the count if it is more than one.
        clock: a monotonic clock in seconds.
    """

    def __init__(self, report: Callable[..., None], clock: Callable[[], float] = time.monotonic) -> None:
        self._report = report
        self._clock = clock
        self._kinds: dict[
            tuple[str, object, object], tuple[float, int, dict[str, Any]]
        ] = {}  # next time, count, fields

    def __call__(self, event: str, **fields: Any) -> None:
        kind, now = (event, fields.get("model"), fields.get("dialect")), self._clock()
        due, times, _ = self._kinds.get(kind, (now, 0, {}))
        if now < due:
            self._kinds[kind] = due, times + 1, fields
            return
        if len(self._kinds) >= _KINDS:
            self._kinds.clear()
        self._kinds[kind] = now + _EVERY, 0, {}
        self._say(event, times + 1, fields)

    def flush(self) -> None:
        """Log the counts that are due; call this periodically."""
        if not self._kinds:
            return
        now = self._clock()
        for kind, (due, times, fields) in list(self._kinds.items()):
            if now >= due:
                del self._kinds[kind]
                if times:
                    self._say(kind[0], times, fields)

    def _say(self, event: str, times: int, fields: dict[str, Any]) -> None:
        self._report(event, **fields, **({"times": times} if times > 1 else {}))


def traced(error: BaseException) -> str:
    """Format an exception's traceback as `plain` text; of a long one, only the end. Never raises."""
    try:
        return plain("".join(traceback.format_exception(error))[-_TRACEBACK:], _TRACEBACK)
    except BaseException:  # noqa: BLE001  str() of a model's exception may raise anything
        return f"(a traceback of {type(error).__name__} that cannot be made)"


class _Adopted(logging.Handler):
    """Forwards records of the standard logging module to our logger."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        fields = {"exc_info": record.exc_info[1]} if record.exc_info else {}
        level = min(max(record.levelno // 10 * 10, logging.DEBUG), logging.CRITICAL)
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001  its arguments do not fit its format; log both without formatting
            text = plain(f"{plain(record.msg)} {plain(record.args)}")
        self._log.adopt(level, text, f"{record.name} {plain(record.msg, 80)}", logger=record.name, **fields)


def _adopt_foreign(log: Log, level: int) -> None:
    """Forward the logs of libraries: warnings and errors only, or all records if `level` is debug."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _Adopted)]:
        root.removeHandler(handler)
    root.addHandler(_Adopted(log))
    root.setLevel(level if level == logging.DEBUG else max(level, logging.WARNING))
