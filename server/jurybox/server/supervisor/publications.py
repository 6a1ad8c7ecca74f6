"""How often weights are published: the supervisor looks at a channel now and then and remembers what it saw."""

from __future__ import annotations

from collections import deque

_WINDOW = 10.0  # seconds the rate is taken over


class PublicationRate:
    """Publications a second on one channel over the last ten seconds, by the growth of its version."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def look(self, version: int, now: float) -> None:
        """The newest version is this one; `now` in seconds of any steady clock."""
        if self._seen and version < self._seen[-1][1]:
            self._seen.clear()  # another channel
        self._seen.append((now, version))
        while len(self._seen) > 2 and self._seen[1][0] <= now - _WINDOW:
            self._seen.popleft()

    @property
    def per_second(self) -> float:
        """0.0 before the second look."""
        if len(self._seen) < 2:
            return 0.0
        (began, first), (ended, last) = self._seen[0], self._seen[-1]
        return (last - first) / (ended - began) if ended > began else 0.0
