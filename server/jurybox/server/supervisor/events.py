"""What happened lately: the supervisor's last log lines, for the status document."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from jurybox.protocol.errors import plain

_KEPT = 50
_LONGEST = 300  # characters of a value: a model's reason may be a page of traceback
_OF_EVERY_LINE = ("timestamp", "level", "process", "event", "exception")


class Events:
    """A ring of the last events, as the log level lets them through.

    Args:
        clock: seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._kept: deque[dict[str, Any]] = deque(maxlen=_KEPT)

    def keep(self, line: Mapping[str, Any]) -> None:
        """Take note of a log line, given as its fields."""
        fields = {
            plain(key, 100): value if isinstance(value, (int, float)) else plain(value, _LONGEST)
            for key, value in line.items()
            if key not in _OF_EVERY_LINE
        }
        event = plain(line["event"], _LONGEST)
        self._kept.append({"at": self._clock(), "level": line["level"], "event": event, "fields": fields})

    def last(self) -> list[dict[str, Any]]:
        """Those kept, the newest last: `at` (seconds since 1970), `level`, `event`, `fields`."""
        return list(self._kept)
