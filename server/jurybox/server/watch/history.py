"""The last seconds of a server, kept by whoever watches it."""

from __future__ import annotations

from collections import deque

from jurybox.server.watch.events import Failures, sentence
from jurybox.server.watch.sample import sample
from jurybox.server.watch.snapshot import Document, Snapshot

_SHOWN = 30  # events


class History:
    """Snapshots of the last `window` seconds; what is shown is what happened within them.

    Percentiles of a fraction of a second would jump about; over two they are steady and still lively.
    """

    def __init__(self, window: float = 2.0) -> None:
        self._window_ns = int(window * 1e9)
        self._snapshots: deque[Snapshot] = deque()
        self._failures = Failures()

    def add(self, snapshot: Snapshot) -> Document:
        """Take in the newest snapshot; gives the document of jurybox.server.watch.sample."""
        kept = self._snapshots
        if kept and kept[-1].server_id != snapshot.server_id:
            kept.clear()
        previous = kept[-1] if kept else None
        kept.append(snapshot)
        while len(kept) > 2 and snapshot.taken - kept[1].taken >= self._window_ns:
            kept.popleft()
        told = self._failures.between(previous, snapshot)
        events = sorted([*snapshot.document["events"], *told], key=lambda event: float(event["at"]))
        shown = [{**event, "text": sentence(event)} for event in events[-_SHOWN:]]
        return sample(kept[0] if len(kept) > 1 else None, snapshot, shown)
