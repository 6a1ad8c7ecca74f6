"""Logging: one line for each event on standard error, as text or JSON, with the process that wrote it.

    2026-03-01T12:00:00.123456Z info engine-0 model ready model=photo

Values are escaped, so that a newline in a name cannot start a new line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, TextIO, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from jurybox.protocol.errors import plain

Log = FilteringBoundLogger

_LONGEST = 20_000  # characters of a value in a line
_TRACEBACK = 6000  # characters of a traceback: its end says where it happened
_KINDS = 256

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure(
    role: str,
    level: str,
    format: str,
    stream: TextIO | None = None,
    keep: Callable[[EventDict], None] | None = None,
) -> Log:
    """Set up logging in this process and return its logger.

    Args:
        role: of the process: "supervisor", "engine-0", "gateway"; the field "process" of every line.
        level: debug, info, warning or error.
        format: text or json.
        stream: where lines go; standard error without it.
        keep: also given every line that is logged, as its fields.
    """
    processors: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _add_process(role),
        structlog.processors.format_exc_info,
        *([_keep_with(keep)] if keep else []),
        _as_json if format == "json" else _as_text,
    ]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        # A line is one write, so that processes which share standard error do not write into each other's lines.
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, _Unfailing(stream or sys.stderr))),
        cache_logger_on_first_use=False,
    )
    log = cast(Log, structlog.get_logger())
    _adopt_foreign(log, LEVELS[level])
    return log


def _add_process(role: str) -> Callable[[WrappedLogger, str, EventDict], EventDict]:
    def add(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event["process"] = role
        return event

    return add


def _keep_with(keep: Callable[[EventDict], None]) -> Callable[[WrappedLogger, str, EventDict], EventDict]:
    def pass_on(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        keep({**event})
        return event

    return pass_on


def _as_json(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    head = {key: event.pop(key) for key in ("timestamp", "level", "process", "event")}
    return json.dumps({**head, **event}, default=plain)


def _as_text(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
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


class Seldom:
    """Limits frequent log events: one for each model and event in `every` seconds, with a count.

    Args:
        report: called with (event, fields), and "times" where it came more than once.
        clock: seconds, monotonic.
    """

    def __init__(
        self, report: Callable[..., None], every: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._report = report
        self._every = every
        self._clock = clock
        self._kinds: dict[tuple[str, object], tuple[float, int, dict[str, Any]]] = {}  # when next, how many wait, last

    def __call__(self, event: str, **fields: Any) -> None:
        kind, now = (event, fields.get("model")), self._clock()
        due, times, _ = self._kinds.get(kind, (now, 0, {}))
        if now < due:
            self._kinds[kind] = due, times + 1, fields
            return
        if len(self._kinds) >= _KINDS:
            self._kinds.clear()
        self._kinds[kind] = now + self._every, 0, {}
        self._say(event, times + 1, fields)

    def flush(self) -> None:
        """Log the counts that are due; call it periodically."""
        if not self._kinds:
            return
        now = self._clock()
        for (event, model), (due, times, fields) in list(self._kinds.items()):
            if now >= due:
                del self._kinds[event, model]
                if times:
                    self._say(event, times, fields)

    def _say(self, event: str, times: int, fields: dict[str, Any]) -> None:
        self._report(event, **fields, **({"times": times} if times > 1 else {}))


def traced(error: BaseException) -> str:
    """Format an exception's traceback as ASCII text; of a long one the end. Never raises."""
    try:
        return plain("".join(traceback.format_exception(error))[-_TRACEBACK:], _TRACEBACK)
    except BaseException:  # noqa: BLE001  a model's exception may raise anything when it is asked for its text
        return f"(a traceback of {type(error).__name__} that cannot be made)"


class _Unfailing:
    """A stream for lines that ignores write errors (a full disk, a closed pipe)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            return self._stream.write(text)
        return 0

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


class _Adopted(logging.Handler):
    """Forwards records of the standard logging module to our logger."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        fields = {"exc_info": record.exc_info} if record.exc_info else {}
        level = min(max(record.levelno // 10 * 10, logging.DEBUG), logging.CRITICAL)
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001  its arguments do not fit its message; what was meant is still worth a line
            text = plain(f"{plain(record.msg)} {plain(record.args)}")
        self._log.log(level, text, logger=record.name, **fields)


def _adopt_foreign(log: Log, level: int) -> None:
    """Forward the logs of libraries: warnings and errors; all of them with level debug."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _Adopted)]:
        root.removeHandler(handler)
    root.addHandler(_Adopted(log))
    root.setLevel(level if level == logging.DEBUG else max(level, logging.WARNING))
