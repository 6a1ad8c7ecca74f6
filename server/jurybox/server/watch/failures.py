"""Failed requests as events: the supervisor does not see them, the board counts them."""

from __future__ import annotations

from collections import deque

from jurybox.server.watch.sample import FAILURES, growth
from jurybox.server.watch.snapshot import Document, Snapshot

_KEPT = 32
_TOGETHER = 5.0  # seconds within which failures of a kind are one event
_WORDS = {
    "failed": "the model failed",
    "expired": "requests expired while they waited",
    "refused": "requests refused",
}


class Failures:
    """The last failures, those of one model and kind that come close together as one event."""

    def __init__(self) -> None:
        self._events: deque[Document] = deque(maxlen=_KEPT)

    def between(self, earlier: Snapshot | None, later: Snapshot) -> list[Document]:
        """Take note of what failed between two snapshots; gives all that is kept, as the status document's events."""
        if earlier is not None and earlier.server_id == later.server_id:
            grown = growth(earlier, later)
            for at, model in enumerate(later.models):
                for kind in FAILURES:
                    if count := int(grown[kind][:, at].sum()):
                        self._note(model["name"], kind, count, later.at)
        return list(self._events)

    def _note(self, model: str, kind: str, count: int, at: float) -> None:
        text = _WORDS[kind]
        for event in self._events:
            if event["event"] == text and event["fields"]["model"] == model and at - event["at"] < _TOGETHER:
                event["fields"]["tickets"] += count
                return
        fields = {"model": model, "tickets": count}
        self._events.append({"at": at, "level": "error", "event": text, "fields": fields})
